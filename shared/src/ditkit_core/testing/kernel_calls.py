"""The operations that have kernels: which of them run, and what one with a fault would do."""

from typing import Any

import torch
from torch import Tensor

from ditkit_core.nn.kernels.ops import IMPLEMENTATIONS
from ditkit_core.testing.observer import Observer


def results_of(name: str) -> list[str | int]:
    """Of an operation: the places of its results, or the names of the arguments that it writes."""
    schema = getattr(torch.ops.ditkit, name).default._schema
    written = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [*range(len(schema.returns)), *written]


def spoilt(tensor: Tensor) -> None:
    """Change the largest value of a result, where there is one: by three hundredths, or a code or a
    bit by one."""
    if tensor.numel():
        flat = tensor.view(-1)
        codes = flat.view(torch.int8) if flat.dtype.itemsize == 1 else flat
        index = int(codes.double().abs().argmax())
        codes[index] = (
            codes[index] * 1.03 if codes.is_floating_point() else codes[index] - codes[index].sign()
        )


class KernelCalls(Observer):
    """Notes the operations with kernels that run inside the block, and plants a fault in a result
    of one.

    Args:
        faulty: The operation with the fault.
        result: Which of its results has it.
        of_frozen: Only where no weight is trained, which is another kernel.
    """

    def __init__(self, faulty: str = "", result: str | int = 0, *, of_frozen: bool = False):
        super().__init__()
        self.names, self._faulty, self._result, self._of_frozen = (
            set[str](),
            faulty,
            result,
            of_frozen,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._opname
        if func.namespace == "ditkit" and name in IMPLEMENTATIONS:
            self.names.add(name)
            if name == self._faulty:
                names = [argument.name for argument in func._schema.arguments]
                results = result if isinstance(result, tuple) else (result,)
                values = (
                    dict(zip(names, args, strict=False)) | (kwargs or {}) | dict(enumerate(results))
                )
                if not (self._of_frozen and values["trained"]):
                    spoilt(values[self._result])
        return result
