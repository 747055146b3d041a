"""Products of 8-bit codes, forward and for the gradient of the input, against fp64 by their
definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ditkit_core.nn import eight_bit_products
from ditkit_core.nn.context import BlockSettings, as_on, block_settings
from ditkit_core.nn.eight_bit_products import is_exact_on_cpu
from ditkit_core.nn.quantized_linear import QuantizedLinear, products_in_dtype
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.testing.conformance_levers import LEVERS, add_random_assistant
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.pretend_devices import PretendDevices, move_to, on_host
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import ADAPTERS, differing

KINDS = ("int8", "fp8")
LARGEST = {"int8": 127, "fp8": 448}
DTYPES = (torch.float32, torch.bfloat16)


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(
    kind: str, num_in: int = 64, num_out: int = 48, *, bias: bool = True
) -> QuantizedLinear:
    """A layer whose rows differ in size by up to 100 times, as output channels of real models
    do."""
    layer = QuantizedLinear(num_in, num_out, kind, bias=bias)
    layer.set_weight(sample(num_out, num_in, seed=1) * torch.logspace(-2, 0, num_out)[:, None])
    if bias:
        layer.bias = nn.Parameter(sample(num_out, seed=2), requires_grad=False)
    layer.in_8_bits = layer.computes_in_8_bits
    return layer


def run(
    layer: QuantizedLinear, x: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and the gradient of its input."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(gradient)
    return out.detach(), x.grad


def rounding(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """By how much rounding to codes may move each number: half a step of int8; of fp8 1/16 of the
    number (three bits of fraction), or half of the smallest step, 2**-9."""
    scale = rows.abs().amax(1, keepdim=True) / LARGEST[kind]
    return (
        (scale / 2).expand_as(rows)
        if kind == "int8"
        else torch.maximum(rows.abs() / 16, scale * 2**-10)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_rounding_rows_of_inputs_and_of_gradients(kind, dtype):
    """Number by number, against fp64 with the dequantized weight: rounded numbers times weights,
    and one rounding of the result."""
    layer = layer_of(kind)
    x, gradient = sample(40, 64, seed=3).to(dtype), sample(40, 48, seed=4).to(dtype)
    out, d_x = run(layer, x, gradient)
    assert out.dtype == d_x.dtype == dtype
    weight, scale = layer.dequantize(torch.float64), layer.weight_scale.double()
    expected = x.double() @ weight.T + layer.bias.double()
    # sums and scales are in fp32, the result in `dtype`
    slack = 1e-5 + torch.finfo(dtype).eps * expected.abs()
    assert (
        (out - expected).abs() <= rounding(kind, x.double()) @ weight.abs().T * 1.001 + slack
    ).all()
    scaled = gradient.double() * scale.T
    expected = gradient.double() @ weight
    bound = rounding(kind, scaled) @ (weight / scale).abs()
    slack = 1e-5 + torch.finfo(dtype).eps * expected.abs()
    assert ((d_x - expected).abs() <= bound * 1.001 + slack).all()
    # and as small as such errors are in the mean: 1/127/sqrt(12) of 2.5 to 3 deviations; of fp8
    # 2**-4/sqrt(12) or a little more
    relative = float((d_x - expected).norm() / expected.norm())
    low, high = {"int8": (0.004, 0.015), "fp8": (0.015, 0.04)}[kind]
    assert low < relative < high


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_exactly_that_of_the_codes(kind):
    """Recomputed in fp64 from the codes: no second rounding of the weight, both scales applied to
    the sum."""
    layer, x, gradient = layer_of(kind), sample(20, 64, seed=3), sample(20, 48, seed=4)
    out, d_x = run(layer, x, gradient)
    codes, scale = layer.weight.double(), layer.weight_scale.double()

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        of_row = (rows.abs().amax(1, keepdim=True) / LARGEST[kind]).float()
        codes = rows.float() / of_row
        codes = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn)
        return codes.double() * of_row.double()

    torch.testing.assert_close(
        out.double(), rounded(x) @ codes.T * scale.T + layer.bias.double(), rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(
        d_x.double(), rounded(gradient * layer.weight_scale.T) @ codes, rtol=1e-6, atol=1e-5
    )


def test_large_output_channels_do_not_drown_the_gradient_of_small_ones():
    """Scales of the weight's rows are in the gradient before it is rounded: what counts is what a
    column adds to the result."""
    layer = layer_of("int8", bias=False)
    # A gradient that makes up for the sizes of rows: each then adds as much to the result as any
    # other.
    gradient = sample(40, 48, seed=4) / layer.weight_scale.T
    _, d_x = run(layer, sample(40, 64), gradient)
    expected = gradient.double() @ layer.dequantize(torch.float64)
    assert (d_x - expected).norm() < 0.015 * expected.norm()


@pytest.mark.parametrize("shape", [(5, 7, 64), (1, 64), (64,), (0, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_as_many_and_keep_their_shape(kind, shape):
    """torch's int8 product on a GPU takes 17 rows or more: fewer are filled up."""
    layer, x = layer_of(kind), sample(*shape)
    gradient = sample(*shape[:-1], 48, seed=4)
    out, d_x = run(layer, x, gradient)
    assert out.shape == gradient.shape and d_x.shape == x.shape
    many = (
        torch.cat([x.reshape(-1, 64), sample(30, 64)]),
        torch.cat([gradient.reshape(-1, 48), sample(30, 48)]),
    )
    for found, expected in zip((out, d_x), run(layer, *many), strict=True):
        expected = expected[: x.numel() // 64].view(found.shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if kind == "int8" else 1e-5)
    with torch.no_grad():
        assert torch.equal(layer(x), out)


def test_the_int8_product_of_a_gpu_is_given_as_many_rows_as_it_takes(monkeypatch):
    given, product = [], torch._int_mm
    monkeypatch.setattr(
        torch, "_int_mm", lambda left, right: given.append(len(left)) or product(left, right)
    )
    with as_on("cuda"):
        for rows in (5, 17, 20):
            run(layer_of("int8"), sample(rows, 64), sample(rows, 48, seed=4))
    assert given == [17, 17, 17, 17, 20, 20]


def test_parts_of_rows_and_strides_change_no_bit(monkeypatch):
    layer, x, gradient = layer_of("int8"), sample(64, 90).T, sample(90, 48, seed=4)
    whole = run(layer, x, gradient)
    monkeypatch.setattr(eight_bit_products, "AT_ONCE", {"cpu": 64 * 20})
    for found, expected in zip(
        run(layer, x.contiguous(), gradient.T.contiguous().T), whole, strict=True
    ):
        assert torch.equal(found, expected)


def test_only_a_part_of_the_rows_exists_in_32_bits(monkeypatch):
    monkeypatch.setattr(eight_bit_products, "AT_ONCE", {"cpu": 2**16})
    layer, x = layer_of("int8", 256, 256), sample(4096, 256).bfloat16()
    with MemoryTracker() as tracker, torch.no_grad():
        layer(x)
    parts = 4 if is_exact_on_cpu() else 7  # codes in fp32, and their sums once more
    assert tracker.peak[torch.device("cpu")] < 2 * x.nbytes + parts * 4 * 2**16, (
        "input, result, and a few parts"
    )


class KernelsInTorch:
    """What the kernels of products compute, and which of them ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def round_rows(
        self, x: Tensor, columns: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return eight_bit_products.rounded(x if columns is None else x * columns, dtype)

    def transpose_codes(self, codes: Tensor) -> Tensor:
        return codes.T.contiguous()

    def apply_scales(
        self, sums: Tensor, scale: Tensor, columns: Any, bias: Any, *, out: Tensor
    ) -> None:
        self.ran.append("apply_scales")
        out.copy_(
            sums * scale * (1 if columns is None else columns) + (0 if bias is None else bias)
        )

    def multiply_codes(
        self, left: Tensor, right: Tensor, scale: Tensor, columns: Any, bias: Any, *, out: Tensor
    ) -> None:
        assert left.is_contiguous() and right.is_contiguous() and out.is_contiguous()
        self.apply_scales(eight_bit_products._sums(left, right.T), scale, columns, bias, out=out)
        self.ran[-1] = "multiply_codes"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> KernelsInTorch:
    """Pretends that tensors are on a Hopper GPU, whose kernels are fused."""
    kernels = KernelsInTorch()
    monkeypatch.setattr(eight_bit_products, "kernels", kernels)
    monkeypatch.setattr(eight_bit_products.hopper, "is_hopper", lambda x: True)
    monkeypatch.setattr("ditkit_core.nn.quantized_linear.kernels_in_force", lambda x: True)
    return kernels


@pytest.mark.parametrize(
    ("kind", "bias", "dtype", "ran"),
    [
        ("int8", True, torch.bfloat16, ["multiply_codes"] * 4),
        ("int8", True, torch.float32, ["multiply_codes"] * 4),
        ("fp8", False, torch.bfloat16, []),  # torch's own product takes scales of rows and columns
        ("fp8", True, torch.bfloat16, ["apply_scales"]),  # and in the backward there is no bias
        ("fp8", False, torch.float32, ["apply_scales"] * 2),
    ],
)
def test_products_of_hopper_apply_scales_and_change_no_result(
    kind, bias, dtype, ran, hopper, monkeypatch
):
    # two parts of the rows in the forward, and in the backward
    monkeypatch.setattr(eight_bit_products, "CODES_AT_ONCE", 64 * 25)
    layer = layer_of(kind, bias=bias)
    x, gradient = sample(40, 64, seed=3).to(dtype), sample(40, 48, seed=4).to(dtype)
    found = run(layer, x, gradient)
    assert hopper.ran == ran
    monkeypatch.undo()
    for ours, expected in zip(found, run(layer, x, gradient), strict=True):
        assert ours.dtype == dtype
        if kind == "int8" and dtype == torch.bfloat16:
            assert torch.equal(ours, expected)
        # Sums of fp8 are in another order, so a result may round the other way.
        assert ((ours - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("largest", [False, True])
def test_sums_of_int8_are_exact_without_instructions_for_them(monkeypatch, largest):
    """The CPU's other way, over more than one span of fp32; and a layer has the same bits with
    both."""
    codes = (
        torch.full((20, 2500), -128, dtype=torch.int8)
        if largest
        else torch.randint(-127, 128, (20, 2500)).to(torch.int8)
    )
    monkeypatch.setattr(eight_bit_products, "is_exact_on_cpu", lambda: False)
    assert torch.equal(
        eight_bit_products._sums(codes, codes.T).long(), codes.long() @ codes.T.long()
    )
    found = run(layer_of("int8"), sample(20, 64), sample(20, 48, seed=4))
    monkeypatch.undo()
    assert all(
        map(torch.equal, found, run(layer_of("int8"), sample(20, 64), sample(20, 48, seed=4)))
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_stays_so_and_others_are_untouched(kind, wrong):
    """The check of a step's loss and gradients sees it."""
    layer, x, gradient = layer_of(kind), sample(20, 64), sample(20, 48, seed=4)
    x[3, 5], gradient[4, 7] = wrong, wrong
    out, d_x = run(layer, x, gradient)
    for found, row in ((out, 3), (d_x, 4)):
        others = [i for i in range(20) if i != row]
        assert not found[row].isfinite().any() and found[others].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_give_zeros(kind):
    layer, x = layer_of(kind, bias=False), sample(20, 64)
    x[2], x[3] = 0, 1e-44
    out, _ = run(layer, x, torch.zeros(20, 48))
    assert not out[2].any() and out.isfinite().all() and out[3].abs().max() < 1e-40


@pytest.mark.parametrize(
    ("kind", "size"),
    [("nf4", (64, 64)), ("int8", (64, 40)), ("fp8", (24, 64)), ("int8", (2**17 + 16, 16))],
)
def test_formats_and_sizes_that_tensor_cores_do_not_multiply_are_known(kind, size):
    with torch.device("meta"):
        assert not QuantizedLinear(size[1], size[0], kind, bias=False).computes_in_8_bits
        assert QuantizedLinear(64, 16, "fp8", bias=False).computes_in_8_bits


def test_products_in_dtype_are_those_without_it():
    layer, x, gradient = layer_of("int8"), sample(20, 64), sample(20, 48, seed=4)
    in_8_bits = run(layer, x, gradient)
    model = nn.ModuleDict({"a": layer, "b": layer_of("nf4")})
    with products_in_dtype(model):
        exact = run(layer, x, gradient)
    layer.in_8_bits = False
    plain = run(layer, x, gradient)
    layer.in_8_bits = True
    assert all(map(torch.equal, exact, plain)) and all(
        map(torch.equal, in_8_bits, run(layer, x, gradient))
    )
    assert not torch.equal(exact[0], in_8_bits[0]) and not model["b"].in_8_bits


def has_fp8_product() -> bool:
    one, codes = torch.ones(()), torch.ones(32, 32).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(codes, codes.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_of_a_gpu_give_what_the_cpu_gives(kind):
    """torch's fp8 product runs on a CPU too, a thousand times slower: its sums are in another
    order."""
    if kind == "int8" and not is_exact_on_cpu():
        pytest.skip("torch's int8 product is wrong on this CPU, so a CPU takes another")
    if kind == "fp8" and not has_fp8_product():
        pytest.skip("torch has no fp8 product for this CPU")
    layer, x, gradient = (
        layer_of(kind),
        sample(20, 64).bfloat16(),
        sample(20, 48, seed=4).bfloat16(),
    )
    here = run(layer, x, gradient)
    with as_on("cuda"):
        there = run(layer, x, gradient)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0 if kind == "int8" else 2**-7, atol=0 if kind == "int8" else 1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gets_matrices_contiguous_along_the_sum_and_adds_up_in_fp32(kind, monkeypatch):
    """Its tensor cores take fp8 in no other layout, where a CPU takes any; fast sums of fp8 have
    fewer bits than fp32."""
    seen = []

    def product(left, right, *, use_fast_accum=False, **scales):
        seen.append((left.is_contiguous(), right.T.is_contiguous(), use_fast_accum))
        return (left.float() @ right.float()).to(torch.int32 if kind == "int8" else torch.float32)

    for name in ("_int_mm", "_scaled_mm"):
        monkeypatch.setattr(torch, name, product)
    with as_on("cuda"):
        run(layer_of(kind), sample(64, 20).T, sample(48, 20, seed=4).T)
    assert seen == [(True, True, False)] * 2


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_fp64_is_computed_without_kernels(in_8_bits):
    """As an audit's reference is; kernels compute in fp32."""
    if in_8_bits and not is_exact_on_cpu():
        pytest.skip("torch's int8 product is wrong on this CPU, so a CPU takes another")
    layer, x, gradient = layer_of("int8"), sample(20, 64).double(), sample(20, 48, seed=4).double()
    layer.in_8_bits, layer.bias.data = in_8_bits, layer.bias.double()
    expected = run(layer, x, gradient)
    with as_on("cuda"), block_settings(BlockSettings(kernels="triton")):
        found = run(layer, x, gradient)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_stand_for_a_gpu(kind):
    layer = layer_of(kind)
    values = {name: parameter.detach() for name, parameter in layer._parameters.items()}
    with as_on("cuda"), FakeTensorMode() as mode:
        for name, value in values.items():
            layer._parameters[name] = nn.Parameter(mode.from_tensor(value), requires_grad=False)
        out, d_x = run(
            layer,
            torch.empty(20, 64, dtype=torch.bfloat16),
            torch.empty(20, 48, dtype=torch.bfloat16),
        )
    assert (
        out.shape == (20, 48) and d_x.shape == (20, 64) and out.dtype == d_x.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_is_given_nothing_to_keep(kind):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        assert layer_of(kind)(sample(20, 64).requires_grad_()).requires_grad
    assert saved == []


@pytest.mark.parametrize("adapter", LEVERS["adapter"])
@pytest.mark.parametrize("kind", LEVERS["quantize"])
def test_an_adapted_layer_is_alike_on_every_device(kind, adapter):
    """Each adapter over each quantized base, bit by bit: nothing of the two is made on the host,
    forward or backward. Levers around them: `LeverChecks`."""
    name, _, assistant = adapter.partition(" next to ")
    config = replace(ADAPTERS[name], targets=("mlp.2",))
    model = make_quantized(TOY, ToyArch(depth=1), kind, dtype=torch.bfloat16, adapter=config)
    if assistant:
        add_random_assistant(model)
    layer = model.layers[0].mlp[2]

    def run(device: torch.device) -> dict[str, Tensor]:
        """The layer's result, and every gradient, on a device."""
        move_to(layer, device)
        torch.manual_seed(5)
        x = sample(6, 64, seed=3).bfloat16().to(device).requires_grad_()
        out = layer(x)
        out.backward(sample(6, 32, seed=4).to(device, out.dtype))
        gradients = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
        assert gradients and all(gradient is not None for gradient in gradients.values())
        found = {"out": out, "input": x.grad, **gradients}
        return {name: on_host(tensor) for name, tensor in found.items()}

    here = run(torch.device("cpu"))
    with PretendDevices():
        assert differing(run(torch.device("cpu:1")), here) == []
