"""musubi-tuner, DiffSynth and LyCORIS themselves, over adapter files, against what ditkit says of
them.

    MUSUBI=FOLDER uv run tools/clients/others.py musubi
    DIFFSYNTH=FOLDER uv run tools/clients/others.py diffsynth
    MUSUBI=FOLDER uv run tools/clients/others.py lycoris
    uv run tools/clients/others.py lycoris-reads

`MUSUBI` and `DIFFSYNTH` are clones, LyCORIS is the package lycoris-lora. Each program merges a file
into musubi-tuner's model of Wan (text to video, tiny, fp32, CPU); `lycoris-reads` has LyCORIS apply
our files to diffusers' model of each family instead. The other prediction is compared with ours of
the same file. The exit status is 1 where a word is not so.
"""

import argparse
import importlib
import importlib.util
import itertools
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from client_models import ARCHS, base_file, distance, item_of, load_ours, predict, spec_of, trained
from ditkit_core.adapters.files.identify import find_adapter
from ditkit_core.errors import UserError
from ditkit_flux2.verify import DIFFUSERS as FLUX2_IN_DIFFUSERS
from ditkit_wan.verify import DIFFUSERS as WAN_IN_DIFFUSERS
from ditkit_zimage.verify import DIFFUSERS as ZIMAGE_IN_DIFFUSERS

NAME = "t2v"
SAME = 1e-5
KINDS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 6},
    "rslora": {"r": 6, "lora_alpha": 5, "use_rslora": True},
    "lokr": {"method": "lokr", "r": 4, "lora_alpha": 6, "decompose_factor": 8},
    "loha": {"method": "loha", "r": 4, "lora_alpha": 6},
}
NETWORKS = {
    kind: f"musubi_tuner.networks.{module}"
    for kind, module in (
        ("lora", "lora_wan"),
        ("rslora", "lora_wan"),
        ("lokr", "lokr"),
        ("loha", "loha"),
    )
}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "rslora": {"algo": "lora", "rs_lora": True},
    "dora": {"algo": "lora", "dora_wd": True},
    "lokr": {"factor": 8},
    "lokr-whole": {"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 8},
    "loha": {},
    "full": {},
}
"""What LyCORIS is told, by the name of a row."""


class Bench:
    """A folder of files, and the predictions over them."""

    def __init__(self, folder: Path):
        self.folder, self.item, self.faults = folder, item_of(NAME), 0
        self.base = base_file(folder, NAME)

    def model(self) -> nn.Module:
        """musubi-tuner's model of Wan over our base."""
        # Its text encoder asks for a GPU's number when it is imported.
        with patch("torch.cuda.current_device", return_value=0):
            from musubi_tuner.wan.modules.model import WanModel

        arch = ARCHS[NAME][1]
        model = WanModel(
            model_type="t2v",
            model_version="2.1",
            in_dim=arch.in_channels,
            dim=arch.dim,
            ffn_dim=arch.ffn_dim,
            out_dim=16,
            num_heads=arch.heads,
            num_layers=arch.layers,
            attn_mode="torch",
        )
        missing = model.load_state_dict(load_file(self.base), strict=False).missing_keys
        assert not missing, missing
        return model

    def over(self, module: nn.Module) -> Tensor:
        """Our prediction over another program's merged weights."""
        file = self.folder / "merged.safetensors"
        save_file(
            {key: value.detach().contiguous() for key, value in module.state_dict().items()}, file
        )
        return predict(load_ours(NAME, file), self.item)

    def save(self, label: str, form: str, model: Any) -> Path:
        """An adapter's file in a form."""
        file = self.folder / f"{label}-{form}.safetensors"
        file.unlink(missing_ok=True)
        model.save_adapter(file, form=form, dtype="fp32")
        return file

    def word(self, file: Path, program: str, model: str = NAME) -> str:
        """Our word of a program and a file, in the architecture of a tiny model."""
        spec, base = spec_of(model), base_file(self.folder, model)
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in load_ours(model, base).module.named_parameters()
        }
        layers = {
            name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2
        }
        found = find_adapter(file, spec, layers=layers)
        return spec.adapters.rules.readers(found.layout, list(found.shapes))[program]

    def row(self, text: str, apart: float, word: str | None = None) -> None:
        """Print a row; with our word of the program it is a fault where that is not so."""
        wrong = apart > SAME if word is None else (apart <= SAME) == bool(word)
        self.faults += wrong
        said = "" if word is None else word or "all of it"
        print(f"| {text} | {apart:.1e} | {said} |{' NOT SO' * wrong}", flush=True)


def randomised(parameters: Mapping[str, Tensor], size: float) -> None:
    """Give an adapter's parameters values that change a prediction."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def musubi(bench: Bench) -> None:
    """Our files merged by musubi-tuner's networks, and theirs by us."""
    cpu = torch.device("cpu")
    for kind, module in NETWORKS.items():
        network = importlib.import_module(module)
        ours = trained(NAME, bench.base, **KINDS[kind])
        file = bench.save(kind, "musubi", ours)
        state, unet = load_file(file), bench.model()
        net = network.create_arch_network_from_weights(1.0, state, unet=unet, for_inference=True)
        net.merge_to(None, unet, state, torch.float32, cpu)
        apart = distance(bench.over(unet), predict(ours, bench.item))
        bench.row(
            f"{kind}, ours there | {len(net.unet_loras)}", apart, bench.word(file, "musubi-tuner")
        )
        if kind == "rslora":
            continue
        unet = bench.model()
        net = network.create_arch_network(1.0, 4, 2.0, None, [], unet)
        net.apply_to(None, unet, False, True)
        randomised(dict(net.named_parameters()), 0.2 if kind == "lora" else 0.35)
        file = bench.folder / f"theirs-{kind}.safetensors"
        net.save_weights(str(file), torch.float32, None)
        state, unet = load_file(file), bench.model()
        net = network.create_arch_network_from_weights(1.0, state, unet=unet, for_inference=True)
        net.merge_to(None, unet, state, torch.float32, cpu)
        merged = load_ours(NAME, bench.base, merge=[str(file)])
        bench.row(
            f"{kind}, theirs here | {len(net.unet_loras)}",
            distance(predict(merged, bench.item), bench.over(unet)),
        )


def diffsynth(bench: Bench) -> None:
    """Our files of every form fused by DiffSynth's loader."""
    source = Path(os.environ["DIFFSYNTH"]) / "diffsynth/utils/lora/general.py"
    spec = importlib.util.spec_from_file_location("general", source)
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    for kind, form in [
        ("lora", form) for form in ("official", "diffsynth", "diffusers", "musubi")
    ] + [("rslora", "official")]:
        ours = trained(NAME, bench.base, **KINDS[kind])
        file, module = bench.save(kind, form, ours), bench.model()
        loader.GeneralLoRALoader().fuse_lora_to_base_model(module, load_file(file))
        apart = distance(bench.over(module), predict(ours, bench.item))
        bench.row(
            f"{kind}, {form} | {len(ours.module.blocks())} blocks",
            apart,
            bench.word(file, "DiffSynth"),
        )


def values_of(layer: Any) -> tuple[Tensor, Tensor]:
    """The weight [out, in] and the bias that a Linear layer with LyCORIS computes with."""
    size = layer.org_module[0].in_features
    bias = layer(torch.zeros(1, size))
    return (layer(torch.eye(size)) - bias).T.contiguous(), bias[0]


def lycoris(bench: Bench) -> None:
    """Files that LyCORIS writes, merged by it and by us."""
    from lycoris import LycorisNetwork, create_lycoris

    LycorisNetwork.apply_preset(
        {"enable_conv": False, "target_module": ["WanAttentionBlock"], "target_name": []}
    )
    for name, settings in ALGORITHMS.items():
        options = {"linear_dim": 4, "linear_alpha": 2, "algo": name, **settings}
        net = create_lycoris(bench.model(), 1.0, **options)
        net.apply_to()
        every = name == "full"  # also biases, but no scale of another algorithm
        randomised(
            {key: value for key, value in net.named_parameters() if every or value.ndim > 1}, 0.3
        )
        file = bench.folder / f"lycoris-{name}.safetensors"
        save_file(
            {key: value.detach().clone().contiguous() for key, value in net.state_dict().items()},
            file,
        )
        # Its trained forward, not its `merge_to`, which multiplies LoKr and LoHa by alpha / rank
        # twice.
        with torch.no_grad():
            trained_values = {lora.lora_name: values_of(lora) for lora in net.loras}
        fresh = bench.model()
        for key, module in fresh.named_modules():
            if (values := trained_values.get(f"lycoris_{key.replace('.', '_')}")) is not None:
                module.weight.data, module.bias.data = values
        merged = load_ours(NAME, bench.base, merge=[str(file)])
        bench.row(
            f"{name}, theirs here | {len(net.loras)}",
            distance(predict(merged, bench.item), bench.over(fresh)),
        )


def in_keys_of_lycoris(file: Path, *, alpha: bool) -> None:
    """Write an adapter in diffusers' form again with LyCORIS' own keys, with or without alpha."""
    ends = {
        "lora_A.weight": "lora_down.weight",
        "lora_B.weight": "lora_up.weight",
        "lora_magnitude_vector": "dora_scale",
    }
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(file).items():
        match = re.fullmatch(r"transformer\.(.+)\.((lora|lokr|hada)_.+)", key)
        assert match is not None, key
        stem, end = f"lycoris_{match[1].replace('.', '_')}", ends.get(match[2], match[2])
        tensors[f"{stem}.{end}"] = tensor[:, None].contiguous() if tensor.ndim == 1 else tensor
        if alpha and end in ("lora_down.weight", "lokr_w2_b", "hada_w1_b"):
            tensors[f"{stem}.alpha"] = torch.tensor(float(len(tensor)))
    save_file(tensors, file)


def lycoris_reads(bench: Bench) -> None:
    """Our files in each form, and with LyCORIS' own keys, applied by it to diffusers' models."""
    from lycoris import create_lycoris_from_weights

    forms = ("official", "diffusers", "diffsynth", "musubi", "lycoris", "lycoris without alpha")
    kinds = {**KINDS, "dora": {"r": 4, "lora_alpha": 6, "use_dora": True}}
    for (name, verifier), kind in itertools.product(VERIFIERS.items(), kinds):
        base = base_file(bench.folder, name)
        ours, plain = trained(name, base, **kinds[kind]), load_ours(name, base).module
        inputs = verifier.inputs(plain)
        for form in forms:
            is_theirs = form.startswith("lycoris")
            try:
                file = bench.save(f"{name}-{kind}", "diffusers" if is_theirs else form, ours)
            except UserError:  # the form has no such adapter
                continue
            if is_theirs:
                in_keys_of_lycoris(file, alpha=form == "lycoris")
            merged = load_ours(name, base, merge=[str(file)]).module
            theirs, apart = verifier.transformer(plain), math.inf
            # It fails on a file without alpha, which is an answer.
            with torch.no_grad(), suppress(TypeError):
                network, _ = create_lycoris_from_weights(1.0, str(file), theirs)
                network.apply_to()
                expected = verifier.run(verifier.transformer(merged), inputs)
                apart = distance(verifier.run(theirs, inputs), expected)
            bench.row(f"{name}, {kind}, {form} |", apart, bench.word(file, "LyCORIS", name))


VERIFIERS = {"t2v": WAN_IN_DIFFUSERS, "klein": FLUX2_IN_DIFFUSERS, "zimage": ZIMAGE_IN_DIFFUSERS}
PROGRAMS: Mapping[str, tuple[Callable[[Bench], None], tuple[str, ...]]] = {
    "musubi": (musubi, ("MUSUBI",)),
    "diffsynth": (diffsynth, ("MUSUBI", "DIFFSYNTH")),
    "lycoris": (lycoris, ("MUSUBI",)),
    "lycoris-reads": (lycoris_reads, ()),
}


def main() -> int:
    """Compare; returns 1 where a word of ours is not so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="+", choices=PROGRAMS)
    args = parser.parse_args()
    for name in args.programs:
        if missing := [variable for variable in PROGRAMS[name][1] if variable not in os.environ]:
            parser.error(f"{name}: set {' and '.join(missing)} to the folder of a clone")
    torch.set_num_threads(1)
    if "MUSUBI" in os.environ:
        sys.path.insert(0, os.environ["MUSUBI"] + "/src")
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        bench = Bench(Path(folder))
        for name in args.programs:
            print(
                f"\n{name}\n\n| file | modules | prediction apart | our word "
                f"|\n|---|---:|---:|---|",
                flush=True,
            )
            try:
                PROGRAMS[name][0](bench)
            except Exception as error:  # noqa: BLE001  # whatever another program raises: the others are worth as much
                bench.faults += 1
                print(f"FAILED {type(error).__name__}: {error}", flush=True)
    return int(bench.faults > 0)


if __name__ == "__main__":
    sys.exit(main())
