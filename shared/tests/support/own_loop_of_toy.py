"""Ranks that divide a model's weights in a loop of their own, for `api/test_load_ranks.py`, and the
same loop in one process."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ditkit_core.adapters.config import AdapterConfig, LoraConfig
from ditkit_core.api.load import load
from ditkit_core.encoding.loader import Batch
from ditkit_core.loading.model import Model
from ditkit_core.testing.ranks import as_rank
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, official_name, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import TrainConfig
from ditkit_core.training.micro_batch import flow_loss
from ditkit_core.training.trainer import Trainer, TrainerConfig

SPEC = altered(TOY, presets={"tiny": ToyArch()})
LORA = LoraConfig(r=4)
ITEMS = toy_items(2)


class Data:
    """A micro-batch of each item."""

    def micro_batches(self, index: int) -> list[Batch]:
        return [Batch(ids=[str(index % 2)], items=[ITEMS[index % 2]])]


def base_of(folder: Path) -> Path:
    file = folder / "toy.safetensors"
    if not file.exists():
        state = make_model(TOY, ToyArch()).state_dict()
        save_file(
            {official_name(name): tensor.contiguous() for name, tensor in state.items()}, file
        )
    return file


def trained(model: Model, ranks: range) -> Model:
    """Three steps of SGD; each of these ranks has an item, and noise by its number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        for rank in ranks:
            random = torch.Generator().manual_seed(10 * step + rank)
            (flow_loss(model, [ITEMS[rank]], generator=random) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def work(folder: Path) -> dict[str, Any]:
    """What a rank has and writes: a file of its own loop, and one of a Trainer's."""
    rank, size, base = dist.get_rank(), dist.get_world_size(), folder / "toy.safetensors"
    found: dict[str, Any] = {}
    for name, adapter in (("lora", LORA), ("lokr", AdapterConfig(method="lokr", rank=2))):
        model = load(SPEC, base, adapter, dtype="fp32", shard=size)
        parameters = list(model.parameters())
        trained(model, range(rank, rank + 1))
        model.save_adapter(folder / f"{name}.safetensors", dtype="fp32")
        found[name] = [
            all(isinstance(each, DTensor) for each in parameters),
            sum(p.to_local().numel() for p in parameters),
            sum(p.numel() for p in parameters),
        ]
    model = load(SPEC, base, LORA, dtype="fp32", shard=size)
    config = TrainerConfig(train=TrainConfig(steps=2, accumulation=2))
    found["step"] = Trainer(model, Data(), config, folder=folder / "run").fit().step
    model.save_adapter(folder / "trainer.safetensors", dtype="fp32")
    return found


if __name__ == "__main__":
    as_rank(lambda: work(Path(sys.argv[1])))
