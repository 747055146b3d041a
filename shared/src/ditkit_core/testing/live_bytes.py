"""Number of bytes of tensors that are alive, counted by their storages, for any owner."""

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from ditkit_core.testing.observer import Observer


class LiveBytes(Observer):
    """Inside the block, every storage that an operation makes is followed until it is freed.

    A storage that several tensors share is counted once. Hooks for saved tensors would not see what
    an autograd function or a checkpoint keeps alongside them, and would count what the model holds
    anyway.
    """

    def __init__(self, *existing: Any) -> None:
        """Count nothing yet.

        Args:
            existing: Existing tensors, or trees of them, which are not counted when an operation
                returns them.
        """
        super().__init__()
        self._existing = [
            leaf.untyped_storage() for leaf in tree_leaves(existing) if isinstance(leaf, Tensor)
        ]
        self._uncounted = {storage._cdata for storage in self._existing}
        self._made: dict[int, weakref.ref[UntypedStorage]] = {}

    def total(self) -> int:
        """Bytes of tensors that were made inside the block and are alive now."""
        return sum(
            storage.nbytes()
            for reference in self._made.values()
            if (storage := reference()) is not None
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._uncounted:
                    self._made[storage._cdata] = weakref.ref(storage)
        return out
