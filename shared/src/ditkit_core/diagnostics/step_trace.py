"""`train.profile`: a Chrome trace of some steps after warm-up, and the kernels that take most of
their time."""

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ditkit_core.documents.tables import Table
from ditkit_core.io.console import say
from ditkit_core.io.files import atomic_write
from ditkit_core.training.trainer import Callback

_FIRST_STEPS = 3
"""Steps of a start that are not traced: they compile, choose kernels and fill the allocator, and
the last warms the profiler up."""
_MOST_KERNELS = 10
_SILENT = "6"
"""Above every level of messages of torch's profiler."""


class StepTrace(Callback):
    """Traces steps of this start with torch's profiler."""

    def __init__(self, steps: int, file: Path, warn: Callable[[str], None]):
        """Trace nothing yet.

        Args:
            steps: Number of steps to trace, at least 1.
            file: Where the trace goes, with the suffix `.json.gz`.
            warn: Called with one line if all steps of the run are done before.
        """
        self._steps, self._file, self._warn = steps, file, warn
        self._profile: profile | None = None

    def started(self, step: int) -> None:
        """Begin to count steps."""
        self._begun = step
        when = schedule(wait=_FIRST_STEPS - 1, warmup=1, active=self._steps, repeat=1)
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        else:
            # Otherwise the profiler prints that it starts and stops, and as an error that there is
            # no GPU. The level of the first two is above the level of errors, which matter on a
            # GPU, where counters may be forbidden. It is read when the first profile of a process
            # begins.
            os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        self._profile = profile(
            activities=kinds, schedule=when, on_trace_ready=self._write, acc_events=True
        )
        self._profile.start()

    def after_step(self, step: int, metrics: object) -> None:
        """Tell the profiler that a step has ended."""
        if self._profile is not None:
            self._profile.step()

    def finished(self, step: int) -> None:
        """Say so if there were too few steps for a trace."""
        unfinished, self._profile = self._profile, None
        if unfinished is not None:
            unfinished.stop()
            self._warn(
                f"train.profile = {self._steps} traces after {_FIRST_STEPS} steps, and this start "
                f"has {step - self._begun}: "
                f"nothing was traced; train {_FIRST_STEPS + self._steps} or more"
            )

    def _write(self, trace: profile) -> None:
        self._profile = None
        with (
            atomic_write(self._file) as temporary,
            TemporaryDirectory(dir=self._file.parent) as folder,
        ):
            plain = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(temporary, "wb") as target:
                shutil.copyfileobj(source, target)
        say(f"profile:  {self._file} (open it in chrome://tracing or https://ui.perfetto.dev)")
        top_kernels(trace, self._steps).show()


def top_kernels(trace: profile, steps: int) -> Table:
    """The kernels of GPUs that take most time, or the operations of a CPU if no GPU computed."""
    averages = trace.key_averages()
    on_gpu = any(event.device_type.name != "CPU" for event in averages)
    times = {
        event.key: (
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000,
            event.count,
        )
        for event in averages
        # An operation of the host has the time of the kernels that it launched, which have rows of
        # their own.
        if not event.key.startswith(("ProfilerStep", "cuda"))
        and not (on_gpu and (event.device_type.name == "CPU" or event.is_user_annotation))
    }
    total = sum(time for time, _ in times.values()) or 1.0
    longest = sorted(times.items(), key=lambda pair: -pair[1][0])[:_MOST_KERNELS]
    rows = [
        [name[:80], f"{time / steps:.2f}", f"{count / steps:g}", f"{100 * time / total:.1f}"]
        for name, (time, count) in longest
    ]
    return Table(head=["kernel", "ms per step", "calls per step", "%"], rows=rows)
