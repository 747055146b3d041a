"""Counts the memory traffic of a block's elementwise work after inductor has fused it, without running it: for `roofline.py`.

The forward and the backward of a block (which begins with the recomputation, as under checkpointing `full`) are traced on fake tensors,
lowered by inductor, and scheduled for a CPU. Bytes are what the scheduled kernels read and write. Inductor's rules of fusion for CPUs
differ in places from those for GPUs, so this is an estimate of what a GPU's kernels move.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import fake_tensor_prop, view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.nn.context import BlockSettings, as_on, traced_settings
from ditkit_core.planner.memory_tracker import Kernel
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import measure
from ditkit_core.planner.reduced_model import ReducedModel

Kernels = Counter[Kernel]


def fused_kernels(job: StepJob, model: ReducedModel) -> dict[str, Kernels]:
    """Kernels of a forward and a backward that are no matmul and no attention, by class of block.

    Args:
        job: The step.
        model: Its model, on `meta`.
    """
    return {name: _of_block(block, carry) for name, (block, carry) in _carries(job, model).items()}


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


def _of_block(block: nn.Module, carry: Any) -> Kernels:
    leaves, spec = tree_flatten(carry)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    names, parameters = list(dict(block.named_parameters())), list(block.parameters())
    mode = FakeTensorMode()

    def copied(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, requires_grad=x.requires_grad)

    def forward(*given: Tensor) -> list[Tensor]:
        full, inputs = list(leaves), given[len(names) :]
        for place, tensor in zip(places, inputs, strict=True):
            full[place] = tensor
        state = dict(zip(names, given, strict=False))
        after, _ = tree_flatten(torch.func.functional_call(block, state, (tree_unflatten(full, spec),)))
        return [x for x in after if isinstance(x, Tensor) and not any(x is each for each in inputs)]

    def backward(*given: Tensor) -> list[Tensor]:
        own, upstream = given[: len(names) + len(places)], given[len(names) + len(places) :]
        outs = [x for x in forward(*own) if x.requires_grad]
        wanted = [x for x in own if x.requires_grad]
        return [g for g in torch.autograd.grad(outs, wanted, upstream, allow_unused=True) if g is not None]

    with mode:
        own = [copied(x) for x in (*parameters, *(leaves[place] for place in places))]
        # What the project's code asks where it is traced: the compiled form has no kernels and no buffers of its own.
        with as_on("cuda"), traced_settings(BlockSettings()), patch("torch.compiler._is_compiling_flag", True):
            upstream = [torch.empty_like(x) for x in forward(*own) if x.requires_grad]
            frozen = [x.detach() for x in own]
            graphs = [_traced(forward, frozen), _traced(backward, [*own, *upstream])]
    first, second = graphs
    return _scheduled(first, frozen) + _scheduled(second, [*frozen, *upstream])


def _traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)


def _scheduled(traced: GraphModule, inputs: Sequence[Tensor]) -> Kernels:
    traced.graph.eliminate_dead_code()
    traced.recompile()
    view_to_reshape(traced)
    with V.set_fake_mode(FakeTensorMode(allow_non_fake_inputs=True)):
        mode = fake_tensor_prop(traced, list(inputs))
    debug = DebugContext()
    with V.set_fake_mode(mode), debug, V.set_debug_handler(debug):
        post_grad_passes(traced, False)
        graph = GraphLowering(traced, example_inputs=list(inputs), shape_env=mode.shape_env)
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            nodes = [
                node
                for node in graph.scheduler.nodes
                if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode)
            ]
            return Counter(Kernel("elementwise", 0, node.get_read_write_buffers_sizes()) for node in nodes)
