"""A view of a staged model in other dtypes than its weights are stored in: each weight is cast
where it is used, and is not changed.

The casts happen inside the stage, hence inside the checkpoint around a block and after a streamer
has fetched its weights: only the casts of one block exist at a time. Gradients of trained weights
are passed to a callback, in the dtype that they were computed in; `.grad` is not touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ditkit_core.adapters.inject import canonical_name, is_adapter_name
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.nn.quantized_linear import QuantizedLinear

DtypeOf = Callable[[str, torch.dtype], torch.dtype]
"""Maps a parameter's name, as in `named_parameters`, and its stored dtype to the dtype that it is
used in."""


def as_stored(name: str, stored: torch.dtype) -> torch.dtype:
    """Use every weight in its stored dtype, as the run does."""
    return stored


def by_op_group(precision: Precision, op_group_of: Callable[[str], str]) -> DtypeOf:
    """Use each weight in the dtype that `precision` has for its place.

    Adapters follow the matmuls, in fp32 or wider. Other weights are never narrowed here: the model
    itself casts those where it uses them.

    Args:
        op_group_of: `ModelSpec.precision.op_group_of`, a function from a canonical name to a place.
    """

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        group = "matmul" if is_adapter_name(name) else op_group_of(canonical_name(name))
        dtype: torch.dtype = getattr(precision, group)
        if group == "matmul" and not is_adapter_name(name):
            return dtype
        return torch.promote_types(stored, dtype)

    return dtype_of


class DtypeView(nn.Module):
    """A StagedModel that runs another one with its weights cast where they are used."""

    def __init__(self, model: Any, dtype_of: DtypeOf, take: Callable[[str, Tensor], None]):
        """Wrap a model.

        Args:
            model: The model, on any devices; it is not changed.
            dtype_of: Dtype to use for each weight; not called for codes and scales of quantized
                matrices.
            take: Called in the backward with the canonical name and the gradient of each trained
                weight, once for each stage that uses it; with several devices from several threads.
        """
        super().__init__()
        names = {id(module): name for name, module in model.named_modules()}

        def view(stage: nn.Module) -> _Stage:
            return _Stage(stage, names[id(stage)], dtype_of, take)

        self.embed, self.head = view(model.embed), view(model.head)
        self.layers = nn.ModuleList(view(block) for block in model.blocks())

    def blocks(self) -> Sequence[nn.Module]:
        """The views of the blocks."""
        return list(self.layers)

    def forward(self, inputs: Any, engine: Engine = run_plain) -> Any:
        return engine(self, inputs)


class _Stage(nn.Module):
    """The view of one stage, which wraps the model's own; that one keeps its parameters."""

    def __init__(
        self, inner: nn.Module, name: str, dtype_of: DtypeOf, take: Callable[[str, Tensor], None]
    ):
        super().__init__()
        self.inner, self._name = inner, name
        self._dtype_of, self._take = dtype_of, take
        self._codes = {
            f"{path}.{leaf}".lstrip(".")
            for path, module in inner.named_modules()
            if isinstance(module, QuantizedLinear)
            for leaf in module.values()
        }

    def forward(self, inputs: Any) -> Any:
        # Names are looked up each time: streaming and placement put other Parameter objects there.
        # A shared parameter is cast once.
        parameters = dict(self.inner.named_parameters()).items()
        cast = {
            path: self._cast(f"{self._name}.{path}", value)
            for path, value in parameters
            if path not in self._codes
        }
        return functional_call(self.inner, cast, (inputs,))

    def _cast(self, name: str, parameter: Tensor) -> Tensor:
        dtype = self._dtype_of(name, parameter.dtype)
        if parameter.requires_grad:
            read: Tensor = _Read.apply(parameter, dtype, self._take, canonical_name(name))
            return read
        return parameter if dtype == parameter.dtype else parameter.detach().to(dtype)


class _Read(torch.autograd.Function):
    """Casts a parameter; the backward passes the gradient to a callback and not to the
    parameter."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: Tensor,
        dtype: torch.dtype,
        take: Callable[[str, Tensor], None],
        name: str,
    ) -> Tensor:
        ctx.take, ctx.name = take, name
        return parameter.detach().to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.take(ctx.name, gradient)
        return None, None, None, None
