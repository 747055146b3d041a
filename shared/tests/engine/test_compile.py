"""Compiled blocks: every policy is in force, numbers are those of compiled blocks that keep everything, and what cannot work is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ditkit_core.config.resolve import resolve
from ditkit_core.engine import compile as compiled
from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.compile import backend_of, check_compiled, check_compiler
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.nn.attention.backends import BACKENDS
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.compiled_runs import check_levers, printed
from ditkit_core.testing.ranks import once
from ditkit_core.testing.toy import TOY, ToyBlock, toy_items
from ditkit_core.testing.world import make_model, outcome

SCRIPT = Path(__file__).parents[1] / "support" / "compiled_toy.py"
_FIRST_IS_APART = torch.__version__ < (2, 12)
"""Whether this torch makes graphs of their own for the blocks behind the first."""
CONFORMANCE = Path(__file__).parents[1] / "testing"


def refused(use: Callable[[], object], *words: str) -> None:
    """Refused in one line, which has these words."""
    with pytest.raises(UserError) as caught:
        use()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def check_in_force(found: Any, *, graphs: int, tolerance: float) -> None:
    """Three blocks, each with two attentions: N forwards of attention where it is kept, 2 N where it is not."""
    assert all(under["equal"] for under in found.values()), found
    assert {policy: under["forwards"] for policy, under in found.items()} == {
        "none": 6, "full": 12, "attn_only": 6, "attn_only(self)": 9,
    }  # fmt: skip
    assert all(under["graphs"] <= graphs for under in found.values()), found
    assert all(under["from_eager"] <= tolerance for under in found.values()), found


@pytest.fixture(scope="module")
def daily(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the script prints of policies and levers."""
    return once(tmp_path_factory.getbasetemp(), "compiled_toy", lambda folder: printed(SCRIPT, "daily"))


@pytest.mark.slow
def test_policies_are_in_force_in_compiled_blocks_and_exact_with_dropout(daily: Any):
    check_in_force(daily["policies"], graphs=1, tolerance=2e-6)


@pytest.mark.slow
def test_they_are_with_adapters_that_drop_in_bf16_and_samples_of_two_sizes():
    """LoRA over a frozen base takes at most two graphs for all blocks: the first carry may need no gradient."""
    check_in_force(printed(SCRIPT, "adapters"), graphs=2, tolerance=0.02)


@pytest.mark.slow
def test_compiled_blocks_go_with_weights_that_come_and_go_offloading_schedules_and_new_sizes(daily: Any):
    found = daily["levers"]
    for policy in ("none", "full", "attn_only"):
        assert found[f"swap {policy}"] and found[f"refilled {policy}"] > 0
        assert found[f"offload {policy}"] and found[f"moved {policy}"] > 0
    assert found["moved full"] < found["moved attn_only"] < found["moved none"]
    assert found["schedule"] and found["schedule forwards"] == 4 + 2 + 2
    assert found["graphs of new sizes"] == (2 if _FIRST_IS_APART else 1)  # the second size makes a symbol of it
    assert found["forwards of force_eager"] == 6
    assert found["graphs without a backward"] == 0
    assert "slef" in found["unknown region"] and "the blocks call cross, self" in found["unknown region"]
    assert "Shortening changes sizes" in found["changed beside tensors"]
    assert "more kinds of input than the 1 that are compiled" in found["too many graphs"]


@pytest.mark.slow
def test_backwards_are_compiled_with_their_forwards(daily: Any):
    """In a backward, devices compile in threads of their own, and torch's compiler is not made for that."""
    assert daily["late backwards"] and not any(daily["late backwards"])


@pytest.mark.slow
def test_buckets_frame_counts_and_numbers_of_samples_take_six_graphs():
    """One sample and several, each of one size and then of any; and a mask."""
    found = printed(SCRIPT, "graphs")
    assert found["batches"] == 40 and found["graphs of batches"][0] <= 6
    # Neither depth nor another model, such as a second expert, takes one.
    assert found["graphs of batches"][1] == (3 if _FIRST_IS_APART else 0)
    assert not found["kept"]


@pytest.mark.exhaustive
def test_a_divided_streamed_pipelined_model_and_one_that_steps_in_its_backward_compile_to_the_same_numbers():
    check_levers("few_levers", CONFORMANCE, ["TestToyWithDropoutInBlockAndAttention"])


@pytest.mark.exhaustive
@pytest.mark.timeout(3100)
def test_levers_compose_with_compiled_blocks():
    check_levers("levers", CONFORMANCE, ["TestToyWithDropoutInBlockAndAttention"])


@pytest.mark.exhaustive
def test_compiled_blocks_go_with_a_quantized_base():
    for kind, found in printed(SCRIPT, "quantized").items():
        assert all(under["equal"] for under in found.values()), (kind, found)
        assert [under["forwards"] for under in found.values()] == [8, 4], (kind, found)
        assert all(under["from_eager"] <= 0.02 for under in found.values()), (kind, found)
        # Products of the dequantized matrices instead of the codes differ by more.
        assert found["full"]["base alone"] <= 1e-3, (kind, found)


@pytest.mark.slow
def test_inductor_is_near_eager_and_keeps_the_same():
    """Fused loops of fp32 sum in another order. Dropout draws masks of its own, under each policy: gradients are held to be those of the loss
    that came out, by its slope."""
    found = printed(SCRIPT, "inductor")
    for policy, (slope, by_difference) in found["slopes"].items():
        assert slope == pytest.approx(by_difference, rel=1e-7), policy
    for under in found["plain"].values():
        assert under["from_first"] <= 2e-5 and under["from_eager"] <= 2e-5, found["plain"]
    assert [under["forwards"] for under in found["plain"].values()] == [4, 4]


def test_a_setting_is_a_switch_or_the_name_of_a_backend():
    assert (backend_of(False), backend_of(True), backend_of("aot_eager"), backend_of("")) == (
        "",
        "inductor",
        "aot_eager",
        "",
    )


@pytest.mark.parametrize(
    ("backend", "reason"), [("inducter", "not a backend"), ("eager", "no backward"), ("cudagraphs", "overwrite")]
)
def test_backends_that_cannot_train_are_refused(backend, reason):
    refused(lambda: check_compiler(backend), backend, reason, "aot_eager")


def test_a_missing_compiler_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    refused(lambda: check_compiler("inductor", ["cpu"]), "g++", "train.compile")
    check_compiler("aot_eager", ["cpu"])
    check_compiler("", ["cpu"])
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    refused(lambda: check_compiler("inductor", ["cuda"]), "triton", "train.compile")


@pytest.mark.parametrize("attention", ["flash4", "sage"])
def test_kernels_that_are_no_operation_are_refused(attention):
    refused(
        lambda: BlockEngine(backend=attention, compile="aot_eager"), repr(attention), "set train.attention to", "sdpa,"
    )
    BlockEngine(backend=attention)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, which it hides
@pytest.mark.parametrize("policy", ["none", "full", "attn_only"])
def test_the_first_look_at_a_block_needs_nothing_of_the_kernel(monkeypatch, policy):
    """Kernels of libraries cannot run on tensors without memory."""

    def kernel(q: Tensor, *given: Any) -> Tensor:
        assert not isinstance(q, FakeTensor)
        return BACKENDS["sdpa"].kernel(q, *given)

    monkeypatch.setitem(BACKENDS, "varlen", replace(BACKENDS["sdpa"], kernel=kernel))
    monkeypatch.setattr(compiled, "run_compiled", lambda block, carry, **given: None)  # as if it were disabled
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"])
    calls = AttentionCalls()
    with counted_calls(calls):
        outcome(TOY, model, toy_items(2), BlockEngine(policy=policy, backend="varlen", compile="aot_eager"))
    assert [each.kind for _, each in calls.traced] == [policy]


def test_what_kernels_fuse_in_eager_blocks_is_left_to_the_compiler_in_compiled_ones(monkeypatch):
    """It fuses those passes itself, and cannot look into a kernel."""
    given = []
    monkeypatch.setattr(compiled, "traced_settings", lambda settings: given.append(settings) or nullcontext())
    monkeypatch.setattr(compiled, "_compiled", lambda *described: lambda *given: None)  # as if it were disabled
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"])
    outcome(TOY, model, toy_items(1), BlockEngine(compile="aot_eager", kernels="triton"))
    assert [settings.kernels for settings in given] == ["torch"] * len(model.blocks())


def test_a_model_that_is_spread_over_ranks_is_refused():
    from torch.distributed.fsdp import FSDPModule

    class FSDPToyBlock(FSDPModule, ToyBlock):
        """As `fully_shard` makes it."""

    refused(lambda: compiled._compiled(FSDPToyBlock, parse_policy("full"), "aot_eager", None), "ranks", "train.compile")


def test_a_quantized_base_that_would_be_kept_dense_is_refused():
    for policy, is_refused in (("none", True), ("none+offload", True), ("full", False), ("attn_only", False)):
        if is_refused:
            refused(lambda p=policy: check_compiled("inductor", [parse_policy(p)], quantized=True), "second time")
        else:
            check_compiled("inductor", [parse_policy(policy)], quantized=True)
        check_compiled("", [parse_policy(policy)], quantized=True)


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        ({"train.compile": "inducter"}, ["inducter"]),
        ({"train.compile": True, "base.quantize": "int8"}, ["train.checkpointing", "full"]),
        ({"train.compile": "aot_eager", "base.quantize": "int8", "train.checkpointing": "budget"}, ["second time"]),
    ],
)
def test_a_run_refuses_before_anything_is_loaded(texts, names):
    config = resolve(RunConfig, flags={"train.device": "cpu", **texts})
    refused(lambda: check_training(create_run(TOY, config)), *names)
