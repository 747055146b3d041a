"""Checks of compiled blocks over every variant of a model that conformance checks know, printed as JSON.

    python -m ditkit_core.testing.compiled_conformance variants test_conformance,test_conformance_controls TestWan,TestWanToDance

It runs in a separate process without type-check hooks, because these cannot be traced. Every class of checks in a named module is a
variant. All variants share the compiler's graphs, as the two experts of a run do.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters

from ditkit_core.engine import activation_offload as offload
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.nn.quantized_layouts import LAYOUTS
from ditkit_core.testing.combinations import pairwise
from ditkit_core.testing.compiled_steps import attention_forwards, compare, difference, divided, numbers
from ditkit_core.testing.conformance_levers import LEVERS
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.conformance_routing import routing_of
from ditkit_core.testing.conformance_swap import stream, train_streamed
from ditkit_core.testing.world import ADAPTERS, Items, differing, make_model, train_shortly
from ditkit_core.training.config import EMAConfig

BACKEND = "aot_eager"
_ONE, _TWO = torch.device("cpu", 1), torch.device("cpu", 2)
_FEW = ("full", "none", "dora", "two", 1, True, True, True, True)
COMPILED_LEVERS = {
    **LEVERS,
    "layout": ("one", "two"),  # graphs are of one device: more of them would compile the same again
    "autocast": (False, True),
}
"""Values by lever, as `conformance_levers` combines them; `_FEW` has one value of each."""


def variants(kind: Any) -> dict[str, Any]:
    """Steps under `attn_only`: the difference from eager, the number of graphs of each step, and the number of kinds of blocks."""
    model: Any = make_model(kind.spec, kind.arch, adapter=ADAPTERS["lora"])
    items = kind().items(2, ragged=True)
    expected, graphs = numbers(kind.spec, model, items, BlockEngine()), []
    for _ in range(2):
        counters.clear()
        with counted_calls(AttentionCalls()):
            compiled = numbers(kind.spec, model, items, BlockEngine(policy="attn_only", compile=BACKEND))
        graphs.append(counters["stats"]["unique_graphs"])
    blocks = [block for block in model.blocks() if next(block.parameters(), None) is not None]
    return {"from_eager": difference(compiled, expected), "graphs": graphs, "kinds": len(set(map(type, blocks)))}


def policies(kind: Any) -> dict[str, Any]:
    """The result of `compare` for adapters with dropout in bf16, with samples of one size."""
    model = make_model(kind.spec, kind.arch, dtype=torch.bfloat16, adapter=ADAPTERS["lora with dropout"])
    return _compared(kind, model, kind().items(2))


def full(kind: Any) -> dict[str, Any]:
    """The same for a full fine-tune in fp32, with one sample."""
    return _compared(kind, make_model(kind.spec, kind.arch), kind().items(1))


def _compared(kind: Any, model: Any, items: Items) -> dict[str, Any]:
    results = compare(kind.spec, model, items, POLICIES, backend=BACKEND)
    for policy, under in results.items():
        run = BlockEngine(policy=policy)
        under["eager forwards"] = attention_forwards(lambda run=run: numbers(kind.spec, model, items, run))  # type: ignore[misc]
    return results


def sizes(kind: Any) -> list[int]:
    """Number of new graphs for one to seven samples of one size, then for two to seven samples of several sizes."""
    model = make_model(kind.spec, kind.arch, adapter=ADAPTERS["lora"])
    graphs = []
    for count, ragged in [*((n, False) for n in range(1, 8)), *((n, True) for n in range(2, 8))]:
        counters.clear()
        numbers(kind.spec, model, kind().items(count, ragged), BlockEngine(policy="attn_only", compile=BACKEND))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def few_levers(kind: Any) -> dict[str, Any]:
    """All levers at once, and a full fine-tune that steps in the backward."""
    return {str(_FEW): list(_together(kind, _FEW)), "fused": list(_fused(kind, "full"))}


def levers(kind: Any) -> dict[str, Any]:
    """Levers in every pair, and full fine-tunes that step in the backward."""
    # compiled `none` over a quantized base is refused before a run
    cases = pairwise(COMPILED_LEVERS, lambda case: case[:2] not in [("none", kind) for kind in (*LAYOUTS, "nvfp4")])
    differences = {str(case): list(_together(kind, case)) for case in cases}
    return differences | {f"fused {policy}": list(_fused(kind, policy)) for policy in POLICIES}


def _together(kind: Any, case: tuple[Any, ...]) -> Iterator[str]:
    """Differences from the same compiled step without levers, and levers that had no effect; `case` has a value of each of `COMPILED_LEVERS`."""
    policy, quantize, adapter, layout, one_of, pipelined, offloads, routed, autocast = case
    dtype, trained = torch.bfloat16, ADAPTERS[adapter]

    def build() -> Any:
        return make_quantized(kind.spec, kind.arch, quantize, dtype=dtype, adapter=trained)

    items = kind().items(2, ragged=True)
    model, host = build(), HostMemory(smallest=0)
    router = routing_of(kind.spec, kind.arch, model) if routed else None
    plain = BlockEngine(policy=policy, compile=BACKEND, router=router)
    expected, values = train_shortly(kind.spec, build(), items, plain, pipelined=pipelined)
    count = len(model.blocks())
    devices = [_ONE] * count if layout == "one" else [_ONE if i < (count + 1) // 2 else _TWO for i in range(count)]
    with ExitStack() as stack:
        moves = stack.enter_context(divided(model, [_ONE, *devices, devices[-1]]))
        if offloads:
            stack.enter_context(patch.object(offload, "can_offload", lambda device: device is not None))
        if autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        swap = stream(model, one_of, devices) if one_of else None
        run = BlockEngine(
            policy=f"{policy}+offload" if offloads else policy, compile=BACKEND, hooks=() if swap is None else (swap,), host=host, router=router
        )  # fmt: skip
        results, others = train_shortly(kind.spec, model, items, run, pipelined=pipelined)
    if results != expected:
        yield f"numbers {results} {expected}"
    yield from differing(others, values)
    if bool(moves) != (layout == "two"):
        yield f"moved {dict(moves)}"
    if swap is not None and not swap.num_bytes:
        yield "nothing was streamed"
    if offloads and not host.num_bytes:
        yield "nothing was offloaded"


def _fused(kind: Any, policy: str) -> Iterator[str]:
    """Differences between two full fine-tunes with EMA: a step after the backward with resident blocks, and steps in it with streamed blocks."""
    items, ema = kind().items(2, ragged=True), EMAConfig(decay=0.9)
    model: Any = make_model(kind.spec, kind.arch)
    expected, values = train_streamed(kind.spec, model, items, BlockEngine(policy=policy, compile=BACKEND), ema=ema)
    model = make_model(kind.spec, kind.arch)
    engine = BlockEngine(policy=policy, compile=BACKEND, hooks=(stream(model, trained=True),))
    results, others = train_streamed(kind.spec, model, items, engine, ema=ema)
    if results != expected:
        yield f"numbers {results} {expected}"
    yield from differing(others, values)


def kinds(modules: str, names: str) -> dict[str, Any]:
    """Classes of checks by name, from several modules."""
    classes = {name: kind for module in modules.split(",") for name, kind in vars(import_module(module)).items()}
    return {name: classes[name] for name in names.split(",")}


WORKS = {work.__name__: work for work in (variants, policies, full, sizes, few_levers, levers)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    work, *arguments = sys.argv[1:]
    print(json.dumps({name: WORKS[work](kind) for name, kind in kinds(*arguments).items()}))
