"""What `train.kernels` becomes as a run starts, and what is said of it."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ditkit_core.config.resolve import resolve
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.execution import StepExecution
from ditkit_core.loading import kernels as loaded_kernels
from ditkit_core.nn.kernel_check import KernelCheck
from ditkit_core.nn.kernels import launch
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.planned_step import with_planned_kernels
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.gpus import with_kernels
from ditkit_core.run.plans.fit import task_for
from ditkit_core.run.plans.plan import make_report
from ditkit_core.testing.ranks import run_ranks
from ditkit_core.testing.toy import TOY

SUPPORT = Path(__file__).parents[1] / "support"
FAULT = "computes LoRA wrongly on cuda:1 (off by 0.3 of the largest value)"


def config(**train: object) -> RunConfig:
    return resolve(RunConfig, flags={f"train.{name}": value for name, value in train.items()})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[torch.device]]:
    """Pretends that a run is on such devices, of which some have a fault; returns those that are
    checked."""

    def pretend(*names: str, **faults: str) -> list[torch.device]:
        checked: list[torch.device] = []
        devices = tuple(map(torch.device, names))
        monkeypatch.setattr(StepExecution, "torch_devices", devices)
        monkeypatch.setattr(launch, "HAS_TRITON", True)
        monkeypatch.setattr(launch.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.delenv("CC", raising=False)

        def check(device: torch.device) -> KernelCheck:
            checked.append(device)
            fault = faults.get(str(device).replace(":", ""), "")
            return KernelCheck(fault, error=1e-7 * len(checked), rounds_products=device.index == 0)

        monkeypatch.setattr(loaded_kernels, "compare_kernels", check)
        return checked

    return pretend


def test_a_cpu_runs_torch_and_nothing_is_said(capfd):
    assert with_kernels(config()).train.kernels == "torch"
    assert capfd.readouterr() == ("", "")


def test_gpus_run_triton_once_each_of_them_has_passed_the_check(gpus, capfd):
    checked = gpus("cuda:0", "cuda:1")
    assert with_kernels(config()).train.kernels == "triton"
    assert list(map(str, checked)) == ["cuda:0", "cuda:1"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "train.kernels = auto: triton, whose kernels passed a check on cuda:0 and cuda:1 (off by "
        "2e-07 of the largest value at most, and cuBLAS "
        "rounds products of LoRAs before it adds them)"
    )


def test_a_kernel_that_fails_is_said_and_the_run_goes_on_with_torch(gpus, capfd):
    gpus("cuda:0", "cuda:1", cuda1=FAULT)
    assert with_kernels(config()).train.kernels == "torch"
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"train.kernels = auto: torch, because triton {FAULT}"


def test_triton_that_was_asked_for_and_fails_is_refused(gpus, capfd):
    gpus("cuda:0", "cuda:1", cuda1=FAULT)
    with pytest.raises(
        UserError,
        match=r"train\.kernels = triton computes LoRA wrongly .*; set train\.kernels = torch",
    ):
        with_kernels(config(kernels="triton"))
    checked = gpus("cuda:0")
    assert with_kernels(config(kernels="triton")).train.kernels == "triton" and checked
    checked = gpus("cuda:0", cuda0=FAULT)
    assert with_kernels(config(kernels="torch")).train.kernels == "torch" and not checked
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("found", "cc", "said"),
    [
        ((), None, "triton needs a C compiler, and gcc and clang are not installed here"),
        (("cc",), None, "triton needs a C compiler, and gcc and clang are not installed here"),
        (("gcc",), "icc", "triton needs a C compiler, and CC = icc is not installed here"),
        (("clang",), None, ""),
        (("icc",), "icc", ""),
    ],
)
def test_without_the_compiler_that_triton_looks_for_torch_runs(
    gpus, monkeypatch, capfd, found, cc, said
):
    """As `triton/runtime/build.py` looks: CC and nothing else where it is set, else gcc, then
    clang."""
    checked = gpus("cuda:0")
    monkeypatch.setattr(launch.shutil, "which", lambda name: name if name in found else None)
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    assert with_kernels(config()).train.kernels == ("torch" if said else "triton")
    assert bool(checked) is not bool(said)
    assert f"because {said}" in capfd.readouterr().err or not said


def test_other_devices_and_no_triton_run_torch_without_a_check(gpus, monkeypatch, capfd):
    checked = gpus("cuda:0", "cpu")
    assert with_kernels(config()).train.kernels == "torch"
    monkeypatch.setattr(launch, "HAS_TRITON", False)
    monkeypatch.setattr(StepExecution, "torch_devices", (torch.device("cuda", 0),))
    assert with_kernels(config()).train.kernels == "torch"
    said = capfd.readouterr().err.splitlines()
    assert [line.partition("because ")[2] for line in said] == [
        "triton runs on GPUs only, and this run uses cpu",
        "triton needs the package triton, which is not installed here",
    ]
    assert not checked


@pytest.mark.parametrize("own", ["", FAULT])
def test_ranks_of_which_one_fails_the_check_all_run_torch_and_that_one_is_named(gpus, capfd, own):
    class First(Ranks):
        def all_gather_object(self, value):
            return [value, ("elsewhere", "" if own else f"triton {FAULT}")]

    gpus("cuda:0", cuda0=own)
    assert with_kernels(config(), First(0, 2)).train.kernels == "torch"
    (line,) = capfd.readouterr().err.splitlines()
    where = f"rank 0 on {socket.gethostname()}" if own else "rank 1 on elsewhere"
    assert line == f"train.kernels = auto: torch, because triton {FAULT} ({where})"


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_agree_whichever_of_them_has_a_wrong_kernel(tmp_path: Path):
    """The check itself finds it, and the ranks exchange what they found."""
    for rank, found in enumerate(run_ranks(SUPPORT / "kernels_of_ranks.py", folder=tmp_path)):
        assert found["none"] == [
            "triton",
            (
                f"triton, whose kernels passed a check on cuda:{rank} (off by 0 of the largest value "
                f"at most)"
            ),
        ]
        for wrong in ("0", "1"):
            kernels, said = found[wrong]
            assert kernels == "torch"
            assert said.startswith("torch, because triton computes twice x wrongly on cpu (off by ")
            assert said.endswith(f"of the largest value) (rank {wrong} on {socket.gethostname()})")


def test_a_stored_run_that_took_triton_asks_again_where_it_is_continued(tmp_path: Path):
    """The machine may be another one. What was asked for stays where it cannot fail."""
    for stored, continued in (("triton", "auto"), ("torch", "torch"), ("auto", "auto")):
        (tmp_path / "config.toml").write_text(f'[train]\nkernels = "{stored}"\n')
        assert resolve(RunConfig, stored=tmp_path).train.kernels == continued


def run_with(**train: object):
    flags = {
        "model.preset": "tiny",
        "data.frames": 1,
        "data.height": 64,
        "data.width": 64,
        "adapter.rank": 2,
    }
    return create_run(
        TOY,
        resolve(RunConfig, flags=flags | {f"train.{name}": value for name, value in train.items()}),
    )


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_plan_is_for_what_auto_would_be_on_its_devices():
    assert make_report(run_with(), "24GiB").work.kernels == "triton"
    assert make_report(run_with(kernels="torch"), "24GiB").work.kernels == "torch"
    # older than those that Triton supports
    assert make_report(run_with(), "rtx2080ti").work.kernels == "torch"
    execution = run_with().execution
    for kind, gpus in (("cpu", ""), ("cuda", "v100-16,24GiB")):
        known = parse_gpus(gpus) if gpus else ()
        assert with_planned_kernels(execution, kind, known).kernels == "torch"
    assert with_planned_kernels(run_with(kernels="triton").execution, "cpu").kernels == "triton"


def test_a_search_keeps_auto_for_the_run_file_and_takes_the_time_of_what_it_would_be():
    for gpu, kernels in (("24GiB", "triton"), ("rtx2080ti", "torch")):
        task = task_for(run_with(), parse_gpus(gpu))
        assert task.execution.kernels == task.varied("full", "none").kernels == "auto"
        assert task.work_of(task.varied("full", "none")).kernels == kernels
