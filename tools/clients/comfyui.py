"""ComfyUI itself, over files that ditkit writes, against what ditkit says of ComfyUI.

    COMFY=FOLDER uv run tools/clients/comfyui.py                        # every model, kind and form
    COMFY=FOLDER uv run tools/clients/comfyui.py --models klein --kinds lora dora

`COMFY` is a clone of ComfyUI; its requirements must be installed next to ditkit. It runs on the
CPU, in fp32.

For each model: the prediction of a whole file in ComfyUI and here. For each kind of adapter and
form, with all Linear layers adapted: the modules that ComfyUI leaves out, which must be those of
which `AdapterRules.readers` says so, and the prediction with the adapter. The rows go to stdout;
the exit status is 1 where a word is not so.
"""

import argparse
import importlib.machinery
import logging
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from client_models import (
    ARCHS,
    GUIDANCE,
    SIGMA,
    base_file,
    distance,
    item_of,
    load_ours,
    predict,
    spec_of,
    trained,
)
from ditkit_core.adapters.files.identify import find_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_flux2 import FLUX2
from ditkit_wan import WAN
from ditkit_wan.conditioning.camera import rays
from ditkit_zimage import ZIMAGE

KINDS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 6},
    "rslora": {"r": 6, "lora_alpha": 5, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "rank_pattern": ("*.0.*=7",),
        "alpha_pattern": ("*.1.*=3",),
    },
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True},
    "lokr": {"method": "lokr", "r": 4, "lora_alpha": 6, "decompose_factor": 8},
    "loha": {"method": "loha", "r": 4, "lora_alpha": 6},
}
OTHERS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "peft": ("official", lambda key: key.replace("diffusion_model.", "base_model.model.")),
    "bare": ("names", lambda key: key.partition(".")[2]),
    "videox": ("musubi", lambda key: key.replace("lora_unet_", "lora_unet__")),
    "onetrainer": ("diffusers", lambda key: underscored(key, "lora_transformer_")),
    "lycoris": ("diffusers", lambda key: underscored(key, "lycoris_")),
}
"""Forms that ditkit reads and does not write: the form that is renamed, and how. `names` is that of
DiffSynth's names."""
OTHER_MODELS = ("s2v", "dance")
"""Models that ComfyUI computes otherwise than their authors (docs/comfyui.md): here only keys are
compared."""
DIFFERENCE_MODELS = ("zimage", "klein", "t2v")
"""Models with rows of whole parameters' differences (`.diff`)."""
LAYERS: dict[str, dict[str, tuple[int, ...]]] = {}
"""By model, the shapes of the layers that an adapter has."""
SAME = 1e-4
"""Two programs' fp32 predictions of a whole file differ by 3e-6 to 2e-5; a module left out changes
them by 1e-2."""


def underscored(key: str, prefix: str) -> str:
    """A key of diffusers' form as programs with another prefix and without dots write it."""
    module, _, end = key.removeprefix("transformer.").rpartition(".lora_")
    return f"{prefix}{module.replace('.', '_')}.lora_{'down' if end[0] == 'A' else 'up'}.weight"


class Lines(logging.Handler):
    """What ComfyUI logs of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def import_comfyui(folder: str) -> Any:
    """ComfyUI's modules, which read the command line when they are imported."""
    arguments, sys.argv = sys.argv, ["comfyui", "--cpu"]
    sys.path.insert(0, folder)
    stand_in_for_sound()
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_detection
    import comfy.sd
    import comfy.utils

    sys.argv = arguments
    know_small_zimage(comfy.model_detection)
    return comfy


def stand_in_for_sound() -> None:
    """An empty torchaudio, which ComfyUI imports: of no use here, and not built for every torch."""
    audio = types.ModuleType("torchaudio")
    audio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules.setdefault("torchaudio", audio)


def know_small_zimage(detection: Any) -> None:
    """ComfyUI knows Z-Image by its width of 3,840 alone: the same settings at the width of the tiny
    model."""
    detect = detection.detect_unet_config

    def detected(state: Any, prefix: str, metadata: Any = None) -> Any:
        config = detect(state, prefix, metadata=metadata)
        if config and config.get("image_model") == "lumina2" and config["dim"] == 1152:
            config |= {
                "n_heads": 9,
                "n_kv_heads": 9,
                "axes_dims": [32, 48, 48],
                "axes_lens": [1536, 512, 512],
                "rope_theta": 256.0,
                "ffn_dim_multiplier": 8 / 3,
                "z_image_modulation": True,
                "time_scale": 1000.0,
                "allow_fp16": False,
            }
            if f"{prefix}cap_pad_token" in state:
                config["pad_tokens_multiple"] = 32
        return config

    detection.detect_unet_config = detected


def load_theirs(comfy: Any, file: Path) -> Any:
    """ComfyUI's model over a file."""
    state, metadata = comfy.utils.load_torch_file(str(file), return_metadata=True)
    options = {"dtype": torch.float32}
    model = comfy.sd.load_diffusion_model_state_dict(
        state, model_options=options, metadata=metadata
    )
    assert model is not None, "ComfyUI does not know this model"
    return model


def predict_theirs(patcher: Any, name: str, item: Mapping[str, Tensor]) -> Tensor:
    """ComfyUI's prediction, as a velocity."""
    spec, arch = ARCHS[name]
    latents, inputs = item["latents"][None], dict[str, Any]()
    if spec is FLUX2 and arch.guidance:
        inputs["guidance"] = torch.tensor([GUIDANCE])
    if spec is not WAN:
        latents = latents[:, :, 0]
    if spec is ZIMAGE:
        inputs["num_tokens"] = len(item["text"])
    names = {
        "image": "clip_fea",
        "audio": "audio_embed",
        "pose": "pose_latents",
        "face": "face_pixel_values",
        "music": "audio_embed",
        "refimage": "clip_fea_ref",
    }
    inputs |= {theirs: item[ours][None] for ours, theirs in names.items() if ours in item}
    if "vace" in item:
        inputs |= {"vace_context": item["vace"][None, None], "vace_strength": [1.0]}
    if "reference" in item:
        reference = item["reference"][None]
        inputs["reference_latent"] = reference if arch.speech else reference[:, :, 0]
    if "camera_path" in item:
        height, width = (8 * size for size in item["latents"].shape[2:])
        inputs["camera_conditions"] = rays(item["camera_path"], height=height, width=width)[None]
    concat = item["y"][None] if "y" in item else None
    with torch.no_grad():
        denoised = patcher.model.apply_model(
            latents,
            torch.tensor([SIGMA]),
            c_concat=concat,
            c_crossattn=item["text"][None],
            **inputs,
        )
    velocity = ((latents - denoised) / SIGMA)[0].float()
    return velocity if spec is WAN else velocity[:, None]


def left_out(lines: Sequence[str], file: Path, name: str) -> set[str]:
    """The modules, by our names, of which ComfyUI's log says that it left keys out."""
    keys = {line.rpartition(" ")[2] for line in lines if "not loaded" in line}
    return {
        module
        for module, entry in find_adapter(
            file, spec_of(name), layers=LAYERS[name]
        ).file.modules.items()
        if not keys.isdisjoint(
            key
            for piece in entry.pieces
            if piece is not None
            for key in piece.adapter.keys.values()
        )
    }


def written(name: str, kind: str, form: str, folder: Path) -> tuple[Model, Path]:
    """Our model with an adapter of all Linear layers that a form can have, and its file."""
    base, config = base_file(folder, name), KINDS[kind]
    source, rename = OTHERS.get(form, (form, None))
    if source == "names":
        source = "diffusers" if ARCHS[name][0] is FLUX2 else "official"
    model = trained(name, base, target_modules="all-linear", **config)
    modules = [m for m in adapter_layers(model.module) if allowed(spec_of(name), source, m)]
    if len(modules) < len(adapter_layers(model.module)):
        model = trained(name, base, target_modules=modules, **config)
    LAYERS[name] = {
        m: tuple(layer.weight.shape) for m, layer in adapter_layers(model.module).items()
    }
    file = folder / "adapters" / f"{name}-{kind}-{form}.safetensors"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    model.save_adapter(file, form=source, dtype="fp32")
    if rename is not None:
        save_file({rename(key): tensor for key, tensor in load_file(file).items()}, file)
    return model, file


def compare_adapter(comfy: Any, patcher: Any, name: str, kind: str, form: str, folder: Path) -> str:
    """A row about one adapter file; raises AssertionError where our word of ComfyUI is not so."""
    spec, item = spec_of(name), item_of(name)
    model, file = written(name, kind, form, folder)
    log, root = Lines(), logging.getLogger()
    root.addHandler(log)
    state, _ = comfy.utils.load_torch_file(str(file), return_metadata=True)
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, state, 1.0, 0)
    patched.patch_model(device_to=torch.device("cpu"))
    root.removeHandler(log)
    theirs = predict_theirs(patched, name, item)
    patched.unpatch_model(device_to=torch.device("cpu"))
    apart = distance(theirs, predict(model, item))
    left = left_out(log.lines, file, name)
    layout = find_adapter(file, spec, layers=LAYERS[name]).layout
    modules = list(LAYERS[name])

    def said(modules: Sequence[str]) -> str:
        return spec.adapters.rules.readers(layout, modules)["ComfyUI"]

    word = said(modules)
    row = f"| {name} | {kind} | {form} | {len(modules)} | {len(left)} | {apart:.1e} | {word or 'all of it'} |"
    if name in OTHER_MODELS:  # its predictions differ without an adapter too
        apart = 0.0 if not left else 1.0
    assert bool(word) == bool(left or apart > SAME), f"{row}: not so"
    if "loads a part" in word:
        assert left == {m for m in modules if said([m])}, (
            f"{row}: other modules: {sorted(left)[:4]}"
        )
    if "loads nothing" in word:
        assert len(left) == len(modules), f"{row}: loads some"
    return row


def compare_differences(comfy: Any, patcher: Any, name: str, form: str, folder: Path) -> str:
    """A row about a file of differences of the blocks' weights and biases; AssertionError where
    our word of it is not so."""
    base, generator = base_file(folder, name), torch.Generator().manual_seed(3)
    ends, differences = {"weight": "diff", "bias": "diff_b"}, dict[str, Tensor]()
    for key, tensor in load_file(base).items():
        module, _, end = key.rpartition(".")
        if (
            end not in ends
            or "norm" in key
            or "mod" in key.lower()
            or not ("blocks." in key or "layers." in key)
        ):
            continue
        prefixed = (
            f"diffusion_model.{module}"
            if form == "official"
            else f"lora_unet_{module.replace('.', '_')}"
        )
        noise = torch.randn(tensor.shape, generator=generator)
        differences[f"{prefixed}.{ends[end]}"] = noise * tensor.std() / 2
    file = folder / "adapters" / f"{name}-differences-{form}.safetensors"
    save_file(differences, file)
    log, root = Lines(), logging.getLogger()
    root.addHandler(log)
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, load_file(file), 1.0, 0)
    root.removeHandler(log)
    patched.patch_model(device_to=torch.device("cpu"))
    theirs = predict_theirs(patched, name, item_of(name))
    patched.unpatch_model(device_to=torch.device("cpu"))
    apart = distance(theirs, predict(load_ours(name, base, merge=[str(file)]), item_of(name)))
    left = sum("not loaded" in line for line in log.lines)
    row = f"| {name} | differences | {form} | {len(differences)} keys | {left} | {apart:.1e} | |"
    spec = spec_of(name)
    found = find_adapter(file, spec)
    word = spec.adapters.rules.readers(found.layout, found.modules)["ComfyUI"]
    as_said = (left == 0 and apart <= SAME) if not word else (left > 0 and apart > SAME)
    assert as_said, f"{row}: {word or 'loads all of it'}: not so"
    return row


def allowed(spec: Any, form: str, module: str) -> bool:
    """Whether a form can have an adapter of a module."""
    try:
        spec.adapters.check(form, [module])
    except UserError:
        return False
    return True


FORMS = [*ADAPTER_FORMS, *OTHERS]


def main() -> int:
    """Compare; returns 1 where a word of ours is not so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--folder", type=Path, help="where files are kept")
    args = parser.parse_args()
    if "COMFY" not in os.environ:
        parser.error("set COMFY to the folder of a clone of ComfyUI")
    torch.set_num_threads(1)
    comfy = import_comfyui(os.environ["COMFY"])
    folder = args.folder or Path(tempfile.mkdtemp(prefix="clients-"))
    faults = 0
    print("| model | adapter | form | modules | left out | prediction apart | our word |")
    print("|---|---|---|---:|---:|---:|---|")
    for name in args.models:
        file, item = base_file(folder, name), item_of(name)
        patcher = load_theirs(comfy, file)
        apart = distance(predict_theirs(patcher, name, item), predict(load_ours(name, file), item))
        print(f"| {name} | none | official | | | {apart:.1e} | |", flush=True)
        faults += apart > SAME and name not in OTHER_MODELS
        for kind in args.kinds:
            for form in args.forms:
                if form in OTHERS and kind != "lora":
                    continue
                try:
                    print(compare_adapter(comfy, patcher, name, kind, form, folder), flush=True)
                except UserError as error:  # a form that a kind does not have
                    print(
                        f"| {name} | {kind} | {form} | | not written: {str(error)[:60]} | | |",
                        flush=True,
                    )
                except AssertionError as error:
                    faults += 1
                    print(f"NOT SO {error}", flush=True)
                except Exception:  # noqa: BLE001 - whatever another program raises is a row
                    faults += 1
                    print(
                        f"FAILED {name} {kind} {form}\n{traceback.format_exc(limit=-3)}", flush=True
                    )
        for form in ("official", "musubi") if name in DIFFERENCE_MODELS else ():
            try:
                print(compare_differences(comfy, patcher, name, form, folder), flush=True)
            except AssertionError as error:
                faults += 1
                print(f"NOT SO {error}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
