"""A staged model seen in other dtypes than its weights are stored in: each weight is cast where it is used, and stays as it is.

The casts are made inside the stage, hence inside the checkpoint around a block and after what streams weights has fetched them: those of
one block exist at a time. Gradients of trained weights go to whoever asked for them, in the dtype that they were computed in; no `.grad`
is touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.inject import canonical_name, is_adapter_name
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.nn.quantized_linear import QuantizedLinear

DtypeOf = Callable[[str, torch.dtype], torch.dtype]
"""A parameter's name, as `named_parameters` has it, and the dtype that it is stored in, to the dtype that it is used in."""


def as_stored(name: str, stored: torch.dtype) -> torch.dtype:
    """Every weight as it is: what a run computes with."""
    return stored


def by_op_group(precision: Precision, place_of: Callable[[str], str]) -> DtypeOf:
    """What each weight is used in if its place runs in the dtype that `precision` has for it.

    Adapters go with the matmuls, in fp32 or wider. Other weights are never narrowed here: a model casts those where it uses them.

    Args:
        precision: The dtypes.
        place_of: `ModelSpec.place_of`.
    """

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        place = "matmul" if is_adapter_name(name) else place_of(canonical_name(name))
        dtype: torch.dtype = getattr(precision, place)
        if place == "matmul" and not is_adapter_name(name):
            return dtype
        return torch.promote_types(stored, dtype)

    return dtype_of


class DtypeView(nn.Module):
    """A StagedModel that runs another one, with its weights cast where they are used."""

    def __init__(self, model: Any, dtype_of: DtypeOf, take: Callable[[str, Tensor], None]):
        """See a model in other dtypes.

        Args:
            model: On whatever devices; nothing of it is changed.
            dtype_of: What each weight is used in. Codes and scales of quantized matrices are not asked for.
            take: Given the canonical name and the gradient of each trained weight, in the backward, once for each stage that uses it;
                on several devices from several threads.
        """
        super().__init__()
        names = {id(module): name for name, module in model.named_modules()}

        def seen(stage: nn.Module) -> _Stage:
            return _Stage(stage, names[id(stage)], dtype_of, take)

        self.embed, self.head = seen(model.embed), seen(model.head)
        self.layers = nn.ModuleList(seen(block) for block in model.blocks())

    def blocks(self) -> Sequence[nn.Module]:
        """The blocks, seen so."""
        return list(self.layers)

    def forward(self, inputs: Any, engine: Engine = run_plain) -> Any:
        return engine(self, inputs)


class _Stage(nn.Module):
    """One stage; the model's own is inside and keeps its parameters."""

    def __init__(self, inner: nn.Module, name: str, dtype_of: DtypeOf, take: Callable[[str, Tensor], None]):
        super().__init__()
        self.inner = inner
        self._dtype_of, self._take = dtype_of, take
        # by where they are entered, not by themselves: what is streamed or placed anew is another object there
        self._entries = [
            (f"{name}.{place}.{leaf}".replace("..", "."), module._parameters, leaf)
            for place, module in inner.named_modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and not (isinstance(module, QuantizedLinear) and leaf in module.values())
        ]

    def forward(self, given: Any) -> Any:
        cast: dict[int, Tensor] = {}
        before = [entries[leaf] for _, entries, leaf in self._entries]
        try:
            for (name, entries, leaf), parameter in zip(self._entries, before, strict=True):
                assert parameter is not None
                if id(parameter) not in cast:  # one that is entered twice has one gradient
                    cast[id(parameter)] = self._cast(name, parameter)
                entries[leaf] = cast[id(parameter)]
            return self.inner(given)
        finally:
            # Also after an error: the model is the run's own.
            for (_, entries, leaf), parameter in zip(self._entries, before, strict=True):
                entries[leaf] = parameter

    def _cast(self, name: str, parameter: Tensor) -> Tensor:
        dtype = self._dtype_of(name, parameter.dtype)
        if parameter.requires_grad:
            read: Tensor = _Read.apply(parameter, dtype, self._take, canonical_name(name))
            return read
        return parameter if dtype == parameter.dtype else parameter.detach().to(dtype)


class _Read(torch.autograd.Function):
    """A parameter's values in a dtype; hands the gradient to someone else than the parameter."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, dtype: torch.dtype, take: Callable[[str, Tensor], None], name: str
    ) -> Tensor:
        ctx.take, ctx.name = take, name
        return parameter.detach().to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.take(ctx.name, gradient)
        return None, None, None, None
