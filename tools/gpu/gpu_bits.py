"""A part of tools/gpu/gpu_truth.py: what must not change a bit, under deterministic kernels, with
work and copies that come late."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from device_clock import attempted
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.block_hooks import BlockHooks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model, train_shortly
from gpu_late import Delay, late_copies, swapped
from gpu_speed import toy_on

Rows = Iterator[dict[str, Any]]
Steps = list[tuple[list[float], dict[str, Tensor]]]
POLICIES = ("none", "full", "attn_only")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train that must give the bits of any other."""

    policy: str
    swap: bool = False
    late: bool = False
    """Whether work and copies begin late."""

    def __str__(self) -> str:
        return f"{self.policy}{' swapped' if self.swap else ''}{', late' if self.late else ''}"


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained: a fresh model of always the same values, and the attention kernel."""

    name: str
    make: Callable[[], Any]
    backend: str
    steps: int
    sleep: int
    """Cycles of the GPU by which late work is late."""

    def trained(self, way: Way, device: torch.device) -> Steps:
        """What some steps reported, and the parameters and gradients after each."""
        model = self.make()
        hooks: tuple[BlockHooks, ...] = (swapped(model, device),) if way.swap else ()
        if not way.swap:
            model.to(device)
        if way.late:
            hooks = Delay(device, self.sleep), *hooks
        # All that is kept is moved: most of it is smaller than what a run moves.
        engine = BlockEngine(
            policy=way.policy, backend=self.backend, hooks=hooks, host=HostMemory(smallest=0)
        )
        torch.manual_seed(3)
        with late_copies(device, self.sleep if way.late else 0):
            return [train_shortly(TOY, model, toy_items(2), engine) for _ in range(self.steps)]


def bitwise(device: torch.device, tiny: bool) -> Rows:
    """Steps under each lever against steps without any; then blocks whose copy takes longer than
    the launch of their work."""
    on_gpu = device.type == "cuda"
    arch = (
        ToyArch(depth=3, dropout=0.1) if tiny else ToyArch(depth=6, dim=2048, heads=16, dropout=0.1)
    )
    adapter = ADAPTERS["lora with dropout"]
    # 20 ms or more; the copy of a block takes 4 ms at PCIe 5's rate, and the launch of its work
    # less than 10 ms.
    small = Model(
        name="",
        make=partial(make_model, TOY, arch, adapter=adapter),
        backend="sdpa_math",
        steps=3,
        sleep=50_000_000,
    )
    ways = [Way(policy=policy) for policy in POLICIES]
    ways += [
        Way(policy=policy, swap=swap, late=late)
        for late in (False, True)
        for policy, swap in (("full", True), ("none+offload", False), ("attn_only+offload", True))
    ]
    yield from _compared(small, ways, device)
    # Blocks of 14B's width in bf16, 0.6 GB each, whose copy takes 12 ms at PCIe 5's rate and 50 ms
    # at that of 3: late by 80 ms or more.
    wide = ToyArch(depth=3) if tiny else ToyArch(depth=3, dim=5120, heads=40)
    backend = "sdpa_flash" if on_gpu else "sdpa"
    large = Model(
        name=f"{backend}, wide: ",
        make=partial(_seeded, device, wide),
        backend=backend,
        steps=1,
        sleep=200_000_000,
    )
    ways = [Way(policy=policy) for policy in POLICIES]
    ways += [Way(policy="full", swap=True, late=late) for late in (False, True)]
    with deterministic():
        yield from _compared(large, ways, device)
    with deterministic(warn_only=False):
        yield from attempted(
            "five backwards", lambda: [repeated(device, backend, 4096 if on_gpu else 64)]
        )
    yield from attempted("pipelined", lambda: [_pipelined(device)])


def _compared(model: Model, ways: Sequence[Way], device: torch.device) -> Rows:
    expected = model.trained(Way(policy="none"), device)
    for way in ways:
        yield from attempted(
            f"{model.name}{way}",
            lambda way=way: [_same(f"{model.name}{way}", model.trained(way, device), expected)],
        )


def _same(name: str, found: Steps, expected: Steps) -> dict[str, Any]:
    same = all(
        a[0] == b[0]
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][key], b[1][key]) for key in a[1])
        for a, b in zip(found, expected, strict=True)
    )
    return {"name": name, "ok": same}


def _seeded(device: torch.device, arch: ToyArch) -> Any:
    torch.manual_seed(5)
    model = toy_on(device, arch)
    for parameter in model.parameters():
        # an adapter that does nothing has no gradients either
        if parameter.requires_grad and not parameter.any():
            parameter.data.normal_(std=0.02)
    return model


def _pipelined(device: torch.device) -> dict[str, Any]:
    """Micro-batches that overlap over two devices against such that do not: two GPUs, or this one
    and the host."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    other = torch.device("cuda", 1 - min(device.index, 1)) if several else torch.device("cpu")
    both = device, other
    found = []
    for pipelined in (False, True):
        model: Any = make_model(TOY, ToyArch(depth=2), adapter=ADAPTERS["lora"])
        for stage, there in (
            (model.embed, device),
            *zip(model.blocks(), both, strict=True),
            (model.head, other),
        ):
            stage.to(there)
        engine = BlockEngine(policy="full", backend="sdpa_math")
        found.append([train_shortly(TOY, model, toy_items(2), engine, pipelined=pipelined)])
    return _same(f"pipelined over {device} and {other}", *found)


@contextmanager
def deterministic(*, warn_only: bool = True) -> Iterator[None]:
    """Inside the block kernels are deterministic where they can be.

    Args:
        warn_only: What cannot is not refused, since its bits are compared. Attention then keeps its
            usual backward.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def repeated(device: torch.device, backend: str, tokens: int) -> dict[str, Any]:
    """Whether five backwards of attention are equal."""
    q, k, v = (
        torch.randn(1, tokens, 16, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with block_settings(BlockSettings(backend=backend)):
        runs = [
            torch.autograd.grad(attend(q, k, v, name="self").float().square().mean(), (q, k, v))
            for _ in range(5)
        ]
    return {
        "name": f"deterministic {backend}, five backwards",
        "ok": all(all(map(torch.equal, run, runs[0])) for run in runs),
    }
