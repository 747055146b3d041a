"""The parts of tools/gpu/gpu_truth.py that time steps: against diffusers', with streamed blocks,
and of a small model."""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bench_step
from device_clock import (
    attempted,
    busy_and_span,
    by_kind,
    interleaved,
    launches,
    mebibytes,
    milliseconds,
    of_published,
    seconds,
)
from ditkit_core.adapters.inject import initialise, inject
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.pinned_memory import PinnedPool, host_memory
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision, PrecisionConfig, set_precision
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import ADAPTERS, outcome
from ditkit_core.weights.quantize import check_compute_on
from gpu_late import swapped

Rows = Iterator[dict[str, Any]]
Steps = Mapping[str, Callable[[], Tensor]]
GIB = 2**30


def speed(device: torch.device, tiny: bool, trace: str = "") -> Rows:
    """Medians of interleaved steps of ours, with torch's kernels where no others are named, and of
    diffusers'; one step of each by kinds of kernels.

    Args:
        trace: Start of the names of files for the profiler's traces of the first steps; empty for
            none.

    What changes the model or its kernels is timed with ours again, after the rows of the others are
    written.
    """
    on_gpu, dtype = device.type == "cuda", torch.bfloat16
    given = ["--device", str(device), *(["--tiny"] if tiny else ["--repeats", "5"])]
    args = bench_step.configured([*given, "--dtype", "bf16"])
    pair = bench_step.wan_pair(args, dtype)
    eager = bench_step.steps_of(args, pair, dtype)
    default, fast = (
        PrecisionConfig(preset=preset).precision(dtype, {}) for preset in ("default", "fast")
    )

    def under(precision: Any, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            set_precision(pair.ours, precision)
            try:
                return step()
            finally:
                set_precision(pair.ours, default)

        return run

    steps = {
        "ours": eager.ours, "ours, fast": under(fast, eager.ours), "diffusers": eager.theirs,
        "diffusers in autocast": eager.autocast,
    }  # fmt: skip
    yield from _timed(steps, args.repeats, device, trace)
    kernels = bench_step.steps_of(args, pair, dtype, kernels="triton" if on_gpu else "torch").ours
    name = f"ours, {'kernels = triton (the default on GPUs)' if on_gpu else 'kernels'}"
    yield from attempted(
        name, partial(_timed, {"ours again": eager.ours, name: kernels}, args.repeats, device)
    )
    for kind, problem in kinds_in_8_bits(device).items():
        if problem:
            yield {"name": f"ours, {kind}", "value": problem}
            continue
        with bench_step.computed_in(pair.ours, kind):
            both = {f"ours, {kind}": eager.ours, f"ours, {kind}, kernels = triton": kernels}
            yield from attempted(f"ours, {kind}", partial(_timed, both, args.repeats, device))


def kinds_in_8_bits(device: torch.device) -> dict[str, str]:
    """The kinds of products in 8 bits, each with why this device cannot compute it; empty if it
    can."""
    problems = dict.fromkeys(("int8", "fp8"), "")
    for kind in problems:
        try:
            check_compute_on(kind, [device])
        except UserError as error:
            problems[kind] = str(error)
    return problems


def _timed(steps: Steps, repeats: int, device: torch.device, trace: str = "") -> Rows:
    found = bench_step.measured(steps, repeats, device)
    first = next(iter(found.values())).seconds
    for name, row in found.items():
        ratio = None if row.seconds is None or first is None else row.seconds / first
        times = {"seconds": row.seconds, "of the first": ratio}
        yield {"name": name, **times, "peak": mebibytes(row.peak), "loss": row.loss}
    for name, step in steps.items():
        if found[name].seconds is None:
            continue
        file = f"{trace}.{re.sub(r'[^a-z]+', '_', name)}.json.gz" if trace else ""
        made = launches(step, device, file)
        (number, taken), (busy, span) = by_kind(made), busy_and_span(made)
        kinds = {kind: f"{number[kind]} in {taken[kind] / 1e3:.1f} ms" for kind in number}
        yield {
            "name": f"{name}: kernels",
            **kinds,
            "gaps": f"{(span - busy) / 1e3:.1f} of {span / 1e3:.1f} ms",
        }


def streaming(device: torch.device, tiny: bool) -> Rows:
    """Time of page-locking and copying, and how much of the copies a step hides."""
    on_gpu, size = device.type == "cuda", 2**20 if tiny else GIB
    pages, memory = PinnedPool(argparse.Namespace()), host_memory(size, device)
    memory.zero_()
    there = torch.empty(size, dtype=torch.uint8, device=device)
    if on_gpu:
        start = time.perf_counter()
        pages.lock(memory, device)
        yield {
            "name": "page-locking a GiB",
            "seconds": time.perf_counter() - start,
            "ok": pages.all_locked,
        }
    copying = statistics.median(
        interleaved([lambda: there.copy_(memory, non_blocking=True)], 5, device)[0]
    )
    yield {"name": "host to device", **_copied(size / copying, device)}
    back = statistics.median(
        interleaved([lambda: memory.copy_(there, non_blocking=True)], 5, device)[0]
    )
    yield {"name": "device to host", **_copied(size / back, device)}
    if on_gpu:
        pages.unlock([memory])
    yield from attempted("a step that streams", partial(_streamed, device, tiny, copying / size))


def _copied(rate: float, device: torch.device) -> dict[str, Any]:
    return {"GB/s": rate / 1e9, **of_published(rate, lambda gpu: gpu.host_bandwidth, device)}


def _streamed(device: torch.device, tiny: bool, seconds_per_byte: float) -> Rows:
    """A step with streamed blocks against one with resident ones."""
    # 12 blocks of Wan 14B's width are 7 GB.
    blocks = 12 if _has(device, 32 * GIB) else 4
    arch = ToyArch(depth=3) if tiny else ToyArch(depth=blocks, dim=5120, heads=40)
    items = (
        toy_items(2)
        if tiny
        else [{**item, "latents": torch.randn(4, 2, 64, 64)} for item in toy_items(2)]
    )
    times, moved = [], 0
    for swap in (False, True):
        model = toy_on(device, arch)
        streamer = swapped(model, device) if swap else None
        if streamer is not None:
            moved = 2 * streamer.num_bytes
        engine = BlockEngine(policy="full", hooks=() if streamer is None else (streamer,))
        step = partial(outcome, TOY, model, items, engine)
        step()
        times.append(min(seconds(step, device) for _ in range(3)))
        del model, step, streamer, engine
    resident, streamed = times
    copying = moved * seconds_per_byte
    hidden = 1 - max(0.0, streamed - resident) / copying
    row = {
        "resident": milliseconds(resident),
        "copies": milliseconds(copying),
        "streamed": milliseconds(streamed),
    }
    # Copies that take longer than the work cannot be hidden behind it.
    right = {} if tiny or copying > resident else {"ok": hidden >= 0.8}
    yield {
        "name": f"a step that streams {mebibytes(moved)}",
        **row,
        "share of copies hidden": hidden,
        **right,
    }


def toy_on(device: torch.device, arch: ToyArch) -> Any:
    """A toy with a LoRA, made on the device: a CPU would be busy with its random weights for longer
    than the part may take."""
    adapter = ADAPTERS["lora"]
    assert adapter is not None
    with device:
        model: Any = TOY.architecture.build(arch, Precision(matmul=torch.bfloat16)).requires_grad_(
            False
        )
    for name, parameter in model.named_parameters():
        if not TOY.precision.keep_fp32(name):
            parameter.data = parameter.data.bfloat16()
    inject(model, adapter, TOY.adapters.targets)
    initialise(model, 0, device_of=lambda name: device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # whoever streams the blocks expects weights that are there
    return model.train()


def _has(device: torch.device, num_bytes: int) -> bool:
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[1] >= num_bytes
