"""The rows of a model's weights, where ranks divide them: what reads, quantizes and adapts weights
asks here for its own."""

from typing import Protocol

import torch
from torch import Tensor, nn

from ditkit_core.nn.quantized_layouts import quantized_layout
from ditkit_core.nn.quantized_linear import QuantizedLinear


class RowReader(Protocol):
    """How the rows of a model's parameters, on `meta`, are divided over ranks that load them
    together; each calls it for all in one order."""

    def rows(self, parameter: Tensor | None) -> range | None:
        """The rows of a parameter that this rank has; None if it has all, or it is no parameter."""
        ...

    def rows_each(self, parameter: Tensor) -> int:
        """How many rows of a parameter each rank has, but for the last ones that have any."""
        ...

    def local_values(self, parameter: Tensor) -> Tensor:
        """The values of a parameter that this rank has, once it was given them: its rows, or
        all."""
        ...

    def put(self, module: nn.Module, leaf: str, rows: Tensor) -> None:
        """Give a divided parameter its rows."""
        ...

    def put_whole(self, module: nn.Module, leaf: str, value: Tensor) -> None:
        """Give a parameter its values; this rank keeps its rows of them if the parameter is
        divided."""
        ...

    def gather(self, values: Tensor, first: int, count: int) -> Tensor:
        """All `count` rows of a parameter, from each rank's `values`, which are its rows from
        `first` on."""
        ...


def dense_rows(layer: nn.Linear, division: RowReader) -> Tensor:
    """This rank's rows of a frozen layer's weight, in fp32, whether it is quantized or not."""
    if not isinstance(layer, QuantizedLinear):
        return division.local_values(layer.weight).float()
    rows, quantize = division.rows(layer.weight), quantized_layout(layer.kind).dequantize
    assert rows is not None
    values = layer.values()
    has_scales = all(len(value) == layer.out_features for value in values.values())
    if has_scales:  # each row has its own
        stored = {name: division.local_values(value) for name, value in values.items()}
        num_rows = len(rows)
    else:  # nf4: blocks of one scale, and groups of scales, are over several rows
        stored = {name: unsharded(value, division) for name, value in values.items()}
        num_rows = layer.out_features
    dense = torch.empty(num_rows, layer.in_features, device=stored["weight"].device)
    with torch.no_grad():
        quantize(stored, dense)
    return dense if has_scales else dense[rows.start : rows.stop]


def unsharded(parameter: Tensor, division: RowReader) -> Tensor:
    """All rows of a parameter, on every rank of the division."""
    rows, local = division.rows(parameter), division.local_values(parameter)
    if rows is None:
        return local
    # As bytes: gloo and NCCL know few of the dtypes of quantized weights.
    width = parameter.numel() // len(parameter) * parameter.itemsize
    gathered = division.gather(
        local.contiguous().view(-1).view(torch.uint8).view(len(local), width),
        rows.start,
        len(parameter),
    )
    return gathered.view(-1).view(parameter.dtype).view(parameter.shape)
