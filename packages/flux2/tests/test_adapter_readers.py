"""What is said of programs that read FLUX.2's adapter files: LoKrs, held against the diffusers that
is installed, and files of others."""

import json
from pathlib import Path

import pytest
import torch
from adapted_flux2 import Adapted
from safetensors.torch import load_file, save_file
from torch import nn

from ditkit_core.adapters.diffusers_model import relative
from ditkit_core.adapters.files import identify
from ditkit_core.adapters.files.identify import Shapes, find_adapter
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.commands import cli
from ditkit_core.errors import UserError
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.adapters import RULES
from ditkit_flux2.spec import FLUX2
from ditkit_flux2.state_dict import NAMES
from ditkit_flux2.verify import DIFFUSERS

QKV = ("*.q", "*.k", "*.v")


def layers_of(world: Adapted) -> dict[str, tuple[int, ...]]:
    """The Linear layers of a model with an adapter."""
    return {
        name.removesuffix(".base_layer"): tuple(module.weight.shape)
        for name, module in world.model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


def said_of_diffusers(world: Adapted, file: Path) -> str:
    found = find_adapter(file, FLUX2, layers=layers_of(world))
    return RULES.readers(found.layout, list(found.shapes))["diffusers"]


def loads_plainly(world: Adapted, file: Path) -> bool:
    """Whether the pipeline's loader alone loads all of a file, to the same outputs: `verify` makes
    peft's layers itself."""
    from diffusers import Flux2KleinPipeline

    theirs, inputs = DIFFUSERS.transformer(world.model), DIFFUSERS.inputs(world.model)
    try:
        Flux2KleinPipeline(None, None, None, None, theirs).load_lora_weights(str(file))
    except ValueError:
        return False
    with torch.no_grad():
        return relative(DIFFUSERS.run(theirs, inputs), world.model(inputs)[0]) < 1e-5


LOKR = {"decomposed": {}, "whole factors": {"rank_pattern": ("*=10000",)}}


@pytest.mark.parametrize("factors", LOKR)
@pytest.mark.parametrize("kind", ["diffusers", "musubi", "keys of alpha"])
def test_what_is_said_of_diffusers_and_a_lokr_is_what_its_loader_does(
    tmp_path: Path, kind: str, factors: str
) -> None:
    targets = ("*.proj", "*.linear1")
    world = Adapted(
        "klein base", targets, alpha=6.0, method="lokr", decompose_factor=4, **LOKR[factors]
    )
    file = world.write(tmp_path, "musubi" if kind == "musubi" else "diffusers")
    if kind == "keys of alpha":
        tensors = load_file(file)
        stems = {name.rpartition(".lokr_")[0] for name in tensors}
        save_file({**tensors, **{f"{stem}.alpha": torch.tensor(3.0) for stem in stems}}, file)
    said = said_of_diffusers(world, file)
    assert loads_plainly(world, file) == (said == "") == (kind == "diffusers"), said


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("official", "diffusers"),
        ("diffusers", "official"),
        ("diffusers", "musubi"),
        ("diffsynth", "musubi"),
        ("musubi", "diffsynth"),
        ("musubi", "official"),
        ("official", "official"),
    ],
)
def test_forms_that_stack_otherwise_become_each_other_bitwise(
    tmp_path: Path, first: str, second: str
) -> None:
    """q, k and v apart in one form, one tensor in the other: A is three times as high there, or
    shared."""
    world = Adapted("klein base", (*QKV, "*.linear1", "head.linear"), alpha=6.0)
    shapes, state = layers_of(world), trainable_parameters(world.model)
    source, out = world.write(tmp_path, first), tmp_path / "out.safetensors"
    assert (
        cli.run(FLUX2, "export", ["--adapter", str(source), "--to", second, "--out", str(out)]) == 0
    )
    file = open_adapter(out, NAMES, shapes)
    assert {f"{name}.lora_A.weight" for name in file.modules} == {
        name for name in state if "lora_A" in name
    }
    for name, module in file.modules.items():
        read = file.read(name)
        used = read.up.any(0)
        assert torch.equal(read.down[used], state[f"{name}.lora_A.weight"])
        assert torch.equal(read.up[:, used] * module.scale, state[f"{name}.lora_B.weight"] * 2)


def test_diffsynths_names_are_diffusers_without_a_prefix(tmp_path: Path) -> None:
    names = set(load_file(Adapted("klein base", ("*.q",)).write(tmp_path, "diffsynth")))
    assert "transformer_blocks.0.attn.to_q.lora_A.default.weight" in names


def test_a_lora_of_another_family_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 2)}, path)
    told = r"is a LoRA of another model \(its names look like those of Wan\): .* …; use the wan commands$"
    with pytest.raises(UserError, match=told):
        find_adapter(path, FLUX2)
    with pytest.raises(UserError, match=told):  # as adapter.init and base.merge open it
        open_adapter(path, FLUX2.architecture.names, layers_of_preset("klein-4b"))


def layers_of_preset(name: str) -> Shapes:
    return identify.layers_of(FLUX2.architecture.build, FLUX2.architecture.presets[name])


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"_class_name": "WanTransformer3DModel", "num_layers": 30}, "describes Wan (WanTransformer3DModel), and no model of flux2; use the wan commands"),
        ({"_class_name": "FluxTransformer2DModel"}, "describes FLUX.1 (FluxTransformer2DModel), and no model of flux2; ditkit does not train that model; name a file of this one"),
        ({"_class_name": "AutoencoderKLFlux2"}, "describes a VAE (AutoencoderKLFlux2), and no model of flux2"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "describes a text encoder (Qwen3ForCausalLM), and no model of flux2"),
        ({"_class_name": "KandinskyTransformer"}, "does not describe this model of flux2 (KandinskyTransformer: it has no "),
        ({"_class_name": "Flux2Transformer2DModel"}, "does not describe this model of flux2 (Flux2Transformer2DModel: it has no "),
    ],
)  # fmt: skip
def test_a_base_of_another_family_is_answered_with_its_commands(
    tmp_path: Path, config: dict[str, object], answer: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        arch_here(FLUX2, ModelPaths(transformer=str(tmp_path)))
    assert str(error.value).startswith(
        f"{tmp_path / 'config.json'} {answer}"
    ) and "Error" not in str(error.value)
    assert ("set model.preset to one of" in str(error.value)) == answer.startswith("does not")


def test_a_single_file_of_another_family_is_answered_with_its_commands(tmp_path: Path) -> None:
    save_file(
        {"blocks.0.self_attn.q.weight": torch.ones(2, 2), "head.head.weight": torch.ones(2, 2)},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(
        UserError,
        match=r"no preset fits the weights in .* \(its names look like those of Wan\); use the wan commands$",
    ):
        arch_here(FLUX2, ModelPaths(transformer=str(tmp_path / "x.safetensors")))
