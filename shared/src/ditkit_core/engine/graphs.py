"""Device work that is recorded once and runs again without Python: CUDA graphs, for work that
always does the same to the same memory.

What a graph reads and writes lies at fixed addresses. Memory that its work allocates comes from a
pool, which all graphs of a device share: they run one after the other, and each may overwrite what
another one left there. So whatever is to outlive a replay is copied out of the pool, or was
allocated before.

`GRAPHS` says what records the work of a kind of device. Tests add one for the CPU
(`testing/recorded_graph.py`), which replays below autograd what Python once called.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ditkit_core.engine.generator_state import GeneratorHook, RewindTrace, rewinding

T = TypeVar("T")


class Graph(Protocol):
    """Recorded work."""

    def replay(self, seed: int) -> None:
        """Run it again, as if the device's generator had been seeded before. The host does not wait
        for it."""

    def free(self) -> None:
        """Free what belongs to this graph alone."""


class Graphs(Protocol):
    """Records the work of one device. All graphs have their memory from one pool."""

    def record(self, work: Callable[[], T], trace: RewindTrace) -> tuple[Graph, T]:
        """Record some work, without running it.

        Args:
            work: Launches it. It has run before, so that nothing is compiled or set up anew.
            trace: What that run wound back.

        Returns:
            The graph, and what `work` returned: tensors in the pool, which a replay fills.

        Raises:
            RuntimeError: If something of the work cannot be recorded, or memory runs out.
        """

    def eagerly(self) -> AbstractContextManager[None]:
        """Context in which other work takes its memory from the pool, while no graph runs. Tensors
        that it allocates there must be gone, or copied, before the next replay."""


GRAPHS: dict[str, Callable[[torch.device], Graphs]] = {"cuda": lambda device: CudaGraphs(device)}
"""By kind of device. What is missing here runs eagerly."""


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Inside the block backwards run on the thread that calls them: a pool of memory, and a
    recording, belong to one thread."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


class CudaGraphs:
    """Records CUDA graphs of one GPU."""

    def __init__(self, device: torch.device):
        """Start with an empty pool."""
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()
            self._pool_id: Any = self._pool.id  # its type differs between versions of torch
            # The pool's memory belongs to one stream: eager work that uses it has to run there too.
            self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], T], trace: RewindTrace) -> tuple[Graph, T]:
        """Record some work as a CUDA graph, as `Graphs.record` says."""
        graph = torch.cuda.CUDAGraph()
        generators = _Generators(self._device, trace)
        for generator in generators.restored:
            graph.register_generator_state(generator)
        # Other threads read data meanwhile, and may allocate memory: only this thread's calls are
        # recorded.
        recording = torch.cuda.graph(
            graph, pool=self._pool_id, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(self._device), in_one_thread(), generators.in_force(), recording:
            result = work()
        return _CudaGraph(graph, generators), result

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Run the block's work in the pool, on the stream that its memory belongs to."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.use_mem_pool(self._pool, self._device),
            in_one_thread(),
        ):
            yield
        outside.wait_stream(self._stream)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, generators: "_Generators"):
        self._graph, self._generators = graph, generators

    def replay(self, seed: int) -> None:
        self._generators.seed(seed)
        self._graph.replay()

    def free(self) -> None:
        self._graph.reset()


class _Generators:
    """The states that recompute puts back while it is recorded: each `restore` switches the GPU's
    generator to a state that is registered with the graph, and stands where the generator stood at
    the snapshot. Source: torch's `graphsafe_set_state`, as its compiler uses it."""

    def __init__(self, device: torch.device, trace: RewindTrace):
        self._hook, self._trace = GeneratorHook(device), trace
        self._default = torch.cuda.default_generators[device.index]
        # Without random numbers there is nothing to wind back, and each state costs two launches in
        # every replay.
        count = len(trace.restored) if trace.samples else 0
        self.restored = [self._default.clone_state() for _ in range(count)]
        self._offsets = [_offset(trace.states[index], device) for index in trace.restored[:count]]
        self._snapshots = self._restores = 0

    def seed(self, seed: int) -> None:
        """Seed the GPU's generator and every state, before a replay."""
        self._default.manual_seed(seed)
        for generator, offset in zip(self.restored, self._offsets, strict=True):
            generator.manual_seed(seed)
            generator.set_offset(offset)

    def snapshot(self, hook: GeneratorHook) -> int:
        self._snapshots += 1
        return self._snapshots - 1

    def restore(self, hook: GeneratorHook, state: Any) -> None:
        if state != self._trace.restored[self._restores]:
            raise RuntimeError(
                "its recomputes wound back other random numbers than in the run before"
            )
        if self.restored:
            self._default.graphsafe_set_state(self.restored[self._restores])
        self._restores += 1

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the block recomputes switch to these states."""
        outside = self._default.graphsafe_get_state()
        try:
            with rewinding(self._hook, self):
                yield
        finally:
            self._default.graphsafe_set_state(outside)


def _offset(state: Tensor, device: torch.device) -> int:
    generator = torch.Generator(device)
    generator.set_state(state)
    return int(generator.get_offset())
