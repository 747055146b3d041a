"""The toy model passes the checks that every model passes, and broken models do not."""

from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.testing.carries import check_carry
from ditkit_core.testing.conformance import Conformance
from ditkit_core.testing.conformance_replay import STEPS
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import Items, make_model, outcome


class TestToyWithDropoutInBlockAndAttention(Conformance):
    """Wan and FLUX.2, which have none, pass the same checks without dropout. It has no
    `last_layers`: a dropout's mask is saved after them. Three layers of a block have adapters: one
    for attention to the tokens, one for attention to the text, and the last; between them are
    layers without."""

    spec = altered(TOY, name="toy-adapted", targets={"all": ("qkv", "key_value", "mlp.2")})
    arch = TOY.architecture.presets["dropout"]
    places_without = ("rotary_tables", "rotary", "qk_norms")
    num_daily: ClassVar = {}
    nightly = ()
    steps_on_a_stand_in = STEPS
    micro_batches_on_a_stand_in = 2
    cuts_alone = True

    def items(self, count: int, ragged: bool = False) -> Items:
        return toy_items(count, ragged=ragged)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
    def test_a_sample_in_a_ragged_batch_equals_itself_alone(self, dtype: torch.dtype) -> None:
        """Without dropout, which draws one mask for the whole batch."""
        alike = _ToyWithoutDropout()
        alike.test_a_sample_in_a_ragged_batch_equals_itself_alone(dtype)


class _ToyWithoutDropout(Conformance):
    spec = TOY
    arch = TOY.architecture.presets["tiny"]

    def items(self, count: int, ragged: bool = False) -> Items:
        return toy_items(count, ragged=ragged)


def test_a_model_of_rms_norms_passes_the_checks_of_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch composes an RMS norm: no operation of it is named after norms, and in bf16 only its
    result is in that dtype."""

    def composed(x: Tensor, shape: list[int]) -> Tensor:
        return F.rms_norm(x, shape)

    monkeypatch.setattr(F, "layer_norm", composed)
    checks = type("OfComposedNorms", (_ToyWithoutDropout,), {})()
    checks.test_a_place_that_is_lowered_from_fp64_alone_runs_lower_alone("norms")
    checks.test_a_place_that_is_raised_alone_runs_wider_alone("norms")

    def rms_norm_in_fp64(x: Tensor, shape: list[int]) -> Tensor:
        return composed(x.double(), shape).to(x.dtype)

    monkeypatch.setattr(F, "layer_norm", rms_norm_in_fp64)
    of_wide_norms = type("OfWideNorms", (_ToyWithoutDropout,), {})()
    with pytest.raises(AssertionError, match="only the head's norm"):
        of_wide_norms.test_a_place_that_is_lowered_from_fp64_alone_runs_lower_alone("norms")


class _Carry(NamedTuple):
    x: Float[Tensor, "batch tokens"]
    y: Float[Tensor, " batch"]


@pytest.mark.parametrize(
    ("carry", "field"),
    [
        (_Carry(torch.ones(2, 3), torch.ones(3)), "y"),
        (_Carry(torch.ones(2, 3), torch.ones(2, dtype=torch.long)), "y"),
        (_Carry(torch.ones(2), torch.ones(2)), "x"),
    ],
)
def test_a_carry_that_breaks_its_annotation_is_named(carry: _Carry, field: str) -> None:
    with pytest.raises(AssertionError, match=f"carry.{field} "):
        check_carry(carry)


class _NestedCarry(NamedTuple):
    x: Float[Tensor, "batch tokens"]
    modulation: tuple[Tensor, ...]


def test_a_carry_that_hides_tensors_is_named() -> None:
    with pytest.raises(AssertionError, match="carry.modulation has tensors inside a tuple"):
        check_carry(_NestedCarry(torch.ones(2, 3), (torch.ones(2), torch.ones(2))))


class _Part(NamedTuple):
    rows: Float[Tensor, "batch rows"]


class _CarryWithPart(NamedTuple):
    x: Float[Tensor, "batch tokens"]
    part: _Part | None


def test_a_named_tuple_in_a_carry_is_checked_as_the_carry_is() -> None:
    for part in (None, _Part(torch.ones(2, 5))):
        check_carry(_CarryWithPart(torch.ones(2, 3), part))
    with pytest.raises(AssertionError, match="carry.part.rows "):
        check_carry(_CarryWithPart(torch.ones(2, 3), _Part(torch.ones(3, 5))))


def test_two_attention_calls_of_one_name_in_a_block_are_refused_before_backward() -> None:
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"])
    block = model.layers[0]
    forward = block.forward
    block.forward = lambda carry: forward(forward(carry))
    with pytest.raises(RuntimeError, match="Duplicate"):
        outcome(TOY, model, toy_items(1), BlockEngine(policy="attn_only"))


@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_without_the_generator_hook_dropout_would_be_replayed_wrong(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the hook is there: the equality checks above fail without it, so they are checks."""
    from ditkit_core.engine.run_block import GeneratorHook

    model: Any = make_model(TOY, TOY.architecture.presets["dropout"])
    plain = outcome(TOY, model, toy_items(2), None)
    monkeypatch.setattr(GeneratorHook, "restore", lambda self, state: None)
    assert outcome(TOY, model, toy_items(2), BlockEngine(policy=policy)).differences(plain)
