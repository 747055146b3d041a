"""FLUX.2's names against the official recording's and diffusers' own: every parameter, in every
form, there and back."""

from pathlib import Path

import pytest
import torch
from flux2_pieces import foreign, native
from safetensors import safe_open
from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.models.state_dict import TensorSlice
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import PRESETS, Flux2Arch
from ditkit_flux2.state_dict import NAMES

GOLDEN = Path(__file__).parent / "golden" / "flux2_bfl_fp32.safetensors"
FORMS = ("official", "diffusers")


def their_state(guidance: bool = True) -> dict[str, Tensor]:
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=20, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance,
    )  # fmt: skip
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def our_state(guidance: bool = True) -> dict[str, Tensor]:
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=2, single_layers=2, text_dim=20, guidance=guidance,
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


@pytest.mark.parametrize("guidance", [True, False], ids=["dev", "klein"])
def test_diffusers_parameters_are_ours_with_the_same_shapes_and_none_is_left_over(guidance):
    assert shapes(native(their_state(guidance))) == shapes(our_state(guidance))
    assert shapes(foreign(our_state(guidance), "diffusers")) == shapes(their_state(guidance))


def test_the_official_recordings_parameters_are_ours_with_the_same_shapes_and_none_is_left_over():
    assert shapes(native(official_state())) == shapes(our_state())
    assert shapes(foreign(our_state(), "official")) == shapes(official_state())


@pytest.mark.parametrize("form", FORMS)
def test_tensors_go_round_bitwise(form):
    ours = our_state()
    assert same(native(foreign(ours, form)), ours)
    theirs = official_state() if form == "official" else their_state()
    assert same(foreign(native(theirs), form), theirs)


def test_official_to_diffusers_and_back_is_exact():
    official = official_state()
    assert same(foreign(native(foreign(native(official), "diffusers")), "official"), official)


def test_official_and_diffusers_tensors_relate_as_its_converter_says():
    """qkv thirds, and the halves of the head's modulation in the other order."""
    official = official_state()
    theirs = foreign(native(official), "diffusers")
    q, k, v = official["double_blocks.1.txt_attn.qkv.weight"].chunk(3)
    assert torch.equal(theirs["transformer_blocks.1.attn.add_q_proj.weight"], q)
    assert torch.equal(theirs["transformer_blocks.1.attn.add_k_proj.weight"], k)
    assert torch.equal(theirs["transformer_blocks.1.attn.add_v_proj.weight"], v)
    shift, scale = official["final_layer.adaLN_modulation.1.weight"].chunk(2)
    assert torch.equal(theirs["norm_out.linear.weight"], torch.cat([scale, shift]))
    for key in ("query", "key"):
        norm = official[f"single_blocks.0.norm.{key}_norm.scale"]
        assert torch.equal(theirs[f"single_transformer_blocks.0.attn.norm_{key[0]}.weight"], norm)


def test_the_halves_of_the_heads_modulation_change_places_both_ways():
    ours = "head.adaLN_modulation.1.weight"
    assert NAMES.to_native("norm_out.linear.weight") == (
        TensorSlice(ours, 1, 2),
        TensorSlice(ours, 0, 2),
    )
    theirs = "norm_out.linear.weight"
    assert NAMES.from_native["diffusers"](ours) == (
        TensorSlice(theirs, 1, 2),
        TensorSlice(theirs, 0, 2),
    )
    assert NAMES.from_native["official"](ours) == (
        TensorSlice("final_layer.adaLN_modulation.1.weight"),
    )


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


@pytest.mark.parametrize("preset", PRESETS)
def test_no_two_parameters_of_a_preset_fall_together_in_any_form(preset):
    with torch.device("meta"):
        model = Flux2Transformer(PRESETS[preset], Precision())
    for form in FORMS:
        parts = [part for name in model.state_dict() for part in NAMES.from_native[form](name)]
        assert len(set(parts)) == len(parts)
        for part in parts:
            back = NAMES.to_native(part.name)
            assert back is not None and len(back) == part.of


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


def test_every_linear_of_ours_has_a_name_in_both_forms_which_is_what_adapter_files_use():
    with torch.device("meta"):
        model = Flux2Transformer(PRESETS["klein-4b"], Precision())
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for form in FORMS:
        names = {
            part.name for name in linears for part in NAMES.from_native[form](f"{name}.weight")
        }
        assert all(name.endswith(".weight") for name in names)
        stacked = 4 * 5 if form == "official" else 0  # q, k, v of two streams are one tensor each
        assert len(names) == len(linears) - stacked
