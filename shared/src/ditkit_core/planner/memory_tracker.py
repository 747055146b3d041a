"""Bytes by device and purpose, now and at their highest, on real tensors or on fake ones.

Under `FakeTensorMode` the devices `cpu:0`, `cpu:1`, … are distinct, refuse to mix, and have a backward: they stand for GPUs on a
machine that has none. A storage is counted from the operation that makes it until the last tensor on it is freed.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

PURPOSES = ("weights", "adapters", "gradients", "optimizer", "average", "activations")
"""What memory is for; everything made while no other purpose is in force is an activation."""


class MemoryTracker(TorchDispatchMode):
    """Counts, while it is in force, what exists on each device.

    Attributes:
        live: Bytes by device and purpose.
        peak: The most bytes that were alive at once, by device, since `restart_peak`.
        at_peak: Bytes by device and purpose when the device's peak was reached.
    """

    def __init__(self, *, rounding: int = 1) -> None:
        """Count nothing yet.

        Args:
            rounding: Bytes that a storage is rounded up to a multiple of; 512 is what CUDA's allocator does.
        """
        super().__init__()
        self.live: dict[torch.device, Counter[str]] = {}
        self.peak: Counter[torch.device] = Counter()
        self.at_peak: dict[torch.device, Counter[str]] = {}
        self._total: Counter[torch.device] = Counter()
        self._rounding = rounding
        self._purpose = "activations"
        # by the storage's address: device, purpose, bytes counted, and the reference that says when it is freed
        self._known: dict[int, tuple[torch.device, str, int, weakref.ref[UntypedStorage]]] = {}
        self._elastic: dict[int, weakref.ref[UntypedStorage]] = {}

    def total(self, device: torch.device) -> int:
        """Bytes alive on a device."""
        return self._total[device]

    def bytes_of(self, tree: Any) -> int:
        """What the tensors of a tree take, each storage once."""
        storages = {storage._cdata: storage.nbytes() for storage in (leaf.untyped_storage() for leaf in _tensors(tree))}
        return sum(map(self._rounded, storages.values()))

    def track(self, tree: Any, purpose: str) -> None:
        """Count what exists already, or count it for another purpose than so far: a module, a tensor, a tree of tensors."""
        for leaf in _tensors([*tree.parameters(), *tree.buffers()] if isinstance(tree, nn.Module) else tree):
            self._forget(leaf.untyped_storage()._cdata)
            self._add(leaf, purpose)

    def watch(self, tensor: Tensor) -> None:
        """Follow the size of a storage that is emptied and filled again in place, which no operation tells of."""
        storage = tensor.untyped_storage()
        self._elastic[storage._cdata] = weakref.ref(storage)

    @contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """What is made inside the block is for this purpose."""
        before, self._purpose = self._purpose, name
        try:
            yield
        finally:
            self._purpose = before

    def restart_peak(self) -> None:
        """Look for the highest from here."""
        self.peak = Counter(self._total)
        self.at_peak = {device: Counter(purposes) for device, purposes in self.live.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._elastic:
            self.poll()
        out = func(*args, **(kwargs or {}))
        for leaf in _tensors(out):
            self._add(leaf, self._purpose)
        return out

    def poll(self) -> None:
        """Look at the sizes of what is emptied and filled in place; of what changed since the last look, what was emptied went first."""
        changes: list[tuple[int, int]] = []
        for address, reference in list(self._elastic.items()):
            storage, known = reference(), self._known.get(address)
            if storage is None or known is None:
                self._elastic.pop(address)
            elif change := self._rounded(storage.nbytes()) - known[2]:
                changes.append((change, address))
        for change, address in sorted(changes):
            device, purpose, size, freed = self._known[address]
            self._known[address] = (device, purpose, size + change, freed)
            self._count(device, purpose, change)

    def _add(self, tensor: Tensor, purpose: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        size = self._rounded(storage.nbytes())
        freed = weakref.ref(storage, lambda _: self._forget(address))
        self._known[address] = (tensor.device, purpose, size, freed)
        self._count(tensor.device, purpose, size)

    def _forget(self, address: int) -> None:
        if (known := self._known.pop(address, None)) is not None:
            self._count(known[0], known[1], -known[2])

    def _count(self, device: torch.device, purpose: str, size: int) -> None:
        self.live.setdefault(device, Counter())[purpose] += size
        self._total[device] += size
        if self._total[device] > self.peak[device]:
            self.peak[device] = self._total[device]
            self.at_peak[device] = Counter(self.live[device])

    def _rounded(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree that have a storage: of one that wraps others, as 8-bit optimizer state does, those others."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        else:
            yield leaf
