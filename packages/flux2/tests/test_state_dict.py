"""FLUX.2's names against the official recording's; test_conformance.py has diffusers' own."""

from pathlib import Path

import pytest
import torch
from flux2_pieces import foreign, native
from safetensors import safe_open
from torch import Tensor

from ditkit_core.models.precision import Precision
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.state_dict import NAMES

GOLDEN = Path(__file__).parent / "golden" / "flux2_bfl_fp32.safetensors"


def our_state() -> dict[str, Tensor]:
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=2, single_layers=2, text_dim=20, guidance=True,
        in_channels=8, out_channels=8,
        axes=(4, 4, 4, 4),
    )  # fmt: skip
    model = Flux2Transformer(arch, Precision())
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def official_state() -> dict[str, Tensor]:
    with safe_open(GOLDEN, "pt") as file:
        return {
            key.removeprefix("sd."): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118
            if key.startswith("sd.")
        }


def shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_official_recordings_parameters_are_ours_with_the_same_shapes_and_none_is_left_over():
    assert shapes(native(official_state())) == shapes(our_state())
    assert shapes(foreign(our_state(), "official")) == shapes(official_state())


def test_official_to_diffusers_and_back_is_exact():
    official = official_state()
    assert same(foreign(native(foreign(native(official), "diffusers")), "official"), official)


def test_repacked_files_may_name_the_weight_of_a_norm_as_torch_does():
    ours = native(official_state())
    repacked = {
        name.replace("_norm.scale", "_norm.weight"): tensor
        for name, tensor in official_state().items()
    }
    assert repacked.keys() != official_state().keys()
    assert same(native(repacked), ours)


def test_prefixes_of_comfyui_files_are_tried_longest_first():
    assert {"diffusion_model.", "model.diffusion_model."} <= set(NAMES.prefixes)
    assert list(NAMES.prefixes) == sorted(NAMES.prefixes, key=len, reverse=True)


@pytest.mark.parametrize(
    "name",
    [
        "double_blocks.0.img_attn.q.weight",
        "double_blocks.x.img_attn.qkv.weight",
        "double_blocks.0.img_attn.qkv.bias",
        "double_blocks.linear1.weight",
        "single_blocks.0.img_attn.qkv.weight",
        "transformer_blocks.*.attn.to_q.weight",
        "blocks.0.self_attn.q.weight",
        "img_in.scale",
        "img_in",
        "",
        "time_in.in_layer.bias",
    ],
)
def test_a_name_that_no_form_has_is_none(name):
    assert NAMES.to_native(name) is None
