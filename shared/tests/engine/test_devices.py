"""The devices of a run by their names, on machines that are not here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ditkit_core.config.sizes import per_device
from ditkit_core.engine import devices
from ditkit_core.engine.devices import choose_device, choose_devices, make_current
from ditkit_core.errors import UserError
from ditkit_core.io import nvidia
from ditkit_core.training.config import TrainConfig


@pytest.fixture
def machine(monkeypatch):
    """Pretends GPUs of these sizes in GiB."""

    def pretend(*sizes):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(sizes))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
        monkeypatch.setattr(devices, "_has_gpu", lambda: bool(sizes))

    return pretend


def test_all_are_the_gpus_of_the_machine(machine):
    machine(24, 24, 16)
    assert [str(device) for device in choose_devices(["all"])] == ["cuda:0", "cuda:1", "cuda:2"]
    assert choose_devices(["cuda:2", "cuda:0"]) == (torch.device("cuda:2"), torch.device("cuda:0"))
    machine(24)
    assert choose_devices(["all"]) == (torch.device("cuda:0"),)


def test_a_gpu_always_has_its_index(machine):
    machine(24, 24)
    for name in ("auto", "cuda", "cuda:0"):
        assert choose_device(name, "train.device") == torch.device("cuda", 0)
    assert choose_devices(["cuda:1", "cuda"]) == (torch.device("cuda", 1), torch.device("cuda", 0))
    machine()
    assert (
        choose_device("auto", "train.device")
        == choose_device("cpu", "train.device")
        == torch.device("cpu")
    )


def test_each_rank_of_a_machine_takes_its_own_gpu(machine, monkeypatch):
    machine(24, 24)
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert [choose_device(name, "train.device").index for name in ("auto", "cuda", "cuda:0")] == [
        1,
        1,
        0,
    ]


def test_the_first_gpu_of_a_run_becomes_current(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    cpu, one, two = torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 2)
    make_current([cpu])
    assert not chosen
    make_current([cpu, two, one])
    assert chosen == [two]


@pytest.fixture
def unusable(monkeypatch):
    """Pretends a GPU that torch cannot use."""

    def init():
        raise RuntimeError(
            "The NVIDIA driver is too old (found version 12040). Please update it\nand more"
        )

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(devices, "_has_gpu", lambda: True)


@pytest.mark.parametrize("names", [["auto"], ["cuda"], ["all"], ["cuda:0", "cuda:1"]], ids=str)
def test_a_driver_that_is_too_old_is_said_and_no_cpu_taken(unusable, monkeypatch, names):
    with pytest.raises(
        UserError, match="cannot use .*too old .found version 12040.*driver for CUDA 13.2"
    ) as caught:
        choose_devices(names)
    assert "\n" not in str(caught.value) and "train.devices" in str(caught.value)
    assert choose_device("cpu", "train.device") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto", "train.device") == torch.device("cpu"), "hidden by the user"


def test_a_torch_without_cuda_takes_the_cpu(unusable, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device("auto", "train.device") == torch.device("cpu")


@pytest.mark.parametrize(
    ("nodes", "listed", "status", "expected"),
    [
        (["nvidia0"], None, 0, True),
        (["nvidiactl"], None, 0, False),
        ([], "GPU 0: NVIDIA H200 (UUID: GPU-1)\n", 0, True),
        ([], "No devices found.\n", 6, False),
        ([], "", 0, False),
    ],
)
def test_a_gpu_is_seen_by_its_node_or_by_the_drivers_tool(
    monkeypatch, nodes, listed, status, expected
):
    monkeypatch.setattr(
        Path,
        "glob",
        lambda self, pattern: (Path(node) for node in nodes if Path(node).match(pattern)),
    )
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None if listed is None else name)
    answer = SimpleNamespace(stdout=listed, returncode=status)
    monkeypatch.setattr(nvidia.subprocess, "run", lambda *args, **options: answer)
    assert devices._has_gpu() is expected


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
