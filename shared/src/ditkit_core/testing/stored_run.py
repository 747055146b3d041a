"""Runs that an earlier version saved half-way, and the check that this version continues them to
bitwise identical results.

A stored run is an archive that `keep` made with the version of that time, through the train command
alone: the inputs, the encoded cache, the run's folder as an interrupt left it, and what the same
version made of it later. Whoever changes how runs are stored keeps reading it: no stored run is
made anew for a change that it is there to find.

The bits of a step belong to a processor: other instructions sum in another order. So bits are asked
for where this machine computes the first half of the run, from its beginning, to the stored bits;
and it must, if it is the kind of machine that the run was made on: there a change of the code is
the only reason left. Elsewhere the second half is compared within tolerances. What is read from the
save has the stored bits everywhere.
"""

import hashlib
import json
import os
import platform
import shutil
import signal
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ditkit_core.commands import cli
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.world import differing
from ditkit_core.training.metrics import is_of_the_machine

HALF, STEPS = 3, 6
"""Optimizer steps after which a run is interrupted, and of the whole run: `train.steps` of its run
file. It saves every `HALF` steps."""

_RUN_FILE: dict[str, dict[str, Any]] = {
    "run": {"folder": "run"},
    "model": {"dtype": "fp32"},
    "encode": {"cache": "cache", "device": "cpu"},
    "optim": {"lr": 5e-3, "schedule": "cosine", "warmup_steps": 2},
    "ema": {"decay": 0.9},
    "train": {"device": "cpu", "threads": 1, "steps": STEPS, "batch_size": 2, "accumulation": 2},
    "save": {"every_steps": HALF},
    "held_out": {"clips": 1, "sigmas": [0.3, 0.8]},
    "log": {"tensorboard": False},
    "sample": {"captions": 0},
    "export": {"dtype": "fp32"},
}
"""What every stored run sets."""

WEIGHT_TOLERANCE, MOMENT_TOLERANCE, METRIC_TOLERANCE = 1e-3, 1e-4, 1e-5
"""What the second half may differ by on another processor, where gradients differ by their last
bits, 1e-6 of their norm. A weight, in learning rates: AdamW moves it by about one in a step and
divides its gradient by its own size, so that the difference matters most for the smallest. The
optimizer's averages, by the norm of each; a metric, by its value. Measured on kernels for no
vectors, for AVX2 and for AVX-512: 6e-6, 1.4e-6 and 1.7e-7."""

_TENSORS = ("trainable", "ema", "optimizer")
_KEPT = ("config.toml", "data.json", "metrics.jsonl")
"""Files that a run needs to continue, besides its save."""
_CHOOSE_KERNELS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)


@dataclass(frozen=True)
class StoredRun:
    """A run that `keep` made."""

    spec: ModelSpec
    archive: Path
    """A zip file with `inputs`, `cache`, `run`, `expected` and `made.json`."""

    def check(self, work: Path) -> None:
        """Assert that this version reads and continues it.

        Args:
            work: An empty folder.
        """
        for folder in (work, stored := work / "stored"):
            with zipfile.ZipFile(self.archive) as archive:
                archive.extractall(folder)
        origin = json.loads((stored / "made.json").read_text(encoding="utf-8"))
        save = stored / "run" / "state" / _name(HALF)
        with chdir(work):
            self._check_average(stored / "expected")
            self._train_from_scratch()
            with _first_step_seen() as states:
                assert _train(self.spec, "run") == 0
        _check_loaded(states, save)
        reproduced = _equal(work / "scratch" / "state" / _name(HALF), save)
        assert reproduced or origin["machine"] != machine(), (
            f"steps 1 to {HALF} give other bits than {origin['commit']} did"
        )
        if reproduced:
            for run in (work / "run", work / "scratch"):
                assert _equal(run / "state" / _name(STEPS), stored / "expected"), (
                    f"{run.name} ends in other bits"
                )
                assert metrics(run) == metrics(stored / "expected")
        else:
            _check_close(work / "run", stored / "expected")

    def _check_average(self, expected: Path) -> None:
        """The export command reads the save and writes the average."""
        assert cli.run(self.spec, "export", ["--run", "run", "--out", "average.safetensors"]) == 0
        digests = json.loads((expected / "average.json").read_text(encoding="utf-8"))
        assert _digests(Path("average.safetensors")) == digests

    def _train_from_scratch(self) -> None:
        """The whole run without an interrupt, from the stored configuration and the stored
        cache."""
        Path("scratch").mkdir()
        shutil.copyfile("run/config.toml", "scratch/config.toml")
        assert _train(self.spec, "scratch") == 0


def keep(
    spec: ModelSpec, folder: Path, *, commit: str, settings: Mapping[str, Mapping[str, Any]]
) -> StoredRun:
    """Train a run in `folder`, interrupt it half-way, and store the run and its later results in
    `folder/run_COMMIT.zip`.

    Args:
        spec: The family.
        folder: Contains `inputs/`.
        commit: The version that does this.
        settings: By section of the run file, what the family sets in addition; paths are relative
            to `folder`.
    """
    sections = {
        name: {**_RUN_FILE.get(name, {}), **settings.get(name, {})}
        for name in {**_RUN_FILE, **settings}
    }
    with chdir(folder):
        Path("run.toml").write_text(tomli_w.dumps(sections), encoding="utf-8")
        with _interrupted(HALF):
            assert cli.run(spec, "train", ["run.toml"]) == 130, "the interrupt ends it"
        shutil.copytree("run", "later")
        assert _train(spec, "later") == 0
        assert cli.run(spec, "export", ["--run", "run", "--out", "average.safetensors"]) == 0
        files = [
            path
            for part in ("inputs", "cache", "run/state")
            for path in Path(part).rglob("*")
            if path.is_file()
        ]
        stored_files = {path.as_posix(): path for path in files}
        stored_files |= {f"run/{name}": Path("run", name) for name in _KEPT}
        stored_files |= {
            f"expected/{group}.safetensors": Path(
                "later", "state", _name(STEPS), f"{group}.safetensors"
            )
            for group in _TENSORS
        }
        stored_files["expected/metrics.jsonl"] = Path("later", "metrics.jsonl")
        stored_files.pop("cache/hashes.json", None)  # has the folders of this machine
        content = {name: path.read_bytes() for name, path in stored_files.items()}
        origin = {"commit": commit, "torch": torch.__version__, "machine": machine()}
        for name, values in {
            "made.json": origin,
            "expected/average.json": _digests(Path("average.safetensors")),
        }.items():
            content[name] = f"{json.dumps(values, indent=1)}\n".encode()
        with zipfile.ZipFile(f"run_{commit}.zip", "w") as archive:
            for name in sorted(content):
                info = zipfile.ZipInfo(name)  # without a date
                archive.writestr(info, content[name], zipfile.ZIP_DEFLATED, compresslevel=9)
    return StoredRun(spec, folder / f"run_{commit}.zip")


def machine() -> str:
    """Digest of everything that chooses kernels: the processor and its instructions, what limits
    them, and the libraries that compute."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = dict(
                line.split("\t", 1)
                for line in file
                if line.startswith(("model name", "flags", "Features"))
            )
    except OSError:  # no Linux
        lines = {"model name": platform.processor()}
    parts = [
        platform.machine(),
        lines,
        torch.backends.cpu.get_cpu_capability(),
        {name: os.environ.get(name) for name in _CHOOSE_KERNELS},
        {name: version(name) for name in ("torch", "peft")},
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without what depends on the clock and the memory."""
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        {name: value for name, value in line.items() if not is_of_the_machine(name)}
        for line in lines
    ]


def _train(spec: ModelSpec, run: str) -> int:
    return cli.run(spec, "train", ["--run", run])


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _tensors(folder: Path, group: str) -> dict[str, Tensor]:
    return load_file(folder / f"{group}.safetensors")


def _digests(file: Path) -> dict[str, str]:
    """By name, a digest of each tensor of a file."""
    return {
        name: hashlib.blake2b(tensor.numpy().tobytes(), digest_size=8).hexdigest()
        for name, tensor in sorted(load_file(file).items())
    }


def _equal(first: Path, second: Path) -> bool:
    """Whether the tensors of two saves are bitwise identical."""
    return not any(differing(_tensors(first, group), _tensors(second, group)) for group in _TENSORS)


@contextmanager
def _interrupted(after: int) -> Iterator[None]:
    """Ctrl-C in the optimizer step of this number."""
    done = 0

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal done
        done += 1
        if done == after:
            signal.raise_signal(signal.SIGINT)

    with _removed_later(register_optimizer_step_post_hook(count)):
        yield


Seen = list[tuple[Tensor, dict[str, Tensor]]]


@contextmanager
def _first_step_seen() -> Iterator[Seen]:
    """Every parameter, and the optimizer's state of it, as they are before the first optimizer
    step: torch shows them to a hook."""
    states: Seen = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not states:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            state = [
                {entry: value.clone() for entry, value in optimizer.state[p].items()}
                for p in parameters
            ]
            states.extend(
                zip([parameter.detach().clone() for parameter in parameters], state, strict=True)
            )

    with _removed_later(register_optimizer_step_pre_hook(look)):
        yield states


@contextmanager
def _removed_later(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _check_loaded(states: Seen, save: Path) -> None:
    """Assert that training went on from exactly the stored weights and optimizer state."""
    weights, state = _tensors(save, "trainable"), _tensors(save, "optimizer")
    optimizer_state: dict[str, Tensor] = {}
    for parameter, entries in states:
        (name,) = [name for name, weight in weights.items() if torch.equal(weight, parameter)]
        optimizer_state |= {f"{name}|{entry}": value for entry, value in entries.items()}
    assert len(states) == len(weights) > 0
    assert differing(optimizer_state, state) == []


def _check_close(run: Path, expected: Path) -> None:
    """Assert that another processor's second half equals the stored run's but for rounding."""
    lines, expected_lines = metrics(run), metrics(expected)
    assert [(line["step"], line.keys()) for line in lines] == [
        (line["step"], line.keys()) for line in expected_lines
    ]
    for line, other in zip(lines, expected_lines, strict=True):
        for name, value in other.items():
            assert abs(line[name] - value) <= METRIC_TOLERANCE * abs(value), (
                line["step"],
                name,
                line[name],
                value,
            )
    rate = max(line["lr"] for line in expected_lines if "lr" in line)
    for group in _TENSORS:
        actual, wanted = _tensors(run / "state" / _name(STEPS), group), _tensors(expected, group)
        assert actual.keys() == wanted.keys(), group
        for name, tensor in wanted.items():
            difference = actual[name] - tensor
            if group == "optimizer":
                assert difference.norm() <= MOMENT_TOLERANCE * tensor.norm(), name
            else:
                assert difference.abs().max() <= WEIGHT_TOLERANCE * rate, (group, name)
