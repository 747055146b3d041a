"""The configuration of a run: its sections, each owned by the module that consumes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.config.field import setting
from ditkit_core.data.config import DataConfig
from ditkit_core.distributed.ranks import RanksConfig
from ditkit_core.encoding.config import EncodeConfig, PriorConfig
from ditkit_core.execution import Execution
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder, RunFolderConfig
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.optimizers import OptimConfig

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The `[experts]` section: for models of two transformers that split the noise levels between
    them (Wan 2.2 A14B)."""

    train: Literal["both", "high_noise", "low_noise"] = setting("both", resume="refused")
    """Which experts to train. Both are trained one after the other, each in its own folder of the
    run; only one is in memory."""
    rank: tuple[int, ...] = setting((), resume="refused")
    """adapter.rank of the high-noise and the low-noise expert. One number is for both; empty means
    adapter.rank."""
    lr: tuple[float, ...] = setting((), resume="stated")
    """optim.lr of the high-noise and the low-noise expert. One number is for both; empty means
    optim.lr."""
    steps: tuple[int, ...] = setting((), resume="free")
    """train.steps of the high-noise and the low-noise expert. One number is for both; empty means
    train.steps."""

    def of(self, name: str, index: int, otherwise: Number) -> Number:
        """The `rank`, `lr` or `steps` of an expert, by its index; `otherwise` if the section sets
        none."""
        values: tuple[Number, ...] = getattr(self, name)
        return values[index if len(values) > 1 else 0] if values else otherwise


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every key that a run file or a flag can set."""

    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    model: ModelPaths = field(default_factory=ModelPaths)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    base: BaseConfig = field(default_factory=BaseConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prior: PriorConfig = field(default_factory=PriorConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step accumulates; prior preservation adds one to each."""
        return self.train.accumulation * (2 if self.prior.wanted else 1)

    @property
    def run_folder(self) -> RunFolder:
        """The run's folder, with `~` replaced."""
        return RunFolder(local_path(self.run.folder))

    @property
    def is_on_demo_base(self) -> bool:
        """Whether the base is the checkpoint that a demo writes into the run's folder."""
        return self.run_folder.inputs in local_path(self.model.base).parents

    def with_execution(self, execution: Execution) -> "RunConfig":
        """The configuration of a run that runs so; precision and ranks stay as they are."""
        return replace(self, train=execution.within(self.train), base=execution.within(self.base))

    def on_device(self, device: str, streamed: int = 0) -> "RunConfig":
        """The configuration for running the model on one device, which need not be one that it
        trains on, and which also encodes prompts that the cache has lost meanwhile; the weights of
        `streamed` blocks stay in host memory."""
        train = replace(
            self.train,
            device=device,
            devices=(),
            split_points=(),
            reserve=(),
            pipelined=False,
            checkpointing="none",
            swap_blocks=(streamed,) if streamed else (),
        )
        return replace(
            self,
            train=train,
            encode=replace(self.encode, device=device),
            sample=replace(self.sample, device=""),
        )


_KEYS = {
    "train": {
        "Model and data": "model.base data.folder data.frames data.height data.width data.buckets data.trigger",
        "What is trained": "adapter.method adapter.rank adapter.alpha adapter.init",
        "Training": "train.steps train.batch_size train.accumulation optim.name optim.lr",
        "Memory": "train.checkpointing train.devices train.swap_blocks base.quantize",
        "Results": "run.folder save.every_steps held_out.clips sample.prompts sample.every_steps",
    },
    "encode": {
        "Model and data": "model.base data.folder data.frames data.height data.width data.on_bad",
        "Encoders": "encode.cache encode.device encode.text_dtype encode.vae_dtype encode.vae_tiling",
    },
    "sample": {
        "Samples": "sample.prompts sample.images sample.seed sample.frames sample.height sample.width sample.steps "
        "sample.guidance sample.negative sample.adapter sample.vae_tiling",
        "Model": "model.base train.devices base.quantize",
    },
    "export": {
        "Files": "export.forms export.dtype export.merged",
        "Model": "model.base model.preset",
    },
    "watch": {"The run": "run.folder"},
    "caption": {
        "Data": "data.folder data.folders data.metadata data.references data.controls data.masks data.trigger "
        "data.image_folders data.allow_outside",
        "Model": "encode.device encode.text_dtype encode.streaming",
    },
}
KEYS_THAT_MATTER: Mapping[str, Mapping[str, Sequence[str]]] = {
    command: {title: keys.split() for title, keys in titles.items()}
    for command, titles in _KEYS.items()
}
"""The keys that the short help of each command explains, by title."""
