"""Which dtypes the parts of Wan have; its presets are held against the official recordings in
test_against_official.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ditkit_core.models.precision import Precision, set_precision
from ditkit_wan.model.transformer import WanInputs, WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

ARCH = WanArch(
    dim=48,
    ffn_dim=64,
    heads=2,
    layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=20,
    text_tokens=6,
    freq_dim=16,
)


@pytest.mark.parametrize("per_token", [False, True])
def test_carry_and_heads_have_the_dtypes_of_their_places(per_token):
    precision = Precision(
        timestep=torch.float32, rotary_tables=torch.bfloat16, modulation=torch.bfloat16,
        residual=torch.bfloat16,
        time_mlp=torch.float64, head=torch.float64, entry=torch.float32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = WanTransformer(ARCH, Precision())
    set_precision(model, precision)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(
            torch.float32 if WAN.precision.keep_fp32(name) else torch.bfloat16
        )
    timestep = torch.full((1, 24), 731.3) if per_token else torch.tensor([731.3])
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda module, args, out: seen.update({name: out.dtype}))

    note("time", model.embed.time_embedding[2])
    note("q", model.layers[0].self_attn.q)
    note("head", model.head.head)
    carry = model.embed(WanInputs([torch.randn(4, 2, 8, 6)], timestep, [torch.randn(5, 20)]))
    assert (carry.tokens.dtype, carry.modulation.dtype) == (torch.float32, torch.bfloat16)
    assert (carry.time.dtype, carry.rotary.dtype, carry.text.dtype) == (
        torch.float64,
        torch.bfloat16,
        torch.bfloat16,
    )
    for layer in model.layers:
        carry = layer(carry)
        assert carry.tokens.dtype == torch.bfloat16
    assert model.head(carry)[0].dtype == torch.float64
    assert seen == {"time": torch.float64, "q": torch.bfloat16, "head": torch.float64}


def test_parameters_compute_where_their_names_say():
    places = {
        name: WAN.precision.op_group_of(name)
        for name, _ in WanTransformer(ARCH, Precision()).named_parameters()
    }
    assert (
        places["embed.time_embedding.0.weight"]
        == places["embed.time_projection.1.bias"]
        == "time_mlp"
    )
    assert places["layers.1.modulation"] == "modulation" and places["head.modulation"] == "head"
    assert (
        places["layers.0.norm3.weight"] == "norms"
        and places["layers.0.cross_attn.norm_k.weight"] == "qk_norms"
    )
    assert places["layers.0.ffn.0.weight"] == places["embed.patch_embedding.weight"] == "matmul"


def test_parameters_of_the_variants_compute_where_official_code_has_them():
    """Norms of image tokens and their positions are fp32 under its autocast; every matmul is
    narrow."""
    arch = replace(
        ARCH, in_channels=8, image_dim=14, image_positions=6, vace_layers=(0,), vace_channels=6
    )
    names = [name for name, _ in WanTransformer(arch, Precision()).named_parameters()]
    places = {name: WAN.precision.op_group_of(name) for name in names}
    assert {
        places[f"embed.img_emb.{name}"] for name in ("emb_pos", "proj.0.weight", "proj.4.bias")
    } == {"norms"}
    assert (
        places["layers.0.cross_attn.norm_k_img.weight"]
        == places["vace_blocks.0.self_attn.norm_q.weight"]
        == "qk_norms"
    )
    assert (
        places["vace_blocks.0.modulation"] == "modulation"
        and places["vace_blocks.0.norm3.bias"] == "norms"
    )
    matmuls = ("embed.img_emb.proj.1.weight", "embed.vace_patch_embedding.weight",
        "embed.vace_before_proj.bias",
               "vace_blocks.0.after_proj.weight", "layers.1.cross_attn.v_img.bias")  # fmt: skip
    assert {places[name] for name in matmuls} == {"matmul"}
