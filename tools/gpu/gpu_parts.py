"""The parts of tools/gpu/gpu_truth.py: each measures on a device and yields rows, which are
appended to a file as they come.

    uv run tools/gpu/gpu_parts.py facts --device cuda --out rows.jsonl

A row has a name and what was measured. Where something has to hold, `ok` says whether it does.
"""

import argparse
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # what both folders share

import torch
from torch import Tensor, nn

import gpu_cases
import gpu_models
import gpu_passes
import plan_truth
from device_clock import attempted, launches, milliseconds, of_published, seconds, started_on
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.nn.quantized_layouts import LAYOUTS
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import ADAPTERS, largest, make_model, outcome, train_shortly
from gpu_bits import POLICIES, bitwise
from gpu_late import swapped
from gpu_speed import Rows, kinds_in_8_bits, speed, streaming
from gpu_truth import NO_DEVICE, PEERS, append

GIB = 2**30


def facts(device: torch.device, tiny: bool) -> Rows:
    """Versions, switches, attention kernels, and what CUDA itself takes of the memory."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.mem_get_info(device) if on_gpu else (0, 0)
    driver = (
        _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else ""
    )
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
    yield from (
        {"name": switch, "value": "on" if on else "off", "ok": not on}
        for switch, on in switches.items()
    )
    tokens, heads = (64, 2) if tiny else (20280, 40)
    for what, keys, is_masked in (
        ("self", tokens, False),
        ("cross", 512, False),
        ("masked", 512, True),
    ):
        name = f"kernel of {what} attention"
        found = partial(_attention_kernels, device, tokens, keys, heads, is_masked)
        yield from attempted(
            name, lambda name=name, found=found: [{"name": name, "value": found()}]
        )
    yield {
        "name": "query gradients of low scores",
        "ok": _low_scores_have_gradients(device, 192 if tiny else 704),
    }
    if on_gpu:
        square = torch.ones(1024, 1024, device=device, dtype=torch.bfloat16)
        torch.mm(square, square)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        taken = before[0] - free - torch.cuda.memory_reserved(device)
        yield {"name": "taken by libraries since the first call", "value": f"{taken / GIB:.2f} GiB"}
        yield {
            "name": "in use before",
            "value": f"{(total - before[0]) / GIB:.2f} GiB, with this process's context",
        }


def _said(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):  # a container may lack the command
        return "unknown"


def _attention_kernels(
    device: torch.device, queries: int, keys: int, heads: int, is_masked: bool
) -> str:
    q, k, v = (
        torch.randn(1, n, heads, 128, device=device, dtype=torch.bfloat16)
        for n in (queries, keys, keys)
    )
    q.requires_grad_()
    mask = torch.arange(keys, device=device)[None] < keys - 8 if is_masked else None
    found = launches(
        lambda: attend(q, k, v, name="self", padding_mask=mask).float().mean().backward(), device
    )
    return (
        ", ".join(
            dict.fromkeys(each.name[:60] for each in found if each.kind.startswith("attention"))
        )
        or "composed"
    )


def _low_scores_have_gradients(device: torch.device, tokens: int) -> bool:
    """Whether they are finite where all scores are -120: before cuDNN 9.26 they are not on Hopper,
    with a mask and 64 modulo 128 keys."""
    q, k, v = (
        0.1 * torch.randn(1, tokens, 1, 64, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8
    mask = torch.ones(1, tokens, dtype=torch.bool, device=device)
    attend(
        q.requires_grad_(), k, v, name="self", padding_mask=mask
    ).float().square().sum().backward()
    assert q.grad is not None
    return bool(q.grad.isfinite().all())


def numbers(device: torch.device, tiny: bool) -> Rows:
    """Every gradient: fp32 against the CPU, bf16 against fp64 next to the CPU's own error."""
    for name, spec, arch, items in _families(tiny):
        for adapter in ("full", "lora"):
            made = {
                dtype: make_model(spec, arch, dtype=dtype, adapter=ADAPTERS[adapter])
                for dtype in (torch.float32, torch.bfloat16, torch.float64)
            }
            on_cpu = {
                dtype: outcome(spec, model, items, BlockEngine()) for dtype, model in made.items()
            }

            def compared(
                engine: BlockEngine,
                made: Any = made,
                on_cpu: Any = on_cpu,
                given: Any = (spec, items),
            ) -> Rows:
                there = {
                    dtype: outcome(given[0], made[dtype].to(device), given[1], engine)
                    for dtype in (torch.float32, torch.bfloat16)
                }
                fp32 = _distance(there[torch.float32].gradients, on_cpu[torch.float32].gradients)
                truth = on_cpu[torch.float64].gradients
                errors = [_error(each[torch.bfloat16].gradients, truth) for each in (there, on_cpu)]
                yield {
                    "fp32 against CPU": fp32, "bf16 against fp64": errors[0],
                    "CPU's bf16 against fp64": errors[1],
                    "ok": fp32 <= 1e-4 and errors[0] <= 1.2 * errors[1] + 1e-6,
                }  # fmt: skip

            for way, engine in _engines(device).items():
                title = f"{name} {adapter} {way}"
                yield from (
                    {"name": title, **row} for row in attempted(title, partial(compared, engine))
                )


def _engines(device: torch.device) -> dict[str, BlockEngine]:
    """The ways to run a model whose numbers are compared."""
    engines = {policy: BlockEngine(policy=policy) for policy in POLICIES}
    if device.type == "cuda":
        engines["kernels of Triton"] = BlockEngine(policy="full", kernels="triton")
    return engines


def _families(tiny: bool) -> Iterator[tuple[str, Any, Any, list[dict[str, Tensor]]]]:
    yield "toy", TOY, ToyArch(), toy_items(2)
    if not tiny:
        for family in ("wan", "flux2"):
            spec, arch, _, outline = plan_truth.described(
                plan_truth.Case(model=family, tokens=1024, width=256, blocks=3)
            )
            random = torch.Generator().manual_seed(0)
            item = {
                key: torch.randn(t.shape, generator=random).to(t.dtype)
                for key, t in outline[0].items()
            }
            yield family, spec, arch, [item]


def _distance(found: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> float:
    """The largest relative difference of a gradient, by norms; NaN if one is missing or not a
    number, which is within no tolerance."""
    pairs = ((found[name], tensor) for name, tensor in right.items() if tensor is not None)
    return largest(
        math.nan
        if a is None
        else float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in pairs
    )


def _error(found: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> float:
    """The relative difference of all gradients together: that of one small tensor changes by a
    seventh with the order of a sum."""
    pairs = [(found[name], tensor) for name, tensor in right.items() if tensor is not None]
    apart = math.hypot(
        *(math.nan if a is None else float((a.double() - b.double()).norm()) for a, b in pairs)
    )
    return apart / math.hypot(*(float(b.double().norm()) for _, b in pairs))


def quantized(device: torch.device, tiny: bool) -> Rows:
    """Codes and values as on the CPU; a step with streamed blocks as with resident ones."""
    for kind in LAYOUTS:
        yield from attempted(kind, partial(_quantized, kind, 128 if tiny else 5120, device))


def _quantized(kind: str, size: int, device: torch.device) -> Rows:
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    layers = []
    for where in (torch.device("cpu"), device):
        layer = QuantizedLinear(size, size, kind, bias=False).to(where)
        layer.set_weight(weight.clone().to(where))  # which it overwrites
        layers.append(layer)
    ours, there = layers
    codes = all(
        torch.equal(value, there.values()[name].cpu()) for name, value in ours.values().items()
    )
    yield {"name": f"{kind} codes", "ok": codes}
    yield {"name": f"{kind} values", "ok": torch.equal(ours.dequantize(), there.dequantize().cpu())}
    results = []
    for swap in (False, True):
        model = make_quantized(TOY, ToyArch(dim=64, heads=2), kind, adapter=ADAPTERS["lora"])
        hooks = (swapped(model, device),) if swap else ()
        if not swap:
            model.to(device)
        engine = BlockEngine(policy="full", backend="sdpa_math", hooks=hooks)
        results.append(train_shortly(TOY, model, toy_items(2), engine))
    same = results[0][0] == results[1][0] and all(
        map(torch.equal, results[0][1].values(), results[1][1].values())
    )
    yield {"name": f"{kind} streamed", "ok": same}


def computed(device: torch.device, tiny: bool) -> Rows:
    """Products in 8 bits against the CPU's, which have the same codes, and their time against bf16,
    forward and backward."""
    rows, size = (64, 128) if tiny else (20_280, 5120)
    given = torch.randn(rows, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    there, work = given.to(device), 4 * rows * size**2  # forward and backward
    dense = nn.Linear(size, size, device=device, dtype=torch.bfloat16).requires_grad_(False)
    taken = min(seconds(partial(_both_ways, dense, there), device) for _ in range(4))
    share = of_published(work / taken, lambda gpu: gpu.bf16_flops, device)
    yield {"name": f"bf16, {rows} rows", "both ways": milliseconds(taken), **share}
    for kind, problem in kinds_in_8_bits(device).items():
        if problem:
            yield {"name": f"{kind} computed", "value": problem}
            continue
        layer = QuantizedLinear(size, size, kind, bias=False)
        layer.set_weight(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))
        layer.in_8_bits = True
        exact = _both_ways(layer, given[:64])  # few, because a CPU's are slow
        layer.to(device)
        for kernels in ("torch",) if device.type == "cpu" else ("torch", "triton"):
            name = f"{kind} computed, {kernels}, {rows} rows"
            compared = partial(_computed, layer, there, exact, kernels)
            yield from ({"name": name, **row} for row in attempted(name, compared))


def _computed(
    layer: QuantizedLinear, there: Tensor, exact: tuple[Tensor, Tensor], kernels: str
) -> Rows:
    with block_settings(BlockSettings(kernels=kernels)):
        found = _both_ways(layer, there[: len(exact[0])])
        taken = min(seconds(partial(_both_ways, layer, there), there.device) for _ in range(4))
    apart = largest(
        float((a.cpu() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)
    )
    right = apart <= (FP8_LIMIT if layer.kind == "fp8" else 0)
    share = of_published(
        4 * there.numel() * layer.out_features / taken,
        lambda gpu: getattr(gpu, f"{layer.kind}_flops"),
        there.device,
    )
    yield {
        "both ways": milliseconds(taken),
        "difference": apart,
        **share,
        "ok": right and share.get("ok", True),
    }


FP8_LIMIT = 2**-9
"""Largest difference of products in fp8 from those of a CPU, whose sums are fp32. An H100 cuts off
sums of 128 products behind 13 bits or so: random sums differ by 1.3e-4 of their size, whatever
their number, and some of them round to another bf16, which makes 7e-4."""


def _both_ways(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """A product of a square layer, and a gradient of its input."""
    inputs = x.detach().requires_grad_()
    out = layer(inputs)
    # Not the result as upstream gradient: where that rounds to another bf16, a code in 8 bits
    # differs, and products by four times as much.
    return out.detach(), torch.autograd.grad(out, inputs, x)[0]


_FAILED = re.compile(
    r"\[gw\d+\] \[ *\d+%\] (?:FAILED|ERROR) (.+)|(.+::.+) (?:FAILED|ERROR) +\[ *\d+%\]"
)
"""A line of `pytest -v` on a test that failed, from workers or from a single process."""


def tests(device: torch.device, tiny: bool) -> Rows:
    """The tests for a GPU, and each that fails; where it is tiny, those of one file that run on a
    CPU.

    Those that measure memory run in one process. The others, eight of ten, compare small models,
    and four processes share the GPU.
    """
    small = "trains_as_the_cpu_does"
    runs = [
        ["-n", "0", "-k", f"not {small}", "shared/tests"],
        ["-n", "4", "-k", small, "shared/tests/testing", "packages"],
    ]
    if tiny:
        runs = [["-n", "0", "-m", "not slow", "shared/tests/engine/test_pinned_memory.py"]]
    for chosen in runs:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-rfE",
            "--tb=no",
            "-m",
            "gpu",
            "--timeout",
            "60",
            *chosen,
        ]
        last, root, pipe = "nothing", Path(__file__).parents[2], subprocess.PIPE
        with subprocess.Popen(
            command, cwd=root, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as run:
            for line in run.stdout or ():
                last = line.strip() or last
                name, _, reason = last.partition(" - ")
                if failed := _FAILED.fullmatch(last):
                    # at once: the part may run out of time
                    yield {"name": failed[1] or failed[2], "ok": False}
                elif name.startswith(("FAILED ", "ERROR ")):  # at the end, in pytest's summary
                    yield {"name": name.partition(" ")[2], "value": reason[:200]}
        yield {"name": f"pytest {' '.join(chosen)}", "value": last, "ok": run.returncode == 0}


def plan(device: torch.device, tiny: bool, is_shared: bool = False) -> Rows:
    """Plans of slices at full width against what a process of their own occupies; a case is planned
    while the one before it runs.

    Args:
        is_shared: Whether other parts take memory of the GPU meanwhile, so that what the driver has
            in use says nothing.
    """
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (math.inf, math.inf)
    others = None if is_shared else total - free
    cases = plan_truth.tiny_cases()[1:] if tiny else plan_truth.grid(device)[:9]
    with ThreadPoolExecutor(1) as beside:
        planned = plan_truth.plan(cases[0], device)
        for case, following in zip(cases, [*cases[1:], None], strict=True):
            run = (
                beside.submit(plan_truth.in_own_process, case, device) if planned <= free else None
            )
            next_planned = 0 if following is None else plan_truth.plan(following, device)
            if run is None:
                yield {
                    "name": case.name,
                    "planned MiB": f"{planned / 2**20:,.0f}",
                    "value": "more than this GPU has free",
                }
            else:
                yield _planned(case.name, planned, run.result(), others, tiny)
            planned = next_planned
    for case in cases if device.type == "cuda" else ():
        if case.between:
            found = plan_truth.in_own_process(
                case, device, PYTORCH_ALLOC_CONF="expandable_segments:False"
            )
            name = f"{case.name}, no expandable segments"
            yield _planned(name, plan_truth.plan(case, device), found, others, tiny)


def _planned(
    name: str, planned: int, measured: dict[str, float] | str, others: float | None, tiny: bool
) -> dict[str, Any]:
    """A row of a plan; what is in use is without that of other processes, of which this is one, and
    left out where others change it."""
    if isinstance(measured, str):
        return {
            "name": name,
            "planned MiB": f"{planned / 2**20:,.0f}",
            "value": measured,
            "ok": False,
        }
    if "in use" in measured:
        in_use = {} if others is None else {"in use": measured["in use"] - others}
        measured = {name: value for name, value in measured.items() if name != "in use"} | in_use
    found = plan_truth.Comparison(planned=planned, measured=measured)
    within = found.ratio is not None and abs(found.ratio - 1) <= plan_truth.TOLERANCE
    return {"name": name, **found.columns(), **({} if tiny else {"ok": within})}


def passes(device: torch.device, tiny: bool) -> Rows:
    """`gpu_passes.passes`, and on a GPU `gpu_passes.waits`."""
    yield from gpu_passes.passes(device, tiny)
    if device.type == "cuda":
        yield from gpu_passes.waits(device, _families(tiny))


def demos(device: torch.device, tiny: bool) -> Rows:
    """`gpu_runs.demos`."""
    import gpu_runs  # imports diffusers, for which no other part has the seconds

    yield from gpu_runs.demos(device, tiny)


def real(device: torch.device, tiny: bool) -> Rows:
    """`gpu_runs.real`."""
    import gpu_runs

    yield from gpu_runs.real(device, tiny)


def backends(device: torch.device, tiny: bool) -> Rows:
    """`gpu_attention.backends`."""
    import gpu_attention

    yield from gpu_attention.backends(device, tiny)


def peers(trainer: str, device: torch.device, tiny: bool, checkout: Path | None = None) -> Rows:
    """`gpu_peers.peers`."""
    import gpu_peers

    assert checkout is not None, "without one the part is not run"
    yield from gpu_peers.peers(trainer, checkout, device, tiny)


def seeds(device: torch.device, tiny: bool) -> Rows:
    """`gpu_seeds.seeds`."""
    import gpu_seeds

    yield from gpu_seeds.seeds(device, tiny)


PARTS: dict[str, Callable[[torch.device, bool], Rows]] = {
    part.__name__: part
    for part in (
        facts,
        numbers,
        bitwise,
        quantized,
        computed,
        tests,
        plan,
        speed,
        passes,
        streaming,
        demos,
        seeds,
        real,
        backends,
    )
}
PARTS |= {name: partial(gpu_models.models, name) for name in gpu_cases.CASES}
PARTS |= {name: partial(peers, name) for name in PEERS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one part, and append its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--wait", action="store_true", help="for a line from standard input, after imports"
    )
    parser.add_argument("--shared", action="store_true", help="other parts run meanwhile")
    parser.add_argument("--checkout", type=Path, help="of another trainer, for its part")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    if args.wait:
        sys.stdin.readline()
    try:
        device = started_on(args.device)
    except UserError as error:
        print(f"UserError: {error}", file=sys.stderr)
        return NO_DEVICE
    if args.shared:
        torch.set_num_threads(max(1, torch.get_num_threads() // 4))
    part = PARTS[args.part]
    if part is speed:
        part = partial(speed, trace=str(args.out.with_suffix("")))
    if part is plan:
        part = partial(plan, is_shared=args.shared)
    if args.part in PEERS:
        part = partial(peers, args.part, checkout=args.checkout)
    for row in part(device, args.tiny):
        append(args.out, {"part": args.part, **row})
    return 0


if __name__ == "__main__":
    sys.exit(main())
