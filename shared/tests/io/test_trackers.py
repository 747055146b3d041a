"""Trackers get what the run's folder has, continue their run, and never end a training; the real
libraries, without a network."""

import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preview_runs import check_equal
from toy_world import World

from ditkit_core.data.media.clip import write_image, write_video
from ditkit_core.errors import MissingDependency
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.trackers import TrackedRun, Trackers, check_installed
from ditkit_core.training.metrics import LogConfig, MetricsLog, log_left_samples

LIBRARIES = ("wandb", "trackio")
RUN = TrackedRun(name="fox", settings={"adapter.rank": 4, "data.folder": "clips"})


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the libraries keep files of their own; trackio asks for it when it is imported, wandb
    when it is first used."""
    folder = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
            patch.setenv(name, str(folder))
        patch.setenv("WANDB_MODE", "offline")
        yield folder


SLOW = pytest.param("wandb", marks=pytest.mark.slow)  # it starts a process of its own each time


@pytest.fixture(params=[SLOW, "trackio"])
def library(request: pytest.FixtureRequest, local: Path) -> str:
    name: str = request.param
    module = pytest.importorskip(name, reason=f"the extra {name} is not installed")
    if name == "wandb":
        # it keeps what it read of the environment when some test before this one used it
        module.teardown()
    return name


def config(library: Any) -> LogConfig:
    return LogConfig(tensorboard=False, tracker=library, project="tests")


def add_samples(folder: Path, step: int) -> None:
    stem = f"step-{step:06d}"
    image, video = (
        folder / "samples" / f"{stem}-{name}" for name in ("0-a-fox.png", "1-a-run.mp4")
    )
    image.parent.mkdir(exist_ok=True)
    write_image(image, torch.zeros(3, 16, 16))
    write_video(video, torch.zeros(3, 4, 16, 16), 8.0)
    listed = [
        {"file": file.name, "prompt": f"prompt of {file.name}", "seed": 0}
        for file in (image, video)
    ]
    (image.parent / f"{stem}.json").write_text(json.dumps({"samples": listed, "shown": image.name}))


def id_of(folder: Path, library: str) -> str:
    return json.loads(RunFolder(folder).tracker.read_text())[library]["id"]


def rows_of(library: str, folder: Path) -> list[dict[str, Any]]:
    """The rows that the library has stored for a run, in order: numbers by name, media by name with
    their caption."""
    rows = wandb_rows(folder) if library == "wandb" else trackio_rows(id_of(folder, library))
    return [
        {
            name: value["caption"] if isinstance(value, dict) else value
            for name, value in row.items()
            if name[0] != "_"
        }
        for row in rows
    ]


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # `finish` does not wait until its process has written the end of the file
    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        assert file.stem == f"run-{id_of(folder, 'wandb')}"
        for content in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                assert (record.run.display_name, record.run.project) == ("fox", "tests")
                settings = {
                    each.key: json.loads(each.value_json) for each in record.run.config.update
                }
                assert settings.items() >= RUN.settings.items()
            row: dict[str, Any] = {}
            for item in record.history.item:
                name, *part = item.nested_key
                within, key = (row.setdefault(name, {}), part[0]) if part else (row, name)
                within[key] = json.loads(item.value_json)
            rows += [row] if row else []
    return rows


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of wandb's file: blocks of 32 KiB after a header of 7 bytes, with checksum,
    length and kind before each piece."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last piece
            yield record
            record = b""


def trackio_rows(id: str) -> list[dict[str, Any]]:
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "tests.db") as database:
        found = database.execute(
            "select step, run_name, metrics from metrics where run_id = ? order by id", (id,)
        )
        rows = [({"step": step, **json.loads(metrics)}, name) for step, name, metrics in found]
        ((settings,),) = database.execute("select config from configs where run_id = ?", (id,))
    assert json.loads(settings).items() >= RUN.settings.items() and {name for _, name in rows} == {
        "fox"
    }
    return [row for row, _ in rows]


def samples_row(step: int) -> dict[str, Any]:
    names = {"0-a-fox": "png", "1-a-run": "mp4"}
    return {
        f"samples/{name}": f"prompt of step-{step:06d}-{name}.{end}" for name, end in names.items()
    } | {"step": step}


def test_numbers_samples_and_settings_are_logged_and_a_resumed_run_is_the_same_run(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warnings: list[str] = []
    with MetricsLog(tmp_path, config(library), tracked=RUN, warn=warnings.append) as log:
        log.write(0, {"held_out": 1.5, "held_out/sigma_0.3": 1.25})
        log.write(1, {"loss": 0.5, "activation_max_block": "blocks.0"})
        add_samples(tmp_path, 1)
        log.write(2, {"loss": 0.25})
    first = id_of(tmp_path, library)
    with MetricsLog(
        tmp_path, config(library), tracked=RUN, start_step=1, warn=warnings.append
    ) as log:
        log.write(2, {"loss": 0.25})
        add_samples(tmp_path, 2)
    add_samples(tmp_path, 3)
    # its folders bear the second that they were made in
    time.sleep(1.1 if library == "wandb" else 0)
    for _ in range(2):
        log_left_samples(tmp_path, config(library), RUN, warnings.append)
    assert warnings == [] and id_of(tmp_path, library) == first
    numbers = [
        {"step": 0, "held_out": 1.5, "held_out/sigma_0.3": 1.25},
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25},
    ]
    again = [numbers[2], samples_row(2), samples_row(3)]
    assert rows_of(library, tmp_path) == [*numbers, samples_row(1), *again], (
        "a repeated step is there twice, with equal values"
    )
    assert capsys.readouterr().out.count("\n") == 3, "a line for each time that it is opened"

    # One that starts anew, without a save, is another run; what an earlier start has generated is
    # not new.
    with MetricsLog(tmp_path, config(library), tracked=RUN, warn=warnings.append) as log:
        log.write(0, {"loss": 0.75})
    assert id_of(tmp_path, library) != first and warnings == []


def test_a_training_is_bitwise_identical_with_a_tracker(
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    flags = (
        "--sample.every_steps",
        "1",
        "--log.every_steps",
        "1",
        "--save.every_steps",
        "1",
        "--ema.decay",
        "0.9",
    )
    assert world.train("plain", 2, *flags) == 0
    capsys.readouterr()
    assert world.train("fox", 2, *flags, "--log.tracker", library, "--log.project", "whole") == 0
    said = capsys.readouterr()
    assert "the run goes on" not in said.err and said.out.count(f"{library}:") == 1
    check_equal(tmp_path / "plain", tmp_path / "fox")
    memory = json.loads(RunFolder(tmp_path / "fox").tracker.read_text())[library]
    assert sorted(memory["samples"]) == ["step-000000", "step-000001", "step-000002"]
    # A complete run has nothing left to log.
    assert world.train("fox", 2, *flags, "--log.tracker", library, "--log.project", "whole") == 0
    assert f"{library}:" not in capsys.readouterr().out


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("fails_at", ["init", "log", "finish"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_fails_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fails_at: str
) -> None:
    class Odd(Exception):
        """What no list of exceptions would have."""

    def acts(what: str) -> Any:
        def act(*_: Any, **__: Any) -> Any:
            if what == fails_at:
                raise Odd("no network\n  or so")
            return run

        return act

    run = SimpleNamespace(
        log=acts("log"), finish=acts("finish"), define_metric=acts(""), id="", url="https://there"
    )
    run.settings = SimpleNamespace(mode="online", sync_dir="")
    library = SimpleNamespace(
        init=acts("init"), finish=acts("finish"), setup=lambda: run, login=lambda prompt: True
    )
    library.Settings = lambda **_: None
    monkeypatch.setitem(sys.modules, name, library)
    warnings: list[str] = []
    with MetricsLog(tmp_path, config(name), warn=warnings.append) as log:
        for step in range(3):
            log.write(step, {"loss": 0.5})
    assert [row["step"] for row in read(tmp_path)] == [0, 1, 2]
    failed = "it failed (Odd: no network or so); it gets no more numbers"
    assert warnings == [
        f'log.tracker = "{name}": {failed}; the run goes on, and its numbers are in metrics.jsonl'
    ]


def test_nobody_is_asked_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(login=lambda prompt: prompt, Settings=lambda **_: None)
    library.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="online"))
    monkeypatch.setitem(sys.modules, "wandb", library)
    warnings: list[str] = []
    with MetricsLog(tmp_path, config("wandb"), warn=warnings.append) as log:
        log.write(1, {"loss": 0.5})
    assert (
        "nobody is logged in (wandb login); WANDB_MODE=offline needs no login and no network; the "
        "run" in warnings[0]
    )


def test_a_folder_in_place_of_the_memory_is_one_line(local: Path, tmp_path: Path) -> None:
    RunFolder(tmp_path).tracker.mkdir()
    warnings: list[str] = []
    with MetricsLog(tmp_path, config("trackio"), warn=warnings.append) as log:
        log.write(1, {"loss": 0.5})
    assert len(warnings) == 1 and "tracker.json" in warnings[0] and "the run goes on" in warnings[0]
    assert [row["step"] for row in read(tmp_path)] == [1]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"trackio": 1}', '{"trackio": {"id": 1}}', '{"trackio": {"samples": {}}}'],
)
def test_a_damaged_memory_begins_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    run = SimpleNamespace(log=lambda *_, **__: None, id="")
    monkeypatch.setitem(
        sys.modules, "trackio", SimpleNamespace(init=lambda **_: run, finish=lambda: None)
    )
    RunFolder(tmp_path).tracker.write_text(content)
    warnings: list[str] = []
    with MetricsLog(tmp_path, config("trackio"), start_step=1, warn=warnings.append):
        pass
    assert (
        warnings == []
        and len(id_of(tmp_path, "trackio")) == 12
        and run.id == id_of(tmp_path, "trackio")
    )


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_installed("none", "ditkit-wan")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingDependency) as error:
        check_installed("trackio", "ditkit-wan")
    assert str(error.value) == (
        'log.tracker = "trackio" needs the library trackio: uv sync --extra trackio in a checkout, else '
        'uv pip install "ditkit-wan[trackio]"; or leave log.tracker out'
    )


def test_the_file_of_metrics_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    warnings: list[str] = []
    with MetricsLog(tmp_path, LogConfig(), warn=warnings.append) as log:
        log.write(1, {"loss": 0.5})
    assert (
        len(warnings) == 1
        and "tensorboard: it failed (ModuleNotFoundError: import of tensorboard" in warnings[0]
        and log._file.closed
    )
    assert read(tmp_path) == [{"step": 1, "loss": 0.5}]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trackers, "add", interrupted)
    log = MetricsLog(tmp_path, LogConfig())
    with pytest.raises(KeyboardInterrupt), log:
        pass
    assert log._file.closed


def test_where_the_trackers_run_is_is_said_once(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples that are left when training has ended open the run a second time."""
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    with MetricsLog(tmp_path, config("trackio"), tracked=RUN):
        pass
    assert capsys.readouterr().out.count("trackio show --project tests") == 1
    for is_said in (True, False):  # after training, or by a command that found the run complete
        add_samples(tmp_path, 10 + is_said)
        log_left_samples(
            tmp_path, config("trackio"), RUN, lambda line: pytest.fail(line), is_said=is_said
        )
        assert capsys.readouterr().out.count("trackio show --project tests") == (not is_said)
