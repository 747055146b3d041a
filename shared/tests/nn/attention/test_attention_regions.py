"""What `attn_only` keeps is marked where attention is called: it holds for every kernel, is never
lost in silence, and replays dropout."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy_training
from torch import Tensor, nn

from ditkit_core.engine import ac_schedule as policy_schedule
from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.run_block import CHECKPOINTS, keeping_nothing, run_block
from ditkit_core.errors import UserError
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.attention.backends import BACKENDS, Backend, Kernel
from ditkit_core.nn.context import AttentionCalls, BlockSettings, counted_calls
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, outcome, train_shortly
from ditkit_core.training.checkpoint import latest
from ditkit_core.training.config import TrainConfig

HEADS, TOKENS = 2, 6


class Attending(nn.Module):
    """A block that attends to itself and to a text."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.q, self.k, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, text = carry
        for name, seen in (("self", x), ("cross", text)):
            q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in (self.q(x), self.k(seen), seen.sin()))
            x = x + F.dropout(
                self.out(attend(q, k, v, name=name, dropout=self.dropout).flatten(2)), self.dropout
            )
        return x, text


class Composed(torch.autograd.Function):
    """Attention written by hand, which keeps its weights."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return differentiated(gradient, *ctx.saved_tensors)


class FakeFlash(torch.autograd.Function):
    """As a flash kernel does it: keeps its result and the log-sum-exp, and computes the weights
    again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        weights = (
            torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5 - lse[..., None]
        ).exp()
        assert torch.isfinite(out).all()
        return differentiated(gradient, q, k, v, weights)


def differentiated(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    of_weights = torch.einsum("bqhd,bkhd->bhqk", gradient, v)
    of_scores = (
        weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    )
    return (
        torch.einsum("bhqk,bkhd->bqhd", of_scores, k),
        torch.einsum("bhqk,bqhd->bkhd", of_scores, q),
        torch.einsum("bhqk,bqhd->bkhd", weights, gradient),
    )


BIAS = nn.Parameter(torch.linspace(-1, 1, TOKENS * TOKENS).reshape(1, 1, TOKENS, TOKENS))


def with_a_mask(make: Callable[[], Tensor]) -> Kernel:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, dropout: float
    ) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=make()).transpose(1, 2)

    return kernel


KERNELS: dict[str, tuple[Kernel, float]] = {
    "sdpa": (BACKENDS["sdpa"].kernel, 0.0),
    "sdpa_math": (BACKENDS["sdpa_math"].kernel, 0.0),
    "with dropout, which torch composes": (BACKENDS["sdpa"].kernel, 0.4),
    "a mask that needs a gradient": (with_a_mask(lambda: BIAS), 0.0),
    "a mask made of one that needs a gradient": (with_a_mask(lambda: BIAS * 2), 0.0),
    "a mask of bools": (with_a_mask(lambda: BIAS.detach() < 0.9), 0.0),
    "an autograd function": (lambda q, k, v, padding_mask, dropout: Composed.apply(q, k, v), 0.0),
    "a fake of flash attention": (
        lambda q, k, v, padding_mask, dropout: FakeFlash.apply(q, k, v)[0],
        0.0,
    ),
}
"""Kernels by what is special about them, with the dropout they are given."""


@dataclass
class Seen:
    """What a forward and backward of two blocks did."""

    gradients: list[Tensor]
    forward: int
    """Kernel runs in the forward."""
    again: int
    """Kernel runs in the backward."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Seen]]:
    """(what is special about a kernel, policy) to what two blocks under it do."""

    def run(special: str, policy: str) -> Seen:
        kernel, dropout = KERNELS[special]
        count = 0

        def counted(*given: Any) -> Tensor:
            nonlocal count
            count += 1
            return kernel(*given)

        backend = Backend(kernel=counted, takes_mask=True, takes_dropout=True, half_only=False)
        monkeypatch.setitem(BACKENDS, "counted", backend)
        torch.manual_seed(0)
        blocks = [Attending(dropout) for _ in range(2)]
        x, text = (torch.randn(2, TOKENS, 8).requires_grad_() for _ in range(2))
        carry = x * 1, text * 1
        for index, block in enumerate(blocks):
            carry = run_block(
                block,
                carry,
                policy=parse_policy(policy),
                settings=BlockSettings(backend="counted"),
                name=f"block {index}",
            )
        forward = count
        leaves = [x, text, *(p for block in blocks for p in block.parameters())]
        leaves += [BIAS] if "needs a gradient" in special else []
        gradients = torch.autograd.grad(carry[0].square().sum(), leaves)
        return Seen(list(gradients), forward, count - forward)

    yield run


@pytest.mark.parametrize("special", KERNELS)
@pytest.mark.parametrize(
    ("policy", "again"), [("none", 0), ("full", 4), ("attn_only", 0), ("attn_only(self)", 2), ("attn_only(self, cross)", 0)]
)  # fmt: skip
def test_a_kept_call_runs_once_whatever_its_kernel_is(runs, special, policy, again):
    """Two blocks of two calls: N + 0 where all are kept, N_self + 2 N_cross where self-attention
    is."""
    plain, under = runs(special, "none"), runs(special, policy)
    assert (under.forward, under.again) == (4, again)
    assert all(map(torch.equal, under.gradients, plain.gradients))
    assert all(bool(gradient.abs().sum() > 0) for gradient in plain.gradients)


# Nothing is recomputed in silence


class Forgetful(AttentionOnly):
    """A policy that says that attention is kept, and is run by a checkpoint that knows nothing of
    it."""


def test_a_policy_that_computes_attention_again_in_silence_stops_the_first_step(monkeypatch):
    monkeypatch.setitem(policy_schedule.MAKERS, "forgetful", lambda arguments: Forgetful())
    monkeypatch.setitem(CHECKPOINTS, Forgetful, keeping_nothing)
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match="attention 'cross'|attention 'self'") as refused:
        train_shortly(TOY, model, toy_items(2), BlockEngine(policy="forgetful"))
    assert "should have been kept but is computed again" in str(refused.value) and "\n" not in str(
        refused.value
    )
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("policy", ["attn_only(slf)", "full, 1=attn_only(slf)"])
def test_a_name_that_no_block_calls_is_refused_in_the_first_step_of_every_start(
    monkeypatch, tmp_path, policy
):
    config = TrainConfig(steps=2, batch_size=2, accumulation=2)
    toy_training.toy_run(tmp_path / "resumed", 2, config=config)
    monkeypatch.setattr(toy_training, "BlockEngine", lambda: BlockEngine(policy=policy))
    for folder, steps in (("new", 2), ("resumed", 4)):
        with pytest.raises(UserError) as refused:
            toy_training.toy_run(tmp_path / folder, steps, config=replace(config, steps=steps))
        assert str(refused.value) == (
            "train.checkpointing: attn_only(slf) keeps attention 'slf', which no block calls; the "
            "blocks call cross, self"
        )
    assert latest(tmp_path / "new" / "state", warn=print) is None, "nothing was updated"


def test_calls_are_counted_in_the_first_step_alone(monkeypatch, tmp_path):
    looked: list[Counter[str]] = []
    monkeypatch.setattr(AttentionCalls, "check", lambda calls: looked.append(calls.counts.copy()))
    monkeypatch.setattr(toy_training, "BlockEngine", lambda: BlockEngine(policy="attn_only"))
    toy_training.toy_run(tmp_path, 3, config=TrainConfig(steps=3, batch_size=2, accumulation=2))
    # two micro-batches of two blocks
    assert looked == [Counter(self=2, cross=2), Counter(self=4, cross=4)]


@pytest.mark.parametrize(
    "policy", ["none", "full", "attn_only", "attn_only(self)", "full, 1=attn_only(cross)"]
)
def test_policies_that_keep_what_they_say_pass(policy):
    model: Any = make_model(TOY, ToyArch(depth=3))
    calls = AttentionCalls()
    with counted_calls(calls):
        outcome(TOY, model, toy_items(1), BlockEngine(policy=policy))
    calls.check()
    # not those of the recompute
    assert calls.counts == ({} if policy == "none" else Counter(self=3, cross=3))


def test_a_policy_that_keeps_attention_of_blocks_without_any_is_refused():
    calls = AttentionCalls()
    with counted_calls(calls):
        run_block(
            nn.Linear(4, 4), torch.ones(2, 4), policy=parse_policy("attn_only"), name="block 0"
        )
    with pytest.raises(
        UserError,
        match="attn_only keeps the results of attention, but no block calls attention; write full",
    ):
        calls.check()


# A second backward, and two at once


@pytest.mark.parametrize("policy", ["none", "full", "attn_only", "attn_only(self)"])
@pytest.mark.parametrize("preset", ["tiny", "dropout"])
def test_a_second_backward_of_a_graph_gives_the_same_gradients(policy, preset):
    twice: list[dict[str, Tensor]] = []

    def backward(loss: Tensor) -> None:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            twice.append({name: p.grad.clone() for name, p in model.named_parameters()})

    model: Any = make_model(TOY, TOY.architecture.presets[preset])
    plain = outcome(TOY, model, toy_items(2), None)
    outcome(TOY, model, toy_items(2), BlockEngine(policy=policy), backward=backward)
    assert len(twice) == 2
    for gradients in twice:
        assert [
            n for n, gradient in gradients.items() if not torch.equal(gradient, plain.gradients[n])
        ] == []


@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_two_backwards_at_once_replay_each_its_own_dropout(policy):
    """Threads of one process share a generator: a recompute owns it until it is done."""
    wide = ToyArch(dim=64, depth=6, dropout=0.3)
    models: list[Any] = [make_model(TOY, wide) for _ in range(2)]
    plain = outcome(TOY, models[0], toy_items(2), None)
    both = threading.Barrier(2)
    losses: list[Tensor] = []
    for model in models:
        outcome(TOY, model, toy_items(2), BlockEngine(policy=policy), backward=losses.append)

    def backward(loss: Tensor) -> None:
        both.wait()
        loss.backward()

    for _ in range(3):
        threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for model in models:
            found = {name: p.grad for name, p in model.named_parameters()}
            assert [
                n for n, g in found.items() if g is None or not torch.equal(g, plain.gradients[n])
            ] == []
        losses.clear()
        for model in models:
            outcome(TOY, model, toy_items(2), BlockEngine(policy=policy), backward=losses.append)


# Collectives inside attention


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, for collectives that really run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class InPlaceAllToAll(torch.autograd.Function):
    """Ulysses' exchange as it is mostly written: into a buffer."""

    issued: ClassVar[int] = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        InPlaceAllToAll.issued += 1
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous())
        return out


def functional_all_to_all(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    InPlaceAllToAll.issued += 1
    return all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD).wait()


@pytest.mark.parametrize(
    "exchange", [InPlaceAllToAll.apply, functional_all_to_all], ids=["in place", "functional"]
)
@pytest.mark.parametrize(("policy", "issued"), [("none", 4), ("full", 8), ("attn_only", 4)])
def test_a_collective_inside_attention_is_issued_once_where_attention_is_kept(
    monkeypatch, alone, exchange, policy, issued
):
    sdpa = BACKENDS["sdpa"]
    exchanged = replace(sdpa, kernel=lambda q, *others: exchange(sdpa.kernel(q, *others)))
    monkeypatch.setitem(BACKENDS, "exchanged", exchanged)
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"])
    plain = outcome(TOY, model, toy_items(2), None)
    InPlaceAllToAll.issued = 0
    under = outcome(TOY, model, toy_items(2), BlockEngine(policy=policy, backend="exchanged"))
    assert InPlaceAllToAll.issued == issued * len(model.blocks()) // 2
    assert under.differences(plain) == []


def test_what_a_policy_holds_at_its_core_is_a_plain_value():
    assert parse_policy("attn_only(self)") == AttentionOnly(names=("self",)) and isinstance(
        Full(), Policy
    )
