"""What the ranks do for `training/test_sharded.py`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.sharding.shards import Shards
from ditkit_core.io.ranks import Ranks
from ditkit_core.models.precision import Precision
from ditkit_core.testing.replicas import SHARDED, Divided, forked, main
from ditkit_core.testing.toy import TOY, ToyArch, ToyCarry, ToyInputs, toy_items
from ditkit_core.testing.world import make_model

DAILY = (
    "lora, five micro-batches",
    "full in bf16, stochastic",
    "lora on int8, multiplied in 8 bits",
    "lora on nf4",
    "lokr",
)
WORLDS = (Divided(4, 2), Divided(4, 2, context=2, few=("lokr", "lora on nf4")))
EVERY = (Divided(2, 2), Divided(4, 2), Divided(4, 4))
BOTH = (Divided(2, 2, context=2), Divided(4, 2, context=2), Divided(4, 4, context=2), Divided(4, 2, context=4))


def work(cases: Sequence[str] = tuple(SHARDED), worlds: Sequence[Divided] = (*EVERY, *BOTH)) -> None:
    """Train the cases in one process and by ranks that divide the weights."""
    items = toy_items(6, ragged=True)
    main(TOY, ToyArch(dim=32, depth=2), items, worlds=(1,), continued=(), cases=cases, sharded=worlds)


class Conditioned(nn.Module):
    """An embedding with a layer that only samples with one more token of text need."""

    def __init__(self, embed: Any):
        super().__init__()
        self.embed, self.precision, self.extra = embed, embed.precision, nn.Linear(32, 32)

    def forward(self, inputs: ToyInputs) -> ToyCarry:
        carry: ToyCarry = self.embed(inputs)
        if carry.text.shape[1] == 5:
            return carry
        return carry._replace(tokens=carry.tokens + self.extra(carry.tokens))


def seldom(ranks: Ranks) -> dict[str, Any]:
    """One backward where the second rank alone uses a layer, and what the first has of whole weights while it reads them."""
    ranks.shard = 2
    model: Any = make_model(TOY, ToyArch(dim=32, depth=2))
    torch.manual_seed(3)
    model.embed = Conditioned(model.embed)
    shards = Shards(model, trainable_parameters(model), Precision(matmul=torch.float32), ranks, torch.device("cpu"))
    item = dict(toy_items(1)[0])
    if ranks.rank == 1:
        item["text"] = torch.cat([item["text"], item["text"][:1]])
    sigma = torch.tensor([0.5])
    (output,) = model(TOY.training.make_inputs([item["latents"]], sigma, [item], 1.0))
    shards.begin(last=True)
    output.square().sum().backward()
    shards.take_gradients()
    gradient = shards.local["embed.extra.weight"].grad

    def read() -> list[Any]:
        with shards.readable():
            return [[name, list(each.shape)] for name, each in trainable_parameters(model).items()]

    return {"gradient": [] if gradient is None else gradient.norm().item(), "whole": ranks.on_first(read, shards.help)}


if __name__ == "__main__":
    work(DAILY, WORLDS)
    forked(2, seldom, Path(sys.argv[1]) / "seldom")
