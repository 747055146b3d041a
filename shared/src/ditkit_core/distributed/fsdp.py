"""Shards parameters, gradients and optimizer state of a model over ranks, by FSDP2.

The train command does it with `ranks.shard`, by `Shards`. A training loop of your own calls `shard`
once the model is built, adapters included:

    torch.distributed.init_process_group()
    shard(model, precision)
    loss_of(model(inputs, BlockEngine(policy="attn_only"))).backward()

An engine's policies work as on one rank: blocks are called as modules, inside their checkpoints, so
a recompute gathers nothing again. FSDP2 casts nothing: parameters are stored in the dtype that they
are computed in, and a model casts its activations itself. Up to torch 2.12 FSDP2 cast a block's
inputs in the forward but not in the recompute.

Layers of your own that split their work over ranks call whatever must not run again, such as the
sum behind a part of an MLP, through `attention.kept(function, name, *tensors)`. It is the public
mark for authors of such layers: policies that keep attention keep that call with it, and a
recompute does not repeat its collective.
"""

from collections.abc import Sequence
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ditkit_core.distributed.ranks import Ranks, world
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.linear import CastLinear


def shard(model: StagedModel, precision: Precision, mesh: DeviceMesh | None = None) -> None:
    """Shard a model, on one device, over ranks in place: each block is gathered while it runs, all
    else with the model.

    Gradients are averaged over ranks, in `precision.reduction`. FSDP2 takes trained parameters of
    one dtype at a time. Where a block or the rest has several (a full fine-tune in bf16), layers
    that stay fp32 are gathered on their own. What is left of the rarer dtype (tables of modulation,
    weights of norms) stays unsharded on each rank, and its gradients are averaged after the
    backward.

    Args:
        mesh: The ranks; by default all of them. With two dimensions, parameters are sharded over
            the second and replicated over the first.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if (ranks := world()) is None:
        raise UserError(
            "sharding needs ranks: start with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if isinstance(model, FSDPModule):
        raise UserError(
            "the model is sharded already: call shard once, after adapters are injected"
        )
    if len(devices) != 1:
        raise UserError(
            f"sharding takes a model on one device, not on {len(devices)}: build it without "
            f"splitting it over devices"
        )
    if mesh is None:
        mesh = init_device_mesh(devices.pop().type, (ranks.size,))
    if unsharded := divide(model, precision, mesh):
        reduce_whole(unsharded, mesh, precision.reduction)
    # With dtypes sorted out, nothing trained should be left to a single rank; FSDP2 itself would
    # not report it.
    check_reduced(model)


def divide(
    model: StagedModel, precision: Precision, mesh: DeviceMesh, *, sum_over: int | None = None
) -> list[nn.Parameter]:
    """As `shard`, for a model that may be on `meta`.

    Args:
        sum_over: Gradients of sharded parameters are summed and divided by this number instead of
            averaged.

    Returns:
        The trained parameters that stay whole, which are left to `reduce_whole`.
    """
    if not shards_integers() and not all(
        parameter.is_floating_point() for parameter in model.parameters()
    ):
        raise UserError(
            f"this torch, {torch.__version__}, cannot shard a base in integers; update it, or use "
            f"one in fp8 or not quantized"
        )
    policy = MixedPrecisionPolicy(
        param_dtype=None, reduce_dtype=precision.reduction, cast_forward_inputs=False
    )
    # The model itself comes last: FSDP2 gives a parent whatever its sharded children left.
    unsharded: list[nn.Parameter] = []
    units: list[Any] = [
        block for block in model.blocks() if next(block.parameters(), None) is not None
    ]
    for unit in [*units, model]:
        for layer in _layers_apart(unit, unsharded):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        unsharded += _rarer(_trained(unit, unsharded))
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=set(unsharded))
        # Before FSDP2's own hook, which would otherwise take a recompute for a forward.
        unit.register_forward_pre_hook(_enter_backward, prepend=True)
    if sum_over is not None:
        divide_sums(model, sum_over)
    return unsharded


def divide_sums(model: StagedModel | nn.Module, divisor: int) -> None:
    """Have gradients of sharded parameters summed over ranks and divided by this number, instead of
    averaged."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
            module.set_gradient_divide_factor(float(divisor))


def count_exchanges(model: nn.Module, ranks: Ranks, replicas: int) -> None:
    """Have the ranks count what FSDP2 exchanges for a model, with `replicas` copies of it over the
    ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )

    class Gather(DefaultAllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **named: Any
        ) -> Any:
            with ranks.exchange(output_tensor.nbytes - input_tensor.nbytes):
                return super().__call__(output_tensor, input_tensor, *args, **named)

    class Scatter(DefaultReduceScatter):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **named: Any
        ) -> Any:
            # The sum over copies follows, in a collective that FSDP2 lets nobody replace.
            over_copies = 2 * output_tensor.nbytes * (replicas - 1) // replicas
            with ranks.exchange(input_tensor.nbytes - output_tensor.nbytes + over_copies):
                return super().__call__(output_tensor, input_tensor, *args, **named)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Scatter())


def _enter_backward(unit: Any, args: Any) -> None:
    """Have FSDP2 treat a unit's recompute as part of its backward, even if it begins before the
    backward has entered the unit.

    torch_remat recomputes a block before anything in it, FSDP2's own hook included. FSDP2 would
    treat that as a forward: it would gather what `set_modules_to_forward_prefetch` names once more,
    for nothing, and prefetch for the backward only after the recompute.
    """
    if torch._C._current_graph_task_id() == -1:
        return  # no backward is running: this is a forward
    state = unit._get_fsdp_state()
    if state._training_state.name != "PRE_BACKWARD":
        state._pre_backward(None)


def _trained(unit: nn.Module, excluded: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Trained parameters of a unit that are neither in `excluded` nor sharded yet."""
    excluded_ids = {id(parameter) for parameter in excluded}
    parameters = (
        parameter
        for parameter in unit.parameters()
        if parameter.requires_grad and id(parameter) not in excluded_ids
    )
    return [parameter for parameter in parameters if not isinstance(parameter, DTensor)]


def _layers_apart(unit: nn.Module, excluded: Sequence[nn.Parameter]) -> list[nn.Module]:
    """Layers to gather on their own, so that the unit's other parameters have one dtype."""
    trained = _trained(unit, excluded)
    if len({parameter.dtype for parameter in trained}) < 2:
        return []
    trained_ids = {id(parameter) for parameter in trained}
    # FSDP2 gathers in hooks on the module's call, so only layers qualify that are always called as
    # modules.
    layers = (module for module in unit.modules() if isinstance(module, CastLinear))
    return [
        layer
        for layer in layers
        if id(layer.weight) in trained_ids and layer.weight.dtype == torch.float32
    ]


def _rarer(trained: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of any dtype but the one with the most elements."""
    elements: dict[torch.dtype, int] = {}
    for parameter in trained:
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default=None)
    return [parameter for parameter in trained if parameter.dtype != most]


def keeps_wide_gradients() -> bool:
    """Whether this torch gives gradients that were summed over ranks the parameter's `grad_dtype`.
    Torch 2.11 rounds them to its dtype."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return "_capture_grad_dtype_policy" in vars(FSDPParam)


def shards_integers() -> bool:
    """Whether this torch shards integers, as the codes of int8 and nf4 are. FSDP2 of torch 2.11
    first has every parameter require a gradient."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return "requires_grad_" not in unwrap(FSDPParam._init_sharded_param).__code__.co_names


def check_reduced(model: nn.Module | StagedModel) -> None:
    """Refuse a model with a trained parameter whose gradient would come from one rank alone.

    FSDP2 does not report this: where blocks are sharded and the model around them is not, the
    ranks' embeddings drift apart silently. Call it again after anything is added to a sharded
    model.
    """
    for name, parameter in model.named_parameters():
        if (
            parameter.requires_grad
            and not isinstance(parameter, DTensor)
            and parameter not in _REDUCED
        ):
            raise UserError(
                f"{name} is trained, and neither sharded nor reduced over ranks: call fsdp.shard "
                "on the complete model, or fsdp.reduce_whole for parameters that stay unsharded"
            )


_REDUCED = WeakIdKeyDictionary()
"""Unsharded parameters whose gradients are averaged, with the object that does it. Weak, so that no
model is kept alive."""


def reduce_whole(parameters: Sequence[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Average the gradients of unsharded parameters over ranks after every backward, summed in
    `dtype`.

    Gradients may be accumulated over several backwards: what is averaged already is the same on all
    ranks, and its average is itself. The parameters are the same on every rank, with gradients on
    all ranks or on none.
    """
    reduction = _Reduction(parameters, mesh, dtype)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(reduction.want)
        _REDUCED[parameter] = reduction


class _Reduction:
    """One all-reduce for all parameters, at the end of a backward that reached one of them."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype):
        self._parameters, self._mesh, self._dtype = list(parameters), mesh, dtype
        self._backward = -1
        """The last backward that asked for it. A flag would stay set after a backward that
        fails."""

    def want(self, parameter: Tensor) -> None:
        """Average at the end of this backward: a gradient has arrived."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:  # used by samples of other ranks
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # One collective for all: these parameters are many and small.
        joined = torch.cat([gradient.flatten().to(self._dtype) for gradient in gradients])
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(joined, group=self._mesh.get_group(dimension))
        joined /= self._mesh.size()
        for gradient, mean in zip(
            gradients, joined.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))
