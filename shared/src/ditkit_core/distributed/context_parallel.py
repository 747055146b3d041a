"""Divides the tokens of each sample among the ranks of a context group, from behind the embedding until before the head.

Blocks and their code are the same as in one process: each runs on its rank's tokens, and `attend` exchanges what attention among all tokens
needs (`distributed/token_exchange.py`). Embedding and head run on every rank for all tokens.
"""

from dataclasses import dataclass
from typing import Any

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.token_exchange import TokenExchange
from ditkit_core.models.token_streams import TokenStreams


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sample's tokens, and what of a model's carry runs along tokens."""

    ranks: Ranks
    streams: TokenStreams

    def cut(self, carry: Any) -> tuple[Any, TokenExchange]:
        """A carry with this rank's tokens, and how the ranks exchange them in the blocks of this forward."""
        fields = self.streams.fields(carry)
        length = {names[0]: _at(carry, path).shape[1] for path, names in fields.items() if len(names) == 1}
        lengths = tuple(length[name] for name in self.streams.names)
        inputs = {layer: tuple(length[name] for name in names) for layer, names in self.streams.inputs.items()}
        within = {call: tuple(length[name] for name in names) for call, names in self.streams.within.items()}
        exchange = TokenExchange(self.ranks, (*self.streams.attention, *within), lengths, inputs, within)
        for path, names in fields.items():
            carry = _with(carry, path, exchange.rank_part(_at(carry, path), [length[name] for name in names]))
        return carry, exchange

    def gather(self, carry: Any, exchange: TokenExchange) -> Any:
        """The last block's carry with all tokens in what the head reads."""
        fields, length = self.streams.fields(carry), dict(zip(self.streams.names, exchange.lengths, strict=True))
        for path in self.streams.head:
            if path in fields:
                gathered = exchange.gathered(_at(carry, path), [length[name] for name in fields[path]])
                carry = _with(carry, path, gathered)
        return carry


def _at(carry: Any, path: str) -> Any:
    for name in path.split("."):
        carry = getattr(carry, name)
    return carry


def _with(carry: Any, path: str, value: Any) -> Any:
    """The carry with another value of a field."""
    name, _, rest = path.partition(".")
    return carry._replace(**{name: _with(getattr(carry, name), rest, value) if rest else value})
