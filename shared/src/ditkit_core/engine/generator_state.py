"""The random generator of a block, which a recompute winds back, and how a replay without Python
does the same.

A recompute samples the random numbers of its forward again: its generator gets the state that it
had there. A graph of device work cannot set a state while it is recorded. So the run before notes
which state each `restore` puts back (`RewindTrace`), and a recording gives each of them a generator
of its own that stands at that state (`graphs.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ditkit_core.io.runtimes import runtime_of


class Rewinding(Protocol):
    """Takes the place of a generator's own snapshots while something is noted or recorded."""

    def snapshot(self, hook: "GeneratorHook") -> Any:
        """A handle of the generator's state."""

    def restore(self, hook: "GeneratorHook", state: Any) -> None:
        """Put the state of a handle back."""


_REWINDINGS: dict[str, Rewinding] = {}
"""By name of a generator. Not a ContextVar: autograd recomputes on threads of its own."""


@contextmanager
def rewinding(hook: "GeneratorHook", by: Rewinding) -> Iterator[None]:
    """Inside the block snapshots of a generator are taken and restored by `by`."""
    _REWINDINGS[hook.generator] = by
    try:
        yield
    finally:
        del _REWINDINGS[hook.generator]


@dataclass(frozen=True)
class GeneratorHook:
    """The random generator of a block: its own device's and no other, because backwards of several
    devices run at the same time."""

    device: torch.device

    @property
    def generator(self) -> str:
        """Its name; all CPU devices share one."""
        return "cpu" if runtime_of(self.device) is None else str(self.device)

    def snapshot(self) -> Any:
        """The generator's state."""
        by = _REWINDINGS.get(self.generator)
        return self.state() if by is None else by.snapshot(self)

    def restore(self, state: Any) -> None:
        """Put a snapshot back."""
        by = _REWINDINGS.get(self.generator)
        if by is None:
            self.set_state(state)
        else:
            by.restore(self, state)

    def state(self) -> Tensor:
        """The generator's state as torch stores it."""
        runtime = runtime_of(self.device)
        return torch.get_rng_state() if runtime is None else runtime.get_rng_state(self.device)

    def set_state(self, state: Tensor) -> None:
        """Put a state back that torch stored."""
        if (runtime := runtime_of(self.device)) is None:
            torch.set_rng_state(state)
        else:
            runtime.set_rng_state(state, self.device)


@dataclass
class RewindTrace:
    """Which states the recomputes of a run put back, in their order. It changes nothing of that
    run."""

    states: list[Tensor] = field(default_factory=list)
    """The snapshots in the order in which they were taken."""
    restored: list[int] = field(default_factory=list)
    """For each `restore` the snapshot that it put back."""

    @property
    def samples(self) -> bool:
        """Whether any random number was sampled between two snapshots: else there is nothing to
        wind back."""
        return any(not torch.equal(state, self.states[0]) for state in self.states)

    def snapshot(self, hook: GeneratorHook) -> Tensor:
        """Note a state, and return it."""
        self.states.append(hook.state())
        return self.states[-1]

    def restore(self, hook: GeneratorHook, state: Tensor) -> None:
        """Note which state it is, and put it back."""
        self.restored.append(
            next(index for index, noted in enumerate(self.states) if noted is state)
        )
        hook.set_state(state)
