"""Micro-batches whose forward, loss and backward are recorded once for each kind, and replayed
without Python.

With few tokens the host needs longer to launch a step than the GPU to run it. A replay launches all
of it at once. A kind is everything that Python decides by: shapes of samples and conditions, masks,
whether the base's own prediction is the target. Whatever differs between micro-batches of a kind is
copied into tensors that stay: latents, noise, levels, weights, and the number that the loss is
divided by. Gradients are added to buffers that stay, too, and the seed of dropout is set before
each replay.

The first micro-batches of a kind run eagerly. Then a replay does the same operations on the same
numbers, so every bit is the same as in the eager run.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ditkit_core.engine.block_hooks import BlockHooks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.generator_state import GeneratorHook, RewindTrace, rewinding
from ditkit_core.engine.graphs import GRAPHS, Graph, Graphs
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.io.step_clock import StepClock
from ditkit_core.loading.model import Model
from ditkit_core.training.config import TrainConfig
from ditkit_core.training.flow_matching import PreparedBatch
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.tensor_stats import with_hooks
from ditkit_core.training.train_model import with_clock

KEY = "train.cuda_graphs"
MOST = 32
"""Graphs at once; the one that was replayed the longest ago is dropped for a new one. A graph of a
thousand launches takes a few MiB."""
BUSY_SHARE = 0.5
"""Under `auto`, share of blocks at whose start the GPU must have been idle for a kind to be
replayed."""

Mode = Literal["auto", "on", "off"]
Work = Callable[[Model, PreparedBatch, Tensor, StepClock], Tensor]
"""Forward, loss and backward: (model, micro-batch on its device, the number that the loss is
divided by, clock) to the samples' losses."""


def not_replayed(model: Model, train: TrainConfig, optim: OptimConfig) -> str:
    """Why no micro-batch of a run is replayed; empty if they can be."""
    engine = model.engine
    devices = {parameter.device for parameter in model.module.parameters()}
    if not isinstance(engine, BlockEngine):
        return "the model runs in an engine of another kind"
    reasons = {
        f"{len(devices)} devices share the model": len(devices) > 1,
        "the device is no GPU": not devices
        <= {device for device in devices if device.type in GRAPHS},
        "other ranks have a part of the weights (ranks.shard)": model.shards is not None,
        "other ranks have a part of the tokens (ranks.context)": engine.context is not None,
        "train.pipelined runs all forwards before one backward": train.pipelined,
        "optim.fused_backward updates weights in the backward": optim.fused_backward,
        "blocks are streamed (train.swap_blocks)": bool(engine.hooks),
        "train.checkpointing moves activations to the host": any(
            policy.offload for policy in engine.schedule.distinct
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def replays_of(
    model: Model, train: TrainConfig, optim: OptimConfig, warn: Callable[[str], None]
) -> "ReplayedMicroBatches | None":
    """What replays the micro-batches of a run; None if they run eagerly, which on a GPU a line
    gives the reason of."""
    device = next(model.module.parameters()).device
    if train.cuda_graphs == "off":
        return None
    if reason := not_replayed(model, train, optim):
        if train.cuda_graphs == "on" or device.type == "cuda":
            warn(f"{KEY} = {train.cuda_graphs}: micro-batches run eagerly, because {reason}")
        return None
    return ReplayedMicroBatches(train.cuda_graphs, model.trainable, device, warn)


@dataclass
class _Kind:
    """Micro-batches that differ in values alone."""

    described: str
    eager_runs: int = 0
    trace: RewindTrace = field(default_factory=RewindTrace)
    """What the last eager run wound back."""
    idle: float | None = None
    """Share of its blocks at whose start the GPU was idle; None as long as it is unknown."""
    refused: bool = False
    graph: Graph | None = None
    inputs: list[Tensor] = field(default_factory=list)
    """The tensors that a replay reads."""
    losses: Tensor | None = None
    """The samples' losses, in the pool."""
    names: Sequence[str] = ()
    """The trained parameters that get a gradient."""
    clock: StepClock = field(default_factory=StepClock)
    """The parts of a replay."""


class ReplayedMicroBatches:
    """Runs the micro-batches of a run, eagerly or as replays."""

    def __init__(
        self,
        mode: Mode,
        trainable: Mapping[str, nn.Parameter],
        device: torch.device,
        warn: Callable[[str], None],
    ):
        """Record nothing yet.

        Args:
            mode: `on`, or `auto` for the kinds that the host launches more slowly than the GPU runs
                them.
            trainable: The trained parameters, by name.
            device: The device of the model.
            warn: Called with one line if a kind cannot be recorded.
        """
        self._mode, self._device, self._warn = mode, device, warn
        self._gradients = _GradientBuffers(trainable)
        self._kinds: dict[Any, _Kind] = {}
        self._recorded: OrderedDict[Any, _Kind] = OrderedDict()
        """The kinds that have a graph, the one that was replayed last at the end."""
        self._graphs: Graphs | None = None
        self.num_replays = 0
        """Micro-batches that were replayed so far."""

    def run(
        self,
        model: Model,
        batch: PreparedBatch,
        work: Work,
        *,
        seed: int,
        divisor: float,
        clock: StepClock,
        is_seen: bool,
    ) -> Tensor:
        """Run a micro-batch: its gradients are added to the parameters' gradients.

        Args:
            batch: The micro-batch on its device.
            seed: The generators' seed.
            divisor: What the sum of the samples' losses is divided by.
            is_seen: Whether Python has to see it, as in a step whose activations are watched.

        Returns:
            The samples' losses.
        """
        key = _kind_of(model, batch)
        kind = self._kinds.setdefault(key, _Kind(_described(batch)))
        torch.manual_seed(seed)  # of every device
        on_device = torch.full((), divisor, device=self._device)
        if is_seen or not self._is_due(kind):
            return self._run_eagerly(kind, model, batch, work, on_device, clock)
        if kind.graph is None and not self._record(key, kind, model, batch, on_device, work):
            torch.manual_seed(seed)
            return self._run_eagerly(kind, model, batch, work, on_device, clock)
        self._recorded.move_to_end(key)
        self._gradients.prepare(kind.names)
        torch._foreach_copy_(kind.inputs, [*_tensors(batch), on_device])
        clock.mark(self._device, "forward")
        assert kind.graph is not None and kind.losses is not None
        kind.graph.replay(seed)
        self.num_replays += 1
        clock.replayed(self._device, kind.clock)
        return kind.losses.clone()

    def __len__(self) -> int:
        """The number of graphs."""
        return len(self._recorded)

    def free(self) -> None:
        """Free all graphs and their memory, for other work that needs it. They are recorded again
        when they are due."""
        while self._recorded:
            self._drop()
        self._graphs = None
        self._gradients.free()

    def _is_due(self, kind: _Kind) -> bool:
        """Whether a kind is replayed from now on."""
        if kind.refused or not kind.eager_runs:
            return False
        return self._mode == "on" or (kind.idle is not None and kind.idle > BUSY_SHARE)

    def _run_eagerly(
        self,
        kind: _Kind,
        model: Model,
        batch: PreparedBatch,
        work: Work,
        divisor: Tensor,
        clock: StepClock,
    ) -> Tensor:
        probe = None
        # the first run also compiles
        first, runtime = kind.eager_runs == 0, runtime_of(self._device)
        if self._mode == "auto" and not first and kind.idle is None and runtime is not None:
            probe = IdleProbe(partial(runtime.current_stream, self._device))
            model = replace(model, engine=with_hooks(model.engine, probe))
        kind.eager_runs, kind.trace = kind.eager_runs + 1, RewindTrace()
        with rewinding(GeneratorHook(self._device), kind.trace):
            if not self._recorded or self._graphs is None:
                losses = work(model, batch, divisor, clock)
            else:  # next to the graphs' memory there may be no room for as much again
                with self._gradients.collecting(), self._graphs.eagerly():
                    losses = work(model, batch, divisor, clock)
                losses = losses.clone()
        if probe is not None:
            kind.idle = probe.share
        return losses

    def _record(
        self, key: Any, kind: _Kind, model: Model, batch: PreparedBatch, divisor: Tensor, work: Work
    ) -> bool:
        """Record a kind; returns whether that succeeded."""
        while len(self._recorded) >= MOST:
            self._drop()
        noised, weights, divisor = tree_map_only(
            Tensor, Tensor.clone, (batch.noised, batch.weights, divisor)
        )
        batch = batch._replace(noised=noised, weights=weights)
        clock = StepClock([self._device], in_graph=True)
        timed = with_clock(model, clock)

        def recorded() -> Tensor:
            losses = work(timed, batch, divisor, clock)
            clock.mark(self._device, "")
            return losses

        try:
            self._graphs = self._graphs or GRAPHS[self._device.type](self._device)
            with self._gradients.collecting() as names:
                graph, losses = self._graphs.record(recorded, kind.trace)
        except RuntimeError as error:  # of CUDA, of torch, and torch's for memory that runs out
            kind.refused = True
            if not self._recorded:  # nothing adds to the buffers any more
                self._gradients.free()
            reason = str(error).partition("\n")[0]
            self._warn(
                f"{KEY}: {kind.described} run eagerly, because recording them failed: {reason}"
            )
            return False
        kind.graph, kind.losses, kind.names, kind.clock = graph, losses, tuple(names), clock
        kind.inputs = [*_tensors(batch), divisor]
        self._recorded[key] = kind
        return True

    def _drop(self) -> None:
        _, kind = self._recorded.popitem(last=False)
        assert kind.graph is not None
        kind.graph.free()
        kind.graph, kind.losses, kind.inputs = None, None, []


def _read(batch: PreparedBatch) -> tuple[Any, ...]:
    """What the work of a micro-batch reads of it."""
    return batch.noised, batch.weights, batch.matches_base


def _kind_of(model: Model, batch: PreparedBatch) -> Any:
    """Everything that Python decides by."""
    leaves, spec = tree_flatten(_read(batch))
    shapes = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    module: Any = model.module
    return str(spec), shapes, module.training


def _tensors(batch: PreparedBatch) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(_read(batch)) if isinstance(leaf, Tensor)]


def _described(batch: PreparedBatch) -> str:
    shapes = [list(item["latents"].shape) for item in batch.noised.items]
    return f"micro-batches of {len(shapes)} × {shapes[0]}" if shapes else "micro-batches"


class _GradientBuffers:
    """Gradients at fixed addresses: a replay adds to the memory that was there when it was
    recorded."""

    def __init__(self, trainable: Mapping[str, nn.Parameter]):
        self._trainable = trainable
        self._buffers: dict[str, Tensor] = {}

    def prepare(self, names: Sequence[str]) -> None:
        """Have the gradients of these parameters in their buffers, with their values; those without
        a gradient have zeros."""
        # All of them first: where memory ends among them, no gradient has moved yet.
        buffers = {name: self._buffer(name) for name in names}
        empty, moved = [], []
        for name, buffer in buffers.items():
            parameter = self._trainable[name]
            if parameter.grad is None:
                empty.append(buffer)
            elif parameter.grad is not buffer:
                moved.append((buffer, parameter.grad))
            parameter.grad = buffer
        if empty:
            torch._foreach_zero_(empty)
        if moved:
            torch._foreach_copy_(
                [buffer for buffer, _ in moved], [gradient for _, gradient in moved]
            )

    @contextmanager
    def collecting(self) -> Iterator[list[str]]:
        """Inside the block all gradients are added to their buffers. Yields the names of the
        parameters that got one; others have none afterwards, unless they had one before."""
        names: list[str] = []
        before = {name for name, parameter in self._trainable.items() if parameter.grad is not None}
        self.prepare(list(self._trainable))
        # Autograd also comes to layers whose result nothing reads, with None: eager micro-batches
        # leave them without a gradient.
        hooks = [
            parameter.register_hook(
                lambda gradient, name=name: names.append(name) if gradient is not None else None
            )
            for name, parameter in self._trainable.items()
        ]
        try:
            yield names
        finally:
            for hook in hooks:
                hook.remove()
            for name in self._trainable.keys() - before - set(names):
                self._trainable[name].grad = None

    def free(self) -> None:
        """Free all buffers; no graph refers to them any more, and gradients that exist stay."""
        self._buffers.clear()

    def _buffer(self, name: str) -> Tensor:
        if name not in self._buffers:
            parameter = self._trainable[name]
            self._buffers[name] = torch.zeros_like(
                parameter, dtype=parameter.grad_dtype or parameter.dtype
            )
        return self._buffers[name]


class IdleProbe(BlockHooks):
    """Counts at how many blocks' starts a GPU had done all work before the last one: it then waits
    for the host."""

    def __init__(self, stream: Callable[[], Any]):
        """Look at the stream on which work runs when a block starts: next to graphs it is not the
        one outside."""
        self._stream, self._last = stream, None
        self._seen = self._idle = 0

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """Look at the GPU before a block's forward."""
        self._look()

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """Look at the GPU before a block's backward."""
        self._look()

    @property
    def share(self) -> float:
        """Share of the blocks' starts, in [0, 1]; 0 without any."""
        return self._idle / max(1, self._seen)

    def _look(self) -> None:
        if self._last is not None:
            self._seen += 1
            self._idle += self._last.query()
        self._last = self._stream().record_event()
