"""Numeric sentinels: every few steps, the largest activation of each block, values that are not
finite, and gradients that underflow.

A watched step has one more hook in its engine and is otherwise the same: no value changes. The
statistics stay on their device until they are sent to the host together with the step's loss. Steps
in between have no hook.

A block's own output is the part of the carry that it returns in new memory. Weak references to the
storages of the carry before show which part that is.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ditkit_core.engine.block_hooks import BlockHooks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.nn.context import device_kind

_AT_ONCE = {"cpu": 2**20, "cuda": 2**23}
"""Elements per part, by kind of device. On the host temporary memory then stays in its caches. A
GPU is busy with a part for as long as the host launches the next operation, and needs at most 40
MiB. fp32 counts so many exactly."""

GROWTH = 10.0
"""Factor by which a block's largest activation may grow before a warning."""


class BlockStats(NamedTuple):
    """A part of the carry that a block writes: the block's index in `blocks()`, and the part's
    name."""

    block: int
    part: str


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Statistics of one watched step, over all its micro-batches."""

    largest: dict[BlockStats, float]
    """Largest finite magnitude."""
    not_finite: dict[BlockStats, int]
    """Number of values that are infinite or NaN."""
    underflow: float
    """Share of the gradients' elements that are 0 or below the smallest normal number of the dtype
    they are stored in, over the parameters whose gradient is not 0 everywhere. It is 0 everywhere
    for an adapter's first matrix while its second is 0. 1 if all are 0."""
    worst: str
    """The parameter with the largest such share, or empty."""


def with_hooks(engine: Any, hook: BlockHooks) -> Any:
    """The engine with one more hook, called last; any other callable unchanged."""
    return (
        replace(engine, hooks=(*engine.hooks, hook)) if isinstance(engine, BlockEngine) else engine
    )


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.detach().reshape(-1).split(_AT_ONCE[device_kind(tensor)])


def magnitudes(tensor: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Largest finite magnitude of a floating-point tensor, and the number of its values that are
    not finite; float64, on its device."""
    extremes: list[Tensor] = []
    counts: list[Tensor] = []
    for part in _parts(tensor):
        finite = part.nan_to_num(0.0, 0.0, 0.0)
        extremes += finite.aminmax()
        counts.append(finite.ne(part).sum())  # NaN differs from everything
    return torch.stack(extremes).abs().amax().double(), torch.stack(counts).sum().double()


def normal_counts(gradient: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Number of a gradient's elements from the smallest normal number of its dtype on, and of those
    that are not 0."""
    limits, wide = torch.finfo(gradient.dtype), torch.promote_types(gradient.dtype, torch.float32)
    largest_subnormal = limits.tiny * (1 - limits.eps)
    # A norm of order 0 is a count: one launch that allocates nothing, exact in fp32 for so few
    # elements.
    pairs = [
        [
            torch.linalg.vector_norm(values, 0, dtype=wide)
            for values in (torch.nn.functional.hardshrink(part, largest_subnormal), part)
        ]
        for part in _parts(gradient)
    ]
    normal, nonzero = (
        counts[0] if len(counts) == 1 else torch.stack(counts).sum(dtype=torch.float64)
        for counts in zip(*pairs, strict=True)
    )
    return normal, nonzero


class StatsRecorder(BlockHooks):
    """Watches one step: a hook for its engine, which is also called with its gradients."""

    def __init__(self) -> None:
        self._magnitudes: dict[BlockStats, list[tuple[Tensor, Tensor]]] = {}
        self._guessed: set[BlockStats] = set()
        """Entries of blocks whose input storages are unknown."""
        self._gradients: dict[str, tuple[int, Tensor, Tensor]] = {}
        self._before: dict[int, weakref.ref[Any]] = {}
        self._device: torch.device | None = None
        self._last = -1
        self.reading: StepStats | None = None
        """The statistics, once they are on the host."""

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """Record statistics of what the block wrote."""
        if not torch.is_grad_enabled():
            return
        leaves = [
            (keystr(path).lstrip("."), x)
            for path, x in tree_flatten_with_path(carry)[0]
            if isinstance(x, Tensor)
        ]
        device = next((x.device for _, x in leaves), None)
        # Another forward begins, or the carry was copied from another device: all its storages are
        # new.
        guessed = index <= self._last or self._last < 0 or device != self._device
        for part, leaf in leaves:
            storage = leaf.untyped_storage()
            reference = self._before.get(storage._cdata)
            # A freed storage's address can belong to a new one, so the weak reference decides, not
            # the address.
            if (
                leaf.is_floating_point()
                and leaf.numel()
                and (reference is None or reference() is None)
            ):
                key = BlockStats(index, part)
                if guessed:
                    self._guessed.add(key)
                self._magnitudes.setdefault(key, []).append(magnitudes(leaf))
        storages = [leaf.untyped_storage() for _, leaf in leaves]
        # Weak references: the recorder must not keep activations alive.
        self._before = {storage._cdata: weakref.ref(storage) for storage in storages}
        self._last, self._device = index, device

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Record statistics of a parameter's gradient, before it is clipped."""
        self._gradients[name] = (gradient.numel(), *normal_counts(gradient))

    def packed(self) -> list[Float[Tensor, " numbers"]]:
        """All numbers in the order in which `read` takes them, stacked by device, so that each
        device sends few tensors."""
        # The first block of a device seems to have written the whole carry. Only parts that other
        # blocks write, too, are counted for it.
        changed = {key.part for key in self._magnitudes.keys() - self._guessed}
        if changed:
            self._magnitudes = {
                key: pairs
                for key, pairs in self._magnitudes.items()
                if key not in self._guessed or key.part in changed
            }
        numbers = [
            number
            for pairs in self._magnitudes.values()
            for number in (
                torch.stack([x for x, _ in pairs]).amax(),
                torch.stack([x for _, x in pairs]).sum(),
            )
        ]
        numbers += [number for _, *counts in self._gradients.values() for number in counts]
        stacked, start = [], 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or _kind(numbers[end]) != _kind(numbers[start]):
                stacked.append(torch.stack(numbers[start:end]))
                start = end
        return stacked

    @property
    def keys(self) -> list[BlockStats]:
        """What the first numbers of `packed` are of, two of each."""
        return list(self._magnitudes)

    def read(
        self,
        of_ranks: Sequence[tuple[Sequence[BlockStats], Sequence[float]]],
        divided: Mapping[str, int] | None = None,
        shard: int = 1,
    ) -> None:
        """Receive the `keys` and packed numbers of every rank on the host: activations of its
        micro-batches, which another rank's may lack (of references, say), and gradients, which all
        have.

        Of gradients that the first `shard` ranks divide, `divided` has the numbers of elements.
        """
        activations: dict[BlockStats, tuple[float, float]] = {}
        gradients = []
        for keys, numbers in of_ranks:
            pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
            for key, (largest, count) in zip(starmap(BlockStats, keys), pairs, strict=False):
                before, others = activations.get(key, (0.0, 0.0))
                activations[key] = max(before, largest), others + count
            gradients.append(pairs[len(keys) :])
        shares, lost, total = {}, 0.0, 0
        for index, (name, (size, *_)) in enumerate(self._gradients.items()):
            parts = [
                of_rank[index]
                for of_rank in gradients[: shard if divided and name in divided else 1]
            ]
            size = (divided or {}).get(name, size)
            small, zero = (size - sum(counts) for counts in zip(*parts, strict=True))
            if zero < size:
                shares[name], lost, total = small / size, lost + small, total + size
        worst = max(shares, key=lambda name: shares[name], default="")
        self.reading = StepStats(
            largest={key: largest for key, (largest, _) in activations.items()},
            not_finite={key: int(count) for key, (_, count) in activations.items()},
            underflow=lost / total if total else float(bool(self._gradients)),
            worst=worst if worst and shares[worst] else "",
        )


def _kind(number: Tensor) -> tuple[torch.device, torch.dtype]:
    return number.device, number.dtype


@dataclass
class DriftMonitor:
    """Compares statistics across steps: returns metrics, and warns where one of them goes wrong."""

    limit: float
    """Largest finite number of the blocks' matmul dtype."""
    warn: Callable[[str], None]
    first: dict[str, float] = field(default_factory=dict)
    """Each block's largest activation in the first watched step, by `block.part`:
    `TrainState.first_activations`, which it adds to."""
    _warned: set[str] = field(default_factory=set)

    def take(self, step: int, reading: StepStats) -> dict[str, float | str]:
        """Metrics of a watched step, by name. Warns once for each kind of problem, naming its first
        block."""
        growth: dict[BlockStats, float] = {}
        for key, largest in reading.largest.items():
            first = self.first.setdefault(f"{key.block}.{key.part}", largest)
            if first > 0:
                growth[key] = largest / first
        for key, largest in sorted(reading.largest.items()):
            where, ratio = f"step {step}: {key.part} of block {key.block}", growth.get(key, 1.0)
            if ratio > GROWTH:
                before = largest / ratio
                self._say(
                    "growth",
                    f"{where}: the largest activation is {largest:.3g}, {ratio:.1f} times its "
                    f"first {before:.3g}; "
                    "look at samples of this step, lower optim.lr, or go back to an earlier save",
                )
            if largest > self.limit / 2:
                self._say(
                    "range",
                    f"{where}: the largest activation is {largest:.3g}, within a factor of 2 of "
                    f"{self.limit:.5g}, "
                    "the largest number of model.dtype; choose a wider one, or lower optim.lr",
                )
            if reading.not_finite[key]:
                self._say(
                    "not finite", f"{where}: {reading.not_finite[key]} activations are not finite"
                )
        numbers: dict[str, float | str] = {"grad_underflow": reading.underflow}
        if reading.worst:
            numbers["grad_underflow_worst"] = reading.worst
        if reading.largest:
            highest = max(reading.largest, key=lambda key: reading.largest[key])
            numbers |= {
                "activation_max": reading.largest[highest],
                "activation_max_block": highest.block,
                "activation_drift": max(growth.values(), default=1.0),
                "nonfinite": sum(reading.not_finite.values()),
            }
        return numbers

    def _say(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.warn(line)
