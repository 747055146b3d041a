"""Lines of numbers, and the peak of memory."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.io.memory import peak_memory_bytes, process_peak_bytes
from ditkit_core.training.metrics import LogConfig, MetricsLog


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_line_is_one_json_object(tmp_path):
    with MetricsLog(tmp_path, LogConfig(tensorboard=False)) as log:
        log.write(1, {"loss": 0.5, "lr": 1e-4})
        assert read(tmp_path) == [{"step": 1, "loss": 0.5, "lr": 1e-4}]  # readable while the run goes on
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
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
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
        with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device; free some space"):
            log.write(1, {"loss": 1.0})


def test_lines_are_due_every_so_many_steps():
    log = MetricsLog(Path(), LogConfig(every_steps=3, tensorboard=False))
    assert [step for step in range(1, 10) if log.due(step)] == [3, 6, 9]
    with pytest.raises(UserError, match=r"log\.every_steps"):
        LogConfig(every_steps=0)


@pytest.mark.slow
def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, LogConfig(tensorboard=True)) as log:
        log.write(1, {"loss": 0.5})
        log.write(2, {"loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


@pytest.mark.skipif(os.name == "nt", reason="the second opinion is of POSIX")
def test_the_process_peak_is_in_bytes_and_is_what_the_system_says():
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    expected = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert process_peak_bytes() == pytest.approx(expected, rel=0.1)


def test_without_an_accelerator_the_peak_is_that_of_the_process():
    before = process_peak_bytes()
    assert 10_000_000 < before <= peak_memory_bytes([torch.device("cpu")]) < 1e12
