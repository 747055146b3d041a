"""The whole configuration of a run: the sections, each owned by the module that consumes it."""

from dataclasses import dataclass, field

from ditkit_core.adapter_files import BaseConfig
from ditkit_core.adapters import AdapterConfig
from ditkit_core.checkpoint import SaveConfig
from ditkit_core.components import Components
from ditkit_core.data_config import DataConfig
from ditkit_core.ema import EMAConfig
from ditkit_core.encode import EncodeConfig
from ditkit_core.experts import ExpertsConfig
from ditkit_core.export import ExportConfig
from ditkit_core.flow_matching import FlowConfig
from ditkit_core.held_out import HeldOutConfig
from ditkit_core.metrics import LogConfig
from ditkit_core.optim import OptimConfig
from ditkit_core.precision import PrecisionConfig
from ditkit_core.prior import PriorConfig
from ditkit_core.run_folder import RunFolderConfig
from ditkit_core.sample_stage import SampleConfig
from ditkit_core.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every key that a run file or a flag can set."""

    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    model: Components = field(default_factory=Components)
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
