"""The Triton kernels: in the interpreter against fp64, and under fake tensors.
`tests/test_kernel_resources.py` compiles them."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ditkit_core.errors import UserError
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.nn.functional import gated_unit
from ditkit_core.nn.kernels import launch, ops
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.planner.memory_tracker import fake_tensors
from ditkit_core.planner.step_time import UPDATE_TRAFFIC
from ditkit_core.testing.scripts import printed
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.mark.slow
def test_every_kernel_equals_fp64_forward_and_backward(gpu):
    """In a process of its own, where the interpreter stands in for a GPU: triton reads the variable
    when it is imported."""
    pytest.importorskip("triton")
    kind, interpret = ("cuda", "0") if gpu.is_real else ("cpu", "1")
    found = printed(SUPPORT / "interpreted_kernels.py", kind, TRITON_INTERPRET=interpret)
    has_hopper = len(found["errors"]) > 44  # its kernels run in the interpreter, and on such a GPU
    assert len(found["errors"]) == (66 if has_hopper else 44) and (has_hopper or gpu.is_real)
    for name, is_bitwise, error, operations in found["errors"]:
        # With the step of fp32 that a result may be off as well, 2e-6.
        assert error <= (0 if is_bitwise else 1.8e-6) and operations, (name, error, operations)
    ran = {each for *_, operations in found["errors"] for each in operations}
    assert ran == ops.IMPLEMENTATIONS.keys() - (
        set() if has_hopper else {"add_product", "multiply_codes"}
    )
    assert len(found["parts"]) == 4 and all(found["parts"].values()), found["parts"]


def test_fake_tensors_get_the_kernels_results():
    with fake_tensors("cuda"):
        x = torch.empty(2, 5, 24, dtype=torch.bfloat16, requires_grad=True)
        weight, table = torch.empty(24, requires_grad=True), torch.empty(1, 5, 1, 6, 2)
        out = ops.NormRotation.apply(x, weight, table, 1e-6, 2, torch.bfloat16)
        assert (out.shape, out.dtype) == ((2, 5, 2, 12), torch.bfloat16)
        out.sum().backward()
        assert (x.grad.dtype, weight.grad.dtype, weight.grad.shape) == (
            torch.bfloat16,
            torch.float32,
            (24,),
        )
        with block_settings(BlockSettings(kernels="triton")):
            assert gated_unit(x).grad_fn.name() == "GatedUnitBackward"
            assert gated_unit(x).shape == (2, 5, 12)


class Noted(TorchDispatchMode):
    """Notes the names of our operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func._opname] if func.namespace == "ditkit" else []
        return func(*args, **(kwargs or {}))


def test_an_operation_goes_through_torch_only_where_that_shows(monkeypatch):
    """Under a dispatch mode, for a tensor that is none of torch's plain ones, and where a gradient
    would be lost."""
    pytest.importorskip("triton")
    from ditkit_core.nn.kernels import gated_unit as kernels

    launches = []  # of a kernel that computes nothing
    monkeypatch.setattr(
        kernels._forward, "kernel", defaultdict(lambda: lambda *_, **__: launches.append(1))
    )
    x = torch.nn.Parameter(torch.ones(2, 3, 8))
    assert ops._gated_unit(x).grad_fn is not None  # a backward through it fails
    with torch.no_grad():
        for tensor in (x, x.detach()):
            with torch.profiler.profile() as profiler:
                results = [ops._gated_unit(tensor)]
            assert not any(event.name.startswith("ditkit::") for event in profiler.events())
            with Noted() as noted:
                results.append(ops._gated_unit(tensor))
            assert noted.names == ["gated_unit"]
            assert {(result.shape, result.dtype) for result in results} == {
                ((2, 3, 4), torch.float32)
            }
        with FakeTensorMode():
            fake = torch.empty(2, 3, 8)
        assert isinstance(ops._gated_unit(fake), FakeTensor)
        launches.clear()
        assert ops._gated_unit(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 4)
        assert not launches


@pytest.mark.parametrize(
    ("kind", "launches"), [("int8", (6, 4)), ("fp8", (6, 6)), ("nf4", (16, 4))]
)
def test_a_quantized_layer_is_converted_in_one_launch(kind, launches):
    """Forward and backward: a conversion and a product each; Triton does not convert fp8 on all
    GPUs. A matrix of this size is in one part on a GPU."""
    found = []
    for name in ("torch", "triton"):
        with fake_tensors("cuda") as meter, block_settings(BlockSettings(kernels=name)):
            layer = QuantizedLinear(2048, 4096, kind, bias=False)
            x = torch.empty(5, 2048, dtype=torch.bfloat16, requires_grad=True)
            meter.kernels.clear()
            out = layer(x)
            out.backward(torch.empty_like(out))
            found.append(meter.kernels.total())
    assert tuple(found) == launches


@pytest.mark.parametrize(
    ("rounding", "launches"), [("nearest", (4, 4)), ("split", (12, 4)), ("stochastic", (37, 4))]
)
def test_an_update_of_a_bf16_weight_is_as_many_launches_and_bytes_as_plans_say(rounding, launches):
    """Widen or join, advance the count, update, write."""
    count, own = 2**20, {"nearest": 14, "split": 16, "stochastic": 14}[rounding]
    for kernels, wanted in zip(("torch", "triton"), launches, strict=True):
        with fake_tensors("cuda") as meter:
            weight = torch.nn.Parameter(torch.empty(2**10, 2**10, dtype=torch.bfloat16))
            config = OptimConfig(rounding=rounding)
            optimizer = NamedOptimizer(
                {"weight": weight}, config, accumulation=torch.float32, kernels=kernels
            )
            for step in range(2):  # the state is made in the first
                weight.grad = torch.empty(weight.shape)
                meter.kernels.clear()
                optimizer.begin(1, step)
                optimizer.step(1e-3)
        moved = sum(kernel.bytes * times for kernel, times in meter.kernels.items())
        assert meter.kernels.total() == wanted
        assert round(moved / count) - 2 * own == UPDATE_TRAFFIC[rounding][kernels]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_product_in_8_bits_is_three_launches(kind):
    """Rounding rows, the product, applying scales; the backward also transposes the codes. fp8's
    product gets a scale that is one."""
    found = []
    for name in ("torch", "triton"):
        with fake_tensors("cuda") as meter, block_settings(BlockSettings(kernels=name)):
            layer = QuantizedLinear(128, 64, kind, bias=True)
            layer.in_8_bits = True
            x = torch.empty(32, 128, dtype=torch.bfloat16, requires_grad=True)
            meter.kernels.clear()
            out = layer(x)
            out.backward(torch.empty_like(out))
            found.append(meter.kernels.total())
            assert (
                sum(
                    count
                    for kernel, count in meter.kernels.items()
                    if kernel.kind.startswith(f"matmul_{kind}")
                )
                == 2
            )
    assert found[1] == 7 + 2 * (kind == "fp8")
    assert found[0] > 3 * found[1] - 6


def test_a_cpu_runs_torch_whatever_the_setting():
    with block_settings(BlockSettings(kernels="triton")):
        y = gated_unit(torch.ones(2, 4, requires_grad=True))
    assert torch.equal(y, torch.nn.functional.silu(torch.ones(2, 2)))


def test_triton_is_refused_where_no_gpu_trains_or_it_is_missing(monkeypatch):
    launch.check_kernels("torch", ["cpu"])
    launch.check_kernels("triton", [])
    with pytest.raises(
        UserError, match=r"train\.kernels = triton runs on GPUs only, and this run uses cpu"
    ):
        launch.check_kernels("triton", ["cuda", "cpu"])
    monkeypatch.setattr(launch, "HAS_TRITON", False)
    with pytest.raises(UserError, match="needs the package triton"):
        launch.check_kernels("triton", ["cuda"])
    launch.check_kernels("torch", ["cuda"])
