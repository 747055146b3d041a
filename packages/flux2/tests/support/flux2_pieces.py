"""State dicts between forms by the names alone: what a loader does, in its plainest form."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ditkit_core.models.state_dict import TensorSlice
from ditkit_flux2.state_dict import NAMES


def assembled(pieces: Iterable[tuple[TensorSlice, Tensor]]) -> dict[str, Tensor]:
    """Tensors put together from their parts; all parts have to be there, each once."""
    found: dict[str, dict[int, Tensor]] = {}
    counts: dict[str, int] = {}
    for part, rows in pieces:
        assert part.index not in found.setdefault(part.name, {}), part
        assert counts.setdefault(part.name, part.of) == part.of, part
        found[part.name][part.index] = rows
    for name, parts in found.items():
        assert sorted(parts) == list(range(counts[name])), name
    return {
        name: torch.cat([parts[index] for index in sorted(parts)]) for name, parts in found.items()
    }


def native(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict from another form's."""
    pieces: list[tuple[TensorSlice, Tensor]] = []
    for name, tensor in foreign.items():
        parts = NAMES.to_native(name)
        assert parts is not None, name
        pieces += zip(parts, tensor.chunk(len(parts)), strict=True)
    return assembled(pieces)


def foreign(ours: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """Another form's state dict from ours."""
    pieces: list[tuple[TensorSlice, Tensor]] = []
    for name, tensor in ours.items():
        parts = NAMES.from_native[form](name)
        pieces += zip(parts, tensor.chunk(len(parts)), strict=True)
    return assembled(pieces)
