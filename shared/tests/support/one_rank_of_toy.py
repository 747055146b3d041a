"""The toy's train command on two ranks that torchrun's own agent starts, where one rank alone has a
trouble: for `commands/test_one_rank.py`.

The agent forks the ranks from this process, which has imported everything.
"""

import gc
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from types import SimpleNamespace
from typing import Any

import torch
from cases_at_once import launch, run_cases
from gathered import log_gathered
from made_runs import write_run
from safetensors.torch import save_file
from toy_world import World
from two_experts import TwoExperts

import ditkit_core
from ditkit_core.commands import stage, train_job
from ditkit_core.config.schema import config_fields
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.distributed import shared_folders, torchrun
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.engine import parked_weights
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.models.tiling import Tiles
from ditkit_core.previews import exchange
from ditkit_core.run import data
from ditkit_core.run.config import RunConfig
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToySampler
from ditkit_core.testing.world import ADAPTERS, make_model
from ditkit_core.training import checkpoint, micro_batch, trainer, validation
from ditkit_core.weights.frozen import FrozenVae

STEPS = 4


class LinearVae(FrozenVae):
    strides = (1, 4)


class VaeSampler(ToySampler):
    """Decodes with a VAE of one layer, in the first way that memory has room for; where it lacks,
    only tiles fit."""

    lacks_memory = False

    def __init__(self, file: Path, decodings: Sequence[VaeMode]):
        super().__init__(torch.device("cpu"))
        self.vae = LinearVae(
            make=lambda config: torch.nn.Linear(4, 4, bias=False),
            config={},
            source=SafetensorsSource.open(file),
            names=StateDictNames.renaming(to_native=str),
            device=self.device,
            dtype=torch.float32,
            key="model.vae",
            mode=VaeMode(),
            decodings=decodings,
            tiles=Tiles(8, 4),
            encode_clip=self._decode_part,
            decode_clip=self._decode_part,
        )

    @property
    def decoded(self) -> str:  # type: ignore[override]
        return self.vae.decoded

    def decode(self, latents: torch.Tensor, seed: int = 0) -> torch.Tensor:
        self._clip = latents.shape
        return self.vae.decode(latents)

    def _decode_part(self, vae: Any, part: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.lacks_memory and part.shape == self._clip:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().decode(vae(part.to(vae.weight.dtype).movedim(0, -1)).movedim(-1, 0).float())


FLAGS = [
    *("--train.device", "cpu", "--encode.device", "cpu"),
    *("--train.accumulation", "3", "--train.threads", "1", "--train.checkpointing", "none"),
    *("--held_out.clips", "1", "--ema.decay", "0.9", "--optim.lr", "0.01"),
    *("--sample.prompts", '["a cat", "a dog", "a bird"]'),
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
    errors, broken = micro_batch.velocity_errors, list[bool]()

    def with_nan(*given: Any, **named: Any) -> Any:
        found = errors(*given, **named)
        return found * float("nan") if broken else found

    micro_batch.velocity_errors = with_nan  # type: ignore[attr-defined]
    at_step(3, lambda: broken.append(True))


def cannot_measure() -> None:
    """The loss of the clip that is measured after the last step; the second of two ranks has it."""
    errors, broken = validation.velocity_errors, list[bool]()
    validation.velocity_errors = lambda *given: errors(*given) * (float("nan") if broken else 1)  # type: ignore[attr-defined]
    at_step(3, lambda: broken.append(True))


def is_killed() -> None:
    at_step(3, lambda: os.kill(os.getpid(), 9))


def is_killed_on_another_machine() -> None:
    """The second of two machines, which know no processes of each other."""
    torchrun.siblings = lambda places: {}  # type: ignore[attr-defined]
    waits, exchange = Path(f"{os.environ['TORCHELASTIC_RUN_ID']}.waits"), Ranks.exchange

    def noted(ranks: Ranks, num_bytes: int) -> AbstractContextManager[None]:
        waits.touch()
        return exchange(ranks, num_bytes)

    def end() -> None:
        while not waits.exists():
            time.sleep(0.05)
        time.sleep(1)  # until the other one is inside of the exchange
        os.kill(os.getpid(), 9)

    if os.environ["RANK"] == "1":
        torchrun.socket = SimpleNamespace(gethostname=lambda: "elsewhere")  # type: ignore[attr-defined]
        # By then the other one waits in an exchange: it cannot see this process, and its torchrun,
        # which would be another one, would not end it within the second.
        at_step(3, end)
    else:
        at_step(3, lambda: setattr(Ranks, "exchange", noted))


def is_killed_and_the_other_ends_slowly() -> None:
    """torchrun's SIGTERM comes while the broken exchange is on its way out of the other rank."""
    is_killed_on_another_machine()
    fit = trainer.Trainer.fit

    def slowly(self: Any) -> Any:
        try:
            return fit(self)
        finally:
            time.sleep(20)

    trainer.Trainer.fit = slowly  # type: ignore[method-assign]


def is_stopped_for_ever() -> None:
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def has_a_bug() -> None:
    def fail() -> None:
        raise ValueError("a bug")

    at_step(3, fail)


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
    """The sample of the second preview is broken; before that of the first one comes a class
    image."""
    decode, count = ToySampler.decode, itertools.count(0)

    def failing(sampler: ToySampler, latents: torch.Tensor, seed: int = 0) -> torch.Tensor:
        return decode(sampler, latents, seed) * (float("nan") if next(count) >= 2 else 1)

    ToySampler.decode = failing  # type: ignore[method-assign]


def cannot_generate_a_class_image() -> None:
    decode = ToySampler.decode
    ToySampler.decode = lambda sampler, latents, seed=0: decode(sampler, latents) * float("nan")  # type: ignore[method-assign]


def is_in_another_folder() -> None:
    """As a machine that does not share a disk, to which a relative path is a folder of its own; it
    waits less long for the other's file."""
    shared_folders._SEEN_SECONDS = 1.0
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")


def sees_an_old_list() -> None:
    """Of the folder of class images, as over a network."""
    data.count_media = lambda folder: 0  # type: ignore[attr-defined]


def has_no_room_to_decode() -> None:
    VaeSampler.lacks_memory = True


def lacks_an_expert() -> None:
    exchange.why_no_samples = lambda model, experts: "a file is missing"  # type: ignore[attr-defined]


def has_a_fast_clock() -> None:
    """An hour passes each time that the loop looks."""
    hours = itertools.count(0, 3600)
    trainer.time = SimpleNamespace(
        monotonic=lambda: float(next(hours)), perf_counter=time.perf_counter
    )  # type: ignore[attr-defined]


def logs_what_is_gathered() -> None:
    def log(alive: int, size: int) -> None:
        with Path("full divided.gathered").open("a") as file:
            file.write(f"{alive} {size}\n")

    log_gathered(log)


def has_another(name: str) -> None:
    """Something that all ranks must have alike; none of them may then read weights."""

    def fail(*given: Any) -> None:
        raise AssertionError("weights are read")

    train_job._load = fail  # type: ignore[assignment]
    if name == "data":
        train_job.json_hash = lambda keys: "another"  # type: ignore[attr-defined]
    elif name == "base":
        SafetensorsSource.fingerprint = lambda source: "another"  # type: ignore[method-assign]
    elif name == "torch version":
        stage.torch = SimpleNamespace(__version__="another", set_num_threads=torch.set_num_threads)  # type: ignore[attr-defined]
    elif name == "kind of device":
        connect = torchrun._connect
        torchrun._connect = lambda *given, **named: connect(*given, **named) and "another"
    else:
        ditkit_core.__version__ = "another"


BOTH = 2
OTHERS = ("data", "base", "torch version", "ditkit version", "kind of device")
CASES: dict[str, tuple[Callable[[], None], int]] = {
    "alone": (lambda: None, 0),
    "plain": (lambda: None, 0),
    "stopped": (is_stopped, 1),
    "no memory": (has_no_memory, 1),
    "not finite": (is_not_finite, 1),
    "full divided": (logs_what_is_gathered, 0),
    "cannot measure": (cannot_measure, 1),
    "killed": (is_killed, 1),
    "killed divided": (is_killed, 1),
    "killed elsewhere": (is_killed_on_another_machine, BOTH),
    "killed slowly elsewhere": (is_killed_and_the_other_ends_slowly, BOTH),
    "stopped for ever": (is_stopped_for_ever, 1),
    "bug": (has_a_bug, 1),
    **{f"other {name}": (partial(has_another, name), 1) for name in OTHERS},
    "cannot save": (cannot_save, 0),
    "cannot read": (cannot_read, 1),
    "cannot sample": (cannot_sample, 1),
    "fast clock of 0": (has_a_fast_clock, 0),
    "fast clock of 1": (has_a_fast_clock, 1),
    "other flags": (lambda: FLAGS.extend(["--train.seed", "7"]), 1),
    "other start": (lambda: FLAGS.extend(["--init-from", "alone"]), 0),
    "experts of one": (lacks_an_expert, 1),
    "no room to decode": (has_no_room_to_decode, 1),
    "no class image": (cannot_generate_a_class_image, 1),
    "apart": (is_in_another_folder, 1),
    "old list": (sees_an_old_list, 1),
    **dict.fromkeys(
        (
            "sampled again",
            "class images again",
            "adapter alone",
            "adapter",
            "experts alone",
            "experts",
            "experts divided",
            "full alone",
            "full divided later",
            "merged alone",
            "merged divided later",
            "sizes alone",
            "sizes of three",
            "too few",
        ),
        (lambda: None, 0),
    ),
}
"""What one rank has, and which of the two it is."""
CLASS = (*SAVED, "--prior.prompt", "a class", "--prior.images", "3")
CLASSES = "classes of experts alone"
"""A folder outside of the run, whose copy goes on with it."""
FEW = (*CLASS, "--sample.steps", "2", "--base.quantize", "int8")
"""One step of each expert."""
ADAPTER = (*CLASS, "--sample.adapter", "alone/exports/alone.safetensors")
WHOLE = (
    *("--train.accumulation", "4", "--optim.lr", "0.001"),
    *("--save.every_steps", "2", "--sample.prompts", "[]", "--sample.captions", "0"),
    *("--export.dtype", "fp32", "--export.forms", '["official", "diffusers"]'),
)
FULL = (*WHOLE, "--adapter.method", "full")
MERGED = (*WHOLE, "--adapter.use_dora", "true", "--export.merged", "true")
SIZES = (
    *(*SAVED, "--data.folder", "sizes", "--data.buckets", "true"),
    *("--data.bucket_step", "4", "--train.batch_size", "2"),
)
MORE = {
    **dict.fromkeys(UNSAVED, ()),
    "adapter alone": ADAPTER,
    "adapter": (*ADAPTER, "--ranks.shard", "2", "--ranks.context", "2"),
    **dict.fromkeys(
        (
            "alone",
            "plain",
            "cannot sample",
            "sampled again",
            "no class image",
            "class images again",
            "old list",
        ),
        CLASS,
    ),
    "apart": (*CLASS, "--prior.folder", "classes apart"),
    "experts divided": (*FEW, "--prior.folder", CLASSES, "--ranks.shard", "2"),
    "killed divided": (*SAVED, "--ranks.shard", "2"),
    "too few": (*SAVED, "--train.accumulation", "1"),
    "stopped for ever": (*SAVED, "--ranks.timeout", "10"),
    "full alone": FULL,
    **dict.fromkeys(("full divided", "full divided later"), (*FULL, "--ranks.shard", "2")),
    **dict.fromkeys(("sizes alone", "sizes of three"), SIZES),
    "merged alone": MERGED,
    "merged divided later": (*MERGED, "--ranks.shard", "2"),
    **{
        name: (*FEW, "--prior.folder", f"classes of {name}")
        for name in ("experts of one", "experts alone", "experts")
    },
}
"""Flags of cases that have other ones than `SAVED`."""


def parks_a_cpu() -> None:
    """Weights of a CPU wait as those of a GPU do, but for those in the memory of a file that was
    read."""

    def parked(weights: list[torch.Tensor]) -> Any:
        found = [tensor for tensor in weights if tensor.untyped_storage().resizable()]
        assert len(found) > 20
        return parked_weights.parked_tensors(found)

    exchange.parked = parked  # type: ignore[attr-defined]


def previews_again(folder: Path, before: str, name: str) -> None:
    """A copy of a finished run whose second expert goes on from its first save; nothing was sampled
    or exported since, or before training."""
    run = copytree(folder / before, folder / name)
    for exports in (run / "exports", run / "low_noise" / "exports"):
        rmtree(exports)
    for path in (
        *run.rglob("complete.json"),
        *run.rglob("samples"),
        run / "low_noise" / "state" / "step-000004",
    ):
        if path.parent.name != "high_noise" or path.name == "samples":
            rmtree(path) if path.is_dir() else path.unlink()


def exports_again(folder: Path, before: str, name: str) -> None:
    """A copy of a finished run that goes on from its first save, whose exports are gone."""
    run = copytree(folder / before, folder / name)
    for path in (run / "exports", run / "state" / "step-000004"):
        rmtree(path)
    (run / "complete.json").unlink()


def work(folder: Path, name: str) -> None:
    """What a rank does."""
    rank, (trouble, whose) = int(os.environ["RANK"]), CASES[name]
    with (folder / f"{name} {rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if name == "experts divided":
        parks_a_cpu()
    os.chdir(folder)
    if whose in (rank, BOTH):
        trouble()
    world = EXPERTS[folder] if name.startswith("experts") else WORLDS[folder]
    if name == "no room to decode":
        decodes = lambda paths, device, matmul, decodings: VaeSampler(
            folder / "vae.safetensors", decodings
        )
        world.spec = altered(world.spec, sampler=decodes)
    try:
        code = world.train(name, STEPS, *FLAGS, *MORE.get(name, SAVED))
    except ValueError:
        # as Python does at the end of a process; in a forked one, torchrun's agent takes the
        # exception instead
        traceback.print_exc()
        raise
    sys.exit(code)


AGAIN = ("sampled again", "class images again")
"""Cases that go on with the run of another one as it is."""
AFTER = {
    "sampled again": "cannot sample",
    "class images again": "no class image",
    "experts divided": "experts alone",
    "full divided later": "full alone",
    "merged divided later": "merged alone",
    **dict.fromkeys(("adapter alone", "adapter", "other start"), "alone"),
}
"""Cases that read what another one has written."""
WORLDS: dict[Path, World] = {}
EXPERTS: dict[Path, World] = {}


def prepare(folder: Path) -> None:
    """Make what the ranks read, and import what they need."""
    torch.set_num_threads(1)
    make_model(TOY, ToyArch(), adapter=ADAPTERS["lora"])  # imports peft
    WORLDS[folder] = World(folder)
    save_file({"weight": torch.eye(4)}, folder / "vae.safetensors")
    for place, size in enumerate(((16, 16), (32, 8), (16, 16), (32, 8), (8, 32))):
        WORLDS[folder].add(
            f"sizes/{place}.png", size, f"#{place}0{place}0ff", f"picture of size {place}"
        )
    # Parsed and compiled once, not by each of a hundred ranks.
    config_fields(RunConfig)
    write_report(write_run(folder / "page"))
    # Each stage of a run collects garbage: in the ranks that was half of all time, looking through
    # what this process has imported.
    gc.collect()
    gc.freeze()


def run_case(folder: Path, name: str) -> None:
    """Start the ranks of a case, and write how they ended."""
    if name in AGAIN:
        copytree(folder / AFTER[name], folder / name)
    if name == "experts divided":
        previews_again(folder, AFTER[name], name)
    if name.endswith(" divided later"):
        exports_again(folder, AFTER[name], name)
    ended = launch(work, folder, name, num=1 if "alone" in name else 3 if "three" in name else 2)
    (folder / f"{name}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    into = Path(sys.argv[1])
    prepare(into)
    EXPERTS[into] = TwoExperts(into)
    chosen = sys.argv[2:] or list(CASES)
    run_cases(partial(run_case, into), chosen, AFTER, at_once=2)
    (into / "cases.json").write_text(
        json.dumps({each: json.loads((into / f"{each}.json").read_text()) for each in chosen})
    )
