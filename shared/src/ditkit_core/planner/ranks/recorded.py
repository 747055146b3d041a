"""A rank of a plan: what it would exchange is recorded, and nothing is moved."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ditkit_core.distributed.ranks import Ranks


class Move(NamedTuple):
    """One set of gradients that a rank sends or receives; a broadcast is a move to or from rank 0."""

    sends: bool
    other: int
    """The other rank; -1 for all others."""


@dataclass
class RecordedRanks(Ranks):
    """A rank of several that are not there.

    Of gradients it records the moves, and of tokens the bytes, as rings send them: a rank keeps its own part.
    """

    moves: list[Move] = field(default_factory=list)

    def all_reduce(self, numbers: Tensor, group: Any = None) -> Tensor:
        """Flags."""
        return numbers

    def send(self, tensor: Tensor, to: int) -> None:
        """Gradients."""
        self.moves.append(Move(True, to))

    def recv(self, buffer: Tensor, source: int) -> Tensor:
        """Gradients."""
        self.moves.append(Move(False, source))
        return buffer

    def broadcast(self, tensor: Tensor, source: int = 0, group: Any = None) -> Tensor:
        """The sum of all gradients."""
        self.moves.append(Move(self.is_first, -1))
        return tensor

    def mean_in_group(self, tensor: Tensor) -> Tensor:
        """The sum of gradients of ranks that share samples, which is counted by its number of ranks alone."""
        return tensor

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Tokens or heads."""
        self.bytes_sent += parts.nbytes - parts.nbytes // self.context
        return parts.new_empty(parts.shape)

    def all_gather(self, part: Tensor) -> Tensor:
        """Tokens."""
        self.bytes_sent += part.nbytes * (self.context - 1)
        return part.new_empty((self.context, *part.shape))
