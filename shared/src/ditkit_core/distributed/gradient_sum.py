"""The sum of a step's gradients, in an order that does not depend on how many ranks compute them.

Floating-point sums depend on their order. So the micro-batches are the leaves of a binary tree,
which their number alone decides: the sum over micro-batches [a, b) is the sum of [a, c) and [c, b),
with c - a the largest power of two below b - a. A rank adds what it has, and sends a sum where the
tree goes on with the sum of another rank. One process adds in the same tree, so any number of ranks
has the same bits.

Where the ranks of a context group share a sample's tokens, each has its part of every gradient,
times the group's size. Each adds its parts with the ranks of the same place in other groups, and
once a step the sum is their mean.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ditkit_core.distributed.ranks import Ranks

Gradients = dict[str, Tensor]


def num_waiting_sums(leaf: int) -> int:
    """The sets of gradients that wait to be added to others while one process computes a
    micro-batch of this number.

    The set that an odd one adds to is not among them.
    """
    return (leaf // 2).bit_count()


class GradientSum:
    """Sums gradients over micro-batches and ranks.

    A backward adds to the gradients of the micro-batch before it where the tree adds these two
    first, so that one set of gradients is enough for two micro-batches; four need two sets, and
    eight need three.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], leaves: int, ranks: Ranks):
        """Start without gradients.

        Args:
            parameters: The trained parameters, on one device if there are several ranks.
            leaves: Number of micro-batches of the step, over all ranks.
            ranks: The processes that share them.
        """
        self._parameters, self._leaves, self._ranks = parameters, leaves, ranks
        self._share = ranks.share(leaves)
        self._sums: dict[tuple[int, int], Gradients] = {}
        """By range of micro-batches, those not yet added to their neighbours."""

    def add(self, leaf: int, *, reused: bool = False) -> None:
        """Take the gradients of a micro-batch from the parameters; micro-batches come in their
        order.

        Args:
            reused: Whether the next backward writes its gradients into the same memory, so that
                these have to be copied.
        """
        pair = leaf ^ 1
        if leaf % 2 == 0 and pair in self._share and pair < self._leaves:
            return  # the next backward adds to these
        low = pair if leaf % 2 and pair in self._share else leaf
        gradients = _take(self._parameters)
        self._sums[low, leaf + 1] = (
            {name: gradient.clone() for name, gradient in gradients.items()}
            if reused
            else gradients
        )
        for low, middle, high in _nodes(self._leaves):
            if (low, middle) in self._sums and (middle, high) in self._sums:
                self._join(low, middle, high)

    def finish(self) -> None:
        """Give every rank's parameters the sum over all micro-batches as their gradients."""
        if self._ranks.size == 1:
            total = self._sums.pop((0, self._leaves))
        else:
            present = self._present()
            for low, middle, high in _nodes(self._leaves):
                left, right = (self._ranks.owner(item, self._leaves) for item in (low, middle))
                if left != right and self._ranks.rank == right:
                    self._send(self._sums.pop((middle, high)), left)
                elif left != right and self._ranks.rank == left:
                    self._sums[middle, high] = self._received(right)
                if (low, middle) in self._sums and (middle, high) in self._sums:
                    self._join(low, middle, high)
            total = self._from_first(self._sums.pop((0, self._leaves), {}))
            total = {name: gradient for name, gradient in total.items() if name in present}
        for name, gradient in total.items():
            self._parameters[name].grad = gradient

    def _join(self, low: int, middle: int, high: int) -> None:
        left, right = self._sums.pop((low, middle)), self._sums.pop((middle, high))
        both = [name for name in left if name in right]
        if both:
            torch._foreach_add_([left[name] for name in both], [right[name] for name in both])
        self._sums[low, high] = right | left

    def _present(self) -> set[str]:
        """Names of the parameters that have a gradient on any rank: the others are not updated."""
        names = {name for gradients in self._sums.values() for name in gradients}
        flags = torch.tensor([float(name in names) for name in self._parameters])
        counts = self._ranks.all_reduce(flags).tolist()
        return {name for name, count in zip(self._parameters, counts, strict=True) if count}

    def _send(self, gradients: Gradients, to: int) -> None:
        for names in self._by_dtype():
            self._ranks.send(self._flat(gradients, names), to)

    def _received(self, source: int) -> Gradients:
        parts: Gradients = {}
        for names in self._by_dtype():
            parts |= self._apart(self._ranks.recv(self._buffer(names), source), names)
        return parts

    def _from_first(self, gradients: Gradients) -> Gradients:
        total, ranks = dict(gradients), self._ranks
        for names in self._by_dtype():
            summed = ranks.group_index == 0
            flat = (
                ranks.mean_in_group(self._flat(gradients, names)) if summed else self._buffer(names)
            )
            ranks.broadcast(flat)
            if ranks.is_first and ranks.context == 1:
                continue  # these are its own
            parts = self._apart(flat, names)
            # Copied: a part of a buffer may be aligned otherwise than a tensor of its own, and a
            # norm's bits may depend on that.
            total |= {name: part.clone() for name, part in parts.items()}
        return total

    def _by_dtype(self) -> Sequence[Sequence[str]]:
        """The parameters' names, grouped by gradient dtype: each group is sent as one tensor."""
        groups: dict[torch.dtype, list[str]] = {}
        for name, parameter in self._parameters.items():
            groups.setdefault(_dtype(parameter), []).append(name)
        return list(groups.values())

    def _flat(self, gradients: Gradients, names: Sequence[str]) -> Tensor:
        parameters = (self._parameters[name] for name in names)
        return torch.cat(
            [
                gradients[name].reshape(-1)
                if name in gradients
                else p.new_zeros(p.numel(), dtype=_dtype(p))
                for name, p in zip(names, parameters, strict=True)
            ]
        )

    def _buffer(self, names: Sequence[str]) -> Tensor:
        first = self._parameters[names[0]]
        return first.new_empty(
            sum(self._parameters[name].numel() for name in names), dtype=_dtype(first)
        )

    def _apart(self, flat: Tensor, names: Sequence[str]) -> Gradients:
        parts = flat.split([self._parameters[name].numel() for name in names])
        return {
            name: part.view_as(self._parameters[name])
            for name, part in zip(names, parts, strict=True)
        }


def _nodes(leaves: int) -> Iterator[tuple[int, int, int]]:
    """The tree's sums from the leaves to the root, as (low, middle, high): [low, middle) plus
    [middle, high)."""
    size = 2
    while size // 2 < leaves:
        for low in range(0, leaves - size // 2, size):
            yield low, low + size // 2, min(low + size, leaves)
        size *= 2


def _take(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Remove the gradients from the parameters, and return them by name."""
    gradients = {
        name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None
    }
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype
