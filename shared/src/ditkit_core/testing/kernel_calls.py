"""The operations that have kernels: which of them run, and what one with a fault would do."""

from typing import Any

import torch
from torch import Tensor

from ditkit_core.nn.kernels.ops import IMPLEMENTATIONS
from ditkit_core.testing.observer import Observer


def results_of(name: str) -> list[str | int]:
    """Of an operation: the places of its results, or the names of the arguments that it writes."""
    schema = getattr(torch.ops.ditkit, name).default._schema
    written = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [*range(len(schema.returns)), *written]


def spoilt(tensor: Tensor) -> None:
    """Change the largest value of a result, where there is one: by three hundredths, or a code or a bit by one."""
    if tensor.numel():
        flat = tensor.view(-1)
        codes = flat.view(torch.int8) if flat.dtype.itemsize == 1 else flat
        place = int(codes.double().abs().argmax())
        codes[place] = codes[place] * 1.03 if codes.is_floating_point() else codes[place] - codes[place].sign()


class KernelCalls(Observer):
    """Notes the operations with kernels that run inside the block, and plants a fault in a result of one.

    Args:
        faulty: The operation with the fault.
        result: Which of its results has it.
        of_frozen: Only where no weight is trained, which is another kernel.
    """

    def __init__(self, faulty: str = "", result: str | int = 0, *, of_frozen: bool = False):
        super().__init__()
        self.names, self._faulty, self._result, self._of_frozen = set[str](), faulty, result, of_frozen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), func._opname
        if func.namespace == "ditkit" and name in IMPLEMENTATIONS:
            self.names.add(name)
            if name == self._faulty:
                names = [each.name for each in func._schema.arguments]
                results = made if isinstance(made, tuple) else (made,)
                given = dict(zip(names, args, strict=False)) | (kwargs or {}) | dict(enumerate(results))
                if not (self._of_frozen and given["trained"]):
                    spoilt(given[self._result])
        return made
