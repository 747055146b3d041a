"""Measure the overhead of a checkpointing policy besides recomputation: microseconds a call, as a
share of a training step.

    uv run tools/bench/bench_policy_overhead.py

An empty block (a carry of Wan's form, one multiplication, two calls of attention whose kernel does
nothing) runs forward and backward under each policy, interleaved, one thread; the least CPU time of
the repeats counts. From it goes what a bare `torch.utils.checkpoint` takes for the same, and what
is left is set against a block's part of a CPU step at 1k tokens, of the model that `bench_step.py`
times. The last rows are the account of a step's time (`seconds/forward` and others in the metrics):
the same through an engine with its marks, above without.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench_step import Pair, configured, wan_pair
from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.run_block import run_block
from ditkit_core.io.step_clock import StepClock
from ditkit_core.models.precision import parse_dtype
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.attention.backends import BACKENDS, Backend
from ditkit_core.nn.context import BlockSettings

BARE = "a bare torch.utils.checkpoint"
ACCOUNTED = ("none", "full", "attn_only")
POLICIES = ("none", "full", "attn_only", "attn_only(self)")
BLOCKS = 30
"""As many as Wan2.1's 1.3B has; the empty ones are run as a chain."""


class Carry(NamedTuple):
    """A carry with as many tensors of the same kinds as Wan's."""

    tokens: Tensor
    modulation: Tensor
    rotary: Tensor
    text: Tensor
    lengths: tuple[int, ...]


class Empty(nn.Module):
    """A block with almost no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, carry: Carry) -> Carry:
        x = carry.tokens * self.scale
        for name in ("self", "cross"):
            x = attend(x, x, x, name=name)
        return carry._replace(tokens=x)


def carry() -> Carry:
    """A carry of tiny tensors."""
    return Carry(
        torch.ones(1, 2, 1, 4).requires_grad_(),
        torch.ones(1, 2, 4),
        torch.ones(1, 2, 4),
        torch.ones(1, 2, 4),
        (2,),
    )


def under_policy(blocks: list[Empty], policy: str) -> Callable[[], Tensor]:
    """A forward and backward of all blocks under a policy."""
    parsed, settings = parse_policy(policy), BlockSettings(backend="nothing")

    def work() -> Tensor:
        state = carry()
        for index, block in enumerate(blocks):
            state = run_block(block, state, policy=parsed, settings=settings, name=f"block {index}")
        state.tokens.sum().backward()
        return state.tokens

    return work


def bare(blocks: list[Empty]) -> Callable[[], Tensor]:
    """The same with torch's checkpoint around a function of tensors."""

    def work() -> Tensor:
        state = carry()
        x, rest = state.tokens, state[1:]
        for block in blocks:
            x = checkpoint(
                lambda x, *rest, block=block: _bare_block(block, x), x, *rest, use_reentrant=False
            )
        x.sum().backward()
        return x

    return work


def _bare_block(block: Empty, x: Tensor) -> Tensor:
    return (x * block.scale).view_as(x).view_as(x)


class Ends(nn.Module):
    """What comes before the blocks, or behind them."""

    def __init__(self, run: Callable[[Any], Any]):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # says where it is
        self._run = run

    def forward(self, given: object) -> object:
        return self._run(given)


class Chain(nn.Module):
    """The empty blocks as a model."""

    def __init__(self, blocks: list[Empty]):
        super().__init__()
        self.embed, self.layers = Ends(lambda _: carry()), nn.ModuleList(blocks)
        self.head = Ends(lambda state: state.tokens)

    def blocks(self) -> list[Empty]:
        return list(self.layers)


def accounted(blocks: list[Empty], policy: str, clock: StepClock) -> Callable[[], Tensor]:
    """A forward and backward through the engine, as a training step has them, with the marks of a
    clock or of none."""
    model, engine = Chain(blocks), BlockEngine(policy=policy, backend="nothing", clock=clock)

    def work() -> Tensor:
        clock.begin()
        tokens = engine(model, None)
        clock.mark(tokens.device, "backward")
        tokens.sum().backward()
        clock.mark_all("optimizer")
        clock.end()
        clock.numbers()
        return tokens

    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--width", type=int, default=768, help="of the model whose step is the measure"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    BACKENDS["nothing"] = Backend(
        kernel=lambda q, k, v, padding_mask, dropout: q.view_as(q),
        takes_mask=True,
        takes_dropout=True,
        half_only=False,
    )
    blocks = [Empty() for _ in range(BLOCKS)]
    work = {BARE: bare(blocks)} | {policy: under_policy(blocks, policy) for policy in POLICIES}
    for policy in ACCOUNTED:
        work[f"{policy}, engine"] = accounted(blocks, policy, StepClock())
        work[f"{policy}, with the account"] = accounted(
            blocks, policy, StepClock([torch.device("cpu")])
        )
    least = dict.fromkeys(work, float("inf"))
    for _ in range(args.repeats):
        for name, run in work.items():
            least[name] = min(least[name], seconds(run))
    micro = {name: 1e6 * taken / BLOCKS for name, taken in least.items()}

    given = ["--tokens", "1024", "--width", str(args.width), "--dtype", args.dtype]
    pair_args = configured(given)
    pair = wan_pair(pair_args, parse_dtype(args.dtype))
    block = step_seconds(pair, "full", args.repeats) / pair_args.blocks
    print(
        f"torch {torch.__version__}, one thread, least of {args.repeats}; a block's part of a step "
        f"at 1024 tokens, width {args.width}, {args.dtype}, LoRA, full: {block * 1e3:.1f} ms"
    )
    print(
        "| policy | microseconds a block | above (a bare checkpoint; the engine) | share of a step "
        "|\n|---|---|---|---|"
    )
    for name, taken in micro.items():
        policy, _, kind = name.partition(", ")
        above = taken - micro[f"{policy}, engine" if kind == "with the account" else BARE]
        print(f"| {name} | {taken:.0f} | {above:+.0f} | {1e-6 * above / block:+.2%} |")


def seconds(step: Callable[[], Tensor]) -> float:
    """CPU time, which other programs on the machine do not lengthen."""
    start = time.process_time()
    step()
    return time.process_time() - start


def step_seconds(pair: Pair, policy: str, repeats: int) -> float:
    """The least time of a step of ours, forward and backward."""
    engine = BlockEngine(policy=policy)

    def step() -> Tensor:
        loss = (pair.predict(engine).float() - pair.target).square().mean()
        loss.backward()
        for parameter in pair.ours.parameters():
            parameter.grad = None
        return loss.detach()

    step()
    began = time.perf_counter()
    found = []
    while len(found) < 3 or (len(found) < repeats and time.perf_counter() - began < 60):
        found.append(seconds(step))
    return min(found)


if __name__ == "__main__":
    main()
