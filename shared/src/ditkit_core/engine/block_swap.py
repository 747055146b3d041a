"""Blocks whose weights stay in host memory and pass through their device while they are used.

Every streamed block has one buffer on the host and one on its device. The block's weights are views into the device's; its
storage is emptied and filled again in place, so that whoever holds a weight, autograd too, holds no memory while the block is
away. (Another tensor in place of a weight would leave alive what autograd saved of the first.) Frozen weights are copied one way only.

Trained weights are streamed where the optimizer steps in the backward. What it keeps of them is on the host, too: it comes with the
weights for the block's backward, and both go back once a step, when the block's backward is over and its weights are updated. A
forward needs no optimizer's state and brings nothing back.

At most two blocks of a device are there at once: the one at work, and the one that comes next. A backward leaves none, so that the
first block of the next forward is waited for: it could be fetched early, but would stay through everything that a run does between
two steps, and be out of date where weights are exchanged for their average.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ditkit_core.engine.copy_lane import CopyLane
from ditkit_core.engine.devices import per_device
from ditkit_core.engine.pinned_memory import HOST, Found, PinnedPool, Streamed
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError
from ditkit_core.models.protocol import StagedModel


class KeepsState(Protocol):
    """The optimizer, as far as its state is streamed."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What it updates, by name."""
        ...

    def state_of(self, name: str) -> MutableMapping[str, Any]:
        """What it keeps of a parameter, by entry; empty before the first update."""
        ...

    def is_kept_on_host(self, name: str, entry: str) -> bool:
        """Whether it wants an entry on the host wherever the parameter is."""
        ...


def base_device_map(model: StagedModel, placement: Placement) -> Callable[[str], torch.device]:
    """Where the base's parameters are loaded to, by name: the host for those of streamed blocks, else their device."""
    device_of = placement.device_of(model)
    blocks = [block for index, block in enumerate(model.blocks()) if index in placement.streamed]
    streamed = tuple(f"{name}." for name, module in model.named_modules() if any(module is block for block in blocks))
    return lambda name: HOST if f"{name}.".startswith(streamed) else device_of(name)


def choose_streamed(placement: Placement, counts: Sequence[int], has_weights: Sequence[bool]) -> frozenset[int]:
    """The blocks to stream, spread evenly over those of their device: what is fetched overlaps with what is computed between.

    Args:
        placement: Which device runs which block.
        counts: `train.swap_blocks`: how many blocks of each device, in their order, or one number for all devices.
        has_weights: Of each block; one without is never streamed.

    Raises:
        UserError: If a device has not so many blocks.
    """
    if not counts:
        return frozenset()
    devices = list(dict.fromkeys(placement.blocks))
    where = f"train.swap_blocks = {list(counts)}"
    chosen: set[int] = set()
    for device, count in zip(devices, per_device(counts, len(devices), "train.swap_blocks"), strict=True):
        own = [i for i, where_to in enumerate(placement.blocks) if where_to == device and has_weights[i]]
        if not 0 <= count <= len(own):
            raise UserError(f"{where}: {device} runs {len(own)} blocks; choose 0 to {len(own)} of them")
        # the last of each span: what comes before it hides its copy, and the backward begins with it still there
        chosen |= {own[-(-(k + 1) * len(own) // count) - 1] for k in range(count)}
    return frozenset(chosen)


class BlockSwap:
    """The passage that streams weights: fetched before their turn, emptied after it.

    Only speed depends on whether the guess of what comes next is right; a block that is not there is waited for. State is kept by
    device, whose backwards run side by side.

    Attributes:
        num_bytes: Bytes of all streamed weights.
        buffers: The devices' buffers, one per streamed block: what a `Ledger` has to watch.
        host_buffers: Those on the host.
        locked: Whether the host's buffers are page-locked, without which a GPU's copies do not overlap with its work.
    """

    def __init__(self, model: StagedModel, placement: Placement, *, trained: bool = False):
        """Take the weights of the streamed blocks; the host holds one block twice meanwhile.

        Args:
            model: The model with its weights and adapters; what is streamed is on the host.
            placement: Which blocks are streamed, and to where.
            trained: Whether trained weights are streamed, too. Else they stay where they are.

        Raises:
            UserError: If a trained weight of a streamed block is used elsewhere, too.
        """
        self._queues: dict[torch.device, BlockQueue] = {}
        self._pages = PinnedPool(self)
        if trained:
            _check_sharing(model, placement)
        for index, block in enumerate(model.blocks()):
            if index in placement.streamed and (weights := _weights(block, trained=trained)):
                device = placement.blocks[index]
                self._queues.setdefault(device, BlockQueue(device, self._pages)).add(index, weights)
        self._device = {i: device for i, device in enumerate(placement.blocks) if device in self._queues}
        each = [streamed for queue in self._queues.values() for streamed in queue.blocks.values()]
        self.buffers = [streamed.buffer for streamed in each]
        self.host_buffers = [streamed.host for streamed in each]
        self.num_bytes = sum(streamed.num_bytes for streamed in each)
        self._hosts = {id(slot.device): slot.host for streamed in each for slot in streamed.trained()}

    @property
    def locked(self) -> bool:
        """Whether all that is streamed to GPUs is page-locked on the host."""
        return self._pages.all_locked

    @property
    def state_buffers(self) -> list[Tensor]:
        """The devices' buffers of the optimizer's state."""
        queues = self._queues.values()
        return [part.buffer for queue in queues for parts in queue.states.values() for part in parts]

    def attach(self, optimizer: KeepsState | None) -> None:
        """Stream the state that an optimizer keeps of streamed weights, from now on; None: no one's.

        What it keeps by now, of an earlier run, is on the host.
        """
        for queue in self._queues.values():
            queue.attach(optimizer)

    def host_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What holds a parameter's values between two steps: for a trained weight that is streamed, a parameter on the host."""
        found: Any = self._hosts.get(id(parameter), parameter)
        return found

    def host_changed(self) -> None:
        """Values were changed on the host: what is on the devices is out of date."""
        for queue in self._queues.values():
            queue.clear()

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """The block runs next: its weights are there, and those of the next are on their way."""
        if (queue := self._queue(index)) is not None:
            queue.pre_forward(index)

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """Nothing: a backward may begin with this block."""

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """The block's backward, which may recompute it, runs next."""
        if (queue := self._queue(index)) is not None:
            queue.pre_backward(index)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Inside the block the model's streamed weights are those on the host, to be read, and the optimizer's state, too; it cannot run."""
        self._put(on_host=True)
        try:
            yield
        finally:
            self._put(on_host=False)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside the block all weights are on their devices."""
        try:
            for queue in self._queues.values():
                queue.fill()
            yield
        finally:
            for queue in self._queues.values():
                queue.held = False
                queue.clear()

    def describe(self) -> str:
        """One line on what is streamed."""
        count = sum(len(queue.blocks) for queue in self._queues.values())
        what = "weights, and in training what the optimizer keeps of them," if self._hosts else "weights"
        line = f"{count} blocks are streamed: {self.num_bytes / 2**30:.2f} GiB of {what} stay in host memory"
        return line if self.locked else f"{line}, which could not be page-locked: copies will be waited for"

    def _queue(self, index: int) -> "BlockQueue | None":
        device = self._device.get(index)
        return None if device is None else self._queues[device]

    def _put(self, *, on_host: bool) -> None:
        for queue in self._queues.values():
            for parts in [queue.blocks.values(), *queue.states.values()]:
                for part in parts:
                    part.put(on_host=on_host)


class BlockQueue:
    """The streamed blocks of one device, in their order, and which of them are there."""

    def __init__(self, device: torch.device, pages: PinnedPool):
        self.device = device
        self.blocks: dict[int, Streamed] = {}
        self.states: dict[int, list[Streamed]] = {}
        """What the optimizer keeps of a block's weights; more than one if a weight had its first gradient later than others."""
        self.held = False
        """Whether everything is to stay."""
        self.lane = CopyLane(device)
        self._pages = pages
        self._optimizer: KeepsState | None = None
        self._names: dict[int, list[str]] = {}
        """The optimizer's names of a block's weights."""
        self._trains = False
        self._there: dict[int, torch.cuda.Event | None] = {}
        """Blocks whose weights are there or on their way, with the event after their copy."""
        self._state_there: dict[int, torch.cuda.Event | None] = {}
        """The same of the optimizer's state."""
        self._updated: set[int] = set()
        """Blocks whose backward has begun: what is there is newer than the host's."""
        self._is_storing = False
        """Whether something was sent back to the host and nobody has waited for it."""
        self._ahead = 0
        """Forwards whose backward has not begun."""

    def add(self, index: int, weights: Sequence[Found]) -> None:
        """Stream a block's weights."""
        self.blocks[index] = self._streamed(weights)
        self._trains |= any(True for _ in self.blocks[index].trained())

    def attach(self, optimizer: KeepsState | None) -> None:
        """Stream the state of an optimizer, which is on the host."""
        self._pages.unlock([part.host for part in itertools.chain.from_iterable(self.states.values())])
        self.states, self._names, self._optimizer = {}, {}, optimizer
        if optimizer is None:
            return
        names = {id(parameter): name for name, parameter in optimizer.parameters.items()}
        for index, block in self.blocks.items():
            own = dict.fromkeys(names.get(id(slot.device)) for slot in block.trained())
            self._names[index] = [name for name in own if name is not None]
            self._take_state(index)

    def pre_forward(self, index: int) -> None:
        """Make ready for a block's forward; the next is the following one, after the last that of the backward or of another forward."""
        first, last = min(self.blocks), max(self.blocks)
        trains = torch.is_grad_enabled()
        self.lane.restart()
        self._ahead += trains and index == last
        following = next((i for i in self.blocks if i > index), None)
        if following is None:
            following = max((i for i in self.blocks if i < index), default=None) if trains else first
        self._turn(index, following)
        if self._trains and trains and index == last:
            self._fetch(index, with_state=True)  # its backward comes first

    def pre_backward(self, index: int) -> None:
        """Make ready for a block's backward; the next is the one before it, after the first the last of another micro-batch."""
        last = max(self.blocks)
        self._ahead -= index == last
        following = max((i for i in self.blocks if i < index), default=last if self._ahead > 0 else None)
        self.lane.after_backward(self.clear)
        self._turn(index, following, with_state=self._trains)
        if self._trains and index in self.blocks:
            self._updated.add(index)

    def clear(self) -> None:
        """Empty everything."""
        self._ahead = 0
        self.lane.restart()
        self._keep()
        if self._is_storing:
            self.lane.finish()
        self._is_storing = False

    def fill(self) -> None:
        """Fetch everything, to stay."""
        self.held = True
        for index in self.blocks:
            self._fetch(index)
            self._wait_for(index)

    def _turn(self, index: int, following: int | None, *, with_state: bool = False) -> None:
        if index not in self.blocks and following in (self._state_there if with_state else self._there):
            return  # a resident block: what was there before it may be needed again after it
        self._keep(index, following)
        if index in self.blocks:
            self._fetch(index, with_state=with_state)
            self._wait_for(index)
        if following is not None:
            self._fetch(following, with_state=with_state)

    def _fetch(self, index: int, *, with_state: bool = False) -> None:
        if index not in self._there:
            self._copy([self.blocks[index]], index, self._there)
        if with_state and index not in self._state_there:
            self._copy(self.states.get(index, ()), index, self._state_there)

    def _copy(self, parts: Sequence[Streamed], index: int, there: dict[int, torch.cuda.Event | None]) -> None:
        with self.lane.copies():
            for part in parts:
                part.fetch()
            there[index] = self.lane.record()

    def _wait_for(self, index: int) -> None:
        for event in (self._there[index], self._state_there.get(index)):
            self.lane.wait_for(event)

    def _keep(self, *indices: int | None) -> None:
        gone = [] if self.held else [index for index in self._there if index not in indices]
        if gone:
            # The work that reads and updates what goes is launched by now. When it is done, what is new is copied back, and then the
            # memory is the side stream's to use again.
            self.lane.follow()
        for index in gone:
            with self.lane.copies():
                self._empty(index)

    def _empty(self, index: int) -> None:
        parts = [self.blocks[index], *self.states.get(index, ())]
        is_new = index in self._updated
        self._is_storing |= is_new
        for part in parts:
            if is_new:
                part.store()
            part.empty()
        del self._there[index]
        self._state_there.pop(index, None)
        self._updated.discard(index)
        if is_new:
            self._take_state(index)

    def _take_state(self, index: int) -> None:
        """Stream from now on what the optimizer keeps of a block's weights and is not streamed yet."""
        if self._optimizer is None:
            return
        known = {(id(slot.entries), slot.leaf) for part in self.states.get(index, ()) for slot in part.slots}
        found: list[Found] = []
        for name in self._names[index]:
            entries = self._optimizer.state_of(name)
            for entry, value in entries.items():
                is_new = isinstance(value, Tensor) and (id(entries), entry) not in known
                if is_new and not self._optimizer.is_kept_on_host(name, entry):
                    found.append((entries, entry))
        if found:
            self.states.setdefault(index, []).append(self._streamed(found, returns=True))

    def _streamed(self, found: Sequence[Found], *, returns: bool = False) -> Streamed:
        with self.lane.copies():
            streamed = Streamed(found, self.device, returns=returns)
        if self.lane.overlaps:
            self._pages.lock(streamed.host, self.device)
        return streamed


def _weights(block: nn.Module, *, trained: bool) -> list[Found]:
    """Where a block's frozen parameters and its buffers are entered, and its trained parameters if they are wanted."""
    return [
        (entries, leaf)
        for module in block.modules()
        for entries in (module._parameters, module._buffers)
        for leaf, tensor in entries.items()
        if tensor is not None and (trained or not tensor.requires_grad)
    ]


def _check_sharing(model: StagedModel, placement: Placement) -> None:
    """Refuse to stream a trained weight that is used elsewhere than in its block: it would be there twice, or too late."""
    stages = [*model.blocks(), model.embed, model.head]
    seen: dict[int, int] = {}
    for place, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            other = seen.setdefault(id(parameter), place)
            if parameter.requires_grad and other != place and {other, place} & placement.streamed:
                raise UserError(
                    f"train.swap_blocks streams a block whose trained weight {name} is used elsewhere, too; leave it out"
                )
