"""A model for fake tensors: at full width, of each kind of block the first, one from the middle and
the last.

Built and given its adapters on `meta`, because a parameter that is fake already can neither be
moved nor wrapped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.assistant import add_assistant
from ditkit_core.adapters.inject import (
    canonical_name,
    inject,
    is_adapter_name,
    module_of,
    target_modules,
    trainable_parameters,
)
from ditkit_core.engine.token_route import TokenRouter, router_of
from ditkit_core.engine.token_routing import TokenRouting
from ditkit_core.models.protocol import Engine, StagedModel, run_plain
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.nn.quantized_linear import final_dtype
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.training.optim.optimizer import check_rates
from ditkit_core.weights.quantize import check_quantize, compute_in_8_bits, convert, hold_as_stored


@dataclass(frozen=True)
class ReducedModel:
    """A few blocks of a model, with the interface that the engine needs."""

    full_model: Any
    """The whole model; its other blocks stay on `meta` and are never run."""
    indices: tuple[int, ...]
    """The blocks that are run, by their index in the whole model."""
    stands_for: tuple[int, ...]
    """For each block of the whole model, the position in `indices` of the block that represents
    it."""
    whole_router: TokenRouter | None = None
    """The token routing of the whole model."""

    @property
    def embed(self) -> Any:
        """The whole model's."""
        return self.full_model.embed

    @property
    def head(self) -> Any:
        """The whole model's."""
        return self.full_model.head

    def __call__(self, inputs: Any, engine: Engine = run_plain) -> Any:
        """Run the chosen blocks."""
        return engine(self, inputs)

    def blocks(self) -> list[nn.Module]:
        """The blocks that are run."""
        blocks = self.full_model.blocks()
        return [blocks[index] for index in self.indices]

    def stages(self) -> list[nn.Module]:
        """Embedding, blocks, head."""
        return [self.embed, *self.blocks(), self.head]

    @property
    def router(self) -> TokenRouter | None:
        """The token routing of these blocks: the first and the last of the range are among them."""
        if (router := self.whole_router) is None:
            return None
        routing = router.routing
        inside = [
            at for at, index in enumerate(self.indices) if routing.first <= index <= routing.last
        ]
        return replace(router, routing=replace(routing, first=inside[0], last=inside[-1]))

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained parameters of these stages, by canonical name."""
        held = {id(parameter) for stage in self.stages() for parameter in stage.parameters()}
        return {
            name: p for name, p in trainable_parameters(self.full_model).items() if id(p) in held
        }


def reduced_model(job: StepJob, *, of_each: int | None = 3) -> ReducedModel:
    """Build a step's model on `meta`, choose its blocks, and make those trainable as configured.
    `of_each` blocks of a kind are run, at least 3: the first, the last, and some in between; None
    runs all."""
    spec, adapter = job.spec, job.adapter
    model = build_on_meta(spec, job.arch, job.precision)
    check_quantize(job.quantize, adapter.method)
    if job.execution.quantize != "none":
        convert(model, job.execution.quantize, spec.precision.keep_fp32)
    else:
        hold_as_stored(model, job.stored)
    if job.execution.compute != "dtype":
        compute_in_8_bits(model, job.execution.compute)
    targets = (
        ()
        if adapter.method == "full"
        else target_modules(model, adapter.targets, spec.adapters.targets)
    )
    check_rates(job.optim, targets or list(map(module_of, trainable_parameters(model))))
    ranks = {target: (adapter.rank_of(target), job.assistant.get(target, 0)) for target in targets}
    routing = job.execution.routing
    router = router_of(
        routing, len(model.blocks()), spec.architecture.token_streams(job.arch) if routing else None
    )
    kinds = _kinds(model, ranks, routing, trains_all=adapter.method == "full")
    chosen = ReducedModel(model, *_choose(kinds, of_each), router)
    if targets:  # peft takes a second for a hundred layers, and most are never run
        names = {id(module): name for name, module in model.named_modules()}
        prefixes = tuple(f"{names[id(stage)]}." for stage in chosen.stages())
        inject(
            model,
            adapter,
            spec.adapters.targets,
            only={t for t in targets if t.startswith(prefixes)},
        )
    else:
        inject(model, adapter, spec.adapters.targets)
    add_assistant(model, job.assistant)
    return chosen


def _kinds(
    model: StagedModel,
    targets: Mapping[str, tuple[int, int]],
    routing: TokenRouting | None,
    *,
    trains_all: bool,
) -> list[tuple[Any, ...]]:
    """The kind of each block: class, parameters, adapters with their ranks and an assistant's,
    whether a trained parameter comes before it, so that it has a backward, and where it is with
    respect to a range that tokens skip."""
    names = {id(module): name for name, module in model.named_modules()}
    started = trains_all or any(
        target.startswith(f"{names[id(model.embed)]}.") for target in targets
    )
    kinds = []
    for index, block in enumerate(model.blocks()):
        part = 0 if routing is None else (index >= routing.first) + (index > routing.last)
        prefix = f"{names[id(block)]}."
        adapted = frozenset(
            (t.removeprefix(prefix), both) for t, both in targets.items() if t.startswith(prefix)
        )
        started = started or bool(adapted)
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        kinds.append((type(block), shapes, adapted, started, part))
    return kinds


def _choose(
    kinds: Sequence[tuple[Any, ...]], of_each: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    members: dict[tuple[Any, ...], list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault(kind, []).append(index)
    chosen: set[int] = set()
    stand_in: dict[int, int] = {}
    for indices in members.values():
        few = len(indices) if of_each is None else min(of_each, len(indices))
        # The first and the last of a kind are run because they border on others; the rest are like
        # the second.
        run = [*indices[: few - 1], indices[-1]]
        chosen.update(run)
        stand_in |= {index: index if index in run else run[1] for index in indices}
    ordered = tuple(sorted(chosen))
    return ordered, tuple(ordered.index(stand_in[index]) for index in range(len(kinds)))


def materialise(
    stage: nn.Module, name: str, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Allocate fake memory for a stage, called `name` in its model, with the dtypes of loading:
    `dtype` for base parameters that do not stay in fp32."""

    def loaded(owner: nn.Module, prefix: str, leaf: str, parameter: nn.Parameter) -> torch.dtype:
        full = canonical_name(f"{prefix}.{leaf}".lstrip("."))
        wide = is_adapter_name(full) or spec.precision.keep_fp32(full)
        return final_dtype(owner, leaf, torch.float32 if wide else dtype)

    give_memory(stage, device, name=name, dtype_of=loaded)


def give_memory(
    module: nn.Module,
    device: torch.device,
    *,
    name: str = "",
    dtype_of: Callable[
        [nn.Module, str, str, nn.Parameter], torch.dtype
    ] = lambda owner, prefix, leaf, parameter: parameter.dtype,
) -> None:
    """Under `FakeTensorMode`, replace parameters and buffers on `meta` by ones on a device; shared
    tensors stay shared.

    `Module.to` cannot do this: it would swap tensors that other modules refer to. A parameter's
    dtype is decided by its module, the module's name in its model, its own name and itself.
    """
    replacements: dict[int, Tensor] = {}
    for prefix, owner in module.named_modules(prefix=name):
        for tensors in (owner._parameters, owner._buffers):
            for leaf, tensor in tensors.items():
                if tensor is None:
                    continue
                # Tied parameters share one tensor, and so must their memory.
                if id(tensor) not in replacements:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    dtype = dtype_of(owner, prefix, leaf, tensor) if is_parameter else tensor.dtype
                    fake = torch.empty(tensor.shape, dtype=dtype, device=device)
                    replacements[id(tensor)] = (
                        nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        if is_parameter
                        else fake
                    )
                tensors[leaf] = replacements[id(tensor)]
