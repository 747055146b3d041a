"""A run's context: its configuration, completed with the values of its model family and
architecture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ditkit_core.adapters.files.export import with_forms_of
from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.api.dataset import completed
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.loading.architecture import arch_here
from ditkit_core.loading.on_meta import formats_of_file
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.data import RunData
from ditkit_core.run.experts import restrict_to_expert
from ditkit_core.run.sample_adapters import SampleAdapters
from ditkit_core.weights.fp8_scaled import open_weights


class RunRequest(NamedTuple):
    """The spec and the configuration that a run was created from, before either was completed."""

    spec: ModelSpec
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A run's configuration with its model family; `create_run` makes one."""

    spec: ModelSpec
    """The spec of the architecture; of the family while the architecture is not known."""
    config: RunConfig
    """Has the model's own values where the configuration sets none."""
    arch: Any
    """The architecture; None if no file in this machine says which it is."""
    request: RunRequest
    datasets: dict[DataConfig, Dataset] = field(default_factory=dict, repr=False, compare=False)
    """The datasets that were read, by their section; shared with what `with_config` makes of this
    run."""

    @property
    def experts(self) -> Sequence[Expert]:
        """The architecture's experts; none where one transformer sees all noise levels."""
        return () if self.arch is None else self.spec.architecture.experts(self.arch)

    @property
    def expert(self) -> Expert | None:
        """The expert that the run trains; None if the model has one transformer, or the run trains
        several experts."""
        return next(
            (expert for expert in self.experts if expert.name == self.config.experts.train), None
        )

    @property
    def trains_several(self) -> bool:
        """Whether the run trains several experts, each as a job in a folder of its own."""
        return bool(self.experts) and self.expert is None

    @property
    def component(self) -> str:
        """The component that the run trains."""
        return "transformer" if self.expert is None else self.expert.part

    @property
    def has_random_base(self) -> bool:
        """Whether the base is the demo's, and its weights were never trained."""
        return self.config.is_on_demo_base and not self.spec.demo.trained_base

    @cached_property
    def stored_formats(self) -> Mapping[str, str]:
        """Format in which the blocks' matrices of a local file are held, by layer; none for those
        that are dense, or if the file is not local."""
        path = self.config.model.here(self.component)
        # The format of files that are still to be downloaded is unknown.
        if (
            self.arch is None
            or path is None
            or (path.is_dir() and not any(path.glob("*.safetensors")))
        ):
            return {}
        try:
            return formats_of_file(self.spec, self.arch, open_weights(path), self.precision)
        # Raised again where the file is needed; a plan by model.preset or a config.json does not
        # need it.
        except UserError:
            return {}

    @property
    def stored_as(self) -> str:
        """Format of most of these matrices; `none` if they are dense."""
        counted = Counter(self.stored_formats.values()).most_common(1)
        return counted[0][0] if counted else "none"

    @property
    def base_format(self) -> str:
        """Format of the blocks' matrices in memory: as `base.quantize` configures it, else as their
        file has them."""
        return self.stored_as if self.config.base.quantize == "none" else self.config.base.quantize

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that the model is split across, usually one. Inputs go to the first, which
        also decodes samples."""
        return self.config.train.torch_devices

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the model."""
        matmul = parse_dtype(self.config.model.dtype)
        return self.config.precision.precision(matmul, self.spec.precision.reference)

    @property
    def for_class_images(self) -> "RunContext":
        """The run as class images are generated: without the adapters of [sample], and without
        steps and guidance that are for these."""
        sample = self.config.sample.without_adapters
        if sample is self.config.sample:
            return self
        spec, config = self.request
        return create_run(spec, replace(config, sample=config.sample.without_adapters), self.arch)

    @cached_property
    def execution(self) -> Execution:
        """How the model runs: the parts of [train], [base], [precision] and [ranks] that say so.

        Devices are names still, since a plan need not be for this machine.
        """
        config = self.config
        return Execution.of(config.train, config.base, precision=self.precision, ranks=config.ranks)

    @property
    def trains_bf16(self) -> bool:
        """Whether the trained weights are bf16. The weights of adapters never are."""
        return self.config.adapter.method == "full" and self.precision.matmul == torch.bfloat16

    @property
    def described_precision(self) -> str:
        """The dtype of each place, in a line."""
        optim = self.config.optim
        return self.precision.described(
            base_compute=self.config.base.compute,
            averages_in_8_bits=optim.kind.averages_in_8_bits,
            fused_backward=optim.fused_backward and self.config.micro_batches == 1,
        )

    @cached_property
    def data(self) -> RunData:
        """The dataset, the cache and the encoders."""
        return RunData(self.config, self.auxiliary, self.datasets)

    @cached_property
    def sample_adapters(self) -> SampleAdapters:
        """The adapters that are for samples alone, or for training alone."""
        return SampleAdapters(spec=self.spec, arch=self.arch, config=self.config)

    @cached_property
    def auxiliary(self) -> Auxiliary:
        """The models next to the transformer, not loaded."""
        config = self.config
        return Auxiliary(
            spec=self.spec,
            arch=self.arch,
            paths=config.model,
            encode=config.encode,
            sample=config.sample,
            dtype=parse_dtype(config.model.dtype),
            device_of_sampler=lambda: self.devices[0],
        )

    def with_arch(self, arch: Any) -> "RunContext":
        """The run with an architecture that was only known after its files were downloaded.

        It starts again from what was asked for, because the first `create_run` completed it without
        an architecture.
        """
        return self if arch == self.arch else create_run(*self.request, arch)


def create_run(
    spec: ModelSpec, config: RunConfig, arch: Any = None, *, fetch: bool = False
) -> RunContext:
    """Complete a configuration once with the values that the model decides. Its architecture is
    read from local files, without loading any weights; with `fetch`, a missing description is
    downloaded."""
    request, model = RunRequest(spec, config), config.model
    if arch is None:
        # Raised again where the model is built: some commands need no architecture.
        with suppress(UserError):
            arch = arch_here(spec, model)[1]
        if arch is None and fetch and (model.base or model.transformer or model.transformer_2):
            arch = arch_here(spec, model, fetch=True)[1]
    if arch is not None:
        spec = spec.for_arch(arch)
    data, train = completed(config.data, spec.data), config.train
    if train.control_dropout < 0:
        train = replace(train, control_dropout=spec.training.control_dropout)
    export = with_forms_of(config.export, config.adapter, spec)
    config = replace(config, data=data, train=train, export=export)
    if arch is not None:
        config = restrict_to_expert(config, spec, arch)
    return RunContext(spec=spec, config=config, arch=arch, request=request)


def with_config(run: RunContext, config: RunConfig) -> RunContext:
    """The same model with another configuration, and the same dataset where [data] is the same."""
    return replace(create_run(run.spec, config, run.arch), datasets=run.datasets)
