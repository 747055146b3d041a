"""The folder of a run: whose it is, and that one process trains in it."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from unfinished import unfinished

from ditkit_core.config.field import setting
from ditkit_core.config.resolve import resolve
from ditkit_core.config.resume import ConfigChange
from ditkit_core.distributed.shared_folders import open_run
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder, RunFolderConfig, reserve_sample_number


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The `[keys]` section."""

    steps: int = setting(100, resume="free")
    """Steps."""
    lr: float = setting(1e-4, resume="stated")
    """Rate."""
    rank: int = setting(16, resume="refused")
    """Rank."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree."""

    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    keys: Keys = Keys()


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def refused(folder: Path, config: Tree, match: str) -> None:
    with pytest.raises(UserError, match=match), open_run(folder, config):
        pass


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run folder in which something was saved."""
    folder = tmp_path / "run"
    with open_run(folder, Tree()) as (run, _):
        run.store(Tree())
        (run.state / "step-000010").mkdir(parents=True)
    return folder


def test_a_new_folder_gets_the_configuration(tmp_path: Path) -> None:
    config = Tree(keys=Keys(rank=4))
    with open_run(tmp_path / "a" / "b", config) as (run, stated):
        assert stated == []
        run.store(config)
        assert resolve(Tree, file=run.config_file) == config
    assert contents(tmp_path / "a" / "b") <= {"config.toml", ".lock"}


def test_a_run_is_continued_with_free_and_stated_changes(saved: Path) -> None:
    config = Tree(keys=Keys(steps=200, lr=1e-3))
    with open_run(saved, config) as (run, stated):
        assert stated == [ConfigChange("keys.lr", 1e-4, 1e-3)]
        run.store(config)
        assert resolve(Tree, file=run.config_file) == config


def test_a_run_of_another_configuration_is_refused_and_left_as_it_was(saved: Path) -> None:
    before = (saved / "config.toml").read_bytes()
    refused(saved, Tree(keys=Keys(rank=8)), match=r"keys\.rank 16 -> 8.*--init-from")
    assert (saved / "config.toml").read_bytes() == before


def test_until_something_was_saved_every_key_may_be_corrected(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", Tree()) as (run, _):
        run.store(Tree())
    with open_run(tmp_path / "run", Tree(keys=Keys(rank=8))) as (_, stated):
        assert stated == []


def test_a_mistake_before_anything_was_written_leaves_no_run_behind(tmp_path: Path) -> None:
    def fail(folder: Path, *written: str) -> set[str]:
        with pytest.raises(UserError, match="a mistake"), open_run(folder, Tree()) as (run, _):
            run.store(Tree())
            for name in written:
                (folder / name).mkdir()
            raise UserError("a mistake")
        return contents(folder) - {".lock"}

    assert fail(tmp_path / "new") == set()
    assert fail(tmp_path / "demo", "inputs", "prior") == {"inputs", "prior"}
    assert fail(tmp_path / "started", "state") == {"state", "config.toml"}
    assert fail(tmp_path / "started") == {"state", "config.toml"}, "what another start stored stays"


def test_a_folder_that_holds_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "holiday.mp4").write_bytes(b"x")
    refused(tmp_path, Tree(), match=r"contains holiday\.mp4 but no run")
    assert contents(tmp_path) == {"holiday.mp4"}


def test_a_config_toml_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[server]\nport = 1\n")
    refused(tmp_path, Tree(), match="not a run's configuration")


def test_a_run_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", Tree(), match="is a file")
    refused(tmp_path / "file" / "run", Tree(), match="cannot write in")


def test_a_folder_in_place_of_the_owner_is_one_line_and_leaves_the_run_free(tmp_path: Path) -> None:
    (tmp_path / ".owner").mkdir()
    refused(tmp_path, Tree(), match=r"cannot write .*\.owner")
    (tmp_path / ".owner").rmdir()
    with open_run(tmp_path, Tree()):
        (tmp_path / ".owner").write_bytes(b"\xff")
        refused(tmp_path, Tree(), match=r"in use by another process \(unknown\)")
        (tmp_path / ".owner").unlink()
        (tmp_path / ".owner").mkdir()
        refused(tmp_path, Tree(), match=r"in use by another process \(unknown\)")


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    with open_run(tmp_path, Tree()):
        refused(tmp_path, Tree(), match=r"in use by another process \(process \d+ on .* since ")
    with open_run(tmp_path, Tree()):
        pass


def test_a_lock_goes_with_its_process_however_that_ends(tmp_path: Path) -> None:
    """Held in another process that is then killed; not even its exit status is asked for before the
    folder is free."""
    program = (
        "import sys, time; from pathlib import Path; from ditkit_core.io.run_dir import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        refused(tmp_path, Tree(), match=f"process {other.pid} on")
        other.kill()
        other.wait()
        with open_run(tmp_path, Tree()) as (run, _):
            assert run.path == tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="the locks of Windows are not flock's")
def test_where_the_file_system_has_no_locks_a_run_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts it again: at the first attempt. A process that still runs keeps the
    folder."""
    import fcntl

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    if not (child := os.fork()):
        with open_run(tmp_path, Tree()):
            os._exit(0)  # nothing is released, as after a kill
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").read_text(), "its file is still there"
    with open_run(tmp_path, Tree()):
        refused(tmp_path, Tree(), match="in use by another process")
    with open_run(tmp_path, Tree()):
        pass


def test_completion_is_remembered(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.completed_step() is None
    run.mark_complete(20)
    assert RunFolder(tmp_path).completed_step() == 20
    for text in ("{", "[]", '{"step": 1e999}', '{"step": null}', "[" * 100_000):
        (tmp_path / "complete.json").write_text(text)
        with pytest.raises(UserError, match="is damaged; delete it, and the run continues"):
            run.completed_step()
    (tmp_path / "complete.json").unlink()
    (tmp_path / "complete.json").mkdir()
    with pytest.raises(UserError, match=r"complete\.json cannot be read \(Is a directory\)"):
        run.completed_step()


def test_of_samples_at_once_each_gets_a_number_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "samples"

    def drawing(index: int) -> str:
        with reserve_sample_number(folder) as name:
            (folder / f"{name}-of-{index}.png").touch(exist_ok=False)
            return name

    with ThreadPoolExecutor(8) as pool:
        names = sorted(pool.map(drawing, range(64)))
    assert names == [f"sampled-{number:03d}" for number in range(1, 65)]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_sampling_that_goes_on_or_was_killed_keeps_its_number(tmp_path: Path) -> None:
    with reserve_sample_number(tmp_path) as one, reserve_sample_number(tmp_path) as other:
        assert (one, other) == ("sampled-001", "sampled-002")
    program = (
        "import os, sys; from pathlib import Path; from ditkit_core.io.run_dir import "
        "reserve_sample_number\n"
        "with reserve_sample_number(Path(sys.argv[1])): os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert list(tmp_path.glob("*[!.]*")) == [tmp_path / ".sampled-001"] and not any(
        tmp_path.glob("sampled-*")
    )
    with reserve_sample_number(tmp_path) as name:
        assert name == "sampled-002"
    (tmp_path / "drawn-006-of-an-earlier-version.png").touch()
    with reserve_sample_number(tmp_path) as name:
        assert name == "sampled-007"
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            UserError, match="cannot write in .*file: .*; name another folder with --out"
        ),
        reserve_sample_number(tmp_path / "file"),
    ):
        pass


def test_what_killed_writes_left_is_removed_by_whoever_locks_the_folder(saved: Path) -> None:
    left = [
        unfinished(saved / "report.html"),
        unfinished(saved / "exports" / "cat-step-000010.safetensors"),
        # of an earlier process with the same id
        unfinished(saved / "exports" / "cat.safetensors", os.getpid()),
        unfinished(
            saved / "exports" / "transformer_official" / "diffusion_pytorch_model.safetensors"
        ),
        unfinished(saved / "samples" / "step-000010.json"),
        unfinished(saved / "samples" / "sampled-001-step-000010.json"),
        unfinished(saved / "samples" / "pending" / "step-000010.safetensors"),
        unfinished(saved / "inputs" / "clip.mp4"),
        unfinished(saved / "exports" / "step-000010") / "transformer_official" / "config.json",
    ]
    unknown = ".{}.0123abcd.tmp", ".{}.01234567-1-0123abcd.tmp"
    stays = [
        saved / "exports" / "cat.safetensors",
        saved / ".mine.tmp",
        unfinished(saved / "notes" / "of another program"),
        # Commands that do not lock the folder are writing these.
        unfinished(saved / "samples" / "sampled-002-step-000010.json", os.getppid()),
        unfinished(saved / "exports" / "mine.safetensors", os.getppid()),
        unfinished(saved / "exports" / "cat-export-step-000010" / "config.json", os.getppid()),
        # An earlier version or another machine may be writing these.
        *(saved / "exports" / name.format("mine.safetensors") for name in unknown),
    ]
    for path in (*left, *stays):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    with open_run(saved, Tree()):
        assert [path for path in left if path.exists()] == [] and all(
            path.exists() for path in stays
        )
    assert not list((saved / "exports").glob(".step-000010*"))
    for path in stays:
        os.utime(path, (0, 0))
    with open_run(saved, Tree()):
        assert [path for path in stays if not path.exists()] == stays[6:]


def test_another_process_keeps_what_it_writes(saved: Path) -> None:
    with open_run(saved, Tree()):
        left = unfinished(saved / "report.html")
        left.touch()
        refused(saved, Tree(), match="in use by another process")
        assert left.exists()
