"""What the ranks do for `training/test_sharded.py`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.shards import Shards
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.testing.replicas import EVERY, SHARDED, Divided, forked, main
from ditkit_core.testing.toy import TOY, ToyArch, ToyCarry, ToyInputs, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, training_step

DAILY = (
    "lora, five micro-batches",
    "full in bf16, stochastic",
    "lora on int8, multiplied in 8 bits",
    "lora on fp8",
    "lora on nf4",
    "lokr",
)
UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this torch sums gradients of layers that one rank alone uses. With 2.11, ranks exchange
different sizes, and gloo ends them."""
WORLDS = (
    Divided(4, 2, again=True),
    Divided(4, 4, few=("full in bf16, stochastic", "lora on fp8"), again=True),
    Divided(4, 2, context=2, few=("lokr", "lora on nf4")),
)
BOTH = (
    Divided(2, 2, context=2),
    Divided(4, 2, context=2),
    Divided(4, 4, context=2),
    Divided(4, 2, context=4),
)


def work(
    cases: Sequence[str] = tuple(SHARDED), worlds: Sequence[Divided] = (*EVERY, *BOTH)
) -> None:
    """Train the cases in one process and by ranks that divide the weights."""
    items = toy_items(6, ragged=True)
    main(
        TOY, ToyArch(dim=32, depth=2), items, worlds=(1,), continued=(), cases=cases, sharded=worlds
    )


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
    """One backward where the second rank alone uses a layer, and what the first has of whole
    weights while it reads them."""
    ranks = replace(ranks, shard=2)
    model: Any = make_model(TOY, ToyArch(dim=32, depth=2))
    torch.manual_seed(3)
    model.embed = Conditioned(model.embed)
    shards = Shards(
        model,
        trainable_parameters(model),
        Precision(matmul=torch.float32),
        ranks,
        torch.device("cpu"),
    )
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

    return {
        "gradient": [] if gradient is None else gradient.norm().item(),
        "whole": ranks.on_first(read, shards.help),
    }


class Broken(torch.autograd.Function):
    """The same tokens, with one that is not finite in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, backward: bool) -> torch.Tensor:
        ctx.backward = backward
        return tokens.clone() if backward else tokens * torch.inf

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * torch.inf, None


def weight_is_not_finite(model: Any, rank: int) -> None:
    """The last row, which the second rank has."""
    with torch.no_grad():
        model.layers[0].mlp[0].weight[-1] = torch.inf


def tokens_are_not_finite(model: Any, rank: int, *, backward: bool = False) -> None:
    plain = model.layers[1].forward
    if rank == 1:
        model.layers[1].forward = lambda carry: plain(
            carry._replace(tokens=Broken.apply(carry.tokens, backward))
        )


BREAKS = {
    "weight": weight_is_not_finite,
    "tokens": tokens_are_not_finite,
    "gradient": partial(tokens_are_not_finite, backward=True),
}


def origins(ranks: Ranks) -> dict[str, Any]:
    """What ranks say of a step that is not finite, because of a weight of which one has a part, or
    of what one of them computes."""
    found = {}
    for shard, context, trained in ((2, 1, "lora"), (2, 1, "full"), (1, 2, "full"), (2, 2, "lora")):
        together = replace(ranks, shard=shard).grouped(context)
        for trouble, broken in BREAKS.items():
            model: Any = make_model(TOY, ToyArch(dim=32, depth=2), adapter=ADAPTERS[trained])
            broken(model, ranks.rank)
            case = f"{trouble}, shard {shard}, context {context}, {trained}"
            print(case, flush=True)  # which one it was, if C++ aborts
            found[case] = origin(model, together)
    return found


def origin(model: Any, ranks: Ranks) -> Any:
    """The evidence of one step of three micro-batches, of which the second rank of two replicas has
    two."""
    trainable, shards = trainable_parameters(model), None
    if ranks.shard > 1:
        shards = Shards(
            model, trainable, Precision(matmul=torch.float32), ranks, torch.device("cpu")
        )
        trainable = shards.local
    streams = TOY.architecture.token_streams(None)
    assert streams is not None
    engine = BlockEngine(
        policy="full", context=ContextParallel(ranks, streams) if ranks.context > 1 else None
    )
    batches = [
        Batch(ids=[f"clip {place}"], items=[dict(item)]) for place, item in enumerate(toy_items(3))
    ]
    try:
        training_step(
            Model(model, engine, TOY, trainable, shards=shards), batches, NamedOptimizer(trainable,
            OptimConfig()),
            StepContext(step=0, seed=1, flow=FlowConfig(), ranks=ranks), lr=1e-3, clip_norm=0.0,
        )  # fmt: skip
    except NonFiniteLoss as error:
        return error.evidence["where"]
    raise AssertionError("the step is finite")


if __name__ == "__main__":
    work(DAILY, WORLDS)
    forked(
        2,
        lambda ranks: (seldom(ranks) if UNUSED else {}) | {"origins": origins(ranks)},
        Path(sys.argv[1]) / "two",
    )
