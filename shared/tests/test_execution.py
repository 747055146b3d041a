"""How a model runs, as one value: of a run, and by itself."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ditkit_core.adapters.config import BaseConfig
from ditkit_core.distributed.ranks import RanksConfig
from ditkit_core.engine.ac_policies import AttentionOnly, Full
from ditkit_core.engine.token_routing import TokenRouting
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision, PrecisionConfig
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.scripts import printed
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.training.config import TrainConfig

ANOTHER_PROCESS = {"PYTHONDONTWRITEBYTECODE": "1"}
"""A variable: the process is then no copy of one that has imported modules already."""


def test_a_run_states_its_execution() -> None:
    train = TrainConfig(
        devices=("cuda:0", "cuda:1"),
        split_points=(2,),
        reserve=(1.0,),
        swap_blocks=(1,),
        checkpointing="full, 0=attn_only",
        attention="flex",
        kernels="triton",
        cuda_graphs="off",
        pipelined=True,
        token_routing="0-1=0.5",
    )
    config = RunConfig(
        model=ModelPaths(dtype="fp32"),
        precision=PrecisionConfig(residual="fp64"),
        train=train,
        base=BaseConfig(quantize="fp8", compute="fp8"),
        ranks=RanksConfig(shard=4, context=2),
    )
    execution = create_run(TOY, config, ToyArch()).execution
    assert execution.devices == ("cuda:0", "cuda:1"), "names: this machine need not have them"
    assert execution.schedule.policies([None] * 3) == (AttentionOnly(), Full(), Full())
    assert execution.precision == Precision(matmul=torch.float32, residual=torch.float64)
    assert (execution.attention, execution.kernels, execution.cuda_graphs) == (
        "flex",
        "triton",
        "off",
    )
    assert execution.routing == TokenRouting(0, 1, 0.5)
    assert (execution.split_points, execution.reserve, execution.swap_blocks) == (
        (2,),
        (1.0,),
        (1,),
    )
    assert (execution.quantize, execution.compute, execution.ranks) == (
        "fp8",
        "fp8",
        RanksConfig(shard=4, context=2),
    )
    assert execution.pipelined


def test_every_setting_of_an_execution_is_a_key_of_a_run() -> None:
    keys = {field.name for section in (TrainConfig, BaseConfig) for field in fields(section)}
    others = [field.name for field in fields(Execution) if field.name not in keys]
    assert others == ["precision", "ranks"], "sections of a run file by themselves"


ADDED = 4
"""What the run file of `support/added_setting.py` sets."""


def test_a_setting_that_is_added_is_one_field_in_one_file(tmp_path: Path) -> None:
    """With its description and resume rule it is in run files, help, schema and stored runs, and
    runs, plans and searches have it."""
    found = printed(
        Path(__file__).parent / "support" / "added_setting.py", str(tmp_path), **ANOTHER_PROCESS
    )
    assert found.pop("doc") == "A setting made up for a test, such as `4`."
    assert found.pop("resume") == [f"train.haste {ADDED} -> 3"]
    assert found.pop("help") is True and found.pop("schema") == 3 and found.pop("library") == 5
    assert found == dict.fromkeys(
        ("stored", "run", "planned step", "searched", "fitted run"), ADDED
    )


def test_the_defaults_are_those_of_a_run() -> None:
    run = create_run(TOY, RunConfig(train=TrainConfig(device="cpu")), ToyArch())
    assert run.execution == Execution(device="cpu")


def test_names_become_devices_of_this_machine() -> None:
    assert (
        Execution(devices=("cpu",)).torch_devices
        == Execution(device="cpu").torch_devices
        == (torch.device("cpu"),)
    )
    with pytest.raises(UserError, match="twice"):
        _ = Execution(devices=("cpu", "cpu")).torch_devices


def test_a_device_and_a_list_of_devices_contradict_each_other() -> None:
    with pytest.raises(UserError, match="train.device = 'cpu' and train.devices are both set"):
        Execution(device="cpu", devices=("cpu",))
    with pytest.raises(UserError, match="both set"):
        _ = TrainConfig(device="cpu", devices=("cpu",)).torch_devices
