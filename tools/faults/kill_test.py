"""Random SIGKILLs over all stages of training, and the comparison with a run that was never
disturbed.

    # 200 kills: all families, LoRA, full fine-tuning, and that with all levers of memory
    uv run tools/faults/kill_test.py
    uv run tools/faults/kill_test.py --kills 20 --seed 1
    uv run tools/faults/kill_test.py --families wan --methods lora --kills 2

Each family's demo is trained once without a kill, from nothing to its report, on fewer media. Then
the same command runs in new folders and is killed up to eight times per folder, until it completes:
first at a random moment of the whole run, and then within its first third, so that one run is
killed in many places. Moments are processor time, which does not depend on what else the machine
does. What both folders contain must be equal: saves (every tensor and value), exports and samples
(every byte), metrics (each step once; times aside), the encoded cache, and the names of all other
files.

Every start is a fork of one process that has imported what the undisturbed run had imported:
nothing is written while that happens.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ditkit_core.commands import cli
from ditkit_core.data.media.synthetic import write_inputs
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.recorded_graph import recorded_graphs
from ditkit_core.testing.specs import altered
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.metrics import is_of_the_machine

SPECS = {
    "wan": ("ditkit_wan.spec", "WAN"),
    "flux2": ("ditkit_flux2.spec", "FLUX2"),
    "zimage": ("ditkit_zimage.spec", "ZIMAGE"),
}
FLAGS = (
    "--train.steps", "6", "--save.every_steps", "2", "--sample.every_steps", "3",
    "--sample.prompts", "[]",
    "--sample.captions", "1", "--sample.steps", "2", "--held_out.clips", "1",
    "--held_out.every_steps", "2", "--held_out.sigmas", "[0.5]",
    "--log.every_steps", "1", "--log.tensorboard", "false", "--train.batch_size", "1",
    "--ema.decay", "0.9", "--train.threads", "1",
)  # fmt: skip
METHODS = {
    "lora": ("--export.forms", '["official", "diffusers"]', "--export.merged", "true"),
    "full": ("--adapter.method", "full", "--optim.lr", "1e-4", "--export.forms", '["diffusers"]'),
    # What a full fine-tune on a small GPU needs.
    "streamed": (
        "--adapter.method", "full", "--optim.lr", "1e-4", "--export.forms", '["diffusers"]',
        "--model.dtype", "bf16", "--optim.name",
        "adafactor", "--optim.rounding", "stochastic", "--optim.fused_backward", "true",
        "--train.clip_by", "last_step",
        "--train.accumulation", "2", "--train.swap_blocks", "1",
    ),
    # Replays need a device that has graphs: the stand-in of the tests records and replays the work
    # of a CPU.
    "replayed": ("--train.cuda_graphs", "on", "--export.forms", '["official"]'),
}  # fmt: skip
KEPT = {
    "wan": ("clip00", "clip06", "clip09", "clip12"),
    "flux2": ("picture00", "picture05", "picture13", "picture21", "edit00", "edit04"),
    "zimage": ("shape00", "shape05", "shape13", "shape21"),
}
"""The media that are trained on, by the start of their names: their number changes how long a stage
takes, not what it writes."""
KILLS_PER_RUN = 8
_OF_THE_START = (
    ".lock",
    "train.log",
    "about.json",
    "report.html",
    "metrics.jsonl",
    "state.json",
    "hashes.json",
    "verified.json",
)
"""Files whose bytes depend on when and where a run was started."""
_HANGS_SECONDS = 1800.0


@dataclass(frozen=True)
class Kind:
    """What is trained."""

    family: str
    method: str
    inputs: Path
    """The demo's inputs, which runs copy."""

    def start(self, folder: Path) -> int:
        """Fork a process that trains in `folder/run`; returns its id."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)  # relative paths, so that both folders store the same
        spec = altered(_spec(self.family), write=self._write_inputs)
        status = 99
        try:
            with recorded_graphs() if self.method == "replayed" else contextlib.nullcontext():
                flags = ["--demo", "--run.folder", "run", *FLAGS, *METHODS[self.method]]
                status = cli.run(spec, "train", flags)
            (self.inputs.parent / "modules.json").write_text(json.dumps(list(sys.modules)))
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _write_inputs(self, folder: Path) -> None:
        parts: dict[str, Callable[[Path], None]] = {
            part.name: partial(shutil.copytree, part, dirs_exist_ok=True)
            for part in sorted(self.inputs.iterdir())
            if part.is_dir()
        }
        write_inputs(folder, parts)


def _spec(family: str) -> ModelSpec:
    module, name = SPECS[family]
    spec = getattr(importlib.import_module(module), name)
    assert isinstance(spec, ModelSpec)
    return spec


def write_few(family: str, inputs: Path) -> None:
    """Write a family's demo without most of its media."""
    _spec(family).demo.write(inputs)
    (media,) = (part for part in inputs.iterdir() if part.is_dir() and part.name != "checkpoint")
    for file in media.iterdir():
        if file.name == "metadata.jsonl":
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            file.write_text(
                "".join(
                    line for line in lines if json.loads(line)["file_name"].startswith(KEPT[family])
                )
            )
        elif file.is_file() and not file.name.startswith(KEPT[family]):
            file.unlink()


def import_all(names: Path) -> None:
    """Import the modules that a run had imported when it ended, as far as they can be imported
    alone."""
    for name in json.loads(names.read_text()):
        if name.partition(".")[0] in (
            "ditkit_core",
            "ditkit_wan",
            "ditkit_flux2",
            "ditkit_zimage",
            "diffusers",
            "transformers",
            "peft",
            "torch",
            "av",
            "PIL",
        ):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def cpu_seconds(child: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait(child: int, cpu: float = float("inf")) -> int | None:
    """Wait for a process.

    Returns:
        Its exit status; None if it still runs after this processor time, or after half an hour.
    """
    deadline = time.monotonic() + _HANGS_SECONDS
    while time.monotonic() < deadline:
        used = cpu_seconds(child)  # before waiting: what is waited for has no entry any more
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if used >= cpu:
            return None
        time.sleep(0.002)
    return None


def undisturbed(kind: Kind, folder: Path) -> float:
    """Train without a kill; returns the processor time that it took in seconds."""
    before = os.times()
    status = wait(kind.start(folder))
    if status != 0:
        sys.exit(
            f"the undisturbed run of {kind} ended with status {status}; see {folder / 'log.txt'}"
        )
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def disturbed(
    kind: Kind, folder: Path, cpu: float, kills: int, rng: random.Random
) -> tuple[list[str], str]:
    """Train with at most this many kills.

    Args:
        kind: What is trained.
        folder: A new folder.
        cpu: Seconds of processor time of the undisturbed run; no kill comes later.
        kills: Maximum number of kills.
        rng: Decides when they come.

    Returns:
        Where each kill came, and what is wrong: a status other than 0, or empty.
    """
    places: list[str] = []
    while True:
        child = kind.start(folder)
        # The first squared, because writing the inputs is short and done once.
        moment = cpu / 3 * rng.random() if places else cpu * rng.random() ** 2
        status = wait(child, moment if len(places) < kills else float("inf"))
        if status is not None:
            return places, "" if status == 0 else f"ended with status {status}: {last_line(folder)}"
        time.sleep(rng.uniform(0, 0.01))  # processor time is counted in hundredths of a second
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if len(places) == kills:
            return places, f"still running after {_HANGS_SECONDS:.0f} s: {last_line(folder)}"
        places.append(place(folder))
        (folder / "log.txt").write_text("")


def place(folder: Path) -> str:
    """The stage that a run was in, and what it printed last."""
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    stages = [line.strip().split("  ")[0][:40] for line in lines if line.startswith("[")]
    return f"{stages[-1] if stages else 'start, and writing the inputs'}: {last_line(folder).partition('  ')[0]}"


def last_line(folder: Path) -> str:
    """What a run printed last, shortened."""
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:32] for line in reversed(lines) if line.strip()), "")


def differences(one: Path, other: Path) -> list[str]:
    """What differs between the folders of two finished runs and their caches."""
    first, second = _files(one), _files(other)
    found = [f"only in one: {name}" for name in sorted(first.keys() ^ second.keys())]
    for name in sorted(first.keys() & second.keys()):
        if first[name].name not in _OF_THE_START and _content(first[name]) != _content(
            second[name]
        ):
            found.append(f"differs: {name}")
    for save in sorted(path.name for path in (one / "run" / "state").iterdir()):
        if (other / "run" / "state" / save).is_dir() and not _equal_saves(
            *(f / "run" / "state" / save for f in (one, other))
        ):
            found.append(f"differs: {save}")
    if _metrics(one / "run") != _metrics(other / "run"):
        found.append("differs: metrics.jsonl")
    images = [
        (folder / "run" / "report.html").read_text(encoding="utf-8").count("<img")
        for folder in (one, other)
    ]
    return found + [f"differs: images of report.html: {images}"] * (images[0] != images[1])


def _files(folder: Path) -> dict[str, Path]:
    # What a kill leaves in the cache goes after an hour, because another run may be writing there.
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / "log.txt")
    kept = (
        path
        for path in found
        if not (path.is_relative_to(folder / "cache") and path.name.startswith("."))
    )
    # Hashes of media files are remembered only of files that did not change for some seconds, so
    # the clock decides whether there are any.
    kept = (path for path in kept if path != folder / "cache" / "hashes.json")
    return {str(path.relative_to(folder)): path for path in kept}


def _content(file: Path) -> object:
    content = file.read_bytes()
    if file.suffix != ".safetensors":
        return content
    # The order of a header's entries is that of a hash table with random keys.
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _equal_saves(one: Path, other: Path) -> bool:
    first, second = load_state(one), load_state(other)
    return (
        (first.step, first.values, first.held_out) == (second.step, second.values, second.held_out)
        and first.tensors.keys() == second.tensors.keys()
        and all(
            tensors.keys() == second.tensors[group].keys()
            and all(
                torch.equal(tensor, second.tensors[group][name]) for name, tensor in tensors.items()
            )
            for group, tensors in first.tensors.items()
        )
    )


def _metrics(run: Path) -> list[dict[str, float]]:
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        {name: value for name, value in row.items() if not is_of_the_machine(name)} for row in rows
    ]


def num_replays(folder: Path) -> int:
    """The micro-batches of a finished run that were replayed, by its metrics."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line).get("replays", 0) for line in lines)


def kill_kind(kind: Kind, kills: int, folder: Path, rng: random.Random) -> tuple[Counter[str], int]:
    """Kill runs until `kills` kills came; prints a row for each run.

    Returns:
        The number of kills in each stage, and of runs that differ.
    """
    whole = folder / "whole"
    whole.mkdir(parents=True)
    undisturbed(kind, whole)
    import_all(kind.inputs.parent / "modules.json")
    shutil.rmtree(whole)
    whole.mkdir()
    cpu = undisturbed(kind, whole)
    stages: Counter[str] = Counter()
    bad = number = 0
    while stages.total() < kills:
        number += 1
        run = folder / f"killed-{number}"
        run.mkdir()
        places, fault = disturbed(kind, run, cpu, min(KILLS_PER_RUN, kills - stages.total()), rng)
        wrong = [fault] if fault else differences(whole, run)
        if kind.method == "replayed" and not fault and not num_replays(run):
            wrong.append("no micro-batch was replayed")
        bad += bool(wrong)
        stages.update(each.partition(":")[0] for each in places)
        last = "; ".join(place.partition(": ")[2] or "-" for place in places)
        outcome = "; ".join(wrong) or "equal"
        if kind.method == "replayed":
            outcome += f", {num_replays(run)} replays"
        print(f"| {kind.family} | {kind.method} | {last} | {outcome} |", flush=True)
        if not wrong:
            shutil.rmtree(run)
    return stages, bad


def main() -> int:
    """Kill runs of every kind; returns 1 if one of them differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="number of kills, over all kinds")
    parser.add_argument("--families", nargs="+", choices=SPECS, default=list(SPECS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument(
        "--folder", type=Path, help="where runs that differ are kept (default: a temporary folder)"
    )
    given = parser.parse_args()
    for module in ("ditkit_core.commands.train", "diffusers", "transformers", "peft"):
        importlib.import_module(module)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kill-test-"))
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    kinds = []
    for family in given.families:
        inputs = folder / family / "inputs"
        write_few(family, inputs)
        kinds += [Kind(family, method, inputs) for method in given.methods]
    print(
        "| family | method | the last line before each kill | compared with the undisturbed run "
        "|\n|---|---|---|---|"
    )
    stages: Counter[str] = Counter()
    bad = 0
    for index, kind in enumerate(kinds):
        share = (given.kills - stages.total()) // (len(kinds) - index)
        rng = random.Random(f"{given.seed} {kind.family} {kind.method}")
        found, differing = kill_kind(kind, share, folder / f"{kind.family}-{kind.method}", rng)
        stages, bad = stages + found, bad + differing
    print(
        "\n| stage | kills |\n|---|---:|\n"
        + "\n".join(f"| {stage} | {count} |" for stage, count in sorted(stages.items()))
    )
    print(
        f"\n{stages.total()} kills, {bad} runs that differ"
        + (f"; they are in {folder}" if bad else "")
    )
    if not bad:
        shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
