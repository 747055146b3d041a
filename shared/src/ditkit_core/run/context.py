"""A run's context: its configuration completed by what its model family and architecture decide."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.run.auxiliary import Auxiliary, training_devices
from ditkit_core.run.config import RunConfig
from ditkit_core.run.data import RunData
from ditkit_core.run.experts import restrict_to_expert
from ditkit_core.run.prepare import arch_here
from ditkit_core.weights.fp8_scaled import num_scaled, open_weights


class Given(NamedTuple):
    """What a run was made from, before either was completed."""

    spec: ModelSpec
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A run's configuration with its model family; `create_run` makes one."""

    spec: ModelSpec
    """The spec of the architecture, or of the family as long as the architecture is not known."""
    config: RunConfig
    """With the model's own values where the configuration leaves them open."""
    arch: Any
    """The architecture; None if it is not known and nothing here says it."""
    given: Given

    @property
    def experts(self) -> Sequence[Expert]:
        """The architecture's; none where one transformer sees all noise levels."""
        return () if self.arch is None else self.spec.architecture.experts(self.arch)

    @property
    def expert(self) -> Expert | None:
        """The one that the run trains; None if the model has one transformer, or several are to be trained."""
        return next((expert for expert in self.experts if expert.name == self.config.experts.train), None)

    @property
    def part(self) -> str:
        """The component that the run trains."""
        return "transformer" if self.expert is None else self.expert.part

    @cached_property
    def stored_as(self) -> str:
        """What the blocks' matrices are in a file that lies here: `fp8` for scaled 8 bits, else `none`; `none` of a file elsewhere."""
        path = self.config.model.here(self.part)
        if path is None or (path.is_dir() and not any(path.glob("*.safetensors"))):
            return "none"
        try:
            return "fp8" if num_scaled(open_weights(path)) else "none"
        except UserError:  # said where the file is needed, which a plan by model.preset or a config.json does not
            return "none"

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that the model is divided over, most often one; inputs go to the first, where samples are decoded too."""
        return training_devices(self.config.train)

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the model."""
        matmul = parse_dtype(self.config.model.dtype)
        return self.config.precision.precision(matmul, self.spec.precision.reference)

    @cached_property
    def data(self) -> RunData:
        """The dataset and the cache."""
        return RunData(self.spec, self.config, self.auxiliary.columns)

    @cached_property
    def auxiliary(self) -> Auxiliary:
        """What runs alongside the transformer, not loaded."""
        return Auxiliary(self.spec, self.config, self.arch)


def create_run(spec: ModelSpec, config: RunConfig, arch: Any = None) -> RunContext:
    """Complete a configuration by what the model decides, once.

    Args:
        spec: The model family.
        config: The configuration as it was given.
        arch: The architecture; None asks the files that are here, without loading or fetching any.
    """
    given = Given(spec, config)
    if arch is None:
        with suppress(UserError):  # said where the model is built
            arch = arch_here(spec, config.model)[1]
    if arch is not None:
        spec = spec.for_arch(arch)
    data, train = config.data, config.train
    frames, height, width = spec.data.size
    own_frames = max(data.frame_buckets, default=data.frames) or frames
    data = replace(data, frames=own_frames, height=data.height or height, width=data.width or width)
    if train.control_dropout < 0:
        train = replace(train, control_dropout=spec.training.control_dropout)
    config = replace(config, data=data, train=train)
    if arch is not None:
        config = restrict_to_expert(config, spec, arch)
    return RunContext(spec=spec, config=config, arch=arch, given=given)


def with_config(run: RunContext, config: RunConfig) -> RunContext:
    """The same model with another configuration."""
    return create_run(run.spec, config, run.arch)


def with_arch(run: RunContext, arch: Any) -> RunContext:
    """The run of an architecture that its files told once they were fetched."""
    return run if arch == run.arch else create_run(*run.given, arch)
