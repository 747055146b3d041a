"""Divides the tokens of each sample among the ranks of a context group, from behind the embedding
until before the head.

Blocks and their code are the same as in one process: each runs on its rank's tokens, and `attend`
exchanges what attention among all tokens needs (`TokenExchange`). Embedding and head run on every
rank for all tokens.

Each stream of tokens is divided into equal consecutive parts, with padding behind its last token.
Where the number of heads can be divided, ranks trade tokens for heads before the kernel and back
after it (Ulysses); else each rank gathers all keys and values for its own queries. The kernel sees
the tokens in their order and without that padding, so it needs no mask for it.

Source of the exchange of heads: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ditkit_core.config.layer_patterns import fits
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.models.token_streams import TokenStreams, field_at, with_field


@dataclass(frozen=True)
class TokenExchange:
    """How the tokens of one forward's samples are divided, and the exchanges that attention among
    them needs."""

    ranks: Ranks
    calls: tuple[str, ...]
    """Names of the calls of `attend` that need an exchange."""
    lengths: tuple[int, ...]
    """Number of tokens of each stream, in the order in which attention sees them."""
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By the ending of a layer's name, or a glob: the number of tokens of each stream in its input,
    none for one that every rank has whole."""
    within: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Calls of `attend` among the tokens of some streams only: by the call's name, the number of
    tokens of each of these streams."""
    queries: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The same of the queries, for calls whose queries are of fewer streams than the keys."""

    def rank_part(self, x: Shaped[Tensor, "batch tokens *rest"], lengths: Sequence[int]) -> Tensor:
        """This rank's part of each stream, one after the other.

        Args:
            x: All tokens.
            lengths: Number of tokens of each stream in `x`.
        """
        parts = self._padded(x, lengths)
        # Concatenated also if it is one: a view would keep all tokens in memory.
        return torch.cat([part[:, :, self.ranks.group_rank] for part in parts], 1)

    def gathered(self, x: Shaped[Tensor, "batch part *rest"], lengths: Sequence[int]) -> Tensor:
        """All tokens, of each rank's part of them; every rank must use them in the same way, with
        the same gradient."""
        return self._joined(_GatherSame.apply(self.ranks, x), 1, lengths)

    def dropout(self, x: Float[Tensor, "batch part *rest"], rate: float, layer: str) -> Tensor:
        """Dropout of a layer's input, with this rank's part of the mask that one process has for
        all tokens.

        Each rank samples the whole mask, so that all of their generators go on alike, and keeps its
        part.
        """
        lengths = next(
            (stream_lengths for name, stream_lengths in self.inputs.items() if fits(layer, name)),
            self.lengths,
        )
        if not lengths:
            return F.dropout(x, rate)
        with torch.no_grad():
            factors = self.rank_part(
                F.dropout(x.new_ones(len(x), sum(lengths), *x.shape[2:]), rate), lengths
            )
        assert factors.shape == x.shape, f"TokenStreams.inputs is wrong about {layer}"
        # torch rounds the factor to the input's dtype on a CPU alone.
        return x * factors if x.device.type == "cpu" else x * (factors != 0) * (1 / (1 - rate))

    def attend(
        self,
        kernel: Callable[..., Tensor],
        name: str,
        q: Float[Tensor, "batch part heads head_dim"],
        k: Float[Tensor, "batch part heads head_dim"],
        v: Float[Tensor, "batch part heads head_dim"],
        padding_mask: Bool[Tensor, "batch tokens"] | None,
        dropout: float,
        causal: bool = False,
    ) -> Float[Tensor, "batch part heads head_dim"]:
        """A kernel's attention, in the call `name`, of this rank's queries to the keys of all
        ranks. The mask covers all keys."""
        assert not dropout, (
            "refused before anything was loaded: a mask depends on which rank computes it"
        )
        lengths = self.within.get(name, self.lengths)
        query_lengths = self.queries.get(name, lengths)
        ranks, heads = self.ranks, q.shape[2]
        if heads % ranks.context:
            # A query's place among the keys decides what it attends to: each rank computes all.
            together = (q, k, v) if causal else (k, v)
            *queries, keys, values = self._joined(
                _Gather.apply(ranks, torch.stack(together)), 2, lengths
            ).unbind()
            if not causal:
                return kernel(q, keys, values, padding_mask, dropout)
            return self.rank_part(
                kernel(*queries, keys, values, padding_mask, dropout, causal=True), lengths
            )
        # [for which rank, batch, part of each of the three, its heads, head_dim]: one exchange of
        # all three.
        local_parts = [x.unflatten(2, (ranks.context, -1)).movedim(2, 0) for x in (q, k, v)]
        parts = _AllToAll.apply(ranks, torch.cat(local_parts, 2)).split(
            [x.shape[1] for x in (q, k, v)], 2
        )
        q, k, v = (
            self._joined(part, 1, part_lengths)
            for part, part_lengths in zip(parts, (query_lengths, lengths, lengths), strict=True)
        )
        options = {"causal": True} if causal else {}
        out = kernel(q, k, v, padding_mask, dropout, **options)
        sent = [part.movedim(2, 0) for part in self._padded(out, query_lengths)]
        received = _AllToAll.apply(ranks, torch.cat(sent, 2))
        return received.movedim(0, 2).flatten(2, 3)

    def _padded(self, x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Each stream as [batch, a rank's tokens, ranks, ...]."""
        num = self.ranks.context
        parts = []
        for part, length in zip(x.split(list(lengths), 1), lengths, strict=True):
            if missing := -length % num:
                part = torch.cat([part, part.new_zeros(len(part), missing, *part.shape[2:])], 1)
            parts.append(part.unflatten(1, (num, -1)).transpose(1, 2))
        return parts

    def _joined(self, parts: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """All tokens in their order, from [ranks, ...] with each rank's parts of the streams in the
        dimension `dim` of what follows."""
        sizes = [-(-length // self.ranks.context) for length in lengths]
        streams = [
            part.movedim(0, dim).flatten(dim, dim + 1) for part in parts.split(sizes, dim + 1)
        ]
        streams = [
            stream.narrow(dim, 0, length) for stream, length in zip(streams, lengths, strict=True)
        ]
        return torch.cat(streams, dim) if len(streams) > 1 else streams[0]


class _AllToAll(torch.autograd.Function):
    """Part i [i, ...] goes to rank i of the group."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, parts: Tensor) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_to_all(parts.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.ranks.all_to_all(gradient.contiguous())


class _Gather(torch.autograd.Function):
    """The ranks' tensors [ranks, ...]. What each rank does with them is another part of the loss,
    so gradients are added."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.ranks.all_to_all(gradient.contiguous()).sum(0)


class _GatherSame(_Gather):
    """The ranks' tensors [ranks, ...], with which all ranks do the same.

    Their gradients are the same, so that the sum needs no exchange. It is the sum and not their
    mean: the mean over ranks of each parameter's gradient is then right for those in front of the
    exchange, which saw a part of the tokens, and for those behind it.
    """

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient[ctx.ranks.group_rank] * ctx.ranks.context


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sample's tokens, and what of a model's carry runs along tokens."""

    ranks: Ranks
    streams: TokenStreams

    def cut(self, carry: Any) -> tuple[Any, TokenExchange]:
        """A carry with this rank's tokens, and how the ranks exchange them in the blocks of this
        forward."""
        fields = self.streams.fields(carry)
        length = {
            names[0]: field_at(carry, path).shape[1]
            for path, names in fields.items()
            if len(names) == 1
        }
        lengths = tuple(length[name] for name in self.streams.names)
        inputs = {
            layer: tuple(length[name] for name in names)
            for layer, names in self.streams.inputs.items()
        }
        within = {
            call: tuple(length[name] for name in names)
            for call, names in self.streams.within.items()
        }
        queries = {
            call: tuple(length[name] for name in names)
            for call, names in self.streams.queries.items()
        }
        exchange = TokenExchange(
            self.ranks, (*self.streams.attention, *within), lengths, inputs, within, queries
        )
        for path, names in fields.items():
            carry = with_field(
                carry,
                path,
                exchange.rank_part(field_at(carry, path), [length[name] for name in names]),
            )
        return carry, exchange

    def gather(self, carry: Any, exchange: TokenExchange) -> Any:
        """The last block's carry with all tokens in what the head reads."""
        fields = self.streams.fields(carry)
        length = dict(zip(self.streams.names, exchange.lengths, strict=True))
        for path in self.streams.head:
            if path in fields:
                gathered = exchange.gathered(
                    field_at(carry, path), [length[name] for name in fields[path]]
                )
                carry = with_field(carry, path, gathered)
        return carry
