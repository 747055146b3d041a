"""Maps the rows of a file's tensors to the rows of the model's tensors, for weights and for
adapters.

A file may have q, k and v in one tensor where the model has three, or the halves of a modulation in
another order. For a weight this only moves rows. For an adapter B·A it moves rows of B. Where
modules with adapters of their own share a tensor, that tensor's A contains theirs one below the
other, and its B is block-diagonal: exact, with a rank that is the sum of theirs.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ditkit_core.models.state_dict import TensorSlice


class FusedTensors:
    """Tensors of one side (model or file), assembled from the other side's tensors as these are
    found."""

    def __init__(self) -> None:
        self._parts: dict[str, list[TensorSlice | None]] = {}

    @classmethod
    def of(
        cls,
        names: Iterable[str],
        from_native: Callable[[str], Sequence[TensorSlice]],
        ending: str = "",
    ) -> "FusedTensors":
        """A form's tensors, assembled from ours.

        Args:
            names: Our names.
            from_native: From a name with its ending to the parts of the form's tensors.
            ending: What all names of both sides end with, and are without: `.weight` for modules.
        """
        fused = cls()
        for name in names:
            parts = [
                TensorSlice(part.name.removesuffix(ending), part.index, part.of)
                for part in from_native(f"{name}{ending}")
            ]
            assert fused.add(name, parts), f"{name} shares rows with another"
        return fused

    def add(self, name: str, parts: Sequence[TensorSlice]) -> bool:
        """Record that the rows of a tensor are these parts of the other side's tensors, from the
        first row on.

        False, with nothing recorded, if one of these parts was found before, or a tensor was split
        into another number of parts.
        """
        # All or nothing: half a tensor that was added would hide the parts of a better match.
        for part in parts:
            rows = self._parts.get(part.name, [None] * part.of)
            if len(rows) != part.of or rows[part.index] is not None:
                return False
        for index, part in enumerate(parts):
            self._parts.setdefault(part.name, [None] * part.of)[part.index] = TensorSlice(
                name, index, len(parts)
            )
        return True

    @property
    def parts(self) -> Mapping[str, tuple[TensorSlice | None, ...]]:
        """By the other side's name, in the order in which they were added: the part for each range
        of its rows, None where there is none."""
        return {name: tuple(parts) for name, parts in self._parts.items()}

    @property
    def complete(self) -> Mapping[str, tuple[TensorSlice, ...]]:
        """The entries of `parts` that lack no row."""
        slices = {
            name: tuple(part for part in parts if part is not None)
            for name, parts in self._parts.items()
        }
        return {
            name: parts for name, parts in slices.items() if len(parts) == len(self._parts[name])
        }


def rows_of(tensor: Tensor, index: int, of: int) -> Tensor:
    """Part `index` of a tensor's rows, of `of` equal parts."""
    num_rows = len(tensor) // of if of > 1 else len(tensor)
    return tensor[index * num_rows : (index + 1) * num_rows] if of > 1 else tensor


@dataclass(frozen=True)
class LoraMatrices:
    """One module's adapter, in fp32, without its scaling."""

    down: Tensor
    """A [rank, in]."""
    up: Tensor
    """B [out, rank]."""
    magnitude: Tensor | None = None
    """DoRA's magnitude of each row [out]: the factor of the merged row times its norm, or times the
    norm of the base's row."""
    over_base: bool = False
    """Whether it is the norm of the base's row, as ComfyUI has it."""

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors: `down`, `up` and perhaps `magnitude`."""
        parts = {"down": self.down, "up": self.up, "magnitude": self.magnitude}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [out, in] of the module's weight."""
        return len(self.up), self.down.shape[1]

    @property
    def rank(self) -> int:
        """Rows of A."""
        return len(self.down)

    def scaled(self, factor: float) -> "LoraMatrices":
        """The same adapter with a product that is `factor` times as large."""
        return replace(self, up=self.up * factor)

    def converted(self, convert: Callable[[Tensor], Tensor]) -> "LoraMatrices":
        """The adapter of the converted tensors."""
        return LoraMatrices(
            **{part: convert(tensor) for part, tensor in self.parts.items()},
            over_base=self.over_base,
        )

    def rows(self, index: int, of: int) -> "LoraMatrices":
        """The adapter of a part of the module's output rows."""
        # A is the same for every row: only B and the magnitude have rows of the output.
        magnitude = None if self.magnitude is None else rows_of(self.magnitude, index, of)
        return LoraMatrices(self.down, rows_of(self.up, index, of), magnitude, self.over_base)


def join(pieces: Sequence[tuple[str, LoraMatrices] | None]) -> LoraMatrices:
    """Join the adapters of parts of a tensor's rows into one adapter of the tensor.

    Args:
        pieces: For each part, from the first row on, all of equal size: its owner and its adapter;
            None where there is no adapter. Pieces of one owner share its A, and all pieces share it
            if every A is the same.

    Returns:
        The adapter. Its rank is the sum of the owners' ranks, or the rank of the shared A. It has a
        magnitude if every piece has one.
    """
    adapters = [piece for piece in pieces if piece is not None]
    downs = {owner: matrices.down for owner, matrices in adapters}
    first, *others = downs.values()
    shared = all(torch.equal(first, other) for other in others)
    # B is block-diagonal: an owner's columns of B are multiplied with its own rows of A only. That
    # is exact, and the rank is the sum of the ranks. A shared A is kept as it is: stacking equal
    # copies would multiply the rank for nothing.
    down = first if shared else torch.cat(list(downs.values()))
    starts, start = {}, 0
    for owner, matrix in downs.items():
        starts[owner] = start
        start += 0 if shared else len(matrix)
    num_rows = len(adapters[0][1].up)
    up = torch.zeros(num_rows * len(pieces), len(down))
    for rows, piece in zip(up.split(num_rows), pieces, strict=True):
        if piece is not None:
            owner, matrices = piece
            rows[:, starts[owner] : starts[owner] + len(matrices.down)] = matrices.up
    # A magnitude for some rows only has no meaning: DoRA scales every row of its layer.
    magnitudes = [None if piece is None else piece[1].magnitude for piece in pieces]
    norms = [magnitude for magnitude in magnitudes if magnitude is not None]
    over_base = any(matrices.over_base for _, matrices in adapters)
    return LoraMatrices(
        down, up, torch.cat(norms) if len(norms) == len(pieces) else None, over_base
    )


def columns_of_owners(up: Tensor, owners: Sequence[str]) -> dict[str, Tensor]:
    """Find the columns of a stacked B [out, rank] that belong to each owner of rows: the inverse of
    `join`.

    Blocks of equal rank are recognised even if they contain columns of zeros. In any other B, an
    owner gets the columns that are not zero in its rows. In both cases nothing is lost, because all
    that is left out is zero.

    Args:
        owners: The owner of each part of the rows, from the first row on, all of equal size.

    Returns:
        Indices of columns by owner, for at least one owner; owners whose rows are zero may be
        missing.
    """
    num_rows = len(up) // len(owners)
    distinct = list(dict.fromkeys(owners))
    rank = up.shape[1]
    if len(distinct) == 1:
        return {distinct[0]: torch.arange(rank)}
    # A column belongs to an owner whose rows use it. An owner may have several ranges of rows.
    used = {owner: torch.zeros(rank, dtype=torch.bool) for owner in distinct}
    for owner, rows in zip(owners, up.split(num_rows), strict=True):
        used[owner] |= (rows != 0).any(0)
    columns = {owner: mask.nonzero().flatten() for owner, mask in used.items()}
    needed = {owner for owner in distinct if len(columns[owner])}
    # The most owners first: a block of zeros in between then keeps its rank, and an adapter that is
    # joined and split again is the same.
    groups = (
        group
        for size in range(len(distinct), 0, -1)
        for group in itertools.combinations(distinct, size)
    )
    for members in groups:
        if needed <= set(members) and rank % len(members) == 0:
            blocks = dict(zip(members, torch.arange(rank).chunk(len(members)), strict=True))
            if all(torch.isin(columns[owner], block).all() for owner, block in blocks.items()):
                return blocks
        if not needed:
            return dict.fromkeys(distinct, torch.arange(rank))
    return {owner: columns[owner] for owner in distinct if owner in needed}
