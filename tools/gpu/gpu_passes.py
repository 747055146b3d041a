"""A part of tools/gpu/gpu_truth.py: how fast elementwise work passes over memory, what its launches
cost the host, and where a step waits.

Under fake tensors passes are counted as if each had the memory's full rate and no launch took time.
Here both are measured.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from device_clock import attempted, of_published, seconds
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.nn.functional import gated_sum, gated_unit, modulated_norm, normalised_heads
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.testing.world import ADAPTERS, make_model, micro_batches
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import prepare
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, training_step

Rows = Iterator[dict[str, Any]]
WIDE, NARROW = torch.float32, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Elementwise work, and the bytes that it has to read and write, however it is computed."""

    run: Callable[[], Tensor]
    forward: float
    backward: float = 0.0
    """0 if it has none."""
    has_kernel: bool = True
    """Whether there is a kernel of ours for it."""


def passes_of(device: torch.device, tokens: int, dim: int) -> dict[str, Pass]:
    """What blocks are made of besides matmuls and attention, at a number of tokens and a width, by
    name."""
    heads, number = dim // 128, tokens * dim

    def random(*shape: int, dtype: torch.dtype = WIDE, trains: bool = True) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_(trains)

    x = random(1, tokens, dim)
    y = random(1, tokens, dim, dtype=NARROW)
    both = random(1, tokens, 2 * dim, dtype=NARROW)
    scale, shift, gate = (random(1, 1, dim, trains=False) for _ in range(3))
    norm = nn.RMSNorm(dim, eps=1e-6, device=device).requires_grad_(False)
    rotary = random(1, tokens, 1, dim // heads // 2, 2, trains=False)
    trained = [random(1, 1, dim) for _ in range(2)]
    layers = {
        kind: QuantizedLinear(dim, dim, kind, bias=False).to(device) for kind in ("int8", "nf4")
    }
    for layer in layers.values():
        layer.set_weight(random(dim, dim, trains=False))
    codes = layers["int8"].weight.detach()
    weights = {f"conversion of {kind}": _converted(layer, dim) for kind, layer in layers.items()}
    return {
        "copy": Pass(run=lambda: x.detach().clone(), forward=8 * number, has_kernel=False),
        "modulated norm": Pass(
            run=lambda: modulated_norm(x, scale, shift, 1e-6, WIDE, NARROW),
            forward=6 * number,
            backward=10 * number,
        ),
        "modulated norm, trained": Pass(
            run=lambda: modulated_norm(x, trained[0], trained[1], 1e-6, WIDE, NARROW),
            forward=6 * number,
            backward=10 * number,
        ),
        "norm and rotation": Pass(
            run=lambda: normalised_heads(y, norm, heads, Precision(matmul=NARROW), rotary),
            forward=4 * number,
            backward=6 * number,
        ),
        "gated unit": Pass(run=lambda: gated_unit(both), forward=6 * number, backward=10 * number),
        "gated sum": Pass(
            run=lambda: gated_sum(y, x, gate),
            forward=10 * number,
            backward=6 * number,
            has_kernel=False,
        ),
        **weights,
        "transposed codes": Pass(
            run=lambda: codes.T.contiguous(), forward=2 * dim * dim, has_kernel=False
        ),
    }


def _converted(layer: QuantizedLinear, dim: int) -> Pass:
    # A product with no rows, so that the conversion alone takes time.
    rows = torch.empty(0, dim, device=layer.weight.device, dtype=NARROW)
    stored = sum(value.nbytes for value in layer.values().values())
    return Pass(run=lambda: layer(rows), forward=stored + 2 * dim * dim)


def passes(device: torch.device, tiny: bool) -> Rows:
    """Rate of each pass next to that of a copy, and the host's time for the same on few numbers."""
    large, small = (
        passes_of(device, *size)
        for size in (((64, 128), (8, 128)) if tiny else ((20_280, 5120), (8, 128)))
    )
    repeats, copied = 1 if tiny else 10, 0.0
    for kernels in ("torch", "triton") if device.type == "cuda" else ("torch",):
        for name, each in large.items():
            if kernels == "triton" and not each.has_kernel:
                continue
            measured = partial(_pass, each, small[name], repeats, device)
            with block_settings(BlockSettings(kernels=kernels)):
                for row in attempted(f"{name}, {kernels}", measured):
                    copied = copied or row.get("forward GB/s", 0.0)
                    shares = {
                        f"{way} of a copy": row[f"{way} GB/s"] / copied
                        for way in ("forward", "backward")
                        if f"{way} GB/s" in row
                    }
                    yield {"name": f"{name}, {kernels}", **row, **shares}


def _pass(each: Pass, small: Pass, repeats: int, device: torch.device) -> Rows:
    ahead, back = _rates(each, repeats, device)
    row: dict[str, Any] = {"forward GB/s": ahead / 1e9}
    if each.backward:
        row["backward GB/s"] = back / 1e9
    # What is small enough for a cache passes faster than memory.
    share = {} if each.has_kernel else of_published(ahead, lambda gpu: gpu.memory_bandwidth, device)
    yield {**row, **share, "host µs": _host_microseconds(small, 2 if repeats == 1 else 200, device)}


def _rates(each: Pass, repeats: int, device: torch.device) -> tuple[float, float]:
    """Bytes per second of the forward and of the backward."""

    def forward() -> None:
        for _ in range(repeats):
            each.run()

    forward()
    ahead = min(seconds(forward, device) for _ in range(3)) / repeats
    if not each.backward:
        return each.forward / ahead, 0.0
    out = each.run()
    given, inputs = torch.ones_like(out), _leaves(out)

    def backward() -> None:
        for _ in range(repeats):
            torch.autograd.grad(out, inputs, given, retain_graph=True)

    backward()
    return each.forward / ahead, each.backward / (
        min(seconds(backward, device) for _ in range(3)) / repeats
    )


def _leaves(out: Tensor) -> list[Tensor]:
    """The tensors that a result's backward computes gradients of."""
    found, nodes = dict[int, Tensor](), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        nodes += [following for following, _ in node.next_functions] if node is not None else []
    return list(found.values())


def _host_microseconds(each: Pass, repeats: int, device: torch.device) -> float:
    """The host's time for a forward on few numbers, which a GPU is done with sooner."""
    each.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        each.run()
    return (time.perf_counter() - start) / repeats * 1e6


def waits(device: torch.device, families: Iterable[tuple[str, Any, Any, Any]]) -> Rows:
    """Where the host waits for a GPU in a training step of each family: once, for loss and norm.
    torch itself says where."""
    for name, spec, arch, items in families:
        for kernels in ("torch", "triton"):
            title = f"{name}, {kernels}: waits in a step"
            measured = partial(_waits_in_a_step, device, spec, arch, items, kernels)
            yield from attempted(
                title, lambda title=title, measured=measured: [_places(title, measured())]
            )


def _places(name: str, found: Counter[str]) -> dict[str, Any]:
    places = ", ".join(f"{place} ({number})" for place, number in found.items())
    return {"name": name, "value": places, "ok": found.total() == 1}


def _waits_in_a_step(
    device: torch.device, spec: Any, arch: Any, items: Any, kernels: str
) -> Counter[str]:
    model: Any = make_model(spec, arch, dtype=NARROW, adapter=ADAPTERS["lora"]).to(device)
    trained, batches, found = trainable_parameters(model), micro_batches(items), Counter[str]()
    there = Model(model, BlockEngine(policy="full", kernels=kernels), spec, trained)
    optimizer = NamedOptimizer(trained, OptimConfig())
    for step in range(3):  # the last counts: in the first a kernel's compiler may wait
        ready = [
            prepare(spec, FlowConfig(), batches, i, seed=1, step=step).pinned()
            for i in range(len(batches))
        ]
        context = StepContext(step=step, seed=1, flow=FlowConfig(), prepared=ready.__getitem__)
        torch.cuda.synchronize(device)
        with _noted() as places:
            training_step(there, batches, optimizer, context, lr=1e-4, clip_norm=1.0)
        found = places
    return found


@contextmanager
def _noted() -> Iterator[Counter[str]]:
    """The places at which the host waits inside the block; complete behind it."""
    found = Counter[str]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(
        f"{Path(each.filename).name}:{each.lineno}"
        for each in said
        if "synchronizing" in str(each.message)
    )
