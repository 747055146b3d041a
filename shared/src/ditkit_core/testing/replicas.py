"""A short training run as replicas: the work of a script that `ReplicaConformance` starts once for
all its cases.

The script imports everything once, and forks the ranks of every world: a process that has not
computed yet may fork, and starting one costs seconds of imports. What a case writes is compared by
the tests, in their own process.
"""

import faulthandler
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any, Literal, NamedTuple

import torch

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.fsdp import keeps_wide_gradients, shards_integers
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.shards import Shards
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.io.files import json_hash
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.conformance_routing import routing_of
from ditkit_core.testing.ranks import joined
from ditkit_core.testing.recorded_graph import recorded_graphs
from ditkit_core.testing.world import ADAPTERS, Items, differing, make_model, masked
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
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
    """Whether class images follow each micro-batch, and every other step matches the base."""
    dtype: torch.dtype = torch.float32
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=3e-3, warmup_steps=3))
    decay: float = 0.9
    """Of the average."""
    quantize: str = "none"
    """Form of the base."""
    policy: str = "full"
    routed: bool = False
    """Whether tokens skip blocks."""
    cuda_graphs: Literal["on", "off"] = "off"


CASES = {
    "lora with dropout": Case("lora with dropout"),
    "lora, five micro-batches": Case("lora", accumulation=5, decay=0.0, cuda_graphs="on"),
    "lora, eight micro-batches": Case("lora", accumulation=8, decay=0.0),
    "lora in bf16": Case("lora", dtype=torch.bfloat16),
    "dora with prior": Case("dora", prior=True, accumulation=3),
    "lokr": Case("lokr", policy="attn_only"),
    "schedule-free": Case("lora", optim=OptimConfig(name="schedulefree_adamw", lr=0.01), decay=0.0),
    "full": Case("full"),
}
"""All are bitwise identical on any number of ranks but the full fine-tune, whose gradients are
summed rank by rank."""

SHARDED = {
    **{
        name: CASES[name]
        for name in (
            "lora with dropout",
            "lora, five micro-batches",
            "lora in bf16",
            "dora with prior",
            "lokr",
            "full",
        )
    },
    "full in bf16, split": Case(
        "full",
        dtype=torch.bfloat16,
        optim=OptimConfig(lr=1e-3, rounding="split"),
        policy="attn_only",
    ),
    "full in bf16, stochastic": Case(
        "full", dtype=torch.bfloat16, optim=OptimConfig(lr=1e-3, rounding="stochastic"), decay=0.0
    ),
    "lora on int8": Case("lora", quantize="int8", policy="attn_only"),
    "lora on fp8": Case("lora", quantize="fp8", policy="none"),
    "lora on int8, multiplied in 8 bits": Case("lora", quantize="int8 computed"),
    "lora on nf4": Case("lora", quantize="nf4", dtype=torch.bfloat16),
    "loha on nf4": Case("loha", quantize="nf4", dtype=torch.bfloat16),
    "lora, tokens skip blocks": Case("lora", routed=True),
    "lora on nvfp4": Case("lora", quantize="nvfp4", dtype=torch.bfloat16),
    "lora on rotated int8, multiplied in 8 bits": Case("lora", quantize="int8_rotated_16 computed"),
}
"""Runs whose weights ranks divide; sums over ranks are taken in another order than in one
process."""

BRIEF = {
    "brief lora": Case("lora", accumulation=3, dtype=torch.bfloat16, decay=0.0, policy="none"),
    "brief full": Case("full", accumulation=2, decay=0.0),
    **{
        f"brief full, {rounding}": replace(
            SHARDED[f"full in bf16, {rounding}"], accumulation=2, decay=0.0, policy="none"
        )
        for rounding in ("stochastic", "split")
    },
    "brief lora on nf4": replace(
        SHARDED["lora on nf4"], accumulation=2, decay=0.0, policy="attn_only"
    ),
}
"""Runs in which all Triton kernels of blocks and updates run, with few micro-batches: Triton's
interpreter is slow."""

_KNOWN = CASES | SHARDED | BRIEF


def can_divide(name: str) -> bool:
    """Whether this torch divides the weights of such a run. A run of the others is refused: torch
    2.11 rounds summed gradients, and shards no integers."""
    case = _KNOWN[name]
    rounds = case.trained == "full" and case.dtype == torch.bfloat16 and not keeps_wide_gradients()
    return not rounds and (
        shards_integers() or not case.quantize.startswith(("int8", "nf4", "nvfp4"))
    )


class _Data:
    """Micro-batches of one or two samples, ragged where the items are."""

    def __init__(self, items: Items, case: Case):
        self._items, self._case = masked(items), case

    def micro_batches(self, index: int) -> list[Batch]:
        """Uneven ones, each counted for 1.5 samples."""
        batches = [self._batch(range(index * 2, index * 2 + 1 + index % 2), counted=1.5)]
        if not self._case.prior:
            return batches
        # As the loader's: all of a step or none, since ranks that divide the weights gather them
        # for one more forward together.
        matches_base = index // self._case.accumulation % 2 == 1
        batches.append(self._batch([index + 1], counted=0.0))
        return [replace(batch, matches_base=matches_base) for batch in batches]

    def _batch(self, positions: Sequence[int], counted: float) -> Batch:
        chosen = [position % len(self._items) for position in positions]
        items = [dict(self._items[index]) for index in chosen]
        return Batch(ids=[f"clip {index}" for index in chosen], items=items, counted=counted)


@dataclass
class CountedRanks(Ranks):
    """Ranks that count their exchanges."""

    exchanges: int = 0

    @contextmanager
    def exchange(self, num_bytes: int) -> Iterator[None]:
        """One more."""
        self.exchanges += 1
        with super().exchange(num_bytes):
            yield


class Divided(NamedTuple):
    """Ranks; some of them divide the weights, and some share tokens."""

    size: int
    shard: int
    context: int = 1
    few: tuple[str, ...] = ()
    """The cases that it trains; empty for all."""
    again: bool = False
    """Whether it also trains the second half of each case again, from the save in its middle."""

    def cases(self, names: Sequence[str]) -> list[str]:
        """The cases among these names that it trains."""
        allowed = [name for name in names if self.context == 1 or not _KNOWN[name].routed]
        return [
            name
            for name in allowed
            if name in (self.few or names) and (self.shard == 1 or can_divide(name))
        ]

    def __str__(self) -> str:
        return f"{self.size} by {self.shard}{f' of {self.context}' * (self.context > 1)}"


EVERY = (Divided(2, 2, again=True), Divided(4, 2, again=True), Divided(4, 4, again=True))
"""Two ranks that divide the weights, two groups of two, and four."""


@dataclass(frozen=True)
class Replicas:
    """A family's model and data, and where its runs are written."""

    spec: ModelSpec
    arch: Any
    items: Items
    folder: Path
    cases: Sequence[str]
    """Names of `CASES`, `SHARDED` or `BRIEF`."""
    divided: Divided = field(default_factory=lambda: Divided(1, 1))
    kernels: Literal["torch", "triton"] = "torch"
    held_out: Sequence[int] = (0, 1, 0)
    """Places of the held-out items."""

    def every(self, ranks: Ranks) -> dict[str, Any]:
        """Train all cases, and return this rank's results by case."""
        divided_ranks, results = self.of(ranks), dict[str, Any]()
        for name in self.divided.cases(self.cases):
            results[name] = self.train(name, replace(divided_ranks))
            if self.divided.again:
                self._train_again(name, replace(divided_ranks))
        return results

    def _train_again(self, name: str, ranks: Ranks) -> None:
        """Train the second half of a case in a copy of its run, which ends with the save in its
        middle."""
        run = self.folder / f"{name} on {self.divided}"
        again = run.with_name(f"{run.name} again")
        if ranks.is_first:
            copytree(run, again, ignore=ignore_patterns(f"step-{STEPS:06d}"))
        ranks.barrier()
        self.train(name, ranks, into=again.name)

    def shared(self, context: int, ranks: Ranks) -> dict[str, Any]:
        """Train the cases by ranks that share tokens, and return this rank's results by case."""
        ranks, into = ranks.grouped(context), f"on {ranks.size // context} of {context}"
        return {
            name: self.train(name, replace(ranks), into=f"{name} {into}") for name in self.cases
        }

    def loaded(self, ranks: Ranks, runs: Sequence[tuple[str, str]]) -> dict[str, bool]:
        """By run, whether its last save is bitwise the same after it was loaded; runs by folder and
        case."""
        return {
            into: self._loaded(name, into, replace(divided_ranks))
            for divided_ranks in [self.of(ranks)]
            for into, name in runs
        }

    def of(self, ranks: Ranks) -> Ranks:
        """These ranks, as they divide weights and share tokens."""
        return replace(ranks, shard=self.divided.shard).grouped(self.divided.context)

    def _loaded(self, name: str, into: str, ranks: Ranks) -> bool:
        model = self.model_of(name, ranks)
        state = TrainState(
            model.module,
            model.trainable,
            SHARDED[name].optim,
            EMAConfig(decay=SHARDED[name].decay),
            shards=model.shards,
        )
        folder = self.folder / into / "state" / f"step-{STEPS:06d}"
        state.load_state_dict(load_state(folder, model.shards), folder)
        again, saved = state.state_dict(), load_state(folder)
        if model.shards is not None:
            again = replace(again, tensors=model.shards.unsharded(again.tensors))
        if not ranks.is_first:
            return True
        return not any(
            differing(again.tensors[group], expected) for group, expected in saved.tensors.items()
        )

    def model_of(self, name: str, ranks: Ranks) -> Model:
        """The model of a case, divided if ranks divide weights."""
        case = _KNOWN[name]
        model = make_quantized(
            self.spec, self.arch, case.quantize, dtype=case.dtype, adapter=ADAPTERS[case.trained]
        )
        trainable, shards = trainable_parameters(model), None
        streams = self.spec.architecture.token_streams(self.arch)
        context = (
            ContextParallel(ranks, streams) if ranks.context > 1 and streams is not None else None
        )
        if ranks.shard > 1:
            shards = Shards(
                model, trainable, Precision(matmul=case.dtype), ranks, torch.device("cpu")
            )
            trainable = shards.local
        router = (
            routing_of(self.spec, self.arch, model) if case.routed and context is None else None
        )
        engine = BlockEngine(
            policy=case.policy, kernels=self.kernels, context=context, router=router
        )
        return Model(model, engine, self.spec, trainable, shards=shards)

    @recorded_graphs()
    def train(
        self, name: str, ranks: Ranks, *, steps: int = STEPS, into: str = ""
    ) -> dict[str, Any]:
        """Train a case until `steps`, in a folder named after the number of ranks, and return this
        rank's results for JSON."""
        case, model = _KNOWN[name], self.model_of(name, ranks)
        held_batch = Batch(
            ids=[f"held {index}" for index in range(len(self.held_out))],
            items=[dict(self.items[index]) for index in self.held_out],
        )
        trainer = Trainer(
            model,
            _Data(self.items, case),
            TrainerConfig(
                train=TrainConfig(
                    steps=steps,
                    accumulation=case.accumulation,
                    seed=5,
                    sentinels=2,
                    clip_norm=0.1,
                    kernels=self.kernels,
                    cuda_graphs=case.cuda_graphs,
                ),
                flow=FlowConfig(weighting="bell"),
                optim=case.optim,
                ema=EMAConfig(decay=case.decay),
                save=SaveConfig(every_steps=3, keep_last=9),
                log=LogConfig(tensorboard=False),
            ),
            folder=self.folder
            / (into or f"{name} on {self.divided if self.divided.size > 1 else ranks.size}"),
            validator=Validator(HeldOutConfig(sigmas=(0.3, 0.8)), held_batch),
            ranks=ranks,
        )
        result = trainer.fit()
        values = (
            {}
            if ranks.shard > 1
            else {key: value.detach().double().tolist() for key, value in model.trainable.items()}
        )
        digest = json_hash(values)
        exchanges = ranks.exchanges if isinstance(ranks, CountedRanks) else 0
        return {"weights": digest, "held_out": result.held_out, "exchanges": exchanges}


def forked(num: int, work: Callable[[Ranks], Any], folder: Path) -> list[Any]:
    """The results of the work in `num` processes that are forked from this one and connected by
    gloo.

    Raises:
        AssertionError: If one fails, with the beginning and the end of what each printed: C++ says
            why it aborts, and then come the stacks.
    """
    folder.mkdir(parents=True)
    # A run collects garbage: its ranks need not look through what this process has imported.
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(rank, num, work, folder)) for rank in range(num)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(250)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if any(codes) or None in codes:
        logs = (_log(folder, rank).read_text(errors="replace") for rank in range(num))
        half = _SHOWN // num // 2
        ends = (
            text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"
            for text in logs
        )
        raise AssertionError(
            "\n".join(
                [
                    f"{num} ranks ended with {codes}",
                    *(f"rank {rank}: {end}" for rank, end in enumerate(ends)),
                ]
            )
        )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num)]


_SHOWN = 16000
"""Characters of what all ranks printed that a failure shows: a little less than what `scripts.py:
output_of` shows of a script."""


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def _rank(rank: int, num: int, work: Callable[[Ranks], Any], folder: Path) -> None:
    output = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()  # where it is, if C++ aborts
    with joined(rank, num, folder) if num > 1 else nullcontext():
        result = work(CountedRanks(rank, num) if num > 1 else Ranks())
        (folder / f"{rank}.json").write_text(json.dumps(result))


FEW_SHARDED = ("lora, five micro-batches", "full", "full in bf16, split", "lora on int8")
"""Of `SHARDED`, the cases of a family; the core's own model has more."""


def main(
    spec: ModelSpec,
    arch: Any,
    items: Items,
    *,
    worlds: Sequence[int],
    cases: Sequence[str],
    continued: Sequence[tuple[int, int]] = (),
    sharded: Sequence[Divided] = (),
    shared: Sequence[tuple[int, int]] = (),
) -> None:
    """The work of a script: cases in every world, and runs that go on with another number of ranks.
    A second call adds to the first.

    Args:
        spec: The model family.
        arch: A small architecture.
        items: Training samples of one size or of several.
        worlds: Numbers of ranks, 1 among them.
        continued: Pairs: a run is trained by the first number of ranks until its middle, and by the
            second to its end.
        cases: Names of `CASES` or `SHARDED`.
        sharded: Worlds that divide the weights.
        shared: Pairs: so many ranks in context groups of so many.
    """
    torch.set_num_threads(1)
    # imports peft, which else each of the processes would do
    make_model(spec, arch, adapter=ADAPTERS["lora"])
    folder = Path(sys.argv[1])
    replicas = Replicas(spec, arch, items, folder, cases)
    table = folder / "ranks.json"
    ranks_of: dict[str, Any] = json.loads(table.read_text()) if table.exists() else {}
    for num in worlds:
        ranks_of[str(num)] = forked(num, replicas.every, folder / f"world {num}")
    for world in sharded:
        work = replace(replicas, divided=world).every
        ranks_of[str(world)] = forked(world.size, work, folder / f"world {world}")
    for world in (Divided(1, 1), *sharded) if sharded else ():
        runs = [
            (f"{name} on {other if other.size > 1 else 1}", name)
            for other in (Divided(1, 1), *sharded)
            for name in other.cases(world.cases(cases))
            if other != world
        ]
        work = partial(replace(replicas, divided=world).loaded, runs=runs)
        ranks_of[f"loaded on {world}"] = forked(world.size, work, folder / f"loaded on {world}")
    for num, context in shared:
        results = forked(
            num, partial(replicas.shared, context), folder / f"world {num} of {context}"
        )
        ranks_of[f"{num // context} of {context}"] = results
    name = "lora with dropout"
    for first, second in continued:
        into = f"{name} on {first} then {second}"
        for num, steps in ((first, STEPS // 2), (second, STEPS)):
            half = partial(replicas.train, name, steps=steps, into=into)
            forked(num, half, folder / f"{into} {steps}")
    table.write_text(json.dumps(ranks_of))
