"""What blocks keep for their backward waits in host memory: `full+offload`, `attn_only+offload`, `none+offload`.

A block that offloads runs under saved-tensor hooks, which see whatever its policy keeps: the carry that enters it under `full`, what
attention saved besides under `attn_only`, all of it under `none`. (A checkpoint hands on what it keeps itself; what it computes
again it keeps from the hooks.) When the block's forward was called, each storage among that is copied to the host once, however many
tensors view it and however many blocks keep it, except

- parameters and buffers, which are there anyway,
- what is still in the carry behind the block: text, tables and masks, which all blocks share, and the block's own result, which the
  next block keeps and sends,
- what is smaller than `SMALLEST`, and what lies elsewhere than the block,
- what was emptied behind the block, as FSDP2 does with weights that it gathered: who emptied it fills it again for the backward.

Of the tensors on a device those of two blocks are there at once. In the forward a block's are given up when the next block was launched,
and the device waits there until their copy is done; those of the last block stay, because the backward begins with them. In the backward
the mark behind block i, which autograd passes before it enters the block, waits for what the block needs and starts the copy of what block
i - 1 needs. Device memory is allocated and freed in the order of the device's own stream, so that nothing depends on how far the host is
ahead; copies run on a side stream, one for each device.

Between two forwards host buffers are kept, page-locked (`pinned_memory.py`). A second backward through a retained graph fetches again.
Where blocks run on the host there is nothing to do, and nothing is done.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.copy_lane import CopyLane
from ditkit_core.engine.pinned_memory import HOST, HostBuffers
from ditkit_core.models.protocol import StagedModel

SMALLEST = 2**20
"""Bytes of the smallest storage that is moved: below, a copy costs more than the memory is worth."""


def can_offload(device: torch.device | None) -> bool:
    """Whether what a block keeps there can be moved: not from the host, and a tensor on `meta` has nothing to move."""
    return device is not None and device != HOST and device.type != "meta"


class HostMemory:
    """What outlives a forward: for each device its side stream, its host buffers, and what it holds at the moment."""

    def __init__(self, *, smallest: int = SMALLEST):
        """Hold nothing yet.

        Args:
            smallest: Bytes of the smallest storage that is moved.
        """
        self.smallest = smallest
        self._stores: dict[torch.device, _DeviceStore] = {}

    def store(self, device: torch.device) -> "_DeviceStore":
        """That of a device."""
        if device not in self._stores:
            self._stores[device] = _DeviceStore(device)
        return self._stores[device]

    @property
    def num_bytes(self) -> int:
        """Bytes of all host buffers, in use or not."""
        return sum(store.buffers.num_bytes for store in self._stores.values())


class HostStore:
    """The passage that moves what the blocks of one forward keep; inside the `with` block that forward runs, and nothing stays
    registered behind it."""

    def __init__(self, memory: HostMemory, stages: Sequence[nn.Module], offloaded: Sequence[bool]):
        """Move nothing yet.

        Args:
            memory: What the forward shares with those before and after it.
            stages: All of the model, whose parameters and buffers stay where they are.
            offloaded: Of each block, whether its policy offloads.
        """
        self._memory, self._offloaded = memory, offloaded
        held = (tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers()))
        self._resident = {tensor.untyped_storage()._cdata for tensor in held}
        self._kept: dict[int, weakref.ref[_Kept]] = {}
        self._groups: dict[int, _Group] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """What is saved from now on is the block's."""
        device = next(block.parameters()).device
        if not can_offload(device):
            return
        group = self._groups[index] = _Group(self._memory.store(device))
        if self._offloaded[index]:
            self._hooks.enter_context(saved_tensors_hooks(partial(self._pack, group), _unpack))

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """Send what the block keeps and the carry does not hold."""
        self._hooks.close()
        if (group := self._groups.get(index)) is None:
            return
        carried = {leaf.untyped_storage()._cdata for leaf in tree_leaves(carry) if isinstance(leaf, Tensor)}
        here = (kept for kept in group.alive() if kept.host is None and kept.is_whole)
        group.store.send(group, [kept for kept in here if kept.address not in carried])

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """What the block needs is there, and what the block before it needs is on its way."""
        if (group := self._groups.get(index)) is not None:
            group.store.backward(group)

    def _pack(self, group: "_Group", tensor: Tensor) -> "_Packed":
        # Detached: what an operation saves of its own result would hold the operation, and be freed by no one.
        tensor = tensor.detach()
        if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
            return _Stays(tensor, tensor._version)
        storage, store = tensor.untyped_storage(), group.store
        size = storage.nbytes()
        if (
            tensor.device != store.device
            or size < max(self._memory.smallest, 1)
            or storage._cdata in self._resident
            or size % tensor.itemsize
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return _Stays(tensor, tensor._version)
        kept = found() if (found := self._kept.get(storage._cdata)) is not None else None
        if kept is None or kept.storage() is not storage:
            kept = _Kept(store, tensor)
            self._kept[storage._cdata] = weakref.ref(kept)
        elif kept.version != tensor._version:
            return _Stays(tensor, tensor._version)
        group.add(kept)
        return _View(kept, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@contextmanager
def offloading(
    memory: HostMemory,
    model: StagedModel,
    policies: Sequence[Policy],
    devices: Sequence[torch.device | None],
) -> Iterator[tuple[HostStore, ...]]:
    """Inside the block one forward runs; what its blocks keep is moved by the hook that is yielded, or none where nothing is to be moved.

    Args:
        memory: What the forward shares with those before and after it.
        model: The model.
        policies: Of each block.
        devices: Where each block's weights are.
    """
    wanted = [policy.offload for policy in policies]
    if not any(offload and can_offload(device) for offload, device in zip(wanted, devices, strict=True)):
        yield ()
        return
    with HostStore(memory, [model.embed, *model.blocks(), model.head], wanted) as store:
        yield (store,)


class _Kept:
    """One storage that the backward needs. Autograd holds it, through what was packed, and nobody else."""

    def __init__(self, store: "_DeviceStore", tensor: Tensor):
        storage = tensor.untyped_storage()
        self.store = store
        self.num_bytes = storage.nbytes()
        self.address = storage._cdata
        self.storage = weakref.ref(storage)
        """Says whether the address is still that of the storage."""
        whole = tensor.as_strided((self.num_bytes // tensor.itemsize,), (1,), 0)
        self.device: Tensor | None = whole.view(torch.uint8)
        """All bytes, while they are there."""
        self.version = self.device._version
        self.host: Tensor | None = None
        """A buffer with the bytes, once they were sent."""
        self.coming: torch.cuda.Event | None = None
        """After the copy back, if nobody has waited for it yet."""

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are on the device; a storage may be emptied for a while by whoever made it."""
        return self.device is not None and self.device.untyped_storage().nbytes() == self.num_bytes

    def checked(self) -> Tensor:
        """The bytes as they were saved, before they are sent."""
        assert self.device is not None, "freed before it was sent"
        _check_version(self.device, self.version)
        return self.device

    def there(self) -> Tensor:
        """The bytes on the device, for what is launched next."""
        if self.host is None:
            return self.checked()
        if self.device is None:  # no mark came before: a backward of a part of the model
            self.store.fetch_unmarked(self)
        self.store.wait_for(self)
        assert self.device is not None
        return self.device


@dataclass(frozen=True)
class _Stays:
    """A saved tensor that is not moved."""

    tensor: Tensor
    version: int

    def unpacked(self) -> Tensor:
        """The tensor, unless it was changed."""
        _check_version(self.tensor, self.version)
        return self.tensor


@dataclass(frozen=True)
class _View:
    """A saved tensor as a view of a storage."""

    kept: _Kept
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpacked(self) -> Tensor:
        """The tensor, on its device."""
        return self.kept.there().view(self.dtype).as_strided(self.size, self.stride, self.offset)


_Packed = _Stays | _View


def _unpack(packed: _Packed) -> Tensor:
    return packed.unpacked()


def _check_version(tensor: Tensor, version: int) -> None:
    """What autograd itself does where there are no hooks."""
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {tensor.dtype} "
            f"{list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )


class _Group:
    """What a block of a forward needs in its backward, whichever block sent it."""

    def __init__(self, store: "_DeviceStore"):
        self.store = store
        self.sent: torch.cuda.Event | None = None
        """After the copies to the host, if nobody has waited for them yet."""
        self.before: Callable[[], _Group | None] = _nothing
        """That of the block that ran before on the device, perhaps in another forward, while its graph is there."""
        self._kept: dict[int, weakref.ref[_Kept]] = {}

    def add(self, kept: _Kept) -> None:
        """The block needs it."""
        self._kept[id(kept)] = weakref.ref(kept)

    def alive(self) -> Iterator[_Kept]:
        """What autograd still holds of it."""
        return (kept for reference in self._kept.values() if (kept := reference()) is not None)


def _nothing() -> None:
    return None


class _DeviceStore:
    """What one device keeps on the host, and in which order it goes there and comes back."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers = HostBuffers(device)
        self._lane = CopyLane(device)
        self._there: list[_Group] = []
        """What may be on the device although it is on the host, too."""
        self._coming: list[_Kept] = []
        """What is on its way back: held, because memory that is being written must not be used for anything else."""
        self._last: Callable[[], _Group | None] = _nothing

    def send(self, group: _Group, leaving: Sequence[_Kept]) -> None:
        """Copy to the host what a block keeps, and let go of what the block before it sent."""
        self._lane.restart()
        self._arrive()
        self._let_go()
        group.before, self._last = self._last, weakref.ref(group)
        self._there = [group]
        if not leaving:
            return
        hosts = [self.buffers.take(kept.num_bytes) for kept in leaving]
        self._lane.follow()
        with self._lane.copies():
            for kept, host in zip(leaving, hosts, strict=True):
                host[: kept.num_bytes].copy_(kept.checked(), non_blocking=True)
                kept.host = host
                weakref.finalize(kept, self.buffers.give, host).atexit = False
        group.sent = self._lane.record()

    def backward(self, group: _Group) -> None:
        """Make ready for a block's backward, and start the copies for that of the block before it."""
        self._lane.after_backward(self._clear)
        self._arrive()
        following = group.before()
        near = [group] if following is None else [group, following]
        self._let_go(near)
        self._there = near
        self.fetch([kept for kept in group.alive() if kept.device is None])
        self._arrive()
        if following is not None:
            self.fetch([kept for kept in following.alive() if kept.device is None])

    def fetch(self, missing: Sequence[_Kept]) -> None:
        """Start copies from the host."""
        if not missing:
            return
        # Allocated in the order of the device's own stream: what used the memory before is launched there, and is waited for.
        there = [torch.empty(kept.num_bytes, dtype=torch.uint8, device=self.device) for kept in missing]
        self._lane.follow()
        with self._lane.copies():
            for kept, buffer in zip(missing, there, strict=True):
                assert kept.host is not None
                buffer.copy_(kept.host[: kept.num_bytes], non_blocking=True)
        event = self._lane.record()
        for kept, buffer in zip(missing, there, strict=True):
            kept.device, kept.coming = buffer, event
        self._coming.extend(missing)

    def fetch_unmarked(self, kept: _Kept) -> None:
        """Start the copy of what no mark asked for; it stays until the next mark, or the end of the backward."""
        if (
            torch._C._current_graph_task_id() != -1
        ):  # else somebody looks at what was saved, and the next forward lets go of it
            self._lane.after_backward(self._clear)
        group = _Group(self)
        group.add(kept)
        self._there.append(group)
        self.fetch([kept])

    def wait_for(self, kept: _Kept) -> None:
        """What is launched next on the device finds the bytes there."""
        self._lane.wait_for(kept.coming)
        kept.coming = None

    def _arrive(self) -> None:
        """Wait for all copies from the host."""
        for kept in self._coming:
            self.wait_for(kept)
        self._coming = []

    def _let_go(self, near: Sequence[_Group] = ()) -> None:
        """Free on the device what is on the host, too, and not needed by these."""
        needed = {id(kept) for group in near for kept in group.alive()}
        for group in self._there:
            if group not in near:
                self._lane.wait_for(group.sent)
                group.sent = None
            for kept in group.alive():
                if kept.host is not None and id(kept) not in needed:
                    kept.device = None

    def _clear(self) -> None:
        """The backward is over."""
        self._lane.restart()
        self._arrive()
        self._let_go()
        self._there = []
