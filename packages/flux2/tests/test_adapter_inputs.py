"""LoRA files of FLUX.2 as other programs write them: what each makes of the weights, by hand and by
diffusers' own reader."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from flux2_pieces import foreign, native
from safetensors.torch import save_file
from tiny_flux2 import tiny_model
from torch import Tensor, nn

from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import open_adapter
from ditkit_flux2.state_dict import NAMES

RANK = 4


class Program(NamedTuple):
    """How a program names what it writes."""

    form: str
    prefix: str
    parts: tuple[str, str] = ("lora_A", "lora_B")
    flat: bool = False
    alpha: float | None = None
    diffusers_reads: bool = False
    """Whether diffusers makes the same of the blocks' adapters."""


KOHYA = ("lora_down", "lora_up")
PROGRAMS = {
    "diffusers": Program("diffusers", "transformer.", diffusers_reads=True),
    "ai-toolkit, diffusion-pipe": Program("official", "diffusion_model.", diffusers_reads=True),
    "musubi, whose default alpha is 1": Program("official", "lora_unet_", KOHYA, True, 1.0, True),
    "kohya without alpha": Program("official", "lora_unet_", KOHYA, True, None, True),
    "peft over official names": Program("official", "base_model.model.", diffusers_reads=True),
    "peft over diffusers' names": Program("diffusers", "base_model.model.", diffusers_reads=True),
    "DiffSynth": Program("diffusers", "", ("lora_A.default", "lora_B.default")),
    "DiffSynth, aligned": Program("diffusers", ""),
    "OneTrainer": Program("diffusers", "lora_transformer_", KOHYA, True, 1.0),
    "OneTrainer for ComfyUI": Program("official", "diffusion_model.", KOHYA, False, 2.0),
    "SimpleTuner for ComfyUI": Program("official", "diffusion_model.", alpha=2.0),
    "no prefix": Program("official", ""),
    "model.diffusion_model.": Program("official", "model.diffusion_model.", KOHYA, False, 8.0),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Of our Linear layers."""
    linears = {
        name: module
        for name, module in tiny_model("dev").named_modules()
        if isinstance(module, nn.Linear)
    }
    return {name: tuple(module.weight.shape) for name, module in linears.items()}


def written(
    program: Program, *, blocks_only: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A file's tensors, with an adapter on every Linear layer of the form, and what they add to
    each weight of the form."""
    random = torch.Generator().manual_seed(0)
    ours = {
        f"{name}.weight": torch.empty(shape)
        for name, shape in shapes().items()
        if not blocks_only or "blocks." in name
    }
    tensors, changes = {}, {}
    for weight, empty in foreign(ours, program.form).items():
        name = weight.removesuffix(".weight")
        name = program.prefix + (name.replace(".", "_") if program.flat else name)
        down, up = (
            torch.randn(size, generator=random)
            for size in ((RANK, empty.shape[1]), (len(empty), RANK))
        )
        tensors |= {
            f"{name}.{program.parts[0]}.weight": down,
            f"{name}.{program.parts[1]}.weight": up,
        }
        if program.alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(program.alpha)
        changes[weight] = (program.alpha or RANK) / RANK * up @ down
    return tensors, changes


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_programs_file_changes_each_weight_as_it_says(tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    tensors, changes = written(program)
    save_file(tensors, tmp_path / "x.safetensors")
    file = open_adapter(tmp_path / "x.safetensors", NAMES, shapes())
    assert {found.rank for found in file.modules.values()} == {RANK}
    expected, edits = native(changes), merge_into([(file, 1.0)])
    assert edits.keys() == expected.keys() == {f"{name}.weight" for name in shapes()}
    for weight, change in expected.items():
        merged = torch.zeros_like(change)
        edits[weight](merged)
        torch.testing.assert_close(merged, change, msg=weight)


@pytest.mark.parametrize(
    "name", [name for name, program in PROGRAMS.items() if program.diffusers_reads]
)
def test_diffusers_reads_the_same_of_what_it_reads(name: str) -> None:
    """The blocks alone: of what is outside it drops some in one form and misreads some in
    another."""
    from diffusers import Flux2Pipeline

    tensors, changes = written(PROGRAMS[name], blocks_only=True)
    read: Any = Flux2Pipeline.lora_state_dict(tensors)
    layers = {key.removesuffix(".lora_A.weight") for key in read if key.endswith(".lora_A.weight")}
    assert len(read) == 2 * len(layers)
    products = {
        f"{layer.removeprefix('transformer.')}.weight": read[f"{layer}.lora_B.weight"]
        @ read[f"{layer}.lora_A.weight"]
        for layer in layers
    }
    theirs, ours = native(products), native(changes)
    assert theirs.keys() == ours.keys()
    for weight, change in ours.items():
        torch.testing.assert_close(theirs[weight], change, msg=weight)
