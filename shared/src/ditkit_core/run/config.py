"""The configuration of a run: its sections, each owned by the module that consumes it."""

from dataclasses import dataclass, field

from ditkit_core.adapters.export import ExportConfig
from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.adapters.read import BaseConfig
from ditkit_core.data.config import DataConfig
from ditkit_core.encoding.encode import EncodeConfig
from ditkit_core.encoding.prior_preservation import PriorConfig
from ditkit_core.io.run_dir import RunFolderConfig
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.run.experts import ExpertsConfig
from ditkit_core.sampling.prompts import SampleConfig
from ditkit_core.training.checkpoint import SaveConfig
from ditkit_core.training.ema import EMAConfig
from ditkit_core.training.flow_matching import FlowConfig
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optimizer import OptimConfig
from ditkit_core.training.trainer import TrainConfig
from ditkit_core.training.validation import HeldOutConfig


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
    save: SaveConfig = field(default_factory=SaveConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step accumulates; prior preservation adds one to each."""
        return self.train.accumulation * (2 if self.prior.wanted else 1)
