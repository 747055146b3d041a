"""Tokens that skip blocks: how a range is written, which tokens are chosen, and that a run is the
same however it is interrupted.

`RoutingChecks` compares predictions and gradients of each model with an explicit construction,
`LeverChecks` has the other levers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from toy_world import World, equal

from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.token_route import TokenRouter
from ditkit_core.engine.token_routing import TokenRouting
from ditkit_core.errors import UserError
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.testing.toy import TOY, ToyArch, ToyBlock, toy_items
from ditkit_core.testing.world import make_model

ARCH = ToyArch(depth=4)
STREAMS = TOY.architecture.token_streams(ARCH)


def test_a_range_is_read_and_written() -> None:
    routing = TokenRouting.parse(" 2-25 = .5 ")
    assert routing == TokenRouting(2, 25, 0.5) and str(routing) == "2-25=0.5"
    assert TokenRouting.parse("") is None


@pytest.mark.parametrize("text", ["0.5", "2-1=0.5", "2-3=0", "2-3=1", "2-3=1.5", "2-=0.5", "2-3=0.5, 5-6=0.5", "-2-3=0.5", "2-3=nan"])  # fmt: skip
def test_other_texts_are_refused_in_a_line(text: str) -> None:
    with pytest.raises(
        UserError, match="train.token_routing = .* must be blocks and the share of tokens"
    ) as caught:
        TokenRouting.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (
            STREAMS,
            "the model has the blocks 0 to 3; end the range at one of them, such as '2-2=0.5'",
        ),
        (None, "this architecture has no tokens that may skip blocks"),
        (
            TokenStreams(fields=lambda carry: {}),
            "this architecture has no tokens that may skip blocks",
        ),
    ],
)
def test_models_without_such_blocks_are_refused(streams: TokenStreams | None, message: str) -> None:
    TokenRouting(1, 3, 0.5).check(4, STREAMS)
    with pytest.raises(UserError, match=message):
        TokenRouting(1, 4, 0.5).check(4, streams)


def test_ranks_that_share_tokens_are_refused() -> None:
    assert STREAMS is not None
    with pytest.raises(
        UserError, match="train.token_routing and ranks.context both divide a sample's tokens"
    ):
        BlockEngine(
            router=TokenRouter(TokenRouting(0, 1, 0.5), STREAMS),
            context=ContextParallel(Ranks(), STREAMS),
        )


def routed(share: float, first: int = 1, last: int = 2) -> BlockEngine:
    assert STREAMS is not None
    return BlockEngine(router=TokenRouter(TokenRouting(first, last, share), STREAMS))


def test_a_share_of_each_samples_tokens_skips_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to whole tokens of each sample; those of a shorter sample are padded, and other
    tokens each time."""
    model: Any = make_model(TOY, ARCH)
    sizes, values, forward = [], [], ToyBlock.forward

    def watched(block: Any, carry: Any) -> Any:
        sizes.append((tuple(carry.tokens.shape[:2]), carry.padding_mask))
        return forward(block, carry)

    monkeypatch.setattr(ToyBlock, "forward", watched)
    items = toy_items(2, ragged=True)
    lengths = [TOY.training.num_tokens(item) for item in items]
    assert lengths[0] != lengths[1]
    inputs = TOY.training.make_inputs(
        [item["latents"] for item in items], torch.tensor([0.3, 0.6]), items, 1.0
    )
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(model(inputs, routed(0.25))[0])
        shapes, masks = zip(*sizes, strict=True)
        sizes.clear()
        most, kept = max(lengths), [round(0.75 * length) for length in lengths]
        assert shapes == ((2, most), (2, max(kept)), (2, max(kept)), (2, most))
        for mask, counts in zip(masks, (lengths, kept, kept, lengths), strict=True):
            assert mask.sum(1).tolist() == counts and all(
                row[:n].all() for row, n in zip(mask, counts, strict=True)
            )
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_the_blocks_have_less_arithmetic() -> None:
    model: Any = make_model(TOY, ARCH)
    items = toy_items(1)
    inputs = TOY.training.make_inputs([items[0]["latents"]], torch.tensor([0.3]), items, 1.0)
    counts = []
    for engine in (BlockEngine(), routed(0.5, 0, 3)):
        with FlopCounterMode(display=False) as counter:
            engine(model, inputs)
        counts.append(counter.get_total_flops())
    # of the blocks half or less, of text and ends all
    assert 0.4 < counts[1] / counts[0] < 0.6, counts


def test_an_interrupted_run_is_the_uninterrupted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    flags = ("--train.token_routing", "0-1=0.5", "--held_out.clips", "1", "--sample.captions", "0")
    assert world.train("whole", 2, *flags) == 0
    assert world.train("parts", 1, *flags) == 0
    assert world.train("parts", 2, *flags, "--train.checkpointing", "full") == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))
    assert world.train("plain", 2, "--held_out.clips", "1", "--sample.captions", "0") == 0
    assert not equal(world.adapter("whole"), world.adapter("plain"))
    capsys.readouterr()
    assert world.train("deep", 1, "--train.token_routing", "0-2=0.5") == 1
    assert "the model has the blocks 0 to 1" in capsys.readouterr().err
