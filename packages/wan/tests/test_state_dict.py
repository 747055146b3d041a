"""Wan's names against diffusers' own: every parameter, in every form, there and back."""

import pytest
import torch
from torch import nn

from ditkit_core.models.precision import Precision
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.state_dict import NAMES, to_diffusers, to_native, to_official

TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 20,
        "freq_dim": 24, "ffn_dim": 56, "num_layers": 3, "patch_size": (1, 2, 2)}  # fmt: skip


def their_shapes(**extra) -> dict[str, torch.Size]:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(**TINY, **extra)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


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


def test_every_parameter_of_ours_is_one_of_diffusers_with_the_same_shape_and_none_is_left_over():
    assert {to_diffusers(name): shape for name, shape in our_shapes().items()} == their_shapes()


def test_every_parameter_of_diffusers_is_one_of_ours_with_the_same_shape_and_none_is_left_over():
    assert {to_native(name): shape for name, shape in their_shapes().items()} == our_shapes()


@pytest.mark.parametrize("extra", [{}, {"image_dim": 16, "added_kv_proj_dim": 24}, {"image_dim": 16, "added_kv_proj_dim": 24, "pos_embed_seq_len": 6}], ids=["t2v", "i2v", "flf2v"])  # fmt: skip
def test_names_go_round_in_both_forms_and_no_two_fall_together(extra):
    theirs = list(their_shapes(**extra))
    ours = [to_native(name) for name in theirs]
    assert None not in ours
    assert len(set(ours)) == len(theirs)
    assert [to_diffusers(name) for name in ours] == theirs
    official = [to_official(name) for name in ours]
    assert len(set(official)) == len(theirs)
    assert [to_native(name) for name in official] == ours


def test_vace_names_go_round_in_both_forms():
    from diffusers import WanVACETransformer3DModel

    with torch.device("meta"):
        theirs = list(
            WanVACETransformer3DModel(**TINY, vace_layers=[0, 2], vace_in_channels=8).state_dict()
        )
    ours = [to_native(name) for name in theirs]
    assert None not in ours
    assert len(set(ours)) == len(theirs)
    assert [to_diffusers(name) for name in ours] == theirs
    assert [to_native(to_official(name)) for name in ours] == ours
    assert {
        name for name in map(to_official, ours) if "vace" in name and "blocks.1." not in name
    } >= {
        "vace_patch_embedding.weight",
        "vace_blocks.0.before_proj.weight",
        "vace_blocks.0.after_proj.bias",
        "vace_blocks.0.self_attn.q.weight",
    }


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


def test_every_linear_of_a_block_has_a_name_in_both_forms_which_is_what_adapter_files_use():
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(**TINY)
    theirs = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name
    }
    native = {to_native(f"{name}.weight").removesuffix(".weight") for name in theirs}
    assert native == {
        f"layers.{number}.{module}"
        for number in range(3)
        for module in [
            *(f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"),
            "ffn.0",
            "ffn.2",
        ]
    }
    assert {to_official(f"{name}.weight").removesuffix(".weight") for name in native} == {
        name.replace("layers.", "blocks.") for name in native
    }
    assert {to_diffusers(f"{name}.weight").removesuffix(".weight") for name in native} == theirs
