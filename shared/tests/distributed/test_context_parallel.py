"""What of a carry ranks divide."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.models.token_streams import TokenStreams


class Inner(NamedTuple):
    hints: Tensor


class Carry(NamedTuple):
    image: Tensor
    text: Tensor
    table: Tensor
    inner: Inner
    time: Tensor


STREAMS = TokenStreams(
    names=("text", "image"),
    fields=lambda carry: {
        "image": ("image",), "text": ("text",), "table": ("text", "image"), "inner.hints": ("image",
        ),
    },
    head=("image",),
)  # fmt: skip


def numbered(length, first=0):
    return torch.arange(first, first + length, dtype=torch.float32).reshape(1, length, 1)


def test_each_stream_is_divided_by_itself_in_every_field():
    time, whole = torch.ones(1, 5, 1), torch.cat([numbered(5, 100), numbered(8)], 1)
    carry = Carry(numbered(8), numbered(5, 100), whole, Inner(numbered(8)), time)
    cut, exchange = ContextParallel(Ranks(1, 2, context=2), STREAMS).cut(carry)
    assert cut.image.flatten().tolist() == cut.inner.hints.flatten().tolist() == [4, 5, 6, 7]
    assert cut.text.flatten().tolist() == [103, 104, 0]
    assert cut.table.flatten().tolist() == [103, 104, 0, 4, 5, 6, 7]
    assert cut.time is time, "no tokens, although it is as long as the text"
    assert exchange.lengths == (5, 8) and exchange.calls == ("self",)


@pytest.mark.parametrize("name", ["self", "image", "text"])
def test_a_call_within_a_stream_sees_the_tokens_of_that_stream_alone(monkeypatch, name):
    carry = Carry(
        numbered(8),
        numbered(5),
        torch.cat([numbered(5), numbered(8)], 1),
        Inner(numbered(8)),
        numbered(1),
    )
    streams = replace(STREAMS, within={"image": ("image",), "text": ("text",)})
    cuts = [ContextParallel(Ranks(rank, 2, context=2), streams).cut(carry) for rank in range(2)]
    tokens = [
        {"self": torch.cat([cut.text, cut.image], 1), "image": cut.image, "text": cut.text}
        for cut, _ in cuts
    ]
    # one head, which two ranks cannot divide: they gather keys and values
    parts, exchange, keys = [part[name][..., None] for part in tokens], cuts[1][1], []
    monkeypatch.setattr(
        Ranks,
        "all_gather",
        lambda self, x: torch.stack([torch.stack([part, part]) for part in parts]),
    )

    def kernel(q, k, v, padding_mask, dropout):
        keys.extend(k.flatten().tolist())
        return q

    assert name in exchange.calls
    exchange.attend(kernel, name, parts[1], parts[1], parts[1], None, 0.0)
    assert keys == {"self": [*range(5), *range(8)], "image": [*range(8)], "text": [*range(5)]}[name]
