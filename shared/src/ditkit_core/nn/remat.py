"""Where a recompute may stop: model code declares this at the last matmul of a block, and the
policy around the block obeys it.

A checkpoint that stops recomputing at the last saved tensor (`full`) leaves out a block's last
frozen matmul by itself, and needs none of this. A checkpoint that keeps regions (`attn_only`)
replays a block to its end. At `recompute_boundary` it learns that nothing behind needs to run
again: the recompute leaves the block there, by an exception that `run_block` catches. That is
correct because every tensor that is saved behind the boundary is either kept (a gated sum saves
only its gate, if that is trained), or named at the boundary and then recomputed before it.

A block under `attn_only`, from left to right:

    forward     norm, q k v | attention | projection, norm, up, act | last matmul | gated sum
                  dropped   |   kept    |          dropped          |    only its input, dropped
    recompute   norm, q k v | (skipped) | projection, norm, up, act X RecomputeDone
                                                                    ^ the boundary

`needed` of a boundary are tensors from in front of it that something behind it saves: in the
forward their saved copies are let go, and in the recompute they are put back just before X.
A block with a part whose result is in the carry has a boundary inside, at which `carried_part`
takes that result from the forward and goes on:

    recompute   part A ... X (its result from the forward) | part B ... X RecomputeDone
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch_remat as remat
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ditkit_core.nn.context import scope_in_force, scope_set, settings_in_force
from ditkit_core.nn.lora import keeps_only_its_input


class RecomputeDone(Exception):
    """A recompute has reached its boundary; its caller goes on with what it knows from the
    forward."""


def recompute_boundary(layer: nn.Module, x: Tensor, *needed: Tensor) -> Tensor:
    """Call a block's last layer, a matmul, behind which nothing has to be recomputed.

    That is free if the layer keeps nothing for its backward but its input. A layer that keeps more
    (adapter dropout, DoRA), or is trained, so that a gate behind it needs its output, is recomputed
    like the rest, and so is everything behind it.

    `needed` are large tensors from before the boundary that an operation behind it saves for its
    backward. They are recomputed, not kept.
    """
    return recompute_boundaries([(layer, x)], *needed)[0]


def recompute_boundaries(last: Sequence[tuple[nn.Module, Tensor]], *needed: Tensor) -> list[Tensor]:
    """`recompute_boundary` for a block of several streams, whose last layers are called together,
    each on its input."""
    settings = settings_in_force()
    if settings.keep is None or not all(keeps_only_its_input(layer) for layer, _ in last):
        return [layer(x) for layer, x in last]
    results: list[Tensor] = []

    def run(*inputs: Tensor) -> tuple[()]:
        results.extend(layer(x) for (layer, _), x in zip(last, inputs, strict=True))
        # No results: in the recompute torch_remat would return tensors without memory in their
        # place, which fails under fake tensors.
        return ()

    # A region that is not recomputed: the recompute makes the layers' inputs again but does not
    # call the layers. Whatever else their forward saves is kept.
    remat.region(run, "last matmul", recompute=False)(*(x for _, x in last))
    scope = scope_in_force()
    if settings.recomputing:
        if scope is not None:
            scope.refill(needed)
        # An exception, because the block's code goes on behind this call: nothing else ends it from
        # here.
        raise RecomputeDone
    if scope is not None:
        scope.keep_from_here(needed)
    return results


def carried_part(function: Callable[..., Tensor], *arguments: Any, name: str) -> Tensor:
    """Call a part of a block that ends in a boundary of its own and whose result is part of the
    block's carry.

    That result is in memory anyway, so a recompute takes it from the forward and goes on behind the
    part.

    Args:
        arguments: The part's arguments; the first is a tensor.
        name: Unique within the block.
    """
    settings = settings_in_force()
    if settings.keep is None:
        return function(*arguments)
    # A region around the result alone: the recompute takes it from the forward, without the part
    # that made it.
    region = remat.region(_alias, name, recompute=False)
    outer = scope_in_force()
    scope = RecomputeScope(None if outer is None else outer.hooks)
    if settings.recomputing:
        part_scope = None if outer is None else outer.parts.get(name)
        try:
            with scope_set(part_scope), remat.name_scope(name):
                return function(*arguments)
        except RecomputeDone:
            # the region returns its result from the forward, whatever its argument
            out: Tensor = region(arguments[0])
            return out
    with scope_set(scope), scope, remat.name_scope(name):
        out = function(*arguments)
    if outer is not None:
        # The block's recompute finds the part's scope by name, because it runs the same code again.
        outer.parts[name] = scope
    if scope.is_reached:
        out = region(out)
        remat.recompute_needs_tensor(out)
    return out


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x)


@dataclass
class _Again:
    """A saved tensor that is not kept, because the recompute makes it again."""

    index: int
    """Its index among the tensors that are named at the boundary."""
    value: Tensor | None = None


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class RecomputeScope:
    """What a block, or a part of one (`carried_part`), saves behind its boundary. Its forward runs
    inside the `with` block."""

    def __init__(self, hooks: Hooks | None = None):
        """Start before the boundary. Saved-tensor hooks around the checkpoint, if there are any,
        get what is kept."""
        self.hooks = hooks
        self.is_reached = False
        self.parts: dict[str, RecomputeScope] = {}
        """The scopes of parts (`carried_part`), by name."""
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
        """Keep what is saved from here on: the forward has reached the boundary, and the checkpoint
        must not recompute it."""
        self.is_reached, self._needed = True, needed
        self._open.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def keep_results(self, results: Sequence[Tensor]) -> None:
        """Keep the block's results until its recompute. That is free where the next block keeps
        them too, and plans count it."""
        if self.is_reached:
            self._results = [
                x.detach() if self.hooks is None else self.hooks[0](x.detach()) for x in results
            ]

    def refill(self, needed: Sequence[Tensor]) -> None:
        """Take the recomputed tensors: the recompute has reached the boundary."""
        self._results = []
        for reference in self._again:
            if (again := reference()) is not None:
                again.value = needed[again.index].detach()

    def _pack(self, tensor: Tensor) -> Any:
        # Tensors that are named at the boundary are not kept: a weak reference to the entry
        # suffices, because autograd owns it.
        for index, needed in enumerate(self._needed):
            if _is_same(tensor, needed):
                again = _Again(index)
                self._again.append(weakref.ref(again))
                return again
        # Detached: an operation that saves its own result would keep itself alive through it, and
        # nothing would free that cycle.
        tensor = tensor.detach()
        return tensor if self.hooks is None else self.hooks[0](tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Again):
            # Read once, so that its memory is freed with the backward of the operation.
            value, packed.value = packed.value, None
            assert value is not None, "no recompute came before"
            return value
        if self.hooks is not None:
            return self.hooks[1](packed)
        tensor: Tensor = packed
        return tensor


def _is_same(a: Tensor, b: Tensor) -> bool:
    # Not `is`: autograd may hand hooks another Python object for the same tensor.
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and (a.dtype, a.shape, a.storage_offset()) == (b.dtype, b.shape, b.storage_offset())
        and a.stride() == b.stride()
    )
