"""Steps of a compiled toy, printed as JSON: run in a process of its own, because the type checks of tests cannot be traced."""

import gc
import json
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ditkit_core.engine import activation_offload as offload
from ditkit_core.engine import compile as compiled
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError, keys_shown
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.testing.compiled_steps import attention_forwards, compare, difference, numbers
from ditkit_core.testing.conformance_quantized import COMPUTED, make_quantized
from ditkit_core.testing.toy import TOY, ToyArch, ToyBlock, ToyCarry, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model

POLICIES = ("none", "full", "attn_only", "attn_only(self)")
_FP64_ATTENTION = "sdpa_math" if torch.__version__ < (2, 12) else "sdpa"
"""The inductor of torch 2.11 takes the log-sum-exp of `sdpa`'s kernel for CPUs as fp32 whatever the inputs are, and its backward refuses that
in fp64. No training computes in fp64."""


class Emptying:
    """Hooks that free a block's frozen weights between their uses, as `swap_blocks` does: the storage stays and its memory is freed."""

    def __init__(self) -> None:
        self._there: list[tuple[Tensor, Tensor]] = []
        self._gone: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.refilled = 0

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """Fill this block's weights, and free those of the block before."""
        self._empty()
        frozen = (parameter for parameter in block.parameters() if not parameter.requires_grad)
        self._there = self._gone.pop(index, []) or [(parameter, parameter.detach().clone()) for parameter in frozen]
        self._fill(self._there)
        self._index = index

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """Nothing: the next block's hook frees it."""

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """As `pre_forward`."""
        self.pre_forward(index, block)

    def restore(self) -> None:
        """Fill all weights."""
        self._empty()
        for held in list(self._gone):
            self._fill(self._gone.pop(held))

    def _fill(self, weights: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, host in weights:
            if not tensor.untyped_storage().nbytes():
                with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                    tensor.untyped_storage().resize_(host.nbytes)
                    tensor.copy_(host)
                self.refilled += 1

    def _empty(self) -> None:
        if self._there:
            self._gone[self._index], self._there = self._there, []
            for tensor, _ in self._gone[self._index]:
                with _unsafe_preserve_version_counter(tensor):
                    tensor.untyped_storage().resize_(0)


def policies() -> Any:
    """Every policy, with dropout in attention and block."""
    return compare(TOY, make_model(TOY, ToyArch(depth=3, dropout=0.2)), toy_items(2), POLICIES, backend="aot_eager")


def adapters() -> Any:
    """The same with dropout in adapters, too, in bf16 and with samples of two sizes."""
    model = make_model(TOY, ToyArch(depth=3, dropout=0.2), dtype=torch.bfloat16, adapter=ADAPTERS["lora with dropout"])
    return compare(TOY, model, toy_items(2, ragged=True), POLICIES, backend="aot_eager")


def levers() -> Any:
    """Weights that come and go, what blocks keep on the host, a schedule of several policies, and sizes that change."""
    model = make_model(TOY, ToyArch(depth=3))
    for block in model.blocks():
        block.qkv.requires_grad_(False)
        block.mlp.requires_grad_(False)
    items = toy_items(2)
    expected = numbers(TOY, model, items, BlockEngine(compile="aot_eager"))

    def equal(engine: BlockEngine) -> bool:
        return all(map(torch.equal, numbers(TOY, model, items, engine), expected))

    found: dict[str, Any] = {}
    for policy in ("none", "full", "attn_only"):
        streamer = Emptying()
        found[f"swap {policy}"] = equal(BlockEngine(policy=policy, compile="aot_eager", hooks=(streamer,)))
        found[f"refilled {policy}"] = streamer.refilled
        streamer.restore()
    mixed = BlockEngine(policy="full, 1=none, 2=attn_only", compile="aot_eager")
    found["schedule"] = equal(mixed)
    found["schedule forwards"] = attention_forwards(lambda: numbers(TOY, model, items, mixed))
    # pretend that the host is a device to move from
    offload.can_offload = lambda device: device is not None
    for policy in ("none", "full", "attn_only"):
        host = HostMemory(smallest=0)
        found[f"offload {policy}"] = equal(BlockEngine(policy=f"{policy}+offload", compile="aot_eager", host=host))
        found[f"moved {policy}"] = host.num_bytes
    counters.clear()
    for width in (6, 8, 10):
        wider = [{**item, "latents": torch.randn(4, 2, 4, width)} for item in items]
        numbers(TOY, model, wider, BlockEngine(policy="full", compile="aot_eager"))
    found["graphs of new sizes"] = counters["stats"]["unique_graphs"]
    with torch.compiler.set_stance("force_eager"):
        found["forwards of force_eager"] = attention_forwards(
            lambda: numbers(TOY, model, items, BlockEngine(policy="attn_only", compile="aot_eager"))
        )
    with torch.no_grad():
        counters.clear()
        inputs = TOY.training.make_inputs([item["latents"] for item in items], torch.tensor([0.3, 0.8]), items, 1.0)
        model(inputs, engine=BlockEngine(compile="aot_eager"))
        found["graphs without a backward"] = counters["stats"]["unique_graphs"]
    found["unknown region"] = refusal(model, items, BlockEngine(policy="attn_only(slef)", compile="aot_eager"))
    return found | refusals()


def late_backwards() -> list[bool]:
    """For each backward that was compiled, whether a backward was running by then."""
    running, late = False, list[bool]()

    def backward(graph: Any, given: Any) -> Any:
        late.append(running)
        return boxed_nop(graph, given)

    torch._dynamo.register_backend(aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward), "recording")
    model = make_model(TOY, ToyArch(depth=2))
    items = toy_items(2)
    inputs = TOY.training.make_inputs([item["latents"] for item in items], torch.tensor([0.3, 0.8]), items, 1.0)
    outputs = model(inputs, engine=BlockEngine(policy="full", compile="recording"))
    running = True
    sum(output.square().mean() for output in outputs).backward()
    return late


def daily() -> dict[str, Any]:
    """What the default tests ask, in one process: starting another takes as long as half of it."""
    found = {"policies": policies()}
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    return found | {"levers": levers(), "late backwards": late_backwards()}


def refusal(model: Any, items: Any, engine: BlockEngine) -> str:
    """What a first step is refused with."""
    try:
        with keys_shown(), counted_calls(AttentionCalls()):
            numbers(TOY, model, items, engine)
    except UserError as error:
        return str(error)
    return ""


class Shortening(ToyBlock):
    """A block that hands on something else besides tensors."""

    def forward(self, carry: ToyCarry) -> ToyCarry:
        return super().forward(carry)._replace(sizes=())


RUN = BlockEngine(policy="full", compile="aot_eager")


def items_of(sizes: Sequence[tuple[int, int, int]], random: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Items of random numbers whose latents have these sizes."""
    return [
        {"latents": torch.randn(4, *size, generator=random), "text": torch.randn(5, 8, generator=random)}
        for size in sizes
    ]


def refusals() -> dict[str, str]:
    """What a first step is refused with where a block changes what is no tensor, and where there are too many graphs."""
    compiled._compiled.cache_clear()
    items = items_of([(1, 4, 4)], torch.Generator().manual_seed(0))
    model = make_model(TOY, ToyArch(depth=1))
    numbers(TOY, model, items, RUN)
    model.layers[0].__class__ = Shortening
    found = {"changed beside tensors": refusal(model, items, RUN)}
    most, compiled.MOST_GRAPHS = compiled.MOST_GRAPHS, 1  # which there are by now
    model = make_model(TOY, ToyArch(depth=1), dtype=torch.bfloat16)
    found["too many graphs"] = refusal(model, items, RUN)
    compiled.MOST_GRAPHS = most
    return found


def graphs() -> dict[str, Any]:
    """Graphs of sizes and numbers of samples, and of a deeper model; whether a model is kept."""
    random = torch.Generator().manual_seed(0)
    sizes = [(frames, height, width) for frames in (1, 2, 3) for height, width in ((4, 4), (4, 6), (2, 8), (6, 4))]
    batches = [[size] * count for count in (1, 2, 5) for size in sizes] + [sizes[:count] for count in (3, 4, 6, 9)]
    found: dict[str, Any] = {"batches": len(batches), "graphs of batches": []}
    for depth in (1, 3):
        model = make_model(TOY, ToyArch(depth=depth))
        counters.clear()
        for batch in batches:
            numbers(TOY, model, items_of(batch, random), RUN)
        found["graphs of batches"].append(counters["stats"]["unique_graphs"])
        weight = weakref.ref(model.layers[0].mlp[0].weight)
        del model
        gc.collect()
        found["kept"] = weight() is not None
    return found


def quantized() -> Any:
    """Of each kind of quantized base, under policies that compute blocks again."""
    found = {}
    for kind in ("int8", "fp8", "nf4", *COMPUTED):
        model = make_quantized(TOY, ToyArch(depth=2, dim=64), kind, dtype=torch.bfloat16, adapter=ADAPTERS["lora"])
        found[kind] = compare(TOY, model, toy_items(2), ("full", "attn_only"), backend="aot_eager")
        wide = make_quantized(TOY, ToyArch(depth=2, dim=64), kind)
        eager, compiled = (
            numbers(TOY, wide, toy_items(2), BlockEngine(policy="full", compile=backend))
            for backend in ("", "aot_eager")
        )
        found[kind]["full"]["base alone"] = difference(eager, compiled)
    return found


def slopes(policy: str) -> tuple[float, float]:
    """Of the loss along a random direction under dropout, in fp64: by its gradient, and by a difference."""
    model = make_model(TOY, ToyArch(depth=1, dropout=0.2), dtype=torch.float64)
    items = [{name: tensor.double() for name, tensor in item.items()} for item in toy_items(2)]
    run = BlockEngine(policy=policy, compile="inductor", backend=_FP64_ATTENTION)
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]

    def loss(shift: float) -> torch.Tensor:
        with torch.no_grad():
            for parameter, direction in zip(model.parameters(), directions, strict=True):
                parameter.add_(shift * direction)
        torch.manual_seed(11)
        sigma = torch.tensor([0.3, 0.8], dtype=torch.float64)
        outputs = model(TOY.training.make_inputs([item["latents"] for item in items], sigma, items, 1.0), engine=run)
        return sum((output.square().mean() for output in outputs), torch.zeros(()))

    loss(0.0).backward()
    pairs = zip(model.parameters(), directions, strict=True)
    slope = sum(float((parameter.grad * along).sum()) for parameter, along in pairs if parameter.grad is not None)
    after, before = float(loss(1e-6)), float(loss(-2e-6))
    return slope, (after - before) / 2e-6


def inductor() -> Any:
    """The compiler that runs use."""
    without = make_model(TOY, ToyArch(depth=2))
    items = toy_items(2)
    return {
        "slopes": {policy: slopes(policy) for policy in ("full",)},
        "plain": compare(TOY, without, items, ("none", "attn_only"), backend="inductor"),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    works = {work.__name__: work for work in (daily, adapters, graphs, quantized, inductor)}
    print(json.dumps(works[sys.argv[1]]()))
