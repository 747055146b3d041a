"""An exported adapter is proven by diffusers: the right one passes, a wrong one does not."""

from pathlib import Path

import pytest
import torch
from adapted_flux2 import ADALN, Adapted, kinds_of_layers
from safetensors.torch import load_file, save_file

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.errors import UserError
from ditkit_flux2.verify import DIFFUSERS

QKV = ("*.q", "*.k", "*.v")


def all_layers(kind: str, form: str) -> tuple[str, ...]:
    return tuple(layer for layer in kinds_of_layers(kind) if form == "diffusers" or layer != ADALN)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("dev", "official"), ("dev", "diffusers"), ("klein base", "official"), ("klein", "diffusers")],
)
def test_an_adapter_on_every_layer_is_what_diffusers_computes(
    tmp_path: Path, kind: str, form: str
) -> None:
    world = Adapted(kind, all_layers(kind, form), alpha=6.0)
    before = {name: value.clone() for name, value in trainable_parameters(world.model).items()}
    line = world.verify(world.write(tmp_path, form))
    assert "agrees with our model" in line and "cannot tell" not in line and "\n" not in line
    assert all(
        torch.equal(before[name], value)
        for name, value in trainable_parameters(world.model).items()
    )


@pytest.mark.parametrize(
    "targets", [QKV, ("*.q",), ("*.k", "double_blocks.1.txt_attn.v"), ("*.q", "*.v", "*.proj")]
)
def test_separate_q_k_and_v_are_exact_in_the_fused_tensor(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    world = Adapted("klein base", targets, alpha=6.0)
    assert "agrees with our model" in world.verify(world.write(tmp_path, "official"))


def test_the_official_file_has_the_names_that_comfyui_reads(tmp_path: Path) -> None:
    state = load_file(
        Adapted("klein base", (*QKV, "*.linear1", "embed.img_in")).write(tmp_path, "official")
    )
    qkv = [
        f"double_blocks.{block}.{stream}_attn.qkv" for block in (0, 1) for stream in ("img", "txt")
    ]
    modules = [*qkv, "single_blocks.0.linear1", "single_blocks.1.linear1", "img_in"]
    assert state.keys() == {
        f"diffusion_model.{name}.lora_{part}.weight" for name in modules for part in "AB"
    }
    shapes = [tuple(state[f"diffusion_model.{qkv[0]}.lora_{part}.weight"].shape) for part in "AB"]
    assert shapes == [(9, 32), (96, 9)]  # rank 3 of each


@pytest.mark.parametrize("targets", [("*",), ("*.q", "single_blocks.*", "embed.*")])
def test_dora_in_diffusers_form_is_proven_too(tmp_path: Path, targets: tuple[str, ...]) -> None:
    world = Adapted("dev", targets, use_dora=True, alpha=6.0)
    assert "agrees with our model" in world.verify(world.write(tmp_path, "diffusers"))


@pytest.mark.parametrize(
    "config", [{"method": "lokr"}, {"method": "loha"}], ids=lambda config: config["method"]
)
def test_a_lokr_or_loha_is_compared_with_pefts_layers_in_diffusers_model(
    tmp_path: Path, config: dict[str, str]
) -> None:
    """In the diffusers form, which ComfyUI reads for this model: the official names have q, k and v
    in one."""
    world = Adapted("dev", ("*.q", "*.proj", "single_blocks.*"), alpha=6.0, **config)
    line = world.verify(file := world.write(tmp_path, "diffusers"))
    assert (
        "diffusers' model with peft's layers takes adapter" in line
        and "agrees with our model" in line
    ), line
    assert all(name.startswith("transformer.") for name in load_file(file))
    with pytest.raises(
        UserError, match=r"the official form has .*qkv for more or less than one layer"
    ):
        world.write(tmp_path, "official")


def test_a_16_bit_file_and_a_16_bit_base_are_compared_within_their_rounding(tmp_path: Path) -> None:
    world = Adapted("dev", ("double_blocks.*", "single_blocks.*"))
    assert "cannot tell" not in world.verify(world.write(tmp_path, "official", torch.bfloat16))
    world = Adapted("dev", ("double_blocks.*", "single_blocks.*"), dtype=torch.bfloat16)
    assert "cannot tell" not in world.verify(world.write(tmp_path, "official", torch.bfloat16))
    small = Adapted("dev", ("double_blocks.*",), dtype=torch.bfloat16, size=1e-3)
    assert "bfloat16 cannot tell so small a change" in small.verify(
        small.write(tmp_path, "official", torch.bfloat16)
    )


def tamper(file: Path, change: str) -> None:
    state = load_file(file)
    key = next(key for key in state if key.endswith("norm_out.linear.lora_B.weight"))
    if change == "value":
        state[key] = state[key] * 1.5
    elif change == "halves":
        state[key] = torch.cat(state[key].chunk(2)[::-1])
    elif change == "missing":
        del state[key], state[key.replace("lora_B", "lora_A")]
    elif change == "prefix":
        state = {key.removeprefix("transformer."): tensor for key, tensor in state.items()}
    save_file(state, file)


def test_a_tampered_adapter_is_refused(tmp_path: Path) -> None:
    world = Adapted("klein base", (ADALN, "*.linear1"))
    for change in ("value", "halves", "missing", "prefix"):
        file = world.write(tmp_path, "diffusers")
        tamper(file, change)
        with pytest.raises(UserError, match="adapter.safetensors") as caught:
            world.verify(file)
        refused = str(caught.value)
        assert "\n" not in refused and "export it again" in refused, change


def test_what_diffusers_leaves_out_shows_where_rounding_would_hide_it(tmp_path: Path) -> None:
    world = Adapted("klein base", (ADALN, "*.linear1"), dtype=torch.bfloat16, size=1e-4)
    file = world.write(tmp_path, "diffusers")
    tamper(file, "missing")
    with pytest.raises(UserError, match=r"diffusers ignores the adapter of norm_out\.linear"):
        world.verify(file)


def test_an_adapter_without_effect_is_recognised(tmp_path: Path) -> None:
    world = Adapted("klein base", QKV, size=0.0)
    assert "changes nothing yet" in world.verify(world.write(tmp_path, "official"))


def test_the_bases_matrices_are_not_copied() -> None:
    model = Adapted("dev", QKV).model
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    theirs = DIFFUSERS.transformer(model).named_parameters()
    assert [name for name, parameter in theirs if parameter.data_ptr() not in pointers] == [
        "norm_out.linear.weight"
    ]
