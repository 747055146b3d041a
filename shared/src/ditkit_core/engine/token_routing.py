"""Which blocks a share of a sample's tokens skips in training: `train.token_routing`, parsed before
torch is imported, which takes seconds."""

import re
from dataclasses import dataclass
from typing import Self

from ditkit_core.errors import UserError, argument
from ditkit_core.models.token_streams import TokenStreams

KEY = "train.token_routing"
_FORM = re.compile(r"(\d+)-(\d+)=(\d*\.?\d+)")


@dataclass(frozen=True)
class TokenRouting:
    """Which blocks are skipped, and by which share of the tokens."""

    first: int
    """The first block of the range, counted from 0."""
    last: int
    """The last block of the range, itself included."""
    share: float
    """Share of the tokens that skip the range, in (0, 1)."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The routing of a setting such as `2-25=0.5`; None if it is empty.

        Raises:
            UserError: If it has another form, an empty range, or a share that is not between 0 and
                1.
        """
        if not text.strip():
            return None
        match = _FORM.fullmatch(text.replace(" ", ""))
        if match is None or int(match[1]) > int(match[2]) or not 0 < float(match[3]) < 1:
            raise UserError(
                f"{argument(KEY)} = {text!r} must be blocks and the share of tokens that skip "
                f"them, above 0 and below 1, such as '2-25=0.5'"
            )
        return cls(int(match[1]), int(match[2]), float(match[3]))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}={self.share:g}"

    def check(self, num_blocks: int, streams: TokenStreams | None) -> None:
        """Refuse a model without such blocks, or without tokens that may skip blocks.

        Args:
            num_blocks: Number of blocks of the model.
            streams: The streams that the model declares; None if its blocks need all tokens.

        Raises:
            UserError: If the range or the model does not fit.
        """
        if streams is None or not streams.routed:
            raise UserError(
                f"{argument(KEY)} = {self}: this architecture has no tokens that may skip blocks; "
                f"leave {argument(KEY)} out"
            )
        if self.last >= num_blocks:
            raise UserError(
                f"{argument(KEY)} = {self}: the model has the blocks 0 to {num_blocks - 1}; end "
                f"the range at one of them, such as "
                f"'{min(2, num_blocks - 1)}-{max(min(2, num_blocks - 1), num_blocks - 3)}={self.share:g}'"
            )
