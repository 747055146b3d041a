"""Wan's official names, and names that no form has; test_conformance.py has diffusers' own."""

import pytest
import torch

from ditkit_core.models.precision import Precision
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.state_dict import NAMES, to_native, to_official


def our_shapes() -> dict[str, torch.Size]:
    arch = WanArch(
        dim=24,
        ffn_dim=56,
        heads=2,
        layers=3,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        text_tokens=6,
        freq_dim=24,
    )
    with torch.device("meta"):
        model = WanTransformer(arch, Precision())
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_official_names_of_vace_are_those_of_the_published_files():
    names = {
        "embed.vace_patch_embedding.weight": "vace_patch_embedding.weight",
        "embed.vace_before_proj.weight": "vace_blocks.0.before_proj.weight",
        "vace_blocks.0.after_proj.bias": "vace_blocks.0.after_proj.bias",
        "vace_blocks.0.self_attn.q.weight": "vace_blocks.0.self_attn.q.weight",
    }
    assert {ours: to_official(ours) for ours in names} == names


def test_official_names_are_those_of_the_published_files():
    official = {to_official(name) for name in our_shapes()}
    outside = {
        f"{module}.{leaf}"
        for module in (
            "patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0",
            "time_embedding.2",
            "time_projection.1", "head.head",
        )
        for leaf in ("weight", "bias")
    } | {"head.modulation"}  # fmt: skip
    linears = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"] + [
        "ffn.0",
        "ffn.2",
        "norm3",
    ]
    norms = [f"{kind}_attn.norm_{part}.weight" for kind in ("self", "cross") for part in "qk"]
    block = {f"{module}.{leaf}" for module in linears for leaf in ("weight", "bias")} | {
        *norms,
        "modulation",
    }
    assert len(block) == 27
    assert official == outside | {
        f"blocks.{number}.{name}" for number in range(3) for name in block
    }


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.self_attn.qkv.weight",
        "blocks.x.self_attn.q.weight",
        "double_blocks.0.norm3.weight",
        "norm3.weight",
        "",
        "vace_blocks.1.before_proj.weight",
        "blocks.0.after_proj.weight",
        "first_stage_model.conv.weight",
    ],
)
def test_a_name_that_no_form_has_is_none(name):
    assert to_native(name) is None


def test_prefixes_are_tried_longest_first():
    assert list(NAMES.prefixes) == sorted(NAMES.prefixes, key=len, reverse=True)
