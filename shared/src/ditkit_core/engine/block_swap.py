"""Block swap: weights of blocks stay in host memory and are on their device only while they are
used.

Every streamed block has one buffer on the host and one on its device. The block's weights are views
into the device's buffer. Its storage is emptied and filled again in place, so that nothing that
refers to a weight, autograd included, occupies memory while the block is away. (A new tensor in
place of a weight would keep alive the old one, which autograd saved.) Frozen weights are never
copied back.

Trained weights are streamed where the optimizer steps in the backward. Their optimizer state is on
the host, too: it is copied with the weights for the block's backward. Both are copied back once a
step, when the block's backward is over and its weights are updated. A forward needs no optimizer
state and copies nothing back. Where a step has several micro-batches, all backwards but the last
only add to the sums of gradients, which are on the host as well: they copy those alone.

A device has at most two streamed blocks at a time: the running one and the next one. A backward
leaves none, so the next forward waits for its first block. That block could be fetched early, but
it would then occupy memory through everything that a run does between two steps, and be out of date
where weights are exchanged for their average.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ditkit_core.config.sizes import per_device
from ditkit_core.engine.block_hooks import BlockHooks
from ditkit_core.engine.pinned_memory import HOST, CopyLane, Location, PinnedPool, Streamed
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError, argument
from ditkit_core.models.protocol import StagedModel


class KeepsState(Protocol):
    """The part of an optimizer's interface that streaming its state needs."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that it updates, by name."""

    def state_of(self, name: str) -> MutableMapping[str, Any]:
        """Its state of a parameter, by entry; empty before the first update."""

    def sum_of(self, name: str) -> MutableMapping[str, Any]:
        """The sum of its gradients over micro-batches, as an entry; empty with a single
        micro-batch."""

    def is_kept_on_host(self, name: str, entry: str) -> bool:
        """Whether an entry stays on the host wherever the parameter is."""

    @property
    def backwards(self) -> tuple[int, int]:
        """Backwards of the step that have begun, and that have not. The last one updates the
        parameters."""


def base_device_map(model: StagedModel, placement: Placement) -> Callable[[str], torch.device]:
    """The device to load each base parameter to, by name: the host for streamed blocks, else the
    block's device."""
    device_of = placement.device_of(model)
    blocks = [block for index, block in enumerate(model.blocks()) if index in placement.streamed]
    streamed = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if any(module is block for block in blocks)
    )
    return lambda name: HOST if f"{name}.".startswith(streamed) else device_of(name)


def choose_streamed(
    placement: Placement, counts: Sequence[int], has_weights: Sequence[bool]
) -> frozenset[int]:
    """Choose the blocks to stream, evenly spaced on each device, so that copies overlap with
    computation.

    Args:
        counts: `train.swap_blocks`: the number of blocks for each device, in order, or one number
            for all devices.
        has_weights: Whether each block has weights; one without is never streamed.
    """
    if not counts:
        return frozenset()
    devices = list(dict.fromkeys(placement.blocks))
    where = f"{argument('train.swap_blocks')} = {list(counts)}"
    chosen: set[int] = set()
    for device, count in zip(
        devices, per_device(counts, len(devices), argument("train.swap_blocks")), strict=True
    ):
        device_blocks = [
            i
            for i, block_device in enumerate(placement.blocks)
            if block_device == device and has_weights[i]
        ]
        if not 0 <= count <= len(device_blocks):
            raise UserError(
                f"{where}: {device} runs {len(device_blocks)} blocks; choose 0 to "
                f"{len(device_blocks)} of them"
            )
        # The last block of each span: the blocks before it hide its copy, and the backward begins
        # with it still on the device.
        chosen |= {
            device_blocks[-(-(k + 1) * len(device_blocks) // count) - 1] for k in range(count)
        }
    return frozenset(chosen)


class BlockSwap(BlockHooks):
    """Block hooks that stream weights: fetched before a block runs, freed after it.

    Only speed depends on a right guess of the next block; a block that is not there is waited for.
    State is kept by device, because backwards of several devices run at the same time.

    Attributes:
        num_bytes: Bytes of all streamed weights.
        buffers: Buffers on the devices, one per streamed block, for a memory tracker to watch.
        host_buffers: Buffers on the host.
    """

    def __init__(self, model: StagedModel, placement: Placement, *, trained: bool = False):
        """Take over the weights of the streamed blocks, which are on the host. Meanwhile the host
        has one block twice.

        Args:
            trained: Whether trained weights are streamed as well; otherwise they stay where they
                are.
        """
        self._queues: dict[torch.device, BlockQueue] = {}
        self._pages = PinnedPool(self)
        if trained:
            _check_sharing(model, placement)
        for index, block in enumerate(model.blocks()):
            if index in placement.streamed and (weights := _weights(block, trained=trained)):
                device = placement.blocks[index]
                self._queues.setdefault(device, BlockQueue(device, self._pages)).add(index, weights)
        self._queue_of = {
            i: self._queues[d] for i, d in enumerate(placement.blocks) if d in self._queues
        }
        all_streamed = [
            streamed for queue in self._queues.values() for streamed in queue.blocks.values()
        ]
        self.buffers = [streamed.buffer for streamed in all_streamed]
        self.host_buffers = [streamed.host for streamed in all_streamed]
        self.num_bytes = sum(streamed.num_bytes for streamed in all_streamed)
        # By identity: a parameter on the device is empty most of the time, and cannot be compared
        # by value.
        self._hosts = {
            id(slot.device): slot.host for streamed in all_streamed for slot in streamed.trained()
        }

    @property
    def locked(self) -> bool:
        """Whether all host buffers for GPUs are page-locked; without that, copies do not overlap
        with a GPU's work."""
        return self._pages.all_locked

    def attach(self, optimizer: KeepsState | None) -> None:
        """Stream an optimizer's state of the streamed weights, which is on the host, from now on;
        None: no state."""
        for queue in self._queues.values():
            queue.attach(optimizer)

    def host_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter with the values between two steps: for a streamed trained weight the one on
        the host."""
        host_parameter: Any = self._hosts.get(id(parameter), parameter)
        return host_parameter

    def host_changed(self) -> None:
        """Drop the weights on the devices, because their values were changed on the host, or are
        going to be: no copy reads them any more."""
        for queue in self._queues.values():
            queue.clear()
            # a forward fetches its first block for another one, and nobody may ever wait for that
            queue.lane.finish()

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """Wait for the block's weights, and start the copy of the next block's.

        After the forward they stay, because a backward may begin with this block.
        """
        if (queue := self._queue_of.get(index)) is not None:
            queue.pre_forward(index)

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """Wait for the block's weights before its backward, which may recompute it, and start the
        copy of the next block's."""
        if (queue := self._queue_of.get(index)) is not None:
            queue.pre_backward(index)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Context in which streamed weights and their optimizer state are on the host. The model
        cannot run."""
        self._put(on_host=True)
        try:
            yield
        finally:
            self._put(on_host=False)

    def describe(self) -> str:
        """One line for the log: how many blocks are streamed, and their bytes."""
        count = sum(len(queue.blocks) for queue in self._queues.values())
        contents = (
            "weights, and in training what the optimizer keeps of them,"
            if self._hosts
            else "weights"
        )
        line = f"{count} blocks are streamed: {self.num_bytes / 2**30:.2f} GiB of {contents} stay in host memory"
        return (
            line
            if self.locked
            else f"{line}, which could not be page-locked: copies will be waited for"
        )

    def _put(self, *, on_host: bool) -> None:
        for queue in self._queues.values():
            for part in (*queue.blocks.values(), *queue.of_optimizer()):
                part.put(on_host=on_host)


class BlockQueue:
    """The streamed blocks of one device, in order, and which of them are on the device."""

    def __init__(self, device: torch.device, pages: PinnedPool):
        self.device = device
        self.blocks: dict[int, Streamed] = {}
        self.states: dict[int, list[Streamed]] = {}
        """Optimizer state of a block's weights; more than one entry if a weight had its first
        gradient later than others."""
        self.sums: dict[int, list[Streamed]] = {}
        """The same of the sums of gradients over micro-batches."""
        self.lane = CopyLane(device)
        self._pages = pages
        self._optimizer: KeepsState | None = None
        self._names: dict[int, list[str]] = {}
        """The optimizer's names of a block's weights."""
        self._trains = False
        self._there: dict[int, torch.cuda.Event | None] = {}
        """Blocks whose weights are on the device or on their way, with the event after their
        copy."""
        self._state_there: dict[int, torch.cuda.Event | None] = {}
        """The same for optimizer state."""
        self._updated: set[int] = set()
        """Blocks whose backward has begun: what it writes is newer on the device than on the
        host."""
        self._is_first = self._updates = True
        """Whether the backward that runs or comes next is the first of its step, and whether it is
        the last, which updates."""
        self._is_storing = False
        """Whether something is being copied to the host and nobody has waited for it."""
        self._ahead = 0
        """Number of forwards whose backward has not begun; more than one with pipelined
        micro-batches."""

    def add(self, index: int, weights: Sequence[Location]) -> None:
        """Stream a block's weights."""
        self.blocks[index] = self._streamed(weights)
        self._trains |= any(True for _ in self.blocks[index].trained())

    def attach(self, optimizer: KeepsState | None) -> None:
        """Stream the state of an optimizer, which is on the host now."""
        # Before the buffers of the last optimizer are freed: freed memory that is still page-locked
        # cannot be locked again.
        self._pages.unlock([part.host for part in self.of_optimizer()])
        self.states, self.sums, self._names, self._optimizer = {}, {}, {}, optimizer
        if optimizer is None:
            return
        names = {id(parameter): name for name, parameter in optimizer.parameters.items()}
        for index, block in self.blocks.items():
            trained_names = dict.fromkeys(names.get(id(slot.device)) for slot in block.trained())
            self._names[index] = [name for name in trained_names if name is not None]
            self._take_state(index)

    def of_optimizer(self) -> Iterator[Streamed]:
        """Optimizer state and sums of gradients of all blocks."""
        return itertools.chain.from_iterable((*self.states.values(), *self.sums.values()))

    def pre_forward(self, index: int) -> None:
        """Prepare a block's forward, and fetch the next block.

        The next block is the following one. After the last block it is the one before, for the
        backward; without a backward it is the first, for another forward.
        """
        first, last = min(self.blocks), max(self.blocks)
        trains = torch.is_grad_enabled()
        self.lane.restart()
        self._ahead += trains and index == last
        following = next((i for i in self.blocks if i > index), None)
        if following is None:
            following = (
                max((i for i in self.blocks if i < index), default=None) if trains else first
            )
        self._advance(index, following)
        if self._trains and trains and index == last:
            # The backward begins with this block and needs its optimizer state, which the forward
            # did not.
            begun, remaining = (0, 1) if self._optimizer is None else self._optimizer.backwards
            self._is_first, self._updates = begun == 0, remaining <= 1
            self._fetch(index, with_state=True)

    def pre_backward(self, index: int) -> None:
        """Prepare a block's backward, and fetch the next block: the one before it, and after the
        first the last of another micro-batch."""
        last = max(self.blocks)
        self._ahead -= index == last
        following = max(
            (i for i in self.blocks if i < index), default=last if self._ahead > 0 else None
        )
        self.lane.after_backward(self.clear)
        self._advance(index, following, with_state=self._trains)
        if self._trains and index in self.blocks:
            self._updated.add(index)

    def clear(self) -> None:
        """Free all blocks, and wait until the host has their new values."""
        self._ahead = 0
        self.lane.restart()
        self._keep_only()
        if self._is_storing:
            self.lane.finish()  # on the host, which saves and averages read next
        self._is_storing = False

    def _advance(self, index: int, following: int | None, *, with_state: bool = False) -> None:
        if index not in self.blocks and following in (
            self._state_there if with_state else self._there
        ):
            # A resident block between streamed ones: nothing is freed for it, because the block
            # before may be needed again after it.
            return
        self._keep_only(index, following)
        if index in self.blocks:
            self._fetch(index, with_state=with_state)
            self._wait_for(index)
        if following is not None:
            self._fetch(following, with_state=with_state)

    def _fetch(self, index: int, *, with_state: bool = False) -> None:
        if index not in self._there:
            self._copy([self.blocks[index].fetch], index, self._there)
        if with_state and index not in self._state_there:
            fills = [
                part.make_room if self._is_first else part.fetch
                for part in self.sums.get(index, ())
            ]
            fills += [part.fetch for part in self.states.get(index, ()) if self._updates]
            self._copy(fills, index, self._state_there)

    def _copy(
        self,
        fills: Sequence[Callable[[], None]],
        index: int,
        there: dict[int, torch.cuda.Event | None],
    ) -> None:
        with self.lane.copies():
            for fill in fills:
                fill()
            there[index] = self.lane.record()

    def _wait_for(self, index: int) -> None:
        for event in (self._there[index], self._state_there.get(index)):
            self.lane.wait_for(event)

    def _keep_only(self, *indices: int | None) -> None:
        gone = [index for index in self._there if index not in indices]
        if gone:
            # The work that reads and updates these blocks is launched by now. The side stream waits
            # for it, copies the new values to the host, and only then uses the memory again.
            self.lane.follow()
        for index in gone:
            with self.lane.copies():
                self._empty(index)

    def _empty(self, index: int) -> None:
        block = self.blocks[index]
        states = self.states.get(index, ())
        sums = self.sums.get(index, ())
        is_new = index in self._updated
        self._is_storing |= is_new
        written = (block, *states) if self._updates else sums
        for part in (block, *states, *sums):
            if is_new and part in written:
                part.store()
            part.empty()
        del self._there[index]
        self._state_there.pop(index, None)
        self._updated.discard(index)
        if is_new:
            self._take_state(index)

    def _take_state(self, index: int) -> None:
        """Stream from now on the optimizer state of a block's weights that is not streamed yet: it
        exists after a first update only."""
        if self._optimizer is None:
            return
        optimizer = self._optimizer
        for streamed, entries_of in (
            (self.states, optimizer.state_of),
            (self.sums, optimizer.sum_of),
        ):
            streamed_keys = {
                (id(slot.entries), slot.leaf)
                for part in streamed.get(index, ())
                for slot in part.slots
            }
            locations: list[Location] = []
            for name in self._names[index]:
                entries = entries_of(name)
                for entry in [
                    entry for entry, value in entries.items() if isinstance(value, Tensor)
                ]:
                    if not optimizer.is_kept_on_host(name, entry):
                        locations += self._parts(entries, entry, streamed_keys)
            if locations:
                streamed.setdefault(index, []).append(self._streamed(locations, returns=True))

    def _parts(
        self,
        entries: MutableMapping[str, Any],
        entry: str,
        streamed_keys: Collection[tuple[int, str]],
    ) -> list[Location]:
        """The entries that a tensor is stored in and that are not streamed yet: its own, or the
        entries of the tensors inside a quantized one."""
        value: Any = entries[entry]
        if not is_traceable_wrapper_subclass(value):
            return [] if (id(entries), entry) in streamed_keys else [(entries, entry)]
        names, attributes = value.__tensor_flatten__()
        if any((id(value.__dict__), name) in streamed_keys for name in names):
            return []
        # A wrapper names its device: one that was loaded on the host is made again around tensors
        # on the device.
        inner = {name: getattr(value, name).to(self.device) for name in names}
        kind: Any = type(value)
        tensor = kind.__tensor_unflatten__(inner, attributes, None, None)
        entries[entry] = tensor
        return [(tensor.__dict__, name) for name in names]

    def _streamed(self, locations: Sequence[Location], *, returns: bool = False) -> Streamed:
        with self.lane.copies():
            streamed = Streamed(locations, self.device, returns=returns)
        if self.lane.overlaps:
            self._pages.lock(streamed.host, self.device)
        return streamed


def _weights(block: nn.Module, *, trained: bool) -> list[Location]:
    """The entries of a block's frozen parameters and buffers, and of its trained parameters if
    wanted."""
    return [
        (entries, leaf)
        for module in block.modules()
        for entries in (module._parameters, module._buffers)
        for leaf, tensor in entries.items()
        if tensor is not None and (trained or not tensor.requires_grad)
    ]


def _check_sharing(model: StagedModel, placement: Placement) -> None:
    """Refuse to stream a trained weight that is also used outside its block, where it would be away
    or out of date."""
    stages = [*model.blocks(), model.embed, model.head]
    stage_of: dict[int, int] = {}
    for stage_index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            other = stage_of.setdefault(id(parameter), stage_index)
            if (
                parameter.requires_grad
                and other != stage_index
                and {other, stage_index} & placement.streamed
            ):
                raise UserError(
                    f"{argument('train.swap_blocks')} streams a block whose trained weight {name} "
                    f"is used elsewhere as well; leave it out"
                )
