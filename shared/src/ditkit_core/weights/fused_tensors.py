"""Rows of one side's tensors that lie in the other's: which part is where, and what that makes of an adapter.

A file may have q, k and v in one tensor where the model has three, or the halves of a modulation in the other order. For a
weight that is a matter of rows. An adapter B·A is rows of B; where modules with adapters of their own share a tensor, the
tensor's A holds theirs one below the other, and its B is block-diagonal: exact, at the sum of their ranks.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ditkit_core.models.state_dict import TensorSlice


class FusedTensors:
    """Tensors of one side, put together of the other side's as these are found."""

    def __init__(self) -> None:
        self._found: dict[str, list[TensorSlice | None]] = {}

    def add(self, name: str, parts: Sequence[TensorSlice]) -> bool:
        """Note that the rows of a tensor of this name are these parts of the other side's tensors, in order.

        Returns:
            Whether it could be: not if rows of theirs were found before, or are cut in another way.
        """
        if not all(self._is_free(part) for part in parts):
            return False
        for index, part in enumerate(parts):
            self._found.setdefault(part.name, [None] * part.of)[part.index] = TensorSlice(name, index, len(parts))
        return True

    def _is_free(self, part: TensorSlice) -> bool:
        rows = self._found.get(part.name, [None] * part.of)
        return len(rows) == part.of and rows[part.index] is None

    @property
    def found(self) -> Mapping[str, tuple[TensorSlice | None, ...]]:
        """By the other side's name, in the order of their finding: what its rows are, None where nothing was found."""
        return {name: tuple(parts) for name, parts in self._found.items()}

    @property
    def complete(self) -> Mapping[str, tuple[TensorSlice, ...]]:
        """Those of them that lack no row."""
        whole = {name: tuple(part for part in parts if part is not None) for name, parts in self._found.items()}
        return {name: parts for name, parts in whole.items() if len(parts) == len(self._found[name])}


def rows_of(tensor: Tensor, index: int, of: int) -> Tensor:
    """Number `index` of `of` equal parts of a tensor's rows."""
    num_rows = len(tensor) // of if of > 1 else len(tensor)
    return tensor[index * num_rows : (index + 1) * num_rows] if of > 1 else tensor


@dataclass(frozen=True)
class LoraMatrices:
    """One module's adapter, in fp32, without its scale."""

    down: Tensor
    """A [rank, in]."""
    up: Tensor
    """B [out, rank]."""
    magnitude: Tensor | None = None
    """DoRA's norm of each row [out]."""

    def rows(self, index: int, of: int) -> "LoraMatrices":
        """The adapter of some rows of the module's output."""
        magnitude = None if self.magnitude is None else rows_of(self.magnitude, index, of)
        return LoraMatrices(self.down, rows_of(self.up, index, of), magnitude)


def join(pieces: Sequence[tuple[str, LoraMatrices] | None]) -> LoraMatrices:
    """The adapter of rows that are adapted one by one.

    Args:
        pieces: From the first row on, equally many rows each: whose they are, and their adapter; None where there is none.
            Pieces of one owner share its A, and so do all if every A is the same.

    Returns:
        The rank is the sum of the owners' ranks, or that of the A that all share. There is a magnitude if every piece has one.
    """
    given = [piece for piece in pieces if piece is not None]
    downs = {owner: matrices.down for owner, matrices in given}
    first, *others = downs.values()
    shared = all(torch.equal(first, other) for other in others)
    # Block-diagonal below: an owner's columns of B meet its own rows of A alone, which is exact, at the sum of the
    # ranks.
    down = first if shared else torch.cat(list(downs.values()))
    starts, start = {}, 0
    for owner, matrix in downs.items():
        starts[owner] = start
        start += 0 if shared else len(matrix)
    num_rows = len(given[0][1].up)
    up = torch.zeros(num_rows * len(pieces), len(down))
    for rows, piece in zip(up.split(num_rows), pieces, strict=True):
        if piece is not None:
            owner, matrices = piece
            rows[:, starts[owner] : starts[owner] + len(matrices.down)] = matrices.up
    magnitudes = [None if piece is None else piece[1].magnitude for piece in pieces]
    norms = [magnitude for magnitude in magnitudes if magnitude is not None]
    return LoraMatrices(down, up, torch.cat(norms) if len(norms) == len(pieces) else None)


def columns_of_owners(up: Tensor, owners: Sequence[str]) -> dict[str, Tensor]:
    """Which columns of a stacked B belong to whom: the inverse of `join`.

    Blocks of equal rank are recognised with their columns of zeros; of another B everybody has the columns that are not zero
    in its rows. Either way nothing is lost, and what is left out is zero.

    Args:
        up: B [out, rank].
        owners: Whose the rows are, from the first row on, equally many rows each.

    Returns:
        Numbers of columns by owner, of one owner at least; those whose rows say nothing may be left out.
    """
    num_rows = len(up) // len(owners)
    distinct = list(dict.fromkeys(owners))
    rank = up.shape[1]
    if len(distinct) == 1:
        return {distinct[0]: torch.arange(rank)}
    used = {owner: torch.zeros(rank, dtype=torch.bool) for owner in distinct}
    for owner, rows in zip(owners, up.split(num_rows), strict=True):
        used[owner] |= (rows != 0).any(0)
    columns = {owner: mask.nonzero().flatten() for owner, mask in used.items()}
    needed = {owner for owner in distinct if len(columns[owner])}
    groups = (group for size in range(len(distinct), 0, -1) for group in itertools.combinations(distinct, size))
    for members in groups:
        if needed <= set(members) and rank % len(members) == 0:
            blocks = dict(zip(members, torch.arange(rank).chunk(len(members)), strict=True))
            if all(torch.isin(columns[owner], block).all() for owner, block in blocks.items()):
                return blocks
        if not needed:
            return dict.fromkeys(distinct, torch.arange(rank))
    return {owner: columns[owner] for owner in distinct if owner in needed}
