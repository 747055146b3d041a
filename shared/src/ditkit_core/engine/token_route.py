"""Token routing: a random share of a sample's tokens skips a range of blocks, and joins the others
again behind it.

Blocks and their code are the same as without it: each runs on a carry with fewer tokens, so its
arithmetic and its activations shrink with their number. Every forward with a backward samples other
tokens; forwards without one (validation, samples, the base's own prediction) run all tokens through
all blocks.

Source: TREAD, arXiv:2501.04765, whose route is one range and one share, without extra losses.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from ditkit_core.engine.token_routing import TokenRouting
from ditkit_core.io.runtimes import sent_to
from ditkit_core.models.token_streams import TokenStreams, field_at, masks_of, with_field


@dataclass(frozen=True)
class TokenRouter:
    """The token routing of a model."""

    routing: TokenRouting
    streams: TokenStreams

    def route(self, carry: Any) -> "TokenRoute":
        """The route of one forward, from the embedding's carry: its tokens are chosen by the
        generator of their device."""
        return TokenRoute(self.routing, self.streams, carry)


def router_of(
    routing: TokenRouting | None, num_blocks: int, streams: TokenStreams | None
) -> TokenRouter | None:
    """The token routing of a model; None without one. UserError as `TokenRouting.check`."""
    if routing is None:
        return None
    routing.check(num_blocks, streams)
    assert streams is not None, "refused"
    return TokenRouter(routing, streams)


class TokenRoute:
    """The route of one forward: takes the tokens that skip blocks out of the carry, and puts them
    back."""

    def __init__(self, routing: TokenRouting, streams: TokenStreams, carry: Any):
        """Choose the tokens of each sample that skip no block; arguments as of `TokenRouter`."""
        self._routing, self._streams = routing, streams
        self.unrouted: dict[str, Tensor] | None = None
        """Fields of the carry with all tokens, as long as blocks run on some of them. They go to
        other devices with the carry."""
        fields = streams.fields(carry)
        tokens = {
            names: field_at(carry, path)
            for path, names in fields.items()
            if path in streams.residual
        }
        self._lengths = {name: tokens[(name,)].shape[1] for name in streams.names}
        mask = field_at(carry, next(iter(streams.masks)))
        if mask is not None:
            mask = mask.split([*self._lengths.values()], 1)[streams.names.index(streams.routed)]
        self._chosen, self._is_token = _chosen(tokens[(streams.routed,)], mask, 1 - routing.share)

    def at(self, index: int, carry: Any, *, has_parameters: bool) -> Any:
        """The carry for a block: with some tokens in the range, but for blocks without parameters,
        which only join and rename streams."""
        is_inside = has_parameters and self._routing.first <= index <= self._routing.last
        if is_inside == (self.unrouted is not None):
            return carry
        return self._cut(carry) if is_inside else self.complete(carry)

    def _cut(self, carry: Any) -> Any:
        streams, self.unrouted = self._streams, {}
        fields = {
            path: names for path, names in streams.fields(carry).items() if streams.routed in names
        }
        masks = {
            path: names
            for path, names in masks_of(streams, carry).items()
            if streams.routed in names and field_at(carry, path) is not None
        }
        for path, names in (fields | masks).items():
            self.unrouted[path] = field_at(carry, path)
            parts = self._split(self.unrouted[path], names)
            if path in masks:
                assert self._is_token is not None, "the mask of the embedding"
                parts[streams.routed] = sent_to(self._is_token, self.unrouted[path].device)
            else:
                parts[streams.routed] = self._rows_of(parts[streams.routed])
            carry = with_field(carry, path, _joined(parts.values()))
        if streams.positions:
            device = field_at(carry, next(iter(fields))).device
            carry = with_field(carry, streams.positions, sent_to(self._chosen, device))
        return carry

    def complete(self, carry: Any) -> Any:
        """The carry with all tokens: those that skipped blocks are as they were in front of the
        range."""
        unrouted, self.unrouted = self.unrouted or {}, None
        if self._streams.positions:
            carry = with_field(carry, self._streams.positions, None)
        names = self._streams.fields(carry)
        for path, value in unrouted.items():
            if path in self._streams.residual:
                rows = self._split(field_at(carry, path), names[path])
                before = self._split(value.to(field_at(carry, path).dtype), names[path])
                routed = self._streams.routed
                value = _joined(
                    (rows | {routed: self._with_rows(before[routed], rows[routed])}).values()
                )
            carry = with_field(carry, path, value)
        return carry

    def _split(self, x: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The streams in a field, before or behind the cut."""
        lengths = [self._lengths[name] for name in names]
        if sum(lengths) != x.shape[1]:
            lengths = [
                self._chosen.shape[1] if name == self._streams.routed else self._lengths[name]
                for name in names
            ]
        return dict(zip(names, x.split(lengths, 1), strict=True))

    def _rows_of(
        self, x: Shaped[Tensor, "tables tokens *rest"]
    ) -> Shaped[Tensor, "batch chosen *rest"]:
        """The chosen tokens of each sample; of a table that all samples share, a table for each."""
        chosen = sent_to(self._chosen, x.device)
        numbers = chosen if len(x) == 1 else self._numbers(chosen)
        return x.flatten(0, 1).index_select(0, numbers.flatten()).view(*chosen.shape, *x.shape[2:])

    def _with_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """All tokens, where the chosen ones have other values."""
        chosen = sent_to(self._chosen, x.device)
        # what stands for missing tokens of a shorter sample changes nothing
        if self._is_token is not None:
            rows = torch.where(sent_to(self._is_token, x.device)[..., None], rows, self._rows_of(x))
        return (
            x.flatten(0, 1)
            .index_copy(0, self._numbers(chosen).flatten(), rows.flatten(0, 1))
            .view_as(x)
        )

    def _numbers(self, chosen: Tensor) -> Tensor:
        """Numbers of tokens among those of all samples."""
        length = self._lengths[self._streams.routed]
        return chosen + torch.arange(0, len(chosen) * length, length, device=chosen.device)[:, None]


def _joined(parts: Collection[Tensor]) -> Tensor:
    """Streams one after the other. Of a table that all samples share and one for each sample, a
    table for each sample."""
    if len(parts) == 1:
        return next(iter(parts))
    batch = max(map(len, parts))
    return torch.cat([part.expand(batch, *part.shape[1:]) for part in parts], 1)


def _chosen(
    tokens: Shaped[Tensor, "batch tokens *rest"],
    mask: Bool[Tensor, "batch tokens"] | None,
    share: float,
) -> tuple[Int64[Tensor, "batch chosen"], Bool[Tensor, "batch chosen"] | None]:
    """Indices of a random share of each sample's tokens, and which of them count in a sample that
    is shorter than the longest.

    Args:
        tokens: Tokens of all samples.
        mask: False on padding; None if there is none.
        share: Share of the tokens to choose, in (0, 1); at least one token is chosen.
    """
    batch, length = tokens.shape[:2]
    count = max(1, round(share * length))
    order = torch.rand(batch, length, device=tokens.device)
    if mask is None:
        return order.argsort(1)[:, :count], None
    counts = (share * mask.sum(1)).round().clamp(1, count)
    # Padding comes last.
    chosen = order.masked_fill(~mask, 2.0).argsort(1)[:, :count]
    return chosen, torch.arange(count, device=tokens.device) < counts[:, None]
