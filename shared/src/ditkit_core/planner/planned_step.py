"""A training step as a value, without its weights: what a plan is made for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.execution import Execution
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.workload import Workload
from ditkit_core.training.config import ClipBy, EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig

Size = tuple[int, int, int]
"""Frames, height and width, in pixels."""


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """A training step: the model, one micro-batch, what is trained, and how it runs. A profile is
    made of it, and a placement."""

    spec: ModelSpec
    arch: Any
    batch: Sequence[Mapping[str, Tensor]]
    """One micro-batch: training items on `meta`. Empty where nothing is profiled."""
    execution: Execution = field(default_factory=Execution)
    """How the step runs; its schedule names no devices where it is profiled."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Formats in which frozen matrices stay as their file has them, by layer, where
    `execution.quantize` is `none`."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    clip_norm: float = 1.0
    clip_by: ClipBy = "step"
    assistant: Mapping[str, int] = field(default_factory=dict)
    """Rank of an assistant by module, where it is next to a DoRA that is trained."""
    micro_batches: int = 1
    """Number accumulated in a step; with several, the backward of a later one is also measured."""
    extra_forwards: float = 0.0
    """Mean number of further forwards in a step, which keep nothing: `prior.match_base`, 1 with
    `flow.target_guidance`, 3 with `flow.slider_positive`."""
    kinds: int = 1
    """Kinds of micro-batches, mostly their shapes; each has inputs of its own once it is replayed
    as a CUDA graph."""
    uniform: bool = False
    """Whether every micro-batch has references where this one has, and none where it has none. A
    parameter without a gradient here then has none in any, and no state of the optimizer."""
    validates: bool = False
    """Whether there is a validation, whose forwards are eager."""
    kind: str = "cuda"
    """Kind of device that the step runs on: `cuda` or `cpu`."""

    @property
    def precision(self) -> Precision:
        """The dtype of each group of operations."""
        return self.execution.precision

    @property
    def schedule(self) -> ACSchedule:
        """Policy of the blocks."""
        return self.execution.schedule

    @property
    def kernels(self) -> str:
        """Whose memory the step has: `torch` or `triton`."""
        return self.work.kernels

    @property
    def quantize(self) -> str:
        """Format of the frozen matrices; of most of them, if they stay as they are stored."""
        if self.execution.quantize != "none" or not self.stored:
            return self.execution.quantize
        return Counter(self.stored.values()).most_common(1)[0][0]

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, and not adapters."""
        return self.adapter.method == "full"

    @cached_property
    def work(self) -> Workload:
        """The properties of the step apart from its model."""
        forbids_replays = self.optim.fused_backward or not self.execution.allows_cuda_graphs
        updates_bf16 = self.trains_all and self.precision.matmul == torch.bfloat16
        return Workload(
            execution=self.execution,
            micro_batches=self.micro_batches,
            cuda_graphs="off" if forbids_replays else self.execution.cuda_graphs,
            kinds=self.kinds,
            validates=self.validates,
            extra_forwards=self.extra_forwards,
            rounding=self.optim.rounding if updates_bf16 else "",
        )

    def with_execution(self, **changed: Any) -> "StepJob":
        """The step with other values of `execution`."""
        return replace(self, execution=replace(self.execution, **changed))


def with_planned_kernels(execution: Execution, kind: str, gpus: Sequence[GPU] = ()) -> Execution:
    """The execution with what `kernels = auto` would be on devices of this kind, where Triton is
    installed and its kernels pass their check; where the GPUs are not known, as on recent ones. A
    run on its own devices has resolved the setting before."""
    if execution.kernels != "auto":
        return execution
    # Triton supports no GPU that is older than those that compute in bf16.
    runs_triton = kind == "cuda" and all(gpu.half == "bf16" for gpu in gpus)
    return replace(execution, kernels="triton" if runs_triton else "torch")
