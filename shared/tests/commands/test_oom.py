"""A run that lacks memory: what it says, and that nothing of it is kept alive meanwhile."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from made_profiles import made_profile
from torch._subclasses.fake_tensor import FakeTensor
from toy_world import World

from ditkit_core.commands import oom as out_of_memory
from ditkit_core.commands.oom import MeasuredPeaks, explain, measured_peaks
from ditkit_core.config.resolve import resolve
from ditkit_core.io.memory import is_out_of_memory, release_frames
from ditkit_core.planner import partition, targets
from ditkit_core.run.config import RunConfig
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

GIB = 2**30
_FAILS = []
"""The failure of the test that runs: one function makes the inputs of all, so that their steps are
equal ones."""


def make_inputs(*args):
    latents = args[0][0]
    if not latents.is_meta and not isinstance(latents, FakeTensor):
        _FAILS[-1]()
    return TOY.training.make_inputs(*args)


def spec_that_lacks(world, fail):
    """The world's model, whose step calls `fail`; the look at an outline and the planner's steps do
    not."""
    _FAILS[:] = [fail]
    return altered(world.spec, make_inputs=make_inputs)


def allocate_far_too_much():
    torch.empty(2**60)


def raise_as_an_accelerator():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nMore about it.")


def raise_as_the_host():
    raise MemoryError


@pytest.mark.parametrize(
    ("fail", "failure"),
    [
        (allocate_far_too_much, "can't allocate memory"),
        (raise_as_an_accelerator, "(CUDA out of memory. Tried to allocate 3.00 GiB.)"),
        (raise_as_the_host, "(MemoryError)"),
    ],
)
def test_a_step_without_memory_ends_with_plan_measured_peak_and_a_change_that_fits(
    tmp_path, capsys, fail, failure
):
    world = World(tmp_path)
    world.spec = spec_that_lacks(world, fail)
    assert world.train("run", 1, "--sample.captions", "0") == 1
    error = capsys.readouterr().err
    lines = error.splitlines()
    rows = {line.split("  ")[0]: line.split()[-1] for line in lines}
    assert {"weights", "activations", "peak", "measured peak of the process"} <= rows.keys()
    assert float(rows["measured peak of the process"]) > 0.1
    assert (
        lines[-1].startswith("error: out of memory: according to the plan this run fits")
        and failure in lines[-1]
    )
    assert (
        'train.checkpointing = "attn_only" fits: ' in lines[-1]
        or 'train.checkpointing = "full" fits: ' in lines[-1]
    )
    assert "the last save is untouched" in lines[-1] and "More about it" not in error


def test_nothing_of_the_step_is_held_while_it_is_explained(tmp_path, monkeypatch):
    world, held = World(tmp_path), []

    def fail():
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        try:
            raise_as_an_accelerator()
        except torch.OutOfMemoryError as error:
            other = torch.zeros(1000)
            held.append(weakref.ref(other))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory") from error

    alive = []
    monkeypatch.setattr(
        out_of_memory,
        "measured_peaks",
        lambda config: alive.extend(ref() for ref in held) or MeasuredPeaks((1,)),
    )
    monkeypatch.setattr(out_of_memory, "explain", lambda *args, **kwargs: None)
    world.spec = spec_that_lacks(world, fail)
    assert world.train("run", 1, "--sample.captions", "0") == 1
    assert alive == [None, None]


def test_frames_tell_what_was_at_work():
    try:
        World.__init__(None, None)
    except AttributeError as error:
        assert "toy_world" in release_frames(error) and error.__traceback__ is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (
            torch.distributed.DistBackendError(
                "ncclUnhandledCudaError: ...\nLast error:\nCuda failure 2 'out of memory'"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (
            RuntimeError(
                "cuDNN SDPA execution failed: .. err 2 != CUDA_SUCCESS :: shimCuLaunchKernelEx(..)"
            ),
            True,
        ),
        (
            RuntimeError(
                'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165'
            ),
            True,
        ),
        (
            RuntimeError(
                'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/PeerToPeerAccess.cpp":78'
            ),
            False,
        ),
        (RuntimeError("CUDA driver error: device not ready"), False),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
            False,
        ),
        (RuntimeError("CUDA error: misaligned address"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_lacking_memory(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("ditkit_core.sampling.render", "sample.height"),
        ("ditkit_core.encoding.encode", "encode.streaming"),
    ],
)
def test_encoding_and_sampling_have_remedies_of_their_own(capsys, module, says):
    explain(
        TOY,
        RunConfig(),
        "failure",
        training=True,
        modules={"ditkit_core.training.trainer", module},
        peaks=MeasuredPeaks((1,)),
    )
    error = capsys.readouterr().err
    assert says in error and "train.checkpointing" not in error and error.count("\n") == 1


def test_a_plan_that_fails_does_not_hide_what_happened(monkeypatch, capsys):
    monkeypatch.setattr(out_of_memory, "make_report", lambda run: 1 // 0)
    explain(TOY, RunConfig(), "the failure", training=True, modules=(), peaks=MeasuredPeaks((1,)))
    error = capsys.readouterr().err
    assert "division" in error
    assert (
        "error: out of memory: try train.checkpointing = full" in error and "(the failure)" in error
    )


DEEP = altered(TOY, presets={**TOY.architecture.presets, "deep": ToyArch(depth=12)})


def explained(monkeypatch, capsys, sizes, free, failure="CUDA out of memory", **flags):
    """What is said of a run of twelve blocks of a GiB on GPUs that are not here."""
    properties = [
        SimpleNamespace(name="a card", total_memory=int(size * GIB), major=9, minor=0)
        for size in sizes
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties[device.index]
    )
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (int(free[device.index] * GIB), int(sizes[device.index] * GIB)),
    )
    monkeypatch.setattr(
        partition,
        "profile",
        lambda job, **unused: made_profile(str(job.schedule), job.quantize, work=len(job.batch)),
    )
    monkeypatch.setattr(targets, "free_memory_bytes", lambda device: 64 * GIB)
    named = {"model.preset": "deep", "data.frames": 1, "data.height": 64, "data.width": 64, **flags}
    config = resolve(
        RunConfig, flags={name.replace("__", "."): value for name, value in named.items()}
    )
    peaks = MeasuredPeaks(
        *(tuple(int(size * GIB * share) for size in sizes) for share in (0.5, 0.75))
    )
    explain(DEEP, config, failure, training=True, modules=(), peaks=peaks)
    return capsys.readouterr().err


def test_gpus_are_explained_with_what_each_has_held_and_what_fits_all(monkeypatch, capsys):
    error = explained(monkeypatch, capsys, (10, 8), (10, 8), train__devices=("cuda:0", "cuda:1"))
    measured, gaps = (line for line in error.splitlines() if line.startswith("measured peak"))
    assert measured.split()[2:] == ["5.00", "4.00"]
    assert gaps.split()[2:] == ["with", "gaps", "7.50", "6.00"]
    last = error.splitlines()[-1]
    assert (
        'train.checkpointing = "attn_only"' in last
        and " fits: " in last
        and "according to the plan this run fits" not in last
    )


def test_where_no_setting_is_enough_a_change_is_named_and_no_gpu(monkeypatch, capsys):
    error = explained(monkeypatch, capsys, (5,), (5,), train__device="cuda:0", train__batch_size=4)
    last = error.splitlines()[-1]
    assert (
        "no settings that --fit searches fit; train.batch_size = 1 (now 4)" in last
        and "fits, with" in last
    )
    assert "card" not in last


def test_what_others_use_of_a_gpu_is_no_room(monkeypatch, capsys):
    """The plan fits the GPU, and would not if it knew of the other program."""
    flags = {"train__device": "cuda:0"}
    alone = explained(monkeypatch, capsys, (40,), (39.5,), **flags)
    taken = explained(monkeypatch, capsys, (40,), (12,), **flags)
    assert (
        "according to the plan this run fits" in alone.splitlines()[-1]
        and "according to the plan this run fits" in taken.splitlines()[-1]
    )
    available = [float(error.split(" fits: ")[1].split()[2]) for error in (alone, taken)]
    assert available[1] < 12 < available[0] < 40 * 0.9


def test_a_host_that_cannot_hold_what_is_streamed_gets_less_to_hold(monkeypatch, capsys):
    flags = {"train__device": "cuda:0", "train__swap_blocks": (11,), "train__checkpointing": "full"}
    failure = "DefaultCPUAllocator: can't allocate memory"
    last = explained(monkeypatch, capsys, (12,), (12,), failure, **flags).splitlines()[-1]
    assert "train.swap_blocks = [" in last and "host memory ran out" in last
    assert 0 < int(last.split("train.swap_blocks = [")[1].split("]")[0]) < 10


def test_the_host_is_distinguished_from_an_accelerator_on_every_system():
    for failure in (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "MemoryError",
    ):
        assert out_of_memory.is_of_the_host(failure)
    assert not out_of_memory.is_of_the_host("CUDA out of memory. Tried to allocate 3.00 GiB.")


def test_where_nothing_is_left_to_lower_that_is_said(tmp_path, monkeypatch, capsys):
    world = World(tmp_path)
    world.spec = spec_that_lacks(world, raise_as_the_host)
    monkeypatch.setattr(out_of_memory, "_single", lambda spec, config: iter(()))
    assert world.train("run", 1, "--sample.captions", "0") == 1
    error = capsys.readouterr().err
    assert "no setting is left to lower" in error.splitlines()[-1] and "not planned" not in error


def test_peaks_are_those_in_tensors_and_those_with_gaps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 + device)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 20 + device)
    assert measured_peaks(RunConfig()) == MeasuredPeaks((10, 11), (20, 21))
    on_cpu = measured_peaks(resolve(RunConfig, flags={"train.device": "cpu"}))
    assert len(on_cpu.allocated) == 1 and on_cpu.reserved == ()
