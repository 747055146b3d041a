"""Where a recompute may stop: model code declares it at the last matmul of a block, and the policy around the block handles it.

A checkpoint that stops recomputing at the last saved tensor (`full`) leaves a block's last frozen matmul out by itself, and needs nothing of this. One
that keeps regions (`attn_only`) replays a block to its end. At `recompute_boundary` it learns that nothing behind needs to run again: the recompute
leaves the block there, by an exception that `run_block` catches. That is right because what is saved behind the boundary is kept (all that a gated sum
saves is its gate, if that is trained), or named at the boundary, and then computed again before it.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch_remat as remat
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ditkit_core.nn.context import scope_in_force, scope_set, settings_in_force
from ditkit_core.nn.lora import keeps_only_its_input


class RecomputeDone(Exception):
    """A recompute came to its boundary, and what called it goes on with what it knows from the forward."""


def recompute_boundary(layer: nn.Module, x: Tensor, *needed: Tensor) -> Tensor:
    """`layer(x)`, behind which a block does nothing that a recompute has to repeat.

    That is free as long as the layer keeps nothing for its backward but its input. One that keeps more (adapter dropout, DoRA), or is
    trained, so that a gate behind it needs what it returns, is recomputed like the rest, and so is what follows.

    Args:
        layer: The block's last layer, a matmul.
        x: Its input.
        needed: Large tensors, made before the boundary, that an operation behind it saves for its backward: they are computed again, not kept.
    """
    return recompute_boundaries([(layer, x)], *needed)[0]


def recompute_boundaries(last: Sequence[tuple[nn.Module, Tensor]], *needed: Tensor) -> list[Tensor]:
    """The same of a block of several streams, whose last layers come next to each other.

    Args:
        last: Each stream's last layer, with its input.
        needed: As for `recompute_boundary`.
    """
    settings = settings_in_force()
    # A compiler sees for itself what the backward needs; told to keep this, it would.
    is_plain = torch.compiler.is_compiling() or settings.keep is None
    if is_plain or not all(keeps_only_its_input(layer) for layer, _ in last):
        return [layer(x) for layer, x in last]
    results: list[Tensor] = []

    def run(*inputs: Tensor) -> tuple[()]:
        results.extend(layer(x) for (layer, _), x in zip(last, inputs, strict=True))
        return ()  # nothing: torch_remat would replay what is returned, as a tensor without memory that fake tensors do not survive

    # The layers' inputs are computed again, what else their forward saves is kept; a recompute does not call them.
    remat.region(run, "last matmul", recompute=False)(*(x for _, x in last))
    scope = scope_in_force()
    if settings.recomputing:
        if scope is not None:
            scope.refill(needed)
        raise RecomputeDone
    if scope is not None:
        scope.keep_from_here(needed)
    return results


def handed_on(function: Callable[..., Tensor], *given: Any, name: str) -> Tensor:
    """Call a part of a block that ends in a boundary of its own, and whose result the block hands on.

    What is handed on is there anyway, so a recompute takes it as it was in the forward and goes on behind it.

    Args:
        function: The part.
        given: What it takes.
        name: Unique within the block.
    """
    settings = settings_in_force()
    if torch.compiler.is_compiling() or settings.keep is None:
        return function(*given)
    taken = remat.region(_alias, name, recompute=False)
    outer = scope_in_force()
    scope = RecomputeScope(None if outer is None else outer.hooks)
    if settings.recomputing:
        known = None if outer is None else outer.parts.get(name)
        try:
            with scope_set(known), remat.name_scope(name):
                return function(*given)
        except RecomputeDone:
            out: Tensor = taken(given[0])  # its argument is not looked at
            return out
    with scope_set(scope), scope, remat.name_scope(name):
        out = function(*given)
    if outer is not None:
        outer.parts[name] = scope
    if scope.is_reached:
        out = taken(out)
        remat.recompute_needs_tensor(out)
    return out


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x)


@dataclass
class _Again:
    """A saved tensor that the recompute makes again."""

    index: int
    """Among those that are named at the boundary."""
    value: Tensor | None = None


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class RecomputeScope:
    """What a block, or a part of one that is handed on, saves behind its boundary; inside the `with` block its forward runs."""

    def __init__(self, hooks: Hooks | None = None):
        """Nothing is reached yet.

        Args:
            hooks: Those for saved tensors around the checkpoint, if there are any: they take what is kept.
        """
        self.hooks = hooks
        self.is_reached = False
        self.parts: dict[str, RecomputeScope] = {}
        """Those of parts that are handed on."""
        self._again: list[weakref.ref[_Again]] = []
        self._needed: Sequence[Tensor] = ()
        self._results: Sequence[Any] = ()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._needed = ()

    def keep_from_here(self, needed: Sequence[Tensor]) -> None:
        """The boundary is reached in the forward: the checkpoint gets nothing more to recompute."""
        self.is_reached, self._needed = True, needed
        self._open.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def hold(self, results: Sequence[Tensor]) -> None:
        """Keep what the block returned until its recompute: it costs nothing where the next block holds it, too, and plans count it."""
        if self.is_reached:
            self._results = [x.detach() if self.hooks is None else self.hooks[0](x.detach()) for x in results]

    def refill(self, needed: Sequence[Tensor]) -> None:
        """It is reached in a recompute, which made anew what it was told of."""
        self._results = []
        for reference in self._again:
            if (again := reference()) is not None:
                again.value = needed[again.index].detach()

    def _pack(self, tensor: Tensor) -> Any:
        for index, needed in enumerate(self._needed):
            if _is_same(tensor, needed):
                again = _Again(index)
                self._again.append(weakref.ref(again))
                return again
        # Detached: what an operation saves of its own result would hold the operation, and be freed by no one.
        tensor = tensor.detach()
        return tensor if self.hooks is None else self.hooks[0](tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Again):
            value, packed.value = packed.value, None
            assert value is not None, "no recompute came before"
            return value
        if self.hooks is not None:
            return self.hooks[1](packed)
        tensor: Tensor = packed
        return tensor


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and (a.dtype, a.shape, a.storage_offset()) == (b.dtype, b.shape, b.storage_offset())
        and a.stride() == b.stride()
    )
