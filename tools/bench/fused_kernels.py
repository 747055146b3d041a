"""Lists what a compiled block runs on a GPU, without one: for `roofline.py`.

Forward and backward, which begins with the recompute of checkpointing `full`, go through torch's compiler as in a run, up to Triton code for
an H200 (sm_90). Nothing is compiled by Triton, and nothing runs. Bytes of a fused kernel are what inductor's scheduler says that it reads and
writes: each tensor once. Matmuls, attention and the project's own operations are counted in the compiled graphs as in eager steps.

What is not as in a run: blocks are traced on fake tensors of a CPU, because autograd refuses fake CUDA tensors without a driver. The graphs,
already divided into forward and backward, are then moved to a fake GPU, whose properties are those of `_H200`. Attention stays the CPU's
operation, which inductor treats as it does a GPU's: as a call between kernels.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ditkit_core.engine.ac_policies import Full
from ditkit_core.engine.compile import run_compiled
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.nn.context import as_on
from ditkit_core.planner.memory_tracker import Kernel, Meter, fake_tensors
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import measure
from ditkit_core.planner.reduced_model import ReducedModel

Kernels = Counter[Kernel]

_H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 * 10**9,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=50 * 1024**2,
)


@dataclass(frozen=True)
class _Graph:
    """A graph of operations on a CPU, as torch hands it to inductor."""

    module: GraphModule
    inputs: list[Any]
    is_backward: bool

    def on(self, device: torch.device) -> tuple[GraphModule, list[Any]]:
        """A copy for another device, with inputs of the fake mode in force."""
        module = deepcopy(self.module)
        for node in module.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = node.kwargs | {"device": device}
        module.recompile()
        return module, tree_map_only(Tensor, lambda x: _like(x, device), self.inputs)


class _Traced(Exception):
    """Both graphs are made; there is nothing to run."""


def compiled_kernels(job: StepJob, model: ReducedModel) -> dict[str, Kernels]:
    """Kernels of a compiled forward and backward, by class of block.

    Args:
        job: The step.
        model: Its model, on `meta`.
    """
    return {name: kernels_of(block, carry) for name, (block, carry) in _carries(job, model).items()}


def _carries(job: StepJob, model: ReducedModel) -> dict[str, tuple[nn.Module, Any]]:
    """A block of each class, with the carry that it gets in a step; of several the second, whose carry has gradients like all after it."""
    seen: dict[str, list[tuple[nn.Module, Any]]] = {}
    run = BlockEngine._run

    def noted(self: BlockEngine, index: int, block: nn.Module, carry: Any, runner: Any) -> Any:
        seen.setdefault(type(block).__name__, []).append((block, carry))
        return run(self, index, block, carry, runner)

    with patch.object(BlockEngine, "_run", noted):
        measure(job, model, [0] * len(model.stages()), updates=False)
    return {
        name: each[min(1, len(each) - 1)] for name, each in seen.items() if any(True for _ in each[0][0].parameters())
    }


def kernels_of(block: nn.Module, carry: Any) -> Kernels:
    """Kernels of a compiled forward and backward of one block."""
    return sum((_fused(graph) + _called(graph) for graph in _graphs(block, carry)), Counter())


def _like(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, requires_grad=x.requires_grad)


def _graphs(block: nn.Module, carry: Any) -> list[_Graph]:
    found: list[_Graph] = []

    def noted(module: GraphModule, inputs: Sequence[Any], **named: Any) -> Callable[..., Any]:
        found.append(_Graph(deepcopy(module), list(inputs), named.get("is_backward", False)))

        def run(given: list[Any]) -> Any:
            raise _Traced

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: GraphModule, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=noted)

    torch._dynamo.reset()  # which would take another size of a block that it knows as a variable
    cpu = torch.device("cpu")
    with FakeTensorMode(), as_on("cuda"):
        for name, parameter in list(block.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            made = nn.Parameter(_like(parameter, cpu).detach(), requires_grad=parameter.requires_grad)
            setattr(block.get_submodule(owner), leaf, made)
        try:
            run_compiled(
                block, tree_map_only(Tensor, lambda x: _like(x, cpu), carry),
                policy=Full(), attention="sdpa", backend=backend,  # type: ignore[arg-type]
            )  # fmt: skip
        except _Traced:
            return found
    raise AssertionError("not compiled")


@contextmanager
def _gpu() -> Iterator[None]:
    """Answers for what inductor asks torch and Triton of the device that it writes code for."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": _H200,
        "_get_device_properties": _H200,
        "get_device_capability": (9, 0),
        "get_rng_state": torch.empty(0),
        "_lazy_init": None,
        "set_rng_state": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(f"torch.cuda.{name}", lambda *_, answer=answer: answer, create=True))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda *_: True))
        stack.enter_context(patch.object(driver, "_active", target))
        yield


def _fused(graph: _Graph) -> Kernels:
    """The kernels that inductor writes."""
    found: Kernels = Counter()

    def counted(lowered: GraphLowering) -> Any:
        lowered.codegen()
        for node in lowered.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                found[Kernel("elementwise", 0, node.get_read_write_buffers_sizes())] += 1
        return SimpleNamespace(call=None)

    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs = graph.on(torch.device("cuda:0"))
    no_files = torch._inductor.config.patch(force_disable_caches=True)
    with _gpu(), no_files, patch.object(GraphLowering, "compile_to_module", counted):
        compile_fx_inner(module, inputs, is_backward=graph.is_backward)
    return found


class _Calls(Interpreter):
    """Runs a graph, and counts what inductor calls instead of writing it."""

    def __init__(self, module: GraphModule, meter: Meter):
        super().__init__(module)
        self.meter, self.found = meter, Kernels()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        definition = OPDEFS.get(getattr(target, "_name", "").partition(".")[0])
        is_ours = definition is not None and definition._namespace == "ditkit"
        self.meter.kernels = Counter()
        made = definition._init_fn(*args, **kwargs) if is_ours else super().call_function(target, args, kwargs)
        for kernel, count in self.meter.kernels.items():
            if is_ours or kernel.kind != "elementwise":
                self.found[kernel] += count
        return made


def _called(graph: _Graph) -> Kernels:
    """Matmuls, attention, and all that the project's own operations run."""
    with fake_tensors("cuda") as meter, torch.no_grad():
        module, inputs = graph.on(torch.device("cpu:1"))
        calls = _Calls(module, meter)
        calls.run(*inputs)
        return calls.found
