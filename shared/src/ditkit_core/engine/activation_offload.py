"""Moves what blocks keep for their backward to host memory: `full+offload`, `attn_only+offload`,
`none+offload`.

A block that offloads runs under saved-tensor hooks, which see whatever its policy keeps: the carry
that enters it under `full`, and what attention saved under `attn_only`, or everything under `none`.
(A checkpoint passes what it keeps to the hooks; what it computes again it hides from them.) After
the launch of the block's forward, each storage among that is copied to the host once, however many
tensors view it and however many blocks keep it, except

- parameters and buffers, which stay on the device anyway,
- whatever the carry behind the block still has: text, tables and masks, which all blocks share, and
  the block's own result, which the next block keeps and copies,
- storages smaller than `SMALLEST`, and those on another device than the block,
- storages that were emptied after the block, as FSDP2 does with gathered weights: their owner fills
  them again for the backward.

A device has the tensors of at most two blocks at a time. In the forward, a block's tensors are
freed once the next block was launched, and the device waits there until their copy is done. The
last block's tensors stay, because the backward begins with them. In the backward, the mark behind
block i, which autograd passes before it enters the block, waits for what the block needs and starts
the copy of what block i - 1 needs. Device memory is allocated and freed in the order of the
device's own stream, so nothing depends on how far the host is ahead. Copies run on a side stream,
one per device.

Page-locked host buffers are kept from one forward to the next (`pinned_memory.py`). A second
backward through a retained graph copies the tensors back again. Where blocks run on the host,
nothing is moved.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.pinned_memory import HOST, CopyLane, HostBuffers
from ditkit_core.models.protocol import Stages

SMALLEST = 2**20
"""Bytes of the smallest storage that is moved. Below this a copy costs more time than the memory is
worth."""


def can_offload(device: torch.device | None) -> bool:
    """Whether a block's tensors on a device can be moved: those on the host are there already, and
    those on `meta` have no bytes."""
    return device is not None and device != HOST and device.type != "meta"


class HostMemory:
    """State that outlives a forward: for each device its side stream, its host buffers, and what it
    has on the host at the moment."""

    def __init__(self, *, smallest: int = SMALLEST):
        self.smallest = smallest
        self._stores: dict[torch.device, _DeviceStore] = {}

    def store(self, device: torch.device) -> "_DeviceStore":
        """The store of a device, made at the first request."""
        if device not in self._stores:
            self._stores[device] = _DeviceStore(device)
        return self._stores[device]

    @property
    def num_bytes(self) -> int:
        """Bytes of all host buffers, in use or not."""
        return sum(store.buffers.num_bytes for store in self._stores.values())


class HostStore:
    """Block hooks that move what the blocks of one forward keep. That forward runs inside the
    `with` block; no saved-tensor hook stays registered after it."""

    def __init__(self, memory: HostMemory, stages: Sequence[nn.Module], offloaded: Sequence[bool]):
        """Prepare for a forward, and move nothing yet.

        Args:
            memory: Shared with the forwards before and after.
            stages: All stages of the model; their parameters and buffers stay where they are.
            offloaded: Whether each block's policy offloads.
        """
        self._memory, self._offloaded = memory, offloaded
        tensors = (tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers()))
        # By the address of the storage, not of the tensor: a saved transpose of a weight is another
        # tensor.
        self._resident = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._saved: dict[int, weakref.ref[_SavedStorage]] = {}
        self._groups: dict[int, _Group] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """Attribute to this block whatever autograd saves from now on."""
        device = next(block.parameters()).device
        if not can_offload(device):
            return
        group = self._groups[index] = _Group(self._memory.store(device))
        # A block that does not offload has a group, too: the backward of the block behind it starts
        # copies for the group before.
        if self._offloaded[index]:
            self._hooks.enter_context(
                saved_tensors_hooks(partial(self._pack, group), lambda packed: packed())
            )

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """Copy what the block keeps and the carry no longer has."""
        self._hooks.close()
        if (group := self._groups.get(index)) is None:
            return
        carried = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(carry) if isinstance(leaf, Tensor)
        }
        # Another block may have copied a storage already, and a storage that its owner emptied has
        # no bytes to copy.
        here = (saved for saved in group.alive() if saved.host is None and saved.is_whole)
        group.store.send(group, [saved for saved in here if saved.address not in carried])

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """Wait for what the block needs, and start the copies for the block before it."""
        if (group := self._groups.get(index)) is not None:
            group.store.backward(group)

    def _pack(self, group: "_Group", tensor: Tensor) -> Callable[[], Tensor]:
        """The function that gives the tensor back."""
        # Detached: an operation that saves its own result would keep itself alive through it, and
        # nothing would free that cycle.
        tensor = tensor.detach()
        # A wrapper (DTensor) has its bytes in inner tensors, and a sparse tensor has no strides to
        # rebuild it from.
        if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
            return partial(_unchanged, tensor, tensor._version)
        storage, store = tensor.untyped_storage(), group.store
        size = storage.nbytes()
        if (
            # The last three: a storage of odd size cannot be viewed as whole elements, and a view
            # that is conjugated or negated only by a flag would lose the flag.
            tensor.device != store.device
            or size < max(self._memory.smallest, 1)
            or storage._cdata in self._resident
            or size % tensor.itemsize
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return partial(_unchanged, tensor, tensor._version)
        # An address is used again after its storage is freed, so that a match counts only while the
        # storage is the same.
        saved = reference() if (reference := self._saved.get(storage._cdata)) is not None else None
        if saved is None or saved.storage() is not storage:
            saved = _SavedStorage(store, tensor)
            self._saved[storage._cdata] = weakref.ref(saved)
        # Overwritten since another operation saved it: the copy on the host will have the earlier
        # bytes.
        elif saved.version != tensor._version:
            return partial(_unchanged, tensor, tensor._version)
        group.add(saved)
        return partial(
            _view, saved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )


@contextmanager
def offloading(
    memory: HostMemory,
    model: Stages,
    policies: Sequence[Policy],
    devices: Sequence[torch.device | None],
) -> Iterator[tuple[HostStore, ...]]:
    """Yield the hooks that offload one forward, which runs inside the `with` block: one
    `HostStore`, or nothing.

    Args:
        memory: Shared with the forwards before and after.
        policies: The policy of each block.
        devices: The device of each block's weights.
    """
    wanted = [policy.offload for policy in policies]
    if not any(
        offload and can_offload(device) for offload, device in zip(wanted, devices, strict=True)
    ):
        yield ()
        return
    with HostStore(memory, [model.embed, *model.blocks(), model.head], wanted) as store:
        yield (store,)


class _SavedStorage:
    """One storage that the backward needs. Only autograd refers to it, through the packed tensors,
    so that a dropped graph frees it."""

    def __init__(self, store: "_DeviceStore", tensor: Tensor):
        storage = tensor.untyped_storage()
        self.store = store
        self.num_bytes = storage.nbytes()
        self.address = storage._cdata
        self.storage = weakref.ref(storage)
        """Tells whether the address still belongs to that storage."""
        # A view of all bytes: other views of the storage may be saved later, and are rebuilt from
        # it.
        flat = tensor.as_strided((self.num_bytes // tensor.itemsize,), (1,), 0)
        self.device: Tensor | None = flat.view(torch.uint8)
        """All bytes, while they are on the device."""
        self.version = self.device._version
        self.host: Tensor | None = None
        """A host buffer with the bytes, once they were copied."""
        self.coming: torch.cuda.Event | None = None
        """The event after the copy back, if nobody has waited for it yet."""

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are on the device; the storage's owner may have emptied it for a
        while."""
        return self.device is not None and self.device.untyped_storage().nbytes() == self.num_bytes

    def checked(self) -> Tensor:
        """The bytes on the device, checked to be as they were saved."""
        assert self.device is not None, "freed before it was copied"
        return _unchanged(self.device, self.version)

    def there(self) -> Tensor:
        """The bytes on the device, for the work that is launched next."""
        if self.host is None:
            return self.checked()
        if self.device is None:  # no hook ran before: a backward through only a part of the model
            self.store.fetch_unmarked(self)
        self.store.wait_for(self)
        assert self.device is not None
        return self.device


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """A saved tensor, after the check that autograd itself makes where there are no saved-tensor
    hooks, with its message."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {tensor.dtype} {list(tensor.shape)} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor


def _view(
    saved: _SavedStorage, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
) -> Tensor:
    """A saved tensor as a view of a storage, on its device."""
    return saved.there().view(dtype).as_strided(size, stride, offset)


class _Group:
    """The storages that a block of a forward needs in its backward, whichever block copied them."""

    def __init__(self, store: "_DeviceStore"):
        self.store = store
        self.sent: torch.cuda.Event | None = None
        """The event after the copies to the host, if nobody has waited for it yet."""
        self.before: Callable[[], _Group | None] = _nothing
        """The group of the block that ran before on the device, perhaps in another forward; None
        once its graph is freed."""
        # Weak, so that a group keeps nothing alive that autograd has dropped.
        self._saved: dict[int, weakref.ref[_SavedStorage]] = {}

    def add(self, saved: _SavedStorage) -> None:
        """Note that the block needs a storage."""
        self._saved[id(saved)] = weakref.ref(saved)

    def alive(self) -> Iterator[_SavedStorage]:
        """The storages that autograd still refers to."""
        return (saved for reference in self._saved.values() if (saved := reference()) is not None)


def _nothing() -> None:
    return None


class _DeviceStore:
    """What one device has on the host, and the order in which it is copied there and back."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers = HostBuffers(device)
        self._lane = CopyLane(device)
        self._there: list[_Group] = []
        """Groups whose storages may be on the device as well as on the host."""
        self._coming: list[_SavedStorage] = []
        """Storages on their way back. Referred to here, because memory that is being written must
        not be used for anything else."""
        self._last: Callable[[], _Group | None] = _nothing

    def send(self, group: _Group, leaving: Sequence[_SavedStorage]) -> None:
        """Copy to the host what a block keeps, and free on the device what the block before it
        copied."""
        self._lane.restart()
        self._arrive()
        self._release()
        group.before, self._last = self._last, weakref.ref(group)
        self._there = [group]
        if not leaving:
            return
        hosts = [self.buffers.take(saved.num_bytes) for saved in leaving]
        self._lane.follow()
        with self._lane.copies():
            for saved, host in zip(leaving, hosts, strict=True):
                host[: saved.num_bytes].copy_(saved.checked(), non_blocking=True)
                saved.host = host
                # The host buffer goes back to the pool when autograd drops the storage, be it after
                # a backward or with an abandoned graph.
                weakref.finalize(saved, self.buffers.give, host).atexit = False
        group.sent = self._lane.record()

    def backward(self, group: _Group) -> None:
        """Prepare a block's backward, and start the copies for the backward of the block before
        it."""
        self._lane.after_backward(self._clear)
        self._arrive()
        following = group.before()
        # Freed before anything is fetched, so that at most two blocks' tensors are on the device.
        near = [group] if following is None else [group, following]
        self._release(near)
        self._there = near
        self.fetch([saved for saved in group.alive() if saved.device is None])
        self._arrive()
        if following is not None:
            self.fetch([saved for saved in following.alive() if saved.device is None])

    def fetch(self, missing: Sequence[_SavedStorage]) -> None:
        """Start copies from the host."""
        if not missing:
            return
        # Allocated on the device's own stream: whatever used this memory before was launched there,
        # and `follow` waits for it.
        there = [
            torch.empty(saved.num_bytes, dtype=torch.uint8, device=self.device) for saved in missing
        ]
        self._lane.follow()
        with self._lane.copies():
            for saved, buffer in zip(missing, there, strict=True):
                assert saved.host is not None
                buffer.copy_(saved.host[: saved.num_bytes], non_blocking=True)
        event = self._lane.record()
        for saved, buffer in zip(missing, there, strict=True):
            saved.device, saved.coming = buffer, event
        self._coming.extend(missing)

    def fetch_unmarked(self, saved: _SavedStorage) -> None:
        """Start the copy of a storage that no hook asked for. It stays until the next hook, or the
        end of the backward."""
        # Outside of a backward somebody looks at a saved tensor, and the next forward frees it.
        if torch._C._current_graph_task_id() != -1:
            self._lane.after_backward(self._clear)
        group = _Group(self)
        group.add(saved)
        self._there.append(group)
        self.fetch([saved])

    def wait_for(self, saved: _SavedStorage) -> None:
        """Have the work that is launched next on the device wait for the bytes."""
        self._lane.wait_for(saved.coming)
        saved.coming = None

    def _arrive(self) -> None:
        """Wait for all copies from the host."""
        for saved in self._coming:
            self.wait_for(saved)
        self._coming = []

    def _release(self, near: Sequence[_Group] = ()) -> None:
        """Free on the device what is also on the host and not needed by these groups."""
        needed = {id(saved) for group in near for saved in group.alive()}
        for group in self._there:
            if group not in near:
                # Freed memory may be given out at once, while the copy still reads it: the device's
                # stream waits for the copy first.
                self._lane.wait_for(group.sent)
                group.sent = None
            for saved in group.alive():
                if saved.host is not None and id(saved) not in needed:
                    saved.device = None

    def _clear(self) -> None:
        """Free everything: the backward is over."""
        self._lane.restart()
        self._arrive()
        self._release()
        self._there = []
