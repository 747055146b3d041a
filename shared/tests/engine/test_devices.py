"""The devices of a run by their names, on machines that are not here."""

import pytest
import torch

from ditkit_core.config.sizes import per_device
from ditkit_core.engine.devices import choose_devices
from ditkit_core.errors import UserError
from ditkit_core.training.config import TrainConfig


@pytest.fixture
def machine(monkeypatch):
    """Pretends GPUs of these sizes in GiB."""

    def pretend(*sizes):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(sizes))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))

    return pretend


def test_all_are_the_gpus_of_the_machine(machine):
    machine(24, 24, 16)
    assert [str(device) for device in choose_devices(["all"])] == ["cuda:0", "cuda:1", "cuda:2"]
    assert choose_devices(["cuda:2", "cuda:0"]) == (torch.device("cuda:2"), torch.device("cuda:0"))
    machine(24)
    assert choose_devices(["all"]) == (torch.device("cuda:0"),)


@pytest.mark.parametrize(
    ("sizes", "names", "says"),
    [
        ((24,), ["cuda:0", "cuda:1"], "names 2 GPUs, and this machine has 1 CUDA device;"),
        ((), ["cuda:0", "cuda:1"], "names 2 GPUs, and this machine has no CUDA devices;"),
        ((24, 24), ["cuda:0", "cuda:2"], "this machine has 2 CUDA devices; choose another"),
        ((24, 24), ["cuda", "cuda:0"], "names a device twice"),
        ((24,), ["all", "cuda:0"], "means every GPU"),
        ((), ["all"], "has none"),
    ],
)
def test_devices_that_are_not_here_are_named_in_one_line(machine, sizes, names, says):
    machine(*sizes)
    with pytest.raises(UserError, match=says) as caught:
        choose_devices(names)
    assert "\n" not in str(caught.value) and "train.devices" in str(caught.value)


def test_a_reserve_belongs_to_a_device():
    with pytest.raises(UserError, match="3 numbers for 2 devices"):
        per_device((1.0, 1.0, 1.0), 2, "train.reserve")
    for reserve in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"train\.reserve"):
            TrainConfig(reserve=(reserve,))
    for reserve in ((), (1.0,), (1.0, 0.0)):
        per_device(reserve, 2, "train.reserve")


def test_one_value_holds_for_all_devices():
    assert per_device((), 2, "train.reserve") == (0.0, 0.0)
    assert per_device((1.0,), 3, "train.reserve") == (1.0, 1.0, 1.0)
    assert per_device((1.0, 2.0), 2, "train.reserve") == (1.0, 2.0)
