"""The proof of every checkpointing policy, for every model: results are bitwise identical, and
exactly the expected operations are recomputed. Part of `Conformance`.

The expectation comes from each block alone, without a checkpoint: its floating point operations in
total, up to the last tensor that it saves, in its attention calls, and in the layers that the model
declares as a block's last.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.nn.attention import attention
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.testing.combinations import pairwise
from ditkit_core.testing.observer import Observer
from ditkit_core.testing.pretend_devices import HOST, CountCrossings, PretendDevices, divide
from ditkit_core.testing.world import (
    ADAPTERS,
    ModelChecks,
    Outcome,
    backward_without_autocast,
    is_attention_forward,
    is_last,
    make_model,
    outcome,
)

# The policy of each block, by index; written out, so that the check does not depend on the parser
# of schedules.
_BY_BLOCK = {
    "every_n(2)": lambda i: ("full", "none")[i % 2],
    "attn_only, 0=none": lambda i: "attn_only" if i else "none",
}
_OFFLOAD = "+offload"

LEVERS: Mapping[str, Sequence[Any]] = {
    "policy": (
        "full", "attn_only", "attn_only(self)", *_BY_BLOCK,
        *(f"{kind}{_OFFLOAD}" for kind in ("none", "full", "attn_only")),
    ),
    "backend": ("sdpa", "sdpa_math"),
    "adapter": ("full", "lora"),
    "dtype": (torch.float32, torch.bfloat16),
    "autocast": (False, True),
}  # fmt: skip
"""Values by lever; `autocast`: whether an outer autocast is active."""


_OF_A_FAMILY = [
    ("attn_only(self)", "sdpa", "full", torch.float32, True),
    ("full", "sdpa_math", "lora", torch.bfloat16, True),
    ("attn_only", "sdpa_math", "lora", torch.bfloat16, False),
]
"""What a model says of its blocks matters to: their last layers, with and without adapters, and
their attention calls."""
_OF_LEVERS = [case for case in pairwise(LEVERS) if case not in _OF_A_FAMILY]


def _cases() -> list[Any]:
    """Those of a family. Of policies that all blocks have and that do not offload, each with a
    dropout in a slow one, and each with every backend, adapter and dtype under an autocast in an
    exhaustive one."""
    alike = [
        policy
        for policy in LEVERS["policy"]
        if not policy.endswith(_OFFLOAD) and policy not in _BY_BLOCK
    ]
    rest = itertools.product(*{**LEVERS, "policy": alike, "autocast": (True,)}.values())
    with_dropout = itertools.product(
        alike, ("sdpa",), ("lora with dropout",), (torch.float32,), (False,)
    )
    daily = [*_OF_A_FAMILY, *_OF_LEVERS]
    return [
        *_OF_A_FAMILY,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in with_dropout),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in rest if case not in daily),
    ]


class Arithmetic(Observer):
    """Counts runs and floating point operations, by the full name of the operation below
    autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.runs[str(func)] += 1
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops[str(func)] += count(*args, **(kwargs or {}), out_val=out)
        return out


def num_attention(runs: Mapping[str, int]) -> int:
    """Attention forwards among operations."""
    return sum(num for name, num in runs.items() if is_attention_forward(name))


@dataclass
class Work:
    """The arithmetic of a block's forward."""

    flops: int = 0
    saved: Arithmetic = field(default_factory=Arithmetic)
    """Up to the last tensor that is saved for the backward, where a recompute that saves may
    stop."""
    attention: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name of the call: floating point operations, and attention forwards, which one may be."""
    last: int = 0
    """Floating point operations of the last layers."""

    def again(self, policy: str) -> tuple[int, int]:
        """Floating point operations and attention forwards that the backward repeats."""
        every = sum(num for _, num in self.attention.values())
        match policy:
            case "none":
                return 0, 0
            case "full":
                return self.saved.flops.total(), every
            case "attn_only":
                return self.flops - sum(
                    flops for flops, _ in self.attention.values()
                ) - self.last, 0
            case "attn_only(self)":
                of_self, num = self.attention.get("self", (0, 0))  # not every block has it
                return self.flops - of_self - self.last, every - num
        raise AssertionError(policy)


@dataclass
class Step:
    """Counts of a step, with its outcome."""

    outcome: Outcome
    backward_flops: int
    sent: int
    """Bytes that were sent to the host before the backward."""


class PolicyChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    added_as_they_are: ClassVar[tuple[str, ...]] = ()
    """The layers among them whose result is added without a gate: where they are trained
    themselves, nothing keeps it either."""

    @pytest.mark.parametrize(tuple(LEVERS), _cases())
    def test_a_policy_is_exact_and_repeats_what_it_says(
        self, policy: str, backend: str, adapter: str, dtype: torch.dtype, autocast: bool
    ) -> None:
        """Loss, outputs, gradients of parameters, latents and conditions; the generator; arithmetic
        and attention in the backward."""
        self._check_policy(policy, backend, adapter, dtype, autocast)

    @pytest.mark.parametrize(tuple(LEVERS), _OF_LEVERS)
    def test_levers_of_policies_change_nothing(
        self, policy: str, backend: str, adapter: str, dtype: torch.dtype, autocast: bool
    ) -> None:
        """The same, with every pair of values of two levers."""
        self._check_policy(policy, backend, adapter, dtype, autocast)

    def _check_policy(
        self, policy: str, backend: str, adapter: str, dtype: torch.dtype, autocast: bool
    ) -> None:
        checks: Any = type(self)
        plain, every_work = _without_policy(checks, backend, adapter, dtype)
        model: Any = make_model(self.spec, self.arch, dtype=dtype, adapter=ADAPTERS[adapter])
        num = len(model.blocks())
        if offload := policy.endswith(_OFFLOAD):
            divide(model, [torch.device("cpu", 1)] * (num + 2))
        with PretendDevices() if offload else nullcontext():
            engine = BlockEngine(policy=policy, backend=backend, host=HostMemory(smallest=0))
            under = self._step(model, engine, autocast=autocast)
        assert under.outcome.differences(plain.outcome) == []
        assert torch.equal(under.outcome.generator_state, plain.outcome.generator_state), (
            "leaks random state"
        )
        kind = policy.removesuffix(_OFFLOAD)
        expected = [
            work.again(_BY_BLOCK.get(kind, lambda i: kind)(i))
            for i, work in enumerate(every_work)
            if work is not None
        ]
        flops, attention = (sum(counts) for counts in zip(*expected, strict=True))
        repeated = under.backward_flops - plain.backward_flops
        assert repeated == flops, (
            f"repeats {repeated} operations, not {flops}: compare last_layers with the end of each "
            f"block"
        )
        assert under.outcome.num_attention - plain.outcome.num_attention == attention
        assert (under.sent > 0) == offload

    def _left_out(self, model: Any, adapter: str) -> Collection[str]:
        """Last layers that a replay of a block need not come to: frozen ones, whose adapter, if
        they have one, keeps nothing more."""
        if adapter in ("lora", "lokr", "loha", "full"):
            return self.last_layers if adapter != "full" else ()
        adapted = adapter_layers(model)
        return [
            last
            for last in self.last_layers
            if not any(name.endswith(last.split()[-1]) for name in adapted)
        ]

    @pytest.mark.parametrize("adapter", ["full", "lora"])
    def test_what_a_full_recompute_leaves_out(self, adapter: str) -> None:
        """With an adapter the last layer of a block, but for its adapter's product with A; where
        all is trained, what is added as it is."""
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS[adapter])
        ends = self.last_layers if adapter == "lora" else self.added_as_they_are
        for block, work in zip(model.blocks(), self._work(model, "sdpa", ends), strict=True):
            if work is None:
                continue
            left_out = work.flops - work.saved.flops.total()
            assert left_out <= work.last
            assert (left_out > 0) == (work.last > 0), (
                f"{type(block).__name__}: leaves out {left_out}, last_layers are {work.last}"
            )

    def _step(self, model: Any, engine: BlockEngine, *, autocast: bool) -> Step:
        flops, sent = 0, 0

        def backward(loss: Tensor) -> None:
            nonlocal flops, sent
            flops = -count.flops.total()
            sent = sum(size for way, size in crossings.num_bytes.items() if way[1] == HOST)
            backward_without_autocast(loss)
            flops += count.flops.total()

        outer = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with outer, Arithmetic() as count, CountCrossings() as crossings:
            items = self.items(2, ragged=True)
            result = outcome(self.spec, model, items, engine, backward=backward, conditions=True)
        return Step(result, flops, sent)

    def _work(self, model: Any, backend: str, last_layers: Collection[str]) -> list[Work | None]:
        """Each block's; None for one without parameters, which is never repeated."""
        items = [
            {name: x.clone().requires_grad_() for name, x in item.items()}
            for item in self.items(2, ragged=True)
        ]
        carry = model.embed(self.inputs(items))
        works: list[Work | None] = []
        for block in model.blocks():
            if next(block.parameters(), None) is None:
                carry = block(carry)
                works.append(None)
            else:
                work, carry = _work_of(block, carry, backend, last_layers)
                works.append(work)
        return works

    def test_policies_leave_nothing_in_a_model(self) -> None:
        """One engine after the other, and each twice: no wrapper, hook or name stays, and nothing
        is repeated twice."""
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS["lora"])
        before, state = _structure(model), list(model.state_dict())
        plain = self._step(model, BlockEngine(), autocast=False)
        for policy in (policy for policy in LEVERS["policy"] if not policy.endswith(_OFFLOAD)):
            once, again = (
                self._step(model, BlockEngine(policy=policy), autocast=False) for _ in range(2)
            )
            assert once.backward_flops == again.backward_flops > plain.backward_flops, policy
            assert _structure(model) == before and list(model.state_dict()) == state, policy
        assert (
            self._step(model, BlockEngine(), autocast=False).backward_flops == plain.backward_flops
        )


@cache  # which depends on no policy: the cases of a class share it
def _without_policy(
    kind: Any, backend: str, adapter: str, dtype: torch.dtype
) -> tuple[Step, list[Work | None]]:
    """A step that keeps everything, and the work of each block, for a class of checks."""
    checks = kind()
    model: Any = make_model(kind.spec, kind.arch, dtype=dtype, adapter=ADAPTERS[adapter])
    plain = checks._step(model, BlockEngine(backend=backend), autocast=False)
    return plain, checks._work(model, backend, checks._left_out(model, adapter))


def _structure(model: nn.Module) -> list[tuple[Any, ...]]:
    """Modules by name and identity, with the number of their hooks."""
    return [
        (
            name,
            id(module),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
        )
        for name, module in model.named_modules()
    ]


def _work_of(
    block: nn.Module, carry: Any, backend: str, last_layers: Collection[str]
) -> tuple[Work, Any]:
    """A block's work, and the carry that it makes."""
    work, before = Work(), list[int]()

    def note(tensor: Tensor) -> Tensor:
        work.saved.runs, work.saved.flops = count.runs.copy(), count.flops.copy()
        return tensor

    class Regions:
        """Replaces torch_remat, with which attention marks tensors to keep."""

        @staticmethod
        def region(function: Any, name: str, *, recompute: bool) -> Any:
            def called(*args: Any) -> Any:
                flops, runs = count.flops.total(), num_attention(count.runs)
                out = function(*args)
                work.attention[name] = count.flops.total() - flops, num_attention(count.runs) - runs
                return out

            return called

        @staticmethod
        def recompute_needs_tensor(tensor: Tensor) -> None:
            pass

    def entered(layer: nn.Module, args: Any) -> None:
        before.append(count.flops.total())

    def returned(layer: nn.Module, args: Any, out: Any) -> None:
        work.last += count.flops.total() - before.pop()

    ends = [layer for name, layer in block.named_modules() if is_last(name, block, last_layers)]
    hooks = [
        hook
        for x in ends
        for hook in (x.register_forward_pre_hook(entered), x.register_forward_hook(returned))
    ]
    settings = BlockSettings(backend=backend, keep=())
    with pytest.MonkeyPatch.context() as patch, Arithmetic() as count, block_settings(settings):
        patch.setattr(attention, "remat", Regions)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            carry = block(carry)
    for hook in hooks:
        hook.remove()
    work.flops = count.flops.total()
    return work, carry
