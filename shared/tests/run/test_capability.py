"""GPUs that cannot do what a run asks of them are refused by their compute capability, on a machine
without one: torch's answers are set."""

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.nn.attention.support import SUPPORT
from ditkit_core.run.checks import check_preview_device, check_run
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.gpus import check_capability
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.training.config import TrainConfig

GPU = torch.device("cuda:0")
TURING, AMPERE, ADA, HOPPER, B200, BLACKWELL = (7, 5), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)


@pytest.fixture
def gpu(monkeypatch):
    """Sets the compute capability of the only GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "get_arch_list",
        lambda: ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120", "compute_120", "gfx942"],
    )
    return lambda found: monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: found
    )


def a_run(**sections):
    return create_run(TOY, RunConfig(**sections), ToyArch())


def attention(name, dtype="bf16"):
    return a_run(model=ModelPaths(dtype=dtype), train=TrainConfig(attention=name)).execution


FP32 = a_run(model=ModelPaths(dtype="fp32"))


def test_a_gpu_without_bf16_is_refused_before_anything_is_loaded(gpu):
    gpu(TURING)
    with pytest.raises(UserError, match=r"model.dtype = bf16 needs .* Ampere or later, compute capability 8.0, and cuda:0 has 7.5; set model.dtype = fp32"):  # fmt: skip
        check_run(a_run(train=TrainConfig(device="cuda")))
    check_run(a_run(model=ModelPaths(dtype="fp32"), train=TrainConfig(device="cuda")))
    with pytest.raises(UserError, match=r"set precision.attention = fp32"):
        narrow = a_run(model=ModelPaths(dtype="fp32"), precision=PrecisionConfig(attention="bf16"))
        check_capability(narrow.execution, [GPU])
    gpu(AMPERE)
    check_run(a_run(train=TrainConfig(device="cuda")))


def test_a_gpu_that_torch_is_not_built_for_is_refused(gpu):
    gpu((7, 0))
    with pytest.raises(
        UserError, match=r"is built for GPUs of compute capability 7.5 or later, and cuda:0 has 7.0"
    ):
        check_capability(FP32.execution, [GPU])
    check_capability(FP32.execution, [torch.device("cpu")])


@pytest.mark.parametrize(
    "name, found, said",
    [
        ("sdpa_flash", TURING, r"8.0\+, and cuda:0 has 7.5; use sdpa"),
        ("varlen", TURING, r"8.0\+"),
        ("flash3", BLACKWELL, "8.0-9.0, and cuda:0 has 12.0"),
        ("flash4", ADA, r"9.0\+"),
        ("sage", B200, r"8.0, 8.6, 8.9, 9.0, 12.0, 12.1, and cuda:0 has 10.0; use sdpa"),
    ],
)
def test_attention_that_a_gpu_cannot_run_is_refused(name, found, said, gpu):
    gpu(found)
    with pytest.raises(UserError, match=said):
        check_capability(attention(name, "fp32"), [GPU])


@pytest.mark.parametrize("found", [AMPERE, ADA, HOPPER, BLACKWELL])
def test_sage_runs_on_the_gpus_that_it_has_kernels_for(found, gpu):
    gpu(found)
    check_capability(attention("sage"), [GPU])


def test_flash4_is_refused_on_a_mix_of_gpus_for_which_it_would_take_one_kernel(gpu, monkeypatch):
    gpu(HOPPER)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    check_capability(attention("flash4"), [first, second])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", {first: HOPPER, second: B200}.__getitem__
    )
    check_capability(attention("sdpa"), [first, second])
    check_capability(attention("flash4"), [second, torch.device("cpu")])
    with pytest.raises(UserError, match=r"one compute capability in a process, and cuda:0 has 9.0 and cuda:1 has 10.0; use sdpa"):  # fmt: skip
        check_capability(attention("flash4"), [first, second])


@pytest.mark.parametrize("found", [AMPERE, ADA, HOPPER, BLACKWELL])
def test_attention_of_torch_runs_from_ampere_on(found, gpu):
    gpu(found)
    for name in (name for name, support in SUPPORT.items() if support.module is None):
        check_capability(attention(name), [GPU])


def test_the_device_of_previews_is_checked_too(gpu):
    gpu(TURING)
    config = RunConfig(
        sample=SampleConfig(device="cuda", every_steps=1), train=TrainConfig(device="cpu")
    )
    with pytest.raises(UserError, match=r"sample.device = 'cuda': model.dtype = bf16 needs"):
        check_preview_device(create_run(TOY, config, ToyArch()))
