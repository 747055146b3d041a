"""`ops(...)`: which operations are kept by name, what is refused, and that nothing kept runs again."""

import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ditkit_core.engine import ac_policies as checkpoint_policies
from ditkit_core.engine.ac_schedule import ACSchedule, parse_policy, parse_schedule
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.op_names import SETS
from ditkit_core.engine.run_block import GeneratorHook, run_block
from ditkit_core.engine.selective_ac import KeptOps, Region, kept_ops
from ditkit_core.errors import UserError
from ditkit_core.nn.attention.backends import BACKENDS
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model, outcome


class Executed(TorchDispatchMode):
    """Counts operations that run, by their full name: what a checkpoint hands out does not."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


# Names


@pytest.mark.parametrize("text", ["ops(matmul)", "ops(matmul, attention, collectives)", "ops(aten.mm.default, attention)", "full, 1-=ops(aten.silu.default)"])  # fmt: skip
def test_a_schedule_of_operations_is_read_and_written(text):
    policies = parse_schedule(text).policies([None] * 3)
    assert parse_schedule(str(ACSchedule.of_blocks(policies))).policies([None] * 3) == policies
    assert policies[-1].recomputes and policies[-1].kept_attention is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ops", "ops takes names: matmul, attention, collectives, or operations such as aten.mm.default"),
        ("ops(aten.mm)", "'aten.mm' is several operations and matches none; write aten.mm.default"),
        ("ops(aten.sum)", "'aten.sum' is several operations and matches none; write aten.sum"),
        ("ops(matmuls)", "ops knows no 'matmuls'; did you mean matmul?"),
        ("ops(aten.bmmm.default)", "ops knows no 'aten.bmmm.default'; did you mean aten.bmm.default?"),
        ("ops(aten.mm.defalt)", "ops knows no 'aten.mm.defalt'; did you mean aten.mm.default?"),
        ("ops(zzzz.qqq)", "ops knows no 'zzzz.qqq'; choose one of matmul, attention, collectives"),
        ("ops(aten)", "ops knows no 'aten'"),
        ("ops(aten.mul_.Tensor)", "'aten.mul_.Tensor' writes into one of its arguments, so its result cannot be kept"),
        ("ops(aten.mm.out)", "'aten.mm.out' writes into one of its arguments"),
        ("ops(_c10d_functional.all_reduce_.default)", "writes into one of its arguments"),
    ],
)  # fmt: skip
def test_a_name_that_can_keep_nothing_is_refused_in_one_line(text, message):
    with pytest.raises(UserError) as refused:
        parse_schedule(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", [name for name in sorted(SETS["matmul"] | SETS["attention"]) if name.startswith("aten.")]
)
def test_every_operation_of_the_sets_is_one_of_torchs_forwards(name):
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    assert str(found) == name and not found._schema.is_mutable and "backward" not in name


def test_offloading_is_refused_where_torch_hides_what_it_keeps_from_hooks(monkeypatch):
    """`Ops` alone has torch keep it: what is sent where this torch can is for the tests of offloading."""
    monkeypatch.setattr(checkpoint_policies, "kept_results_reach_hooks", lambda: False)
    with pytest.raises(
        UserError, match=r"cannot move what named operations return; update it, write attn_only\+offload"
    ) as refused:
        parse_schedule("full, 1=ops(aten.silu.default)+offload")
    assert "\n" not in str(refused.value)
    assert parse_schedule("full+offload, 1=ops(aten.silu.default)").devices == ()


# Decisions


class Unhashable:
    """An operation that is no torch object and counts how often its name is asked for."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0

    def __str__(self) -> str:
        self.asked += 1
        return self.name


def test_an_operation_is_asked_for_its_name_once_even_if_it_cannot_be_hashed():
    ops = KeptOps(("matmul",))
    kept, other = Unhashable("aten.mm.default"), Unhashable("aten.mul.Tensor")
    for _ in range(50):
        assert ops.decision(kept).keep and not ops.decision(other).keep
    assert (kept.asked, other.asked) == (1, 1)
    assert kept_ops(("matmul",)) is kept_ops(("matmul",)), "blocks and steps share what was decided"


def test_attention_that_drops_weights_is_run_again_and_without_dropout_kept():
    region = Region(kept_ops(("attention",)), GeneratorHook(torch.device("cpu")))
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    context = SelectiveCheckpointContext(is_recompute=False)
    again, save = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert region._policy(context, flash, "q", "k", "v", 0.1) is again
    assert region._policy(context, flash, "q", "k", "v", dropout_p=0.1) is again
    assert region._policy(context, flash, "q", "k", "v") is save
    assert region._policy(context, flash, "q", "k", "v", 0.0, False) is save
    assert region._policy(context, torch.ops.aten._scaled_dot_product_flash_attention_backward.default) is again
    assert region.num_attention == 2


# What runs


@pytest.mark.parametrize("adapter", ["full", "lora", "lora with dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_kept_operation_runs_again(adapter, dtype):
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"], dtype=dtype, adapter=ADAPTERS[adapter])
    counts, outcomes = {}, {}
    for policy in ("none", "full", "ops(matmul)", "ops(attention)", "ops(matmul, attention)"):
        with Executed() as executed:
            outcomes[policy] = outcome(TOY, model, toy_items(2, ragged=True), BlockEngine(policy=policy))
        counts[policy] = {
            name: sum(executed.count[op] for op in ops) for name, ops in SETS.items() if name != "collectives"
        }
        assert outcomes[policy].differences(outcomes["none"]) == [], policy
    none, full = counts["none"], counts["full"]
    assert full["matmul"] > none["matmul"] and full["attention"] == 2 * none["attention"]
    assert counts["ops(matmul)"] == {"matmul": none["matmul"], "attention": full["attention"]}
    assert counts["ops(attention)"]["attention"] == none["attention"]
    assert counts["ops(matmul, attention)"] == none


@pytest.mark.skipif(
    find_spec("flash_attn_interface") is not None, reason="flash-attn 3 itself registers this operation"
)
def test_flash_attn_3_is_kept_by_the_name_of_its_operation(monkeypatch):
    """It wraps its kernel, which no mode sees then."""
    runs = Counter()

    @torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
    def operation(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        runs["forward"] += 1
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", scores, v).clone(), scores

    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0].mean(), None, None

    operation.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]))
    module = ModuleType("flash_attn_interface")
    module.__dict__["flash_attn_func"] = operation
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setitem(BACKENDS, "flash3", replace(BACKENDS["flash3"], devices=(), half_only=False))
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"])
    for policy, times in (("none", 1), ("full", 2), ("ops(attention)", 1)):
        runs.clear()
        calls = AttentionCalls()
        with counted_calls(calls):
            outcome(TOY, model, toy_items(2), BlockEngine(policy=policy, backend="flash3"))
        assert runs["forward"] == times * 2 * TOY.architecture.presets["tiny"].depth, policy


@pytest.mark.parametrize("policy", ["ops(matmul)", "ops(attention)", "ops(matmul, attention)"])
@pytest.mark.parametrize("adapter", ["full", "lora with dropout"])
def test_dropout_in_block_and_attention_is_replayed(policy, adapter):
    model: Any = make_model(TOY, TOY.architecture.presets["dropout"], adapter=ADAPTERS[adapter])
    plain = outcome(TOY, model, toy_items(2), None)
    under = outcome(TOY, model, toy_items(2), BlockEngine(policy=policy))
    assert under.differences(plain) == []
    assert torch.equal(under.generator_state, plain.generator_state)


@torch.library.custom_op("ditkit_tests::drawing", mutates_args=())
def drawing(x: Tensor, dropout_p: float) -> Tensor:
    """As a library's attention with dropout inside: one operation that draws."""
    return x * (torch.rand(x.shape) >= dropout_p)


@drawing.register_fake
def _(x: Tensor, dropout_p: float) -> Tensor:
    return torch.empty_like(x)


drawing.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward((output != 0).to(output)),
)


class Drawing(nn.Module):
    """Draws in one operation, of a library or of torch, and after it."""

    def __init__(self, of_torch: bool) -> None:
        super().__init__()
        self.of_torch, self.weight = of_torch, nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.weight).sin()
        h = torch.native_dropout(h, 0.5, True)[0] if self.of_torch else drawing(h, 0.5)
        return torch.dropout(h.cos(), 0.5, True) * self.weight


@pytest.mark.parametrize(
    ("of_torch", "name"), [(True, "aten.native_dropout.default"), (False, "ditkit_tests.drawing.default")]
)
def test_what_is_sampled_after_a_kept_operation_that_samples_is_sampled_again(of_torch, name):
    """Also twice: the second backward finds nothing kept, and runs it."""

    def gradients(policy: str) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(5)
        block, x = Drawing(of_torch), torch.linspace(0.5, 1, 64).reshape(8, 8).requires_grad_()
        runs, found = [], []
        with Executed() as executed:
            out = run_block(block, x, policy=parse_policy(policy), name="block")
            for _ in range(2):
                found += torch.autograd.grad(out.square().sum(), [x, block.weight], retain_graph=True)
                runs.append(executed.count[name])
        return [out.detach(), *found], runs

    expected, _ = gradients("none")
    found, runs = gradients(f"ops({name})")
    assert runs == [1, 2]
    assert all(map(torch.equal, found, expected))


class Overwriting(nn.Linear):
    """Writes into what its matmul returned."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight).mul_(2).sin().cos()


def test_a_kept_result_that_the_block_overwrites_is_refused_in_one_line():
    out = run_block(Overwriting(4, 4), torch.ones(3, 4), policy=parse_policy("ops(matmul)"), name="block")
    with pytest.raises(UserError, match="returned a tensor that the block then overwrote") as refused:
        out.sum().backward()
    assert "\n" not in str(refused.value)


class Fickle(nn.Linear):
    """Runs another operation in its recompute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (super().forward(x).sin() if self.runs == 1 else super().forward(x).cos()).exp()


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 does not compare the operations that it does not keep"
)
def test_a_block_that_runs_other_operations_in_its_recompute_is_refused_in_one_line():
    out = run_block(Fickle(), torch.ones(3, 4), policy=parse_policy("ops(matmul)"), name="block")
    with pytest.raises(UserError, match="ran other operations in its recompute"):
        out.sum().backward()


# Nothing is recomputed in silence


@pytest.mark.parametrize(("preset", "policy"), [("tiny", "ops(matmul, attention)"), ("dropout", "ops(matmul)")])
def test_operations_that_are_kept_pass_the_first_step(preset, policy):
    model: Any = make_model(TOY, TOY.architecture.presets[preset])
    with counted_calls(AttentionCalls()) as _:
        outcome(TOY, model, toy_items(1), BlockEngine(policy=policy))


def test_attention_that_is_not_one_operation_is_refused_in_the_first_step():
    model: Any = make_model(TOY, TOY.architecture.presets["dropout"])
    with counted_calls(AttentionCalls()), pytest.raises(UserError) as refused:
        outcome(TOY, model, toy_items(1), BlockEngine(policy="ops(matmul, attention)"))
    assert str(refused.value) == (
        "train.checkpointing: ops(matmul, attention) keeps 1 of the 2 attention calls of block 0: the others are not one operation "
        "(dropout, the math kernel, flex, kernels in Python); use attn_only, which keeps every one"
    )


# Collectives


class Exchanging(nn.Linear):
    """An all-to-all between two layers, functional or into a buffer."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(4, 4)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        h = super().forward(x)
        if self.in_place:
            out = torch.empty_like(h)
            dist.all_to_all_single(out, h.detach())
            h = h + out
        else:
            h = all_to_all_single_autograd(h, None, None, dist.group.WORLD)
        return h.sin().cos()


@pytest.mark.parametrize(
    ("in_place", "policy", "issued"),
    [
        (False, "full", 2), (False, "ops(collectives)", 1), (False, "ops(matmul)", 2),
        (True, "full", 2), (True, "ops(collectives)", 2),  # what writes into a buffer cannot be kept by its name
    ],
)  # fmt: skip
def test_functional_collectives_are_issued_once_and_those_in_place_again(in_place, policy, issued):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        with Executed() as executed:
            out = run_block(Exchanging(in_place), x, policy=parse_policy(policy), name="block")
            forward = executed.count.copy()
            out.sum().backward()
    finally:
        dist.destroy_process_group()
    name = "c10d.alltoall_base_.default" if in_place else "_c10d_functional.all_to_all_single.default"
    of_backward = 0 if in_place else 1  # the gradient's own
    assert forward[name] == 1
    assert executed.count[name] - of_backward == issued
