"""Lines of numbers, and the peak of memory."""

import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ordinary_user import ordinary_user

from ditkit_core.errors import UserError
from ditkit_core.io.memory import peak_memory_bytes, peak_reserved_bytes, process_peak_bytes
from ditkit_core.training.metrics import LogConfig, MetricsLog


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_line_is_one_json_object(tmp_path):
    with MetricsLog(tmp_path, LogConfig(tensorboard=False)) as log:
        log.write(1, {"loss": 0.5, "lr": 1e-4})
        # readable while the run goes on
        assert read(tmp_path) == [{"step": 1, "loss": 0.5, "lr": 1e-4}]
        log.write(2, {"loss": 0.25})
    assert read(tmp_path)[1] == {"step": 2, "loss": 0.25}


def test_lines_after_the_resumed_step_and_torn_ones_are_dropped(tmp_path):
    with MetricsLog(tmp_path, LogConfig(tensorboard=False)) as log:
        for step in range(5):
            log.write(step, {"loss": float(step)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    with MetricsLog(tmp_path, LogConfig(tensorboard=False), start_step=3) as log:
        log.write(4, {"loss": 40.0})
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "held_out": 9.0}\n{"step": 1, "loss": 9.0}\n'
    )
    with MetricsLog(tmp_path, LogConfig(tensorboard=False), start_step=0):
        pass
    assert read(tmp_path) == []


def test_a_number_that_json_does_not_know_is_not_written(tmp_path):
    with (
        MetricsLog(tmp_path, LogConfig(tensorboard=False)) as log,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        log.write(1, {"loss": float("nan")})


def test_a_full_disk_is_one_line(tmp_path):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    with MetricsLog(tmp_path, LogConfig(tensorboard=False)) as log:
        log._file.close()
        log._file = Full()
        with pytest.raises(
            UserError, match=r"metrics\.jsonl: No space left on device; free some space"
        ):
            log.write(1, {"loss": 1.0})


@contextmanager
def files_of_at_most(num_bytes):
    """The kernel refuses to write more into a file, as a full disk does."""
    resource = pytest.importorskip("resource")
    before, limit = (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    # Python would store what it compiles meanwhile cut off at the limit, and fail to import it ever
    # after.
    writes_bytecode, sys.dont_write_bytecode = not sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = not writes_bytecode
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)


def test_a_disk_that_really_is_full_is_one_line_and_no_line_is_torn_later(tmp_path):
    with (
        files_of_at_most(200),
        pytest.raises(
            UserError, match=r"^cannot write .*metrics\.jsonl: File too large; free some space$"
        ),
        MetricsLog(tmp_path, LogConfig(tensorboard=False)) as log,
    ):
        for step in range(100):
            log.write(step, {"loss": 0.5})
    with MetricsLog(tmp_path, LogConfig(tensorboard=False), start_step=90) as log:
        log.write(91, {"loss": 0.25})
    *kept, last = read(tmp_path)
    assert (
        [line["step"] for line in kept] == list(range(len(kept)))
        and len(kept) > 5
        and last["step"] == 91
    )


def test_curves_that_do_not_fit_on_the_disk_are_a_warning(tmp_path, capfd):
    warnings = []
    with files_of_at_most(1000), MetricsLog(tmp_path, LogConfig(), warn=warnings.append) as log:
        for step in range(25):
            log.write(step, {"loss": 0.5})
    assert [line["step"] for line in read(tmp_path)] == list(range(25))
    (warning,) = warnings
    assert "tensorboard: File too large; the run goes on" in warning and "\n" not in warning
    assert capfd.readouterr() == ("", "")


def test_a_file_in_place_of_the_curves_is_a_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("mine")
    warnings = []
    with MetricsLog(tmp_path, LogConfig(), warn=warnings.append) as log:
        log.write(1, {"loss": 0.5})
    assert read(tmp_path) == [{"step": 1, "loss": 0.5}]
    assert (
        len(warnings) == 1 and "tensorboard: " in warnings[0] and "the run goes on" in warnings[0]
    )


@pytest.mark.parametrize("start_step", [0, 3])
def test_a_folder_in_place_of_the_file_is_one_line(start_step, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with (
        pytest.raises(UserError, match=r"^[^\n]*metrics\.jsonl[^\n]*[Ii]s a directory[^\n]*$"),
        MetricsLog(tmp_path, LogConfig(tensorboard=False), start_step=start_step),
    ):
        pass


def test_a_file_that_may_not_be_read_is_named_with_the_reason():
    with ordinary_user() as folder:
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        (folder / "metrics.jsonl").chmod(0)
        with (
            pytest.raises(UserError, match=r"metrics\.jsonl cannot be read \(Permission denied\)"),
            MetricsLog(folder, LogConfig(tensorboard=False), start_step=3),
        ):
            pass


ODD_LINES = [
    '{"step": 1e999}',
    "[" * 100_000,
    "[]",
    "null",
    '{"step": NaN}',
    '{"step": null}',
    '{"lost": 1}',
    "\0\0",
]


def test_odd_lines_are_dropped_and_the_change_is_said(tmp_path):
    def log(**given):
        return MetricsLog(
            tmp_path, LogConfig(tensorboard=False), start_step=2, warn=warnings.append, **given
        )

    warnings = []
    with log() as first:
        first.write(1, {"loss": 0.5})
        first.write(2, {"loss": 0.25})
        digest = first.saved()
        first.write(3, {"loss": 9.0})
    good = read(tmp_path)[:2]
    with log(digest=digest) as second:
        assert second.saved() == digest
    assert warnings == [] and read(tmp_path) == good
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("\n".join(ODD_LINES))
    with log(digest=digest):
        pass
    assert warnings == [] and read(tmp_path) == good, "what follows a save is not covered by it"
    (tmp_path / "metrics.jsonl").write_text(
        (tmp_path / "metrics.jsonl").read_text().replace("0.25", "0.15")
    )
    with log(digest=digest):
        pass
    assert (
        len(warnings) == 1
        and "metrics.jsonl was changed or damaged since step 2 was saved" in warnings[0]
    )


def test_lines_are_due_every_so_many_steps():
    log = MetricsLog(Path(), LogConfig(every_steps=3, tensorboard=False))
    assert [step for step in range(1, 10) if log.due(step)] == [3, 6, 9]
    with pytest.raises(UserError, match=r"log\.every_steps"):
        LogConfig(every_steps=0)


def curve(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


@pytest.mark.slow
def test_tensorboard_gets_the_same_numbers(tmp_path):
    with MetricsLog(tmp_path, LogConfig(tensorboard=True)) as log:
        log.write(1, {"loss": 0.5})
        log.write(2, {"loss": 0.25})
    assert curve(tmp_path) == [(1, 0.5), (2, 0.25)]
    with MetricsLog(tmp_path, LogConfig(tensorboard=True), start_step=1) as log:
        log.write(2, {"loss": 0.75, "name": "text"})
    assert curve(tmp_path) == [(1, 0.5), (2, 0.75)], "a resumed run hides what followed its save"
    with MetricsLog(tmp_path, LogConfig(tensorboard=True)) as log:
        log.write(0, {"loss": 1.0})
    assert curve(tmp_path) == [(0, 1.0)], "and one that starts anew everything"


@pytest.mark.skipif(os.name == "nt", reason="the second opinion is of POSIX")
def test_the_process_peak_is_in_bytes_and_is_what_the_system_says():
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    expected = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert process_peak_bytes() == pytest.approx(expected, rel=0.1)


def test_without_an_accelerator_the_peak_is_that_of_the_process():
    before = process_peak_bytes()
    assert 10_000_000 < before <= peak_memory_bytes([torch.device("cpu")]) < 1e12


def test_on_accelerators_what_the_allocator_took_is_a_figure_of_its_own(monkeypatch):
    devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 + device.index)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 20 - device.index)
    assert (peak_memory_bytes(devices), peak_reserved_bytes(devices)) == (11, 20)
    assert peak_reserved_bytes(devices[:1]) is None
