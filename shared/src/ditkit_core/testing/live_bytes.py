"""How many bytes of tensors are alive, counted by their storages: what a checkpoint policy holds, not what it should hold."""

import gc
import weakref
from typing import Any, Self

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the block, every storage that an operation makes is followed until it is freed.

    A storage that existed before is not counted, and one that several tensors share is counted once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self._before: list[UntypedStorage] = []

    def total(self) -> int:
        """Bytes that are alive now."""
        gc.collect()  # a checkpoint's frame may refer to itself
        return sum(storage.nbytes() for ref in self._storages.values() if (storage := ref()) is not None)

    def existing(self, *trees: Any) -> Self:
        """Leave tensors out that exist already: an operation may hand them on."""
        self._before += [leaf.untyped_storage() for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in self._before}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in known and (key not in self._storages or self._storages[key]() is None):
                    self._storages[key] = weakref.ref(storage)
        return out
