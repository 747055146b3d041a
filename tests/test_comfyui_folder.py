"""`--comfyui FOLDER` finds the files of every family among those of all others, by headers of
published sizes."""

import json
import re
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
from ditkit_core.families.causal_vae import causal_vae_name
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


def official_name(name: str) -> str:
    """The name in ComfyUI's files of a parameter of a causal VAE, which diffusers calls so: written
    the other way round than the code under test."""
    stage = re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.", name)
    if stage:
        index = 4 * int(stage[1]) + (3 if stage[2] == "upsamplers" else int(stage[3]))
        name = f"decoder.upsamples.{index}.{name[stage.end() :]}"
    renames = (
        ("encoder.down_blocks.", "encoder.downsamples."),
        ("mid_block.resnets.0", "middle.0"), ("mid_block.attentions.0", "middle.1"),
        ("mid_block.resnets.1", "middle.2"), ("conv_in.", "conv1."), ("norm_out.", "head.0."),
        ("conv_out.", "head.2."), ("post_quant_conv", "conv2"), ("quant_conv", "conv1"),
        ("conv_shortcut", "shortcut"),
    )  # fmt: skip
    for theirs, official in renames:
        name = name.replace(theirs, official)
    if ".middle." not in name and "samples." not in name:
        return name
    parts = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}  # fmt: skip
    return ".".join(parts.get(part, part) for part in name.split("."))


@pytest.mark.parametrize("package", ["ditkit_krea2", "ditkit_qwenimage", "ditkit_wan"])
def test_a_vae_of_the_same_shapes_is_told_by_the_model_that_its_class_is_called_after(
    tmp_path, capsys, package
):
    """ComfyUI's qwen_image_vae, which Krea 2 has too, has the names and shapes of Wan 2.1's."""
    spec, preset = spec_of(package), first_preset(package)
    shapes = parts_of("ditkit_qwenimage", "t2i")["vae"]
    official = {official_name(name): shape for name, shape in shapes.items()}
    assert len(official) == 194 and "decoder.upsamples.3.time_conv.weight" in official
    assert {causal_vae_name(name) for name in official} == shapes.keys()
    names = {"ditkit_wan": "wan_2.1_vae.safetensors"}
    expected = names.get(package, "qwen_image_vae.safetensors")
    paths = ModelPaths(preset=preset, transformer="x", transformer_2="y", text_encoder="t")
    for name in ("qwen_image_vae.safetensors", "wan_2.1_vae.safetensors"):
        write_header(tmp_path / "models" / "vae" / name, official)
    assert names_of(find_files(spec, paths, tmp_path)) == {"vae": expected}


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


def test_a_file_that_is_called_another_model_of_the_same_shapes_is_not_taken(tmp_path):
    spec = spec_of("ditkit_qwenimage")
    shapes = parts_of("ditkit_qwenimage", "t2i")["diffusion_models"]
    files = {
        "t2i": "qwen_image_bf16",
        "edit": "qwen_image_edit_bf16",
        "edit-2509": "qwen_image_edit_2509_bf16",
        "edit-2511": "qwen_image_edit_2511_bf16",
    }
    for name in files.values():
        path = tmp_path / "all" / "models" / "diffusion_models" / f"{name}.safetensors"
        write_header(path, shapes)
        write_header(tmp_path / name / "models" / "diffusion_models" / path.name, shapes)
    for preset, name in files.items():
        paths = ModelPaths(preset=preset, vae="v", text_encoder="t")
        found = find_files(spec, paths, tmp_path / "all")
        assert names_of(found) == {"transformer": f"{name}.safetensors"}
    for preset, other in (("t2i", "edit"), ("edit", "edit-2511"), ("edit-2509", "edit-2511")):
        paths = ModelPaths(preset=preset, vae="v", text_encoder="t")
        with pytest.raises(UserError, match=f"is the transformer of {preset}"):
            find_files(spec, paths, tmp_path / files[other])


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
