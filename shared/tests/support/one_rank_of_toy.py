"""The toy's train command on two ranks that torchrun's own agent starts, where one rank alone has a trouble: for `commands/test_one_rank.py`.

The agent forks the ranks from this process, which has imported everything.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from toy_world import World
from two_experts import TwoExperts

from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.previews import exchange
from ditkit_core.testing.toy import TOY, ToyArch, ToySampler
from ditkit_core.testing.world import ADAPTERS, make_model
from ditkit_core.training import checkpoint, train_step, trainer

STEPS = 4
FLAGS = [
    *("--train.device", "cpu", "--encode.device", "cpu"),
    *("--train.accumulation", "3", "--train.threads", "1", "--train.checkpointing", "none"),
    *(
        "--held_out.clips",
        "1",
        "--ema.decay",
        "0.9",
        "--optim.lr",
        "0.01",
        "--sample.prompts",
        '["a cat", "a dog", "a bird"]',
    ),
    *("--ranks.timeout", "60", "--save.keep_last", "9"),
]
UNSAVED = ("stopped", "fast clock of 0", "fast clock of 1")
"""Cases without a schedule of saves and samples."""
SAVED = ("--save.every_steps", "2", "--sample.every_steps", "2")


def at_step(number: int, act: Callable[[], None]) -> None:
    """Act before a step of this start, counted from 1."""
    step, count = trainer.training_step, itertools.count(1)

    def acting(*given: Any, **named: Any) -> Any:
        if next(count) == number:
            act()
        return step(*given, **named)

    trainer.training_step = acting  # type: ignore[attr-defined]


def is_stopped() -> None:
    at_step(2, lambda: os.kill(os.getpid(), 15))


def has_no_memory() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    at_step(3, fail)


def is_not_finite() -> None:
    errors, broken = train_step.velocity_errors, list[bool]()

    def with_nan(*given: Any, **named: Any) -> Any:
        found = errors(*given, **named)
        return found * float("nan") if broken else found

    train_step.velocity_errors = with_nan  # type: ignore[attr-defined]
    at_step(3, lambda: broken.append(True))


def cannot_save() -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    at_step(3, lambda: setattr(checkpoint, "save_file", fail))


def cannot_read() -> None:
    load, count = EncodedSample.load, itertools.count(1)

    def failing(sample: EncodedSample, *given: Any, **named: Any) -> Any:
        if next(count) >= 8:  # the background thread tries first
            raise UserError("a disk that is gone")
        return load(sample, *given, **named)

    EncodedSample.load = failing  # type: ignore[method-assign]


def cannot_sample() -> None:
    """The sample of the second preview is broken."""
    decode, count = ToySampler.decode, itertools.count(1)

    def failing(sampler: ToySampler, latents: torch.Tensor) -> torch.Tensor:
        return decode(sampler, latents) * (float("nan") if next(count) >= 2 else 1)

    ToySampler.decode = failing  # type: ignore[method-assign]


def lacks_an_expert() -> None:
    exchange.why_no_samples = lambda run: "a file is missing"  # type: ignore[attr-defined]


def has_a_fast_clock() -> None:
    """An hour passes each time that the loop looks."""
    hours = itertools.count(0, 3600)
    trainer.time = SimpleNamespace(monotonic=lambda: float(next(hours)), perf_counter=time.perf_counter)  # type: ignore[attr-defined]


CASES: dict[str, tuple[Callable[[], None], int]] = {
    "alone": (lambda: None, 0),
    "plain": (lambda: None, 0),
    "stopped": (is_stopped, 1),
    "no memory": (has_no_memory, 1),
    "not finite": (is_not_finite, 1),
    "cannot save": (cannot_save, 0),
    "cannot read": (cannot_read, 1),
    "cannot sample": (cannot_sample, 1),
    "fast clock of 0": (has_a_fast_clock, 0),
    "fast clock of 1": (has_a_fast_clock, 1),
    "other flags": (lambda: FLAGS.extend(["--train.seed", "7"]), 1),
    "experts of one": (lacks_an_expert, 1),
    **dict.fromkeys(("sampled again", "adapter alone", "adapter", "experts alone", "experts"), (lambda: None, 0)),
}
"""What one rank has, and which of the two it is."""
FEW = (*SAVED, "--sample.steps", "2")
"""One step of each expert."""
ADAPTER = (*SAVED, "--sample.adapter", "alone/exports/alone.safetensors")
MORE = {
    **dict.fromkeys(UNSAVED, ()),
    "adapter alone": ADAPTER,
    "adapter": (*ADAPTER, "--ranks.shard", "2", "--ranks.context", "2"),
    **dict.fromkeys(("experts of one", "experts alone", "experts"), FEW),
}
"""Flags of cases that have other ones than `SAVED`."""


def work(folder: Path, name: str) -> None:
    """What a rank does."""
    rank, (trouble, whose) = int(os.environ["RANK"]), CASES[name]
    with (folder / f"{name} {rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if rank == whose:
        trouble()
    os.chdir(folder)
    world = EXPERTS[folder] if name.startswith("experts") else WORLDS[folder]
    sys.exit(world.train(name, STEPS, *FLAGS, *MORE.get(name, SAVED)))


WORLDS: dict[Path, World] = {}
EXPERTS: dict[Path, World] = {}


def launch(what: Callable[..., None], folder: Path, name: str, *, num: int = 2, restarts: int = 0) -> dict[str, Any]:
    """Run a case: which ranks torchrun says have failed, and the message that it has of the first."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num, run_id=name, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=restarts, start_method="fork", monitor_interval=0.05, local_addr="localhost",
    )  # fmt: skip
    try:
        elastic_launch(config, what)(folder, name)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return {"codes": {each: found.exitcode for each, found in error.failures.items()}, "said": str(failure.message)}
    return {"codes": {}}


def prepare(folder: Path) -> None:
    """Make what the ranks read, and import what they need."""
    torch.set_num_threads(1)
    make_model(TOY, ToyArch(), adapter=ADAPTERS["lora"])  # imports peft
    WORLDS[folder] = World(folder)


if __name__ == "__main__":
    into, chosen = Path(sys.argv[1]), sys.argv[2:] or CASES
    prepare(into)
    EXPERTS[into] = TwoExperts(into)
    made = {}
    for each in chosen:
        if each == "sampled again":
            copytree(into / "cannot sample", into / each)
        made[each] = launch(work, into, each, num=1 if "alone" in each else 2)
    (into / "cases.json").write_text(json.dumps(made))
