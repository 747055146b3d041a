"""Modules without memory, made without their first values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FIRST_VALUES = frozenset(
    (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_)
)


@contextmanager
def on_meta() -> Iterator[None]:
    """Tensors are made on `meta`, as under `torch.device("meta")`, and random first values, which
    nothing can read there, are left out: they took half of the time that a model needs."""
    with torch.device("meta"), _WithoutFirstValues():
        yield


class _WithoutFirstValues(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FIRST_VALUES:
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.device.type == "meta":
                return tensor
        return func(*args, **(kwargs or {}))
