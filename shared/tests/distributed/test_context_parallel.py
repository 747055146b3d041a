"""What of a carry ranks divide."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
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
        "image": ("image",), "text": ("text",), "table": ("text", "image"), "inner.hints": ("image",),
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


def test_blocks_that_share_tokens_are_not_compiled():
    with pytest.raises(UserError, match="compiled blocks cannot share a sample's tokens"):
        BlockEngine(compile=True, context=ContextParallel(Ranks(0, 2, context=2), STREAMS))
