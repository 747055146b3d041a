"""The parts of tools/gpu_truth.py: each measures on a device and yields rows, which are appended to a file as they come.

    uv run tools/gpu_parts.py facts --device cuda --out rows.jsonl

A row has a name and what was measured. Where something has to hold, `ok` says whether it does.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bench_step
import plan_truth
from device_clock import (
    busy_and_span,
    by_kind,
    interleaved,
    launches,
    mebibytes,
    milliseconds,
    peak_bytes,
    seconds,
    started_on,
    unless_out_of_memory,
)
from ditkit_core.engine.block_hooks import BlockHooks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.pinned_memory import PinnedPool, host_memory
from ditkit_core.errors import UserError
from ditkit_core.models.precision import PrecisionConfig, set_precision
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.nn.quantized_linear import LAYOUTS, QuantizedLinear
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model, outcome, train_shortly
from ditkit_core.weights.quantize import check_compute_on
from gpu_late import Delay, late_copies, swapped
from gpu_runs import Rows, demos, real
from gpu_truth import append

POLICIES = ("none", "full", "attn_only", "ops(matmul)")
GIB = 2**30


def facts(device: torch.device, tiny: bool) -> Rows:
    """Versions, switches, attention kernels, and what CUDA itself takes of the memory."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.mem_get_info(device) if on_gpu else (0, 0)
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else ""
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    yield {
        "name": name,
        "value": f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}, driver {driver}",
    }
    matmul = torch.backends.cuda.matmul
    switches = {
        "TF32 in matmuls": matmul.allow_tf32,
        "TF32 in convolutions": torch.backends.cudnn.allow_tf32,
        "sums in bf16": matmul.allow_bf16_reduced_precision_reduction,
        "sums in fp16": matmul.allow_fp16_reduced_precision_reduction,
    }
    yield from ({"name": switch, "value": value, "ok": not value} for switch, value in switches.items())
    tokens, heads = (64, 2) if tiny else (20280, 40)
    for what, keys, is_masked in (("self", tokens, False), ("cross", 512, False), ("masked", 512, True)):
        yield {
            "name": f"kernel of {what} attention",
            "value": _attention_kernels(device, tokens, keys, heads, is_masked),
        }
    if on_gpu:
        square = torch.ones(1024, 1024, device=device, dtype=torch.bfloat16)
        torch.mm(square, square)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        taken = before[0] - free - torch.cuda.memory_reserved(device)
        yield {"name": "taken by libraries since the first call", "value": f"{taken / GIB:.2f} GiB"}
        yield {"name": "in use before", "value": f"{(total - before[0]) / GIB:.2f} GiB, with this process's context"}


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()


def _attention_kernels(device: torch.device, queries: int, keys: int, heads: int, is_masked: bool) -> str:
    q, k, v = (torch.randn(1, n, heads, 128, device=device, dtype=torch.bfloat16) for n in (queries, keys, keys))
    q.requires_grad_()
    mask = torch.arange(keys, device=device)[None] < keys - 8 if is_masked else None
    found = launches(lambda: attend(q, k, v, name="self", padding_mask=mask).float().mean().backward(), device)
    return ", ".join(dict.fromkeys(each.name[:60] for each in found if each.kind.startswith("attention"))) or "composed"


def numbers(device: torch.device, tiny: bool) -> Rows:
    """Loss and every gradient: fp32 against the CPU, bf16 against fp64 next to the CPU's own error."""
    for name, spec, arch, items in _families(tiny):
        for adapter in ("full", "lora"):
            made = {
                dtype: make_model(spec, arch, dtype=dtype, adapter=ADAPTERS[adapter])
                for dtype in (torch.float32, torch.bfloat16, torch.float64)
            }
            on_cpu = {dtype: outcome(spec, model, items, BlockEngine()) for dtype, model in made.items()}
            truth = on_cpu[torch.float64].gradients
            for policy in POLICIES:
                engine = BlockEngine(policy=policy)
                there = {
                    dtype: outcome(spec, made[dtype].to(device), items, engine)
                    for dtype in (torch.float32, torch.bfloat16)
                }
                fp32 = _distance(there[torch.float32].gradients, on_cpu[torch.float32].gradients)
                errors = [_distance(each[torch.bfloat16].gradients, truth) for each in (there, on_cpu)]
                yield {
                    "name": f"{name} {adapter} {policy}", "fp32 against CPU": fp32, "bf16 against fp64": errors[0],
                    "CPU's bf16 against fp64": errors[1], "ok": fp32 <= 1e-4 and errors[0] <= 1.2 * errors[1] + 1e-6,
                }  # fmt: skip


def _families(tiny: bool) -> Iterator[tuple[str, Any, Any, list[dict[str, Tensor]]]]:
    yield "toy", TOY, ToyArch(), toy_items(2)
    if not tiny:
        for family in ("wan", "flux2"):
            spec, arch, _, outline = plan_truth.described(
                plan_truth.Case(model=family, tokens=1024, width=256, blocks=3)
            )
            random = torch.Generator().manual_seed(0)
            item = {key: torch.randn(t.shape, generator=random).to(t.dtype) for key, t in outline[0].items()}
            yield family, spec, arch, [item]


def _distance(found: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> float:
    """The largest relative difference of a gradient, by norms."""
    pairs = ((found[name], tensor) for name, tensor in right.items() if tensor is not None)
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs if a is not None
    )


def bitwise(device: torch.device, tiny: bool) -> Rows:
    """Three steps under each lever against three without any, with a deterministic attention kernel; then late work and late copies."""
    arch = ToyArch(depth=3, dropout=0.1) if tiny else ToyArch(depth=6, dim=2048, heads=16, dropout=0.1)
    items = toy_items(2)

    def steps(policy: str, swap: bool, delay: bool) -> Any:
        model: Any = make_model(TOY, arch, adapter=ADAPTERS["lora with dropout"])
        hooks: tuple[BlockHooks, ...] = (swapped(model, device),) if swap else ()
        if not swap:
            model.to(device)
        engine = BlockEngine(policy=policy, backend="sdpa_math", hooks=(*([Delay(device)] if delay else []), *hooks))
        torch.manual_seed(3)
        return [train_shortly(TOY, model, items, engine) for _ in range(3)]

    expected = steps("none", False, False)
    cases = [(policy, False, False) for policy in POLICIES]
    cases += [
        (policy, swap, delay)
        for delay in (False, True)
        for policy, swap in (("full", True), ("none+offload", False), ("attn_only+offload", True))
    ]
    for policy, swap, delay in cases:
        late: AbstractContextManager[None] = late_copies(device) if delay else nullcontext()
        with late:
            found = steps(policy, swap, delay)
        same = all(
            a[0] == b[0] and all(map(torch.equal, a[1].values(), b[1].values()))
            for a, b in zip(found, expected, strict=True)
        )
        yield {"name": f"{policy}{' swapped' if swap else ''}{', late' if delay else ''}", "ok": same}
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        q, k, v = (
            torch.randn(1, 4096, 16, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        with block_settings(BlockSettings(backend="sdpa_flash")):
            runs = [
                torch.autograd.grad(attend(q, k, v, name="self").float().square().mean(), (q, k, v)) for _ in range(5)
            ]
        yield {
            "name": "deterministic flash, five backwards",
            "ok": all(all(map(torch.equal, run, runs[0])) for run in runs),
        }


def quantized(device: torch.device, tiny: bool) -> Rows:
    """Codes and values as on the CPU; a step with streamed blocks as with resident ones."""
    size = 128 if tiny else 5120
    for kind in LAYOUTS:
        weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
        layers = []
        for where in (torch.device("cpu"), device):
            layer = QuantizedLinear(size, size, kind, bias=False).to(where)
            layer.set_weight(weight.clone().to(where))  # which it overwrites
            layers.append(layer)
        ours, there = layers
        codes = all(torch.equal(value, there.values()[name].cpu()) for name, value in ours.values().items())
        yield {"name": f"{kind} codes", "ok": codes}
        yield {"name": f"{kind} values", "ok": torch.equal(ours.dequantize(), there.dequantize().cpu())}
        results = []
        for swap in (False, True):
            model = make_quantized(TOY, ToyArch(dim=64, heads=2), kind, adapter=ADAPTERS["lora"])
            hooks = (swapped(model, device),) if swap else ()
            if not swap:
                model.to(device)
            results.append(
                train_shortly(TOY, model, toy_items(2), BlockEngine(policy="full", backend="sdpa_math", hooks=hooks))
            )
        same = results[0][0] == results[1][0] and all(map(torch.equal, results[0][1].values(), results[1][1].values()))
        yield {"name": f"{kind} streamed", "ok": same}


def computed(device: torch.device, tiny: bool) -> Rows:
    """Products in 8 bits against the CPU's, which have the same codes, and their time against bf16, forward and backward."""
    rows, size = (64, 128) if tiny else (20_280, 5120)
    given = torch.randn(rows, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    few, there = given[:64], given.to(device)  # few, because a CPU's are slow
    dense = nn.Linear(size, size, device=device, dtype=torch.bfloat16).requires_grad_(False)
    taken = min(seconds(partial(_both_ways, dense, there), device) for _ in range(4))
    yield {"name": f"bf16, {rows} rows", "both ways": milliseconds(taken)}
    for kind in ("int8", "fp8"):
        try:
            check_compute_on(kind, [device])
        except UserError as error:
            yield {"name": f"{kind} computed", "value": str(error)}
            continue
        layer = QuantizedLinear(size, size, kind, bias=False)
        layer.set_weight(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))
        layer.in_8_bits = True
        exact = _both_ways(layer, few)
        layer.to(device)
        for kernels in ("torch",) if device.type == "cpu" else ("torch", "triton"):
            with block_settings(BlockSettings(kernels=kernels)):
                found = _both_ways(layer, few.to(device))
                taken = min(seconds(partial(_both_ways, layer, there), device) for _ in range(4))
            apart = max(float((a.cpu() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
            # The sums of fp8 are in fp32, in another order: a result in bf16 may round the other way.
            row = {
                "both ways": milliseconds(taken),
                "difference": apart,
                "ok": apart <= (2**-9 if kind == "fp8" else 0),
            }
            yield {"name": f"{kind} computed, {kernels}, {rows} rows", **row}


def _both_ways(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """A product, and the gradient of its input."""
    x = x.detach().requires_grad_()
    out = layer(x)
    return out.detach(), torch.autograd.grad(out, x, out.detach())[0]


def tests(device: torch.device, tiny: bool) -> Rows:
    """The tests for a GPU, in one process, until the first that fails; where it is tiny they are only collected."""
    root = Path(__file__).parents[1]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-m",
        "gpu",
        "-x",
        "--timeout",
        "60",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--collect-only", "shared/tests/engine/test_pinned_memory.py"] if tiny else ["shared/tests", "packages"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    yield {"name": "pytest -m gpu", "value": last, "ok": done.returncode in ((0, 5) if tiny else (0,))}


def plan(device: torch.device, tiny: bool) -> Rows:
    """Plans of slices at full width against what a process of their own occupies."""
    for case in plan_truth.tiny_cases() if tiny else plan_truth.grid(device)[:8]:
        found = plan_truth.compared(case, device)
        within = found.ratio is not None and abs(found.ratio - 1) <= plan_truth.TOLERANCE
        yield {"name": case.name, **found.columns(), **({} if tiny else {"ok": within})}


def speed(device: torch.device, tiny: bool) -> Rows:
    """Medians of interleaved steps of ours and of diffusers', then one step of each by kinds of kernels."""
    given = ["--device", str(device), *(["--tiny"] if tiny else ["--repeats", "5"])]
    args = bench_step.configured([*given, "--dtype", "bf16"])
    dtype = torch.bfloat16
    pair = bench_step.wan_pair(args, dtype)
    eager = bench_step.steps_of(args, pair, dtype)
    default, fast = (PrecisionConfig(preset=preset).precision(dtype, {}) for preset in ("default", "fast"))

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
    if not tiny:
        steps["ours, compiled"] = bench_step.steps_of(args, pair, dtype, compile=True).ours
    found = bench_step.measured(steps, args.repeats, device)
    for name, row in found.items():
        times = {
            "seconds": row.seconds,
            "of ours": None
            if row.seconds is None or found["ours"].seconds is None
            else row.seconds / found["ours"].seconds,
        }
        yield {"name": name, **times, "peak": mebibytes(row.peak), "loss": row.loss}
    for name, step in steps.items():
        if found[name].seconds is None:
            continue
        made = launches(step, device)
        (number, taken), (busy, span) = by_kind(made), busy_and_span(made)
        kinds = {kind: f"{number[kind]} in {taken[kind] / 1e3:.1f} ms" for kind in number}
        yield {"name": f"{name}: kernels", **kinds, "gaps": f"{(span - busy) / 1e3:.1f} of {span / 1e3:.1f} ms"}


def streaming(device: torch.device, tiny: bool) -> Rows:
    """Time of page-locking and copying, and how much of the copies a step hides."""
    on_gpu, size = device.type == "cuda", 2**20 if tiny else 2**30
    pages, memory = PinnedPool(argparse.Namespace()), host_memory(size, device)
    memory.zero_()
    there = torch.empty(size, dtype=torch.uint8, device=device)
    if on_gpu:
        start = time.perf_counter()
        pages.lock(memory, device)
        yield {"name": "page-locking a GiB", "seconds": time.perf_counter() - start, "ok": pages.all_locked}
    copying = statistics.median(interleaved([lambda: there.copy_(memory, non_blocking=True)], 5, device)[0])
    yield {"name": "host to device", "GB/s": size / copying / 1e9}
    back = statistics.median(interleaved([lambda: memory.copy_(there, non_blocking=True)], 5, device)[0])
    yield {"name": "device to host", "GB/s": size / back / 1e9}
    if on_gpu:
        pages.unlock([memory])
    arch = ToyArch(depth=3) if tiny else ToyArch(depth=12, dim=5120, heads=40)
    items = toy_items(2) if tiny else [{**item, "latents": torch.randn(4, 8, 64, 64)} for item in toy_items(2)]
    times, moved = [], 0
    for swap in (False, True):
        model: Any = make_model(TOY, arch, dtype=torch.bfloat16, adapter=ADAPTERS["lora"])
        streamer = swapped(model, device) if swap else None
        if streamer is None:
            model.to(device)
        else:
            moved = 2 * streamer.num_bytes
        engine = BlockEngine(policy="full", hooks=() if streamer is None else (streamer,))
        step = partial(outcome, TOY, model, items, engine)
        step()
        times.append(min(seconds(step, device) for _ in range(3)))
        del model, step, streamer
    resident, streamed = times
    hidden = 1 - max(0.0, streamed - resident) / (moved * copying / size)
    row = {"resident": milliseconds(resident), "streamed": milliseconds(streamed), "share of copies hidden": hidden}
    yield {"name": f"a step that streams {moved / GIB:.2f} GiB", **row}


def klein(device: torch.device, tiny: bool) -> Rows:
    """A step of a small model, which the host may not feed fast enough: launches, and the time between kernels."""
    for tokens in (64,) if tiny else (1024, 4096):
        given = ["--device", str(device), "--model", "flux2", "--dtype", "bf16", "--tokens", str(tokens)]
        given += ["--tiny"] if tiny else ["--width", "3072", "--blocks", "20"]
        args = bench_step.configured(given)
        pair = unless_out_of_memory(lambda args=args: bench_step.flux2_pair(args, torch.bfloat16))
        if pair is None:
            yield {"name": f"{tokens} tokens", "value": "out of memory", "ok": False}
            continue
        for name, step in (
            ("ours", bench_step.steps_of(args, pair, torch.bfloat16).ours),
            ("diffusers", bench_step.steps_of(args, pair, torch.bfloat16).autocast),
        ):
            step()
            taken, made = min(seconds(step, device) for _ in range(2 if tiny else 5)), launches(step, device)
            busy, span = busy_and_span(made)
            yield {
                "name": f"{name}, {tokens} tokens", "step": milliseconds(taken), "launches": len(made),
                "busy": f"{busy / max(span, 1e-9):.0%}", "peak": mebibytes(peak_bytes(step, device)),
            }  # fmt: skip


PARTS: dict[str, Callable[[torch.device, bool], Rows]] = {
    part.__name__: part
    for part in (facts, numbers, bitwise, quantized, computed, tests, plan, speed, streaming, klein, demos, real)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one part, and append its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    for row in PARTS[args.part](started_on(args.device), args.tiny):
        append(args.out, {"part": args.part, **row})
    return 0


if __name__ == "__main__":
    sys.exit(main())
