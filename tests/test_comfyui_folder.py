"""`--comfyui FOLDER` finds the files of every family among those of all others, by headers of
published sizes."""

import json
import struct
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from ditkit_core.adapters.files.identify import parameters_of
from ditkit_core.commands.cli import run
from ditkit_core.commands.comfyui import find_files
from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import ModelSpec
from workspace import MODELS

_WHOLE = {"encoder.embed_tokens.weight": "shared.weight"}
"""Names in files of T5 whose tensor a plan counts under another one."""
FAMILIES = [member.package for member in MODELS]


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A file of tensors with this header, without a byte of them on the disk."""
    header, end = dict[str, object](), 0
    for name, shape in shapes.items():
        begin, end = end, end + (2 if dtype == "BF16" else 1) * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def spec_of(package: str) -> ModelSpec:
    spec: ModelSpec = getattr(import_module(package), package.removeprefix("ditkit_").upper())
    return spec


def in_files(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a transformer's parameters in ComfyUI's files."""
    written = dict[str, tuple[int, ...]]()
    rename = spec.architecture.names.from_native[spec.architecture.names.scaled]
    for name, (rows, *rest) in ((name, shape or (1,)) for name, shape in shapes.items()):
        parts = rename(name)
        for part in parts:
            written[part.name] = (rows * part.of // len(parts), *rest)
    return written


@cache
def parts_of(package: str, preset: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of a preset's parts by ComfyUI's folder."""
    spec = spec_of(package)
    arch = spec.architecture.presets[preset]
    shapes = parameters_of(spec.architecture.build, arch)
    parts = {"diffusion_models": in_files(spec, shapes)}
    for model in spec.auxiliary.models(arch, ModelPaths()):
        if folder := {"VAE encoder": "vae", "text encoder": "text_encoders"}.get(model.name):
            state = model.build(torch.bfloat16).state_dict()
            parts[folder] = {
                _WHOLE.get(name, name): tuple(tensor.shape) for name, tensor in state.items()
            }
    if package == "ditkit_zimage":  # it reads what comes before the last layer, which a plan omits
        texts = parts["text_encoders"]
        texts |= {name.replace("layers.34.", "layers.35."): texts[name] for name in texts}
    return parts


def first_preset(package: str) -> str:
    return next(iter(spec_of(package).architecture.presets))


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parts of the first preset of every family, and what is no model."""
    root = tmp_path_factory.mktemp("comfyui")
    for package in FAMILIES:
        name = package.removeprefix("ditkit_")
        for folder, shapes in parts_of(package, first_preset(package)).items():
            write_header(root / "models" / folder / name / f"{name}_{folder}.safetensors", shapes)
    for folder in ("diffusion_models", "vae", "text_encoders"):
        (root / "models" / folder / "damaged.safetensors").write_bytes(b"no model")
    return root


def names_of(found: Mapping[str, Path]) -> dict[str, str]:
    return {key: path.name for key, path in found.items()}


@pytest.mark.parametrize("package", FAMILIES)
def test_files_of_a_model_are_found_among_those_of_all_families(comfyui, package):
    """Also where VAEs of several families have the same shapes: then the name decides."""
    name = package.removeprefix("ditkit_")
    found = find_files(spec_of(package), ModelPaths(preset=first_preset(package)), comfyui)
    assert names_of(found) == {
        "transformer": f"{name}_diffusion_models.safetensors",
        "vae": f"{name}_vae.safetensors",
        "text_encoder": f"{name}_text_encoders.safetensors",
    }


def test_experts_are_told_by_their_names_and_8_bits_are_the_second_choice(tmp_path):
    spec = spec_of("ditkit_wan")
    shapes = parts_of("ditkit_wan", "t2v-a14b")["diffusion_models"]
    folder = tmp_path / "models" / "unet"
    for name in ("wan2.2_t2v_high_noise_14B_fp16", "wan2.2_t2v_low_noise_14B_fp16"):
        write_header(folder / f"{name}.safetensors", shapes)
        eight = folder / f"{name.replace('fp16', 'fp8_e4m3fn')}.safetensors"
        write_header(eight, shapes, dtype="F8_E4M3")
    found = find_files(spec, ModelPaths(preset="t2v-a14b", vae="v", text_encoder="t"), tmp_path)
    assert names_of(found) == {
        "transformer": "wan2.2_t2v_high_noise_14B_fp16.safetensors",
        "transformer_2": "wan2.2_t2v_low_noise_14B_fp16.safetensors",
    }


def test_a_distilled_model_is_told_by_its_name(tmp_path):
    spec = spec_of("ditkit_zimage")
    shapes = parts_of("ditkit_zimage", "base")["diffusion_models"]
    of_presets = {"base": "z_image_bf16", "turbo": "z_image_turbo_bf16"}
    folders = {name: tmp_path / name / "models" / "diffusion_models" for name in of_presets}
    for preset, name in of_presets.items():
        for folder in (folders[preset], tmp_path / "both" / "models" / "diffusion_models"):
            write_header(folder / f"{name}.safetensors", shapes)
    for preset, name in of_presets.items():
        paths = ModelPaths(preset=preset, vae="v", text_encoder="t")
        found = find_files(spec, paths, tmp_path / "both")
        assert names_of(found) == {"transformer": f"{name}.safetensors"}
        (other,) = of_presets.keys() - {preset}
        with pytest.raises(UserError, match=f"is the transformer of {preset}"):
            find_files(spec, paths, tmp_path / other)


def test_what_is_named_stays_and_several_files_are_a_question(comfyui, tmp_path):
    spec = spec_of("ditkit_zimage")
    named = ModelPaths(preset="base", transformer="mine.safetensors")
    assert "transformer" not in find_files(spec, named, comfyui)
    shapes = parts_of("ditkit_zimage", "base")["diffusion_models"]
    for name in ("a", "b"):
        write_header(tmp_path / "diffusion_models" / f"{name}.safetensors", shapes)
    with pytest.raises(UserError, match=r"2 files fit model\.transformer; give one of them: .*a\."):
        find_files(spec, ModelPaths(preset="base"), tmp_path)
    with pytest.raises(UserError, match=r"files fit base \(b.*turbo \(b.*; set model\.preset"):
        find_files(spec, ModelPaths(), tmp_path)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (
            "nowhere",
            "there is no models/diffusion_models, models/vae or models/text_encoders; name",
        ),
        (
            "empty",
            "is the transformer or the vae or the text encoder of base; name files by model.",
        ),
    ],
)
def test_a_folder_without_files_of_the_model_is_refused(tmp_path, folder, message):
    (tmp_path / "empty" / "vae").mkdir(parents=True)
    with pytest.raises(UserError, match=message):
        find_files(spec_of("ditkit_zimage"), ModelPaths(preset="base"), tmp_path / folder)


def test_a_recipe_is_written_with_the_files(comfyui, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    argv = ["--recipe", "zimage_character_24gb", "--gpus", "24GiB", "--comfyui", str(comfyui)]
    assert run(spec_of("ditkit_zimage"), "train", [*argv, "--print-config", "--changed"]) == 0
    written = tomllib.loads(capsys.readouterr().out)
    assert Path(written["model"]["vae"]).name == "zimage_vae.safetensors"
