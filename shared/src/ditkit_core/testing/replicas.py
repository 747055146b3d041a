"""A short training run as replicas: the work of a script that `ReplicaConformance` starts once for all its cases.

The script imports everything once, and forks the ranks of every world: a process that has not computed yet may fork, and starting one
costs seconds of imports. What a case writes is compared by the tests, in their own process.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.io.files import json_hash
from ditkit_core.io.ranks import Ranks
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.world import ADAPTERS, Items, make_model
from ditkit_core.training.config import EMAConfig, FlowConfig, HeldOutConfig, SaveConfig, TrainConfig
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optimizers import OptimConfig
from ditkit_core.training.train_model import TrainModel
from ditkit_core.training.trainer import Trainer, TrainerConfig
from ditkit_core.training.validation import Validator

STEPS = 6


@dataclass(frozen=True)
class Case:
    """The settings of one run."""

    trained: str
    """A name of `ADAPTERS`."""
    accumulation: int = 4
    prior: bool = False
    """Whether class images follow each micro-batch."""
    dtype: torch.dtype = torch.float32
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=3e-3, warmup_steps=3))
    decay: float = 0.9
    """Of the average."""


CASES = {
    "lora with dropout": Case("lora with dropout"),
    "lora, five micro-batches": Case("lora", accumulation=5, decay=0.0),
    "lora, eight micro-batches": Case("lora", accumulation=8, decay=0.0),
    "lora in bf16": Case("lora", dtype=torch.bfloat16),
    "dora with prior": Case("dora", prior=True, accumulation=3),
    "schedule-free": Case("lora", optim=OptimConfig(name="schedulefree_adamw", lr=0.01), decay=0.0),
    "full": Case("full"),
}
"""All are bitwise identical on any number of ranks but the full fine-tune, whose gradients are summed rank by rank."""


class _Data:
    """Micro-batches of one or two samples, ragged where the items are."""

    def __init__(self, items: Items, *, prior: bool):
        self._items, self._prior = items, prior

    def micro_batches(self, index: int) -> list[Batch]:
        """Uneven ones, each counted for 1.5 samples."""
        made = [self._batch(range(index * 2, index * 2 + 1 + index % 2), counted=1.5)]
        return [*made, self._batch([index + 1], counted=0.0)] if self._prior else made

    def _batch(self, places: Sequence[int], counted: float) -> Batch:
        chosen = [place % len(self._items) for place in places]
        items = [dict(self._items[place]) for place in chosen]
        return Batch(ids=[f"clip {place}" for place in chosen], items=items, counted=counted)


@dataclass
class CountedRanks(Ranks):
    """Ranks that count their exchanges."""

    exchanges: int = 0

    @contextmanager
    def _exchange(self, tensor: Tensor | None = None) -> Iterator[None]:
        self.exchanges += 1
        with super()._exchange(tensor):
            yield


@dataclass(frozen=True)
class Replicas:
    """A family's model and data, and where its runs are written."""

    spec: ModelSpec
    arch: Any
    items: Items
    folder: Path
    cases: Sequence[str]
    """Names of `CASES`."""

    def every(self, ranks: Ranks) -> dict[str, Any]:
        """Train all cases, and return this rank's results by case."""
        return {name: self.train(name, type(ranks)(ranks.rank, ranks.size)) for name in self.cases}

    def train(self, name: str, ranks: Ranks, *, steps: int = STEPS, into: str = "") -> dict[str, Any]:
        """Train a case until `steps`, in a folder named after the number of ranks, and return this rank's results for JSON."""
        case = CASES[name]
        model = make_model(self.spec, self.arch, dtype=case.dtype, adapter=ADAPTERS[case.trained])
        trainable = trainable_parameters(model)
        made = TrainModel(model, BlockEngine(policy="full"), self.spec, trainable)  # type: ignore[arg-type]
        held = Batch(ids=["held 0", "held 1", "held 2"], items=[dict(self.items[place]) for place in (0, 1, 0)])
        trainer = Trainer(
            made,
            _Data(self.items, prior=case.prior),
            TrainerConfig(
                train=TrainConfig(steps=steps, accumulation=case.accumulation, seed=5, sentinels=2, clip_norm=0.1),
                flow=FlowConfig(weighting="bell"),
                optim=case.optim,
                ema=EMAConfig(decay=case.decay),
                save=SaveConfig(every_steps=3, keep_last=9),
                log=LogConfig(tensorboard=False),
            ),
            folder=self.folder / (into or f"{name} on {ranks.size}"),
            validator=Validator(HeldOutConfig(sigmas=(0.3, 0.8)), held),
            ranks=ranks,
        )
        result = trainer.fit()
        digest = json_hash({key: value.detach().double().tolist() for key, value in trainable.items()})
        exchanges = ranks.exchanges if isinstance(ranks, CountedRanks) else 0
        return {"weights": digest, "held_out": result.held_out, "exchanges": exchanges}


def forked(num: int, work: Callable[[Ranks], Any], folder: Path) -> list[Any]:
    """The results of the work in `num` processes that are forked from this one and connected by gloo.

    Raises:
        AssertionError: If one fails; what it printed is in the output of this process.
    """
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, num, work, folder)) for rank in range(num)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(250)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert not any(codes) and None not in codes, f"{num} ranks ended with {codes}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num)]


def _rank(rank: int, num: int, work: Callable[[Ranks], Any], folder: Path) -> None:
    if num == 1:
        found = work(Ranks())
    else:
        meeting = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num, timeout=timedelta(seconds=100))
        found = work(CountedRanks(rank, num))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if num > 1:
        dist.barrier()  # the others may still be reading from this one
        dist.destroy_process_group()


FEW = ("lora with dropout", "lora in bf16", "dora with prior", "full")


def main(
    spec: ModelSpec,
    arch: Any,
    items: Items,
    *,
    worlds: Sequence[int] = (1, 3),
    continued: Sequence[tuple[int, int]] = ((3, 1),),
    cases: Sequence[str] = FEW,
) -> None:
    """The work of a script: cases in every world, and runs that go on with another number of ranks.

    Args:
        spec: The model family.
        arch: A small architecture.
        items: Training samples of one size or of several.
        worlds: Numbers of ranks, 1 among them.
        continued: Pairs: a run is trained by the first number of ranks until its middle, and by the second to its end.
        cases: Names of `CASES`.
    """
    torch.set_num_threads(1)
    make_model(spec, arch, adapter=ADAPTERS["lora"])  # imports peft, which else each of the processes would do
    folder = Path(sys.argv[1])
    replicas = Replicas(spec, arch, items, folder, cases)
    ranks_of: dict[str, Any] = {}
    for num in worlds:
        ranks_of[str(num)] = forked(num, replicas.every, folder / f"world {num}")
    name = "lora with dropout"
    for first, second in continued:
        into = f"{name} on {first} then {second}"
        for num, steps in ((first, STEPS // 2), (second, STEPS)):
            half = partial(replicas.train, name, steps=steps, into=into)
            forked(num, half, folder / f"{into} {steps}")
    (folder / "ranks.json").write_text(json.dumps(ranks_of))
