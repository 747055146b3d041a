"""The shared core of ditkit, and the door to it: everything that a training program needs is
imported from here.

    from ditkit_core import LoraConfig, flow_loss, load

docs/library.md has programs. Names are imported when they are first used, because torch takes
seconds.
"""

from typing import TYPE_CHECKING

from ditkit_core.io.hushed import hush_libraries
from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_core.adapters.config import LoraConfig
    from ditkit_core.api.encode import encode
    from ditkit_core.api.load import load
    from ditkit_core.api.plan import plan
    from ditkit_core.api.sample import sample
    from ditkit_core.engine.engine import BlockEngine
    from ditkit_core.errors import UserError
    from ditkit_core.execution import Execution
    from ditkit_core.loading.model import Model
    from ditkit_core.models.spec import ModelSpec
    from ditkit_core.training.config import TrainConfig
    from ditkit_core.training.micro_batch import flow_loss
    from ditkit_core.training.optim.optimizers import OptimConfig
    from ditkit_core.training.trainer import Trainer, TrainerConfig

hush_libraries()  # before any module imports the libraries
__version__ = "0.1.0"
__all__ = [
    "BlockEngine",
    "Execution",
    "LoraConfig",
    "Model",
    "ModelSpec",
    "OptimConfig",
    "TrainConfig",
    "Trainer",
    "TrainerConfig",
    "UserError",
    "encode",
    "flow_loss",
    "load",
    "plan",
    "sample",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BlockEngine": "engine.engine",
        "Execution": "execution",
        "LoraConfig": "adapters.config",
        "Model": "loading.model",
        "ModelSpec": "models.spec",
        "OptimConfig": "training.optim.optimizers",
        "TrainConfig": "training.config",
        "Trainer": "training.trainer",
        "TrainerConfig": "training.trainer",
        "UserError": "errors",
        "encode": "api.encode",
        "flow_loss": "training.micro_batch",
        "load": "api.load",
        "plan": "api.plan",
        "sample": "api.sample",
    },
)
