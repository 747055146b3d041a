"""How tokens are divided among ranks, and joined again."""

from dataclasses import replace

import pytest
import torch

from ditkit_core.distributed.context_parallel import TokenExchange
from ditkit_core.distributed.ranks import Ranks


def exchanges(num, lengths):
    return [TokenExchange(Ranks(rank, num, context=num), ("self",), lengths) for rank in range(num)]


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("lengths", [(12,), (7,), (1,), (5, 8), (3, 2, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_parts_of_all_ranks_are_all_tokens(monkeypatch, num, lengths, dtype):
    x = torch.arange(2 * sum(lengths) * 3).reshape(2, sum(lengths), 3).to(dtype)
    every = exchanges(num, lengths)
    parts = [each.rank_part(x, lengths) for each in every]
    assert {part.shape for part in parts} == {(2, sum(-(-length // num) for length in lengths), 3)}
    for each, part in zip(every, parts, strict=True):
        monkeypatch.setattr(
            each.ranks, "all_gather", lambda given: torch.stack(parts), raising=False
        )
        assert torch.equal(each.gathered(part, lengths), x)


def test_a_part_keeps_no_other_tokens_in_memory():
    x = torch.ones(1, 8, 3)
    part = exchanges(4, (8,))[1].rank_part(x, (8,))
    assert part.untyped_storage().nbytes() == x.nbytes // 4


def test_padding_is_behind_the_last_token():
    x = torch.arange(1.0, 6.0).reshape(1, 5, 1)
    parts = [each.rank_part(x, (5,)).flatten().tolist() for each in exchanges(4, (5,))]
    assert parts == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_the_gradient_of_what_all_ranks_use_alike_is_their_sum(monkeypatch):
    """Each has the same gradient, so that nothing is exchanged."""
    exchange = replace(exchanges(3, (6,))[1])
    part = torch.zeros(1, 2, 1, requires_grad=True)
    monkeypatch.setattr(
        exchange.ranks, "all_gather", lambda given: torch.stack([given] * 3), raising=False
    )
    (exchange.gathered(part, (6,)) * torch.arange(6.0).reshape(1, 6, 1)).sum().backward()
    assert part.grad.flatten().tolist() == [2 * 3, 3 * 3]
