"""Time, memory and kernels of a step, on a CPU or a GPU: what the benchmarks have in common."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ditkit_core.engine.devices import choose_device, make_current
from ditkit_core.io.memory import is_out_of_memory, release_frames, release_memory
from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.planner.gpus import GPU, KNOWN_GPUS, gpus_here

Result = TypeVar("Result")
Step = Callable[[], object]

KINDS = ("attention", "attention backward", "matmul", "matmul fp32", "copy", "elementwise")
VIEWS = (
    "view", "reshape", "transpose", "expand", "as_strided", "slice", "select", "unsqueeze",
    "squeeze", "aten::t", "permute", "detach",
    "empty", "flatten", "unflatten", "unbind", "split", "chunk", "narrow", "resize", "alias", "is_",
    "result_type", "to", "set_", "item",
    "size", "stride", "lift", "_local_scalar", "data_ptr", "record_stream", "_backward", "T",
    "broadcast", "movedim", "real", "imag",
)  # fmt: skip
"""Operations that compute nothing, by the start of their name."""


def started_on(name: str) -> torch.device:
    """The device to measure on, made current, with the arithmetic of the commands."""
    device = choose_device(name, "--device")
    make_current([device])
    compute_fp32_in_fp32()
    return device


def seconds(step: Step, device: torch.device) -> float:
    """Seconds of one step: on a GPU those between two events on its stream."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_bytes(step: Step, device: torch.device) -> int:
    """Most bytes that tensors of one step occupied at once, above what was there before it."""
    if device.type != "cuda":
        return _live_peak(step)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _live_peak(step: Step) -> int:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profile:
        step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def unless_out_of_memory(measure: Callable[[], Result]) -> Result | None:
    """A measurement; None if memory ran out, which is then free again."""
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        release_frames(error)
    release_memory()
    return None


def attempted(name: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Rows, and one that says why if they end early: too little memory, or no compiler for kernels,
    costs what needs it alone."""
    try:
        yield from rows()
        return
    except Exception as error:  # noqa: BLE001  # whatever it is: the rows after these are worth as much
        reason = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[
            0
        ][:200]
        release_frames(error)
    release_memory()
    yield {"name": name, "value": reason, "ok": False}


def of_published(
    rate: float, published: Callable[[GPU], float], device: torch.device
) -> dict[str, Any]:
    """Columns with the share of a GPU's published rate that was reached; one well above it is a
    mistake of the measurement.

    Args:
        rate: What was measured, in units per second.
        published: Picks the published rate; 0 if there is none.
    """
    if device.type != "cuda":
        return {}
    (gpu,) = gpus_here([device])
    # The rates of a GPU that is not in the table are assumed.
    most = published(gpu) if gpu.source in {known.source for known, _ in KNOWN_GPUS} else 0.0
    # GPUs of consumers clock higher than published; a factor of two is none of the clock.
    return {"of published": f"{rate / most:.0%}", "ok": rate <= 1.3 * most} if most else {}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel on a GPU, or an operation on a CPU, in microseconds of the profiler's clock."""

    name: str
    kind: str
    begin: float
    end: float


def launches(step: Step, device: torch.device, trace: str = "") -> list[Launch]:
    """The kernels of one step by torch's profiler, in order; on a CPU its operations that compute
    something.

    Args:
        trace: File for the profiler's trace; empty for none.
    """
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # torch 2.11 warns without
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    if trace:
        profile.export_chrome_trace(trace)
    found = [
        event
        for event in profile.events() or ()
        if (_is_kernel if on_gpu else _is_operation)(event)
    ]
    made = [
        Launch(
            name=each.name,
            kind=kind_of(each.name, on_gpu=on_gpu),
            begin=each.time_range.start,
            end=each.time_range.end,
        )
        for each in found
    ]
    return sorted(made, key=lambda launch: launch.begin)


def kind_of(name: str, *, on_gpu: bool) -> str:
    """The kind of an operation (CPU) or a kernel (GPU); a product in fp32 is only recognised on a
    GPU."""
    low = name.lower()
    if on_gpu:
        is_attention = any(word in low for word in ("flash", "fmha", "sdpa", "attention"))
        is_product = any(word in low for word in ("gemm", "cutlass", "nvjet", "xmma", "cublas"))
    else:
        is_attention = "scaled_dot_product_flash" in low
        is_product = low in ("aten::mm", "aten::addmm", "aten::bmm", "aten::mkldnn_linear")
    if is_attention:
        return (
            "attention backward"
            if any(word in low for word in ("bwd", "bprop", "backward", "cutlassb"))
            else "attention"
        )
    if is_product:
        return (
            "matmul fp32"
            if on_gpu and any(word in low for word in ("sgemm", "simt", "f32f32_f32f32"))
            else "matmul"
        )
    return "copy" if low.startswith(("memcpy", "memset")) else "elementwise"


def _is_kernel(event: Any) -> bool:
    # Compiled code names its spans, which the profiler shows on the GPU, too: they are no kernels.
    is_on_gpu = event.device_type.name == "CUDA" and not event.is_user_annotation
    return is_on_gpu and not event.name.startswith("aten::")


def _is_operation(event: Any) -> bool:
    """Whether it computes something, and is not a part of a product or of attention, nor only made
    of others that count."""
    if not event.name.startswith("aten::") or _is_view(event.name):
        return False
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::") and kind_of(parent.name, on_gpu=False) != "elementwise":
            return False
        parent = parent.cpu_parent
    if kind_of(event.name, on_gpu=False) != "elementwise":
        return True
    parts = (part.name for part in event.cpu_children if part.name.startswith("aten::"))
    return all(map(_is_view, parts))


def _is_view(name: str) -> bool:
    return name.removeprefix("aten::").startswith(VIEWS) or name in VIEWS


def by_kind(found: Sequence[Launch]) -> tuple[Counter[str], Counter[str]]:
    """Number and microseconds of launches of each kind."""
    number, taken = Counter[str](), Counter[str]()
    for launch in found:
        number[launch.kind] += 1
        taken[launch.kind] += launch.end - launch.begin
    return number, taken


def busy_and_span(found: Sequence[Launch]) -> tuple[float, float]:
    """Microseconds in which something ran, and from the first begin to the last end: the rest are
    gaps."""
    busy, until = 0.0, float("-inf")
    for launch in found:
        busy += max(0.0, launch.end - max(launch.begin, until))
        until = max(until, launch.end)
    return busy, until - found[0].begin if found else 0.0


def milliseconds(value: float | None) -> str:
    """A time for a table; a dash where there is none."""
    return "-" if value is None else f"{value * 1e3:.0f} ms"


def mebibytes(value: int | None) -> str:
    """An amount of memory for a table; a dash where there is none."""
    return "-" if value is None else f"{value / 2**20:,.0f} MiB"


def interleaved(steps: Sequence[Step], repeats: int, device: torch.device) -> list[list[float]]:
    """Seconds of each step, taken in turns, so that whatever slows the machine slows all of
    them."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, times in zip(steps, taken, strict=True):
            times.append(seconds(step, device))
    return taken
