"""Whatever is thrown at the front door: no traceback, no hang, nothing half-written, and what the
check accepts is trained."""

import _thread
import gc
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from front_cases import Case, least, random_case
from malformed import controlled
from safetensors import safe_open
from toy_world import World

from ditkit_core.testing.specs import altered

HANG_SECONDS = 60
CHUNK = 25


class Fault(Exception):
    """What a case did that no case may."""


@contextmanager
def watchdog(seconds: float = HANG_SECONDS) -> Iterator[None]:
    """Interrupt what takes longer; the command line then ends with 130."""
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Front:
    """A toy world in whose folder everything happens."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.world, self.capsys = World(folder), capsys
        self.world.spec = controlled(self.world.spec)
        self.kept = {path.name for path in folder.iterdir()}
        self.is_warm = False
        self.printed = ""

    def run(self, case: Case, *flags: str) -> int:
        """The exit status of one command."""
        self.capsys.readouterr()
        given = case.arguments(self.world)
        with watchdog():
            status = self.world.run("train", "--run.folder", "run", *given, *flags)
        captured = self.capsys.readouterr()
        said, self.printed = captured.err, captured.out
        if status == 130:
            raise Fault(f"{flags}: took longer than {HANG_SECONDS} s")
        if status not in (0, 1, 2, 3) or "Traceback" in said:
            raise Fault(f"{flags}: ended with {status}: {said}")
        lines = said.splitlines()
        if status == 2 and not (len(lines) == 1 and lines[0].startswith("error: ")):
            raise Fault(f"{flags}: no clear line: {said}")
        if (
            status == 1
            and "--check" not in flags
            and not any(line.startswith("error: ") for line in lines)
        ):
            raise Fault(f"{flags}: ended with 1 and no error")
        self.check_files()
        return status

    def check_files(self) -> None:
        """Nothing is half-written."""
        for path in self.world.folder.rglob("*"):
            if path.name.endswith(".tmp"):
                raise Fault(f"{path} was left behind")
            if path.suffix == ".json" and path.is_file() and "clips" not in path.parts:
                json.loads(path.read_text(encoding="utf-8"))
            if path.suffix == ".safetensors" and path.is_file():
                with safe_open(path, "pt") as file:
                    file.keys()

    def try_case(self, case: Case) -> str:
        """Raise whatever is wrong; returns how far the case came."""
        for path in self.world.folder.iterdir():
            if path.name not in self.kept or path.name == "clips":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        clips = self.world.folder / "clips"
        clips.mkdir()
        case.write(clips)
        if self.run(case, "--print-config") != 0:
            return "refused"
        if "plan" in case.steps:
            self.run(case, "--plan")
            return "planned"
        if "check" not in case.steps:
            return "read"
        cheap = ["--train.steps", "1", "--sample.steps", "1"]
        if not any(
            "sample." in text for flag in case.flags for text in flag
        ) and b"[sample]" not in (case.file or b""):
            # nothing is sampled where sampling is not what is tried
            cheap += ["--sample.captions", "0"]
        accepted = self.run(case, *cheap, "--check") == 0
        found = next(self.world.folder.rglob("check.json"), None)
        known = None if found is None else json.loads(found.read_text(encoding="utf-8"))
        needs_processes = "start it with torchrun" in self.printed  # which have tests of their own
        if not accepted:
            if known is None or not known["trainable"]:
                return "not trainable"
            raise Fault("a check that finds nothing wrong and fails")
        if any(finding["code"] == "D20" for finding in (known or {"findings": []})["findings"]):
            return "not tried"  # of a model that would have to be fetched
        if needs_processes:
            return "not tried"
        if self.run(case, *cheap) != 0:
            raise Fault("the check accepted what cannot be trained")
        trained = json.loads(next(self.world.folder.rglob("data.json")).read_text(encoding="utf-8"))
        ids = trained.keys() - {"(base weights)", "(empty caption)", "(digest)"}
        if known is None or len(ids) != known["samples"]:
            raise Fault(
                f"trained on {sorted(ids)}, of which the check knew {known and known['samples']}"
            )
        if not self.is_warm:
            self.is_warm = True
            gc.collect()
            # what a first training imports is not looked through at the end of each run
            gc.freeze()
        return "trained"

    def kind_of_fault(self, case: Case) -> str:
        """The exception's name; "" without one."""
        try:
            self.try_case(case)
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is what is looked for
            return type(error).__name__
        return ""

    def hold(self, seed: int) -> str:
        """Try the case of a seed; a failure says what it takes at least."""
        case = random_case(seed)
        try:
            return self.try_case(case)
        except BaseException as error:
            kind = type(error).__name__
            smallest = least(case, lambda other: self.kind_of_fault(other) == kind)
            raise AssertionError(f"seed {seed}: {kind}: {error}\nleast: {smallest}") from error


@pytest.fixture
def front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Front:
    monkeypatch.chdir(tmp_path)
    return Front(tmp_path, capsys)


def test_a_run_of_ranks_is_checked_in_one_process_which_says_how_to_start_it(front: Front) -> None:
    shared = ("--ranks.context", "2")
    routed = Case(seed=0, flags=(shared, ("--train.token_routing", "0-1=0.5")), steps=("check",))
    assert front.try_case(routed) == "not trainable", "by any number of processes"
    case = Case(seed=0, flags=(shared, ("--adapter.dropout", "0.1")), steps=("check",))
    assert front.try_case(case) == "not tried"
    said = "start it with torchrun: ranks.shard and ranks.context need a multiple of 2 processes"
    assert said in front.printed.replace("\n", " ")


CHUNKS = [range(first, first + CHUNK) for first in range(0, 100, CHUNK)]
MORE = [range(first, first + 4 * CHUNK) for first in range(100, 2000, 4 * CHUNK)]


@pytest.mark.parametrize(
    "seeds",
    [
        *CHUNKS[:2],
        *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in MORE[:1]),
        *(pytest.param(seeds, marks=pytest.mark.exhaustive) for seeds in (*CHUNKS[2:], *MORE[1:])),
    ],
    ids=lambda seeds: str(seeds[0]),
)
def test_nothing_gets_through_that_should_not(front: Front, seeds: range) -> None:
    came = [front.hold(seed) for seed in seeds]
    assert len(set(came)) > 1, came  # not everything ends at the first line


def test_a_fault_is_reported_with_its_seed_and_the_least_that_shows_it(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = next(
        seed
        for seed in range(100)
        if len(random_case(seed).flags) > 2 and random_case(seed).file is None
    )
    guilty = random_case(seed).flags[1]

    def faulty(case: Case) -> str:
        if guilty in case.flags:
            raise ZeroDivisionError("a fault of ours")
        return "trained"

    monkeypatch.setattr(front, "try_case", faulty)
    with pytest.raises(
        AssertionError, match=f"seed {seed}: ZeroDivisionError: a fault of ours"
    ) as caught:
        front.hold(seed)
    assert f"flags=({guilty!r},)" in str(caught.value) and "steps=()" in str(caught.value)


def test_what_hangs_or_writes_by_halves_is_a_fault(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(seed=0)
    with monkeypatch.context() as patched:
        patched.setattr(front.world, "run", lambda *flags: 130)
        with pytest.raises(Fault, match="took longer"):
            front.run(case)
    (front.world.folder / "run").mkdir()
    (front.world.folder / "run" / ".check.json.1234.tmp").write_text("{")
    with pytest.raises(Fault, match="left behind"):
        front.check_files()


def test_the_watchdog_ends_what_does_not_end(front: Front) -> None:
    from ditkit_core.commands import cli

    def endless(*given: object) -> None:
        while True:
            pass

    front.world.spec = altered(front.world.spec, columns=endless)
    with watchdog(1.0):
        assert (
            cli.run(
                front.world.spec,
                "train",
                ["--model.preset", "tiny", "--data.folder", "clips", "--check"],
            )
            == 130
        )
