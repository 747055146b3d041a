"""Our product of a plain LoRA against peft's own forward, and the cases that stay peft's."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.nn import bf16_parts
from ditkit_core.nn import lora as lora_linear
from ditkit_core.nn.bf16_parts import bf16_parts_of, split_factors, split_products
from ditkit_core.nn.context import BlockSettings, as_on, block_settings, settings_in_force
from ditkit_core.nn.lora import _split_for, low_rank_sum
from ditkit_core.planner.memory_tracker import fake_tensors
from ditkit_core.testing.tensor_cores import TensorCores
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model, outcome


def layer_of(dtype: torch.dtype, **config: object) -> nn.Module:
    model = make_model(
        TOY,
        TOY.architecture.presets["tiny"],
        dtype=dtype,
        adapter=AdapterConfig(rank=4, alpha=6.0, **config),
    )
    return adapter_layers(model)["layers.0.out"]


def gradients(layer: nn.Module, x: Tensor, *, peft: bool) -> list[Tensor]:
    from peft.tuners.lora import Linear

    x = x.clone().requires_grad_()
    out = Linear.forward(layer, x) if peft else layer(x)
    layer.zero_grad()
    out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype))
    return [
        out.detach(),
        x.grad,
        layer.lora_A["default"].weight.grad.clone(),
        layer.lora_B["default"].weight.grad.clone(),
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_it_equals_peft(dtype, tolerance):
    """fp32: order of summation. bf16: peft scales after the product and we before, which can round
    to the neighbour."""
    layer = layer_of(dtype)
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for ours, theirs in zip(
        gradients(layer, x, peft=False), gradients(layer, x, peft=True), strict=True
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradcheck():
    torch.manual_seed(0)
    sizes = ((2, 3, 5), (2, 5), (4, 2), (4, 5))
    x, down, up, weight = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes
    )
    assert torch.autograd.gradcheck(
        lambda *t: low_rank_sum(*t[:3], 1.5, lambda x: x @ t[3].T), (x, down, up, weight)
    )


def test_a_sum_over_a_half_base_rounds_once():
    torch.manual_seed(0)
    result, x, down, up = (
        torch.randn(2, 3, 4).bfloat16(),
        torch.randn(2, 3, 5).bfloat16(),
        torch.randn(2, 5),
        torch.randn(4, 2),
    )
    delta = (x.float() @ down.T * 1.5) @ up.T
    assert torch.equal(
        low_rank_sum(x, down, up, 1.5, lambda _: result), (result.float() + delta).bfloat16()
    )


def rows_are_apart() -> bool:
    """Whether this CPU gives a row the same bits among fewer rows, in the three products that are
    made in parts below."""
    torch.manual_seed(0)
    low, up, gradient = torch.randn(23, 4), torch.randn(13, 4), torch.randn(23, 13)
    products = ((low, up.T), (gradient, up), (gradient.T, low))
    return all(
        torch.equal(torch.cat([part @ b for part in a.split(5)]), a @ b) for a, b in products
    )


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_change_no_bit(dtype, exact, monkeypatch):
    """Of outputs and gradients; 23 rows and 13 columns end with a part that is shorter. Sums of
    small integers are exact in any order."""
    if not (exact or rows_are_apart()):
        pytest.skip("this CPU adds up fewer rows in another order")

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        found = torch.randint(-4, 5, shape) if exact else torch.randn(shape)
        return found.to(dtype).requires_grad_()

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        x, base = (values(23, size, dtype=dtype) for size in (8, 13))
        down, up = values(4, 8), values(13, 4)
        out = low_rank_sum(x, down, up, 0.5, lambda _: base * 1)
        return [out, *torch.autograd.grad(out, (x, base, down, up), values(23, 13, dtype=dtype))]

    whole = run()
    monkeypatch.setattr(lora_linear, "_at_once", lambda x, axis: 5)
    assert all(map(torch.equal, run(), whole))


def test_parts_are_copied_along_their_rows(monkeypatch):
    """A copy that transposes takes a CPU several times as long as one along memory."""
    monkeypatch.setattr(lora_linear, "_at_once", lambda x, axis: 5)
    x, base = (torch.randn(23, size).bfloat16().requires_grad_() for size in (8, 13))
    down, up = (torch.randn(*size).requires_grad_() for size in ((4, 8), (13, 4)))
    with Copies() as seen:
        out = low_rank_sum(x, down, up, 0.5, lambda _: base * 1)
        torch.autograd.grad(out, (x, down, up), torch.randn(23, 13).bfloat16())
    assert len(seen.strides) > 3
    assert {stride[-1] for stride in seen.strides} == {1}


class Copies(TorchDispatchMode):
    """Strides of both matrices of every copy from one into another."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.strides += [x.stride() for x in args[:2]]
        return func(*args, **(kwargs or {}))


def test_a_fused_projection_is_never_held_wide():
    """fp32 next to bf16: no tensor of the size of the output in a wider dtype, forward or
    backward."""
    x, down, up = torch.randn(1024, 8).bfloat16(), torch.randn(4, 8), torch.randn(8192, 4)
    x, down, up = (tensor.requires_grad_() for tensor in (x, down, up))
    weight = torch.randn(8192, 8).bfloat16()
    with WidestTensor() as seen:
        low_rank_sum(x, down, up, 1.0, lambda x: F.linear(x, weight)).sum().backward()
    assert seen.bytes == 2 * 1024 * 8192


class WidestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.bytes = max(
            self.bytes,
            *(x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor)),
            0,
        )
        return out


def products(
    result: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    scaling: float,
    weight: Tensor | None = None,
) -> list[Tensor]:
    """The sum, and the gradients of x, down and up; with a weight, x goes through a frozen layer
    too."""
    x, down, up = (tensor.clone().requires_grad_() for tensor in (x, down, up))
    out = low_rank_sum(
        x, down, up, scaling, lambda x: result.clone() if weight is None else F.linear(x, weight)
    )
    weights = (
        torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    )
    return [out.detach(), *torch.autograd.grad(out, (x, down, up), weights)]


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> ExitStack:
    patch.setattr(lora_linear, "TENSOR_CORES_FROM", 0)
    stack = ExitStack()
    stack.enter_context(as_on("cuda"))
    stack.enter_context(TensorCores())
    return stack


def test_an_fp32_number_is_three_of_bf16():
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(
        -25, 25, 1000
    )
    parts = bf16_parts_of(wide)
    assert {part.dtype for part in parts} == {torch.bfloat16}
    assert torch.equal(sum(part.double() for part in parts), wide.double())


def test_what_the_cross_terms_leave_out_is_below_a_rounding():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 32, generator=generator), torch.randn(32, 50, generator=generator)
    left = split_products(a, None, 32, 1.0)[0].double()
    for right in split_factors(b, b)[0].double(), split_factors(b.T, b.T)[1].double().T:
        a, b = a.double(), b.double()
        assert ((left @ right - a @ b).abs() <= 2**-23 * (a.abs() @ b.abs())).all()
        assert torch.equal(left[:, :96].unflatten(1, (3, 32)).sum(1), a)
        assert torch.equal(right[:96].unflatten(0, (3, 32)).sum(0), b)


@pytest.mark.parametrize("scaling", [1.0, 0.75])
def test_tensor_cores_are_as_exact_as_fp32_products(scaling, monkeypatch):
    """Distances to fp64 of everything that is fp32, and of what is rounded to bf16 once."""
    generator = torch.Generator().manual_seed(0)
    rows, width, rank = 96, 3072, 16
    x, result = (
        torch.randn(2, rows, width, generator=generator).bfloat16(),
        torch.randn(2, rows, 80, generator=generator),
    )
    down, up = (
        torch.randn(rank, width, generator=generator),
        torch.randn(80, rank, generator=generator),
    )
    given = x, down, up, scaling
    today = products(result.bfloat16(), *given)
    with as_on_a_gpu(monkeypatch):
        split = products(result.bfloat16(), *given)
    exact = products(result.bfloat16().double(), *(each.double() for each in given[:3]), scaling)
    for name, ours, before, wanted in zip(
        ("out", "x", "down", "up"), split, today, exact, strict=True
    ):
        assert (ours.dtype, ours.shape) == (before.dtype, before.shape), name
        near, far = (
            ((each.double() - wanted).norm() / wanted.norm()).item() for each in (ours, before)
        )
        if ours.dtype == torch.float32:
            assert near <= min(far, 2**-22), name
        else:  # one rounding to bf16 hides the rest: few values fall to the other side
            assert near <= 1.001 * far, name
            assert (ours != before).float().mean() < 1e-3, name


def test_on_a_gpu_no_input_output_or_gradient_is_ever_wide(monkeypatch):
    monkeypatch.setattr(lora_linear, "TENSOR_CORES_FROM", 0)
    tokens, inside, outside, rank = 1024, 2048, 4096, 4
    with FakeTensorMode(), as_on("cuda"), DtypesOfLarge(tokens * inside) as seen:
        x = torch.empty(tokens, inside, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(outside, inside, dtype=torch.bfloat16)
        down, up = (
            torch.empty(rank, inside, requires_grad=True),
            torch.empty(outside, rank, requires_grad=True),
        )
        low_rank_sum(x, down, up, 1.0, lambda x: F.linear(x, weight)).sum().backward()
    assert seen.dtypes == {torch.bfloat16}


class DtypesOfLarge(TorchDispatchMode):
    """Dtypes of the results with at least so many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.dtypes = size, set[torch.dtype]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.dtypes |= {
            x.dtype for x in tree_leaves(out) if isinstance(x, Tensor) and x.numel() >= self.size
        }
        return out


def test_the_gradient_of_the_input_is_rounded_once_with_that_of_the_frozen_layer(monkeypatch):
    """As the output is: its distance to fp64 is that of one rounding, where fp32 products round
    either gradient and their sum."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*size, generator=generator).bfloat16() for size in ((96, 64), (80, 64))
    )
    given = (
        x,
        torch.randn(4, 64, generator=generator),
        torch.randn(80, 4, generator=generator),
        0.75,
    )
    today = products(x, *given, weight)
    with as_on_a_gpu(monkeypatch):
        split = products(x, *given, weight)
    exact = products(x.double(), *(each.double() for each in given[:3]), 0.75, weight.double())
    near, far = (
        ((each[1].double() - exact[1]).norm() / exact[1].norm()).item() for each in (split, today)
    )
    assert near < far


def test_an_input_without_a_gradient_costs_the_frozen_layer_no_backward(monkeypatch):
    weight, factor = torch.randn(8, 4).bfloat16(), torch.randn(2, 4, requires_grad=True)
    seen = []
    with as_on_a_gpu(monkeypatch):
        low_rank_sum(
            torch.randn(6, 4).bfloat16(),
            factor,
            torch.randn(8, 2),
            1.0,
            lambda x: seen.append(x) or F.linear(x, weight),
        ).sum().backward()
    assert not seen[0].requires_grad and factor.grad is not None


def frozen_linear(num_in: int, num_out: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(num_in, num_out, bias=bias).bfloat16().requires_grad_(False)


def through(base: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The sum over a layer, and all gradients."""
    torch.manual_seed(0)
    down, up = torch.randn(4, 16).requires_grad_(), torch.randn(24, 4).requires_grad_()
    out = low_rank_sum(x, down, up, 0.75, base)
    trained = [tensor for tensor in (x, down, up) if tensor.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, trained, torch.randn(out.shape).bfloat16())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16), (2, 3, 5, 16)], ids=str)
def test_one_function_for_a_frozen_layer_has_the_bits_of_three(shape, bias, monkeypatch):
    """Of the result and of all gradients, in one node; also where the input has none."""
    layer, factors = (
        frozen_linear(16, 24, bias=bias),
        (torch.ones(4, 16).requires_grad_(), torch.ones(24, 4)),
    )
    with as_on_a_gpu(monkeypatch):
        for trained in (True, False):
            x = (
                torch.randn(shape, generator=torch.Generator().manual_seed(2))
                .bfloat16()
                .requires_grad_(trained)
            )
            assert low_rank_sum(x, *factors, 1.0, layer).grad_fn.name() == "_SplitLinearBackward"
            assert all(map(torch.equal, through(layer, x), through(lambda x: layer(x), x)))


def test_a_kernel_that_adds_products_adds_those_of_one_function_too(monkeypatch):
    """Forward and backward."""
    added = []

    def add(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        added.append(total.shape)
        return total.addmm_(left, right)

    layer, x = frozen_linear(16, 24, bias=False), torch.randn(6, 16).bfloat16().requires_grad_()
    with as_on_a_gpu(monkeypatch):
        monkeypatch.setattr(lora_linear, "IN_TORCH", bf16_parts.IN_TORCH._replace(add=add))
        through(layer, x)
    assert added == [(6, 24), (6, 16)]


def test_a_layer_with_something_attached_or_a_scattered_input_keeps_three_functions(monkeypatch):
    """A hook is called, a weight that is trained gets its gradient, and torch multiplies each
    sample by itself where they have memory between them."""
    x = torch.randn(2, 3, 16).bfloat16()
    apart = torch.randn(2, 4, 16).bfloat16()[:, :3]
    with as_on_a_gpu(monkeypatch):
        for hook in (
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_full_backward_hook",
        ):
            layer, calls = frozen_linear(16, 24, bias=False), []
            getattr(layer, hook)(lambda *arguments, calls=calls: calls.append(arguments))
            through(layer, x.requires_grad_())
            assert calls, hook
        for name in ("weight", "bias"):
            layer = frozen_linear(16, 24, bias=True)
            getattr(layer, name).requires_grad_()
            low_rank_sum(x, torch.randn(4, 16), torch.randn(24, 4), 1.0, layer).sum().backward()
            assert getattr(layer, name).grad is not None
        layer = frozen_linear(16, 24, bias=True)
        assert all(map(torch.equal, through(layer, apart), through(lambda x: layer(x), apart)))


@pytest.mark.parametrize("adapter", ["lora", "lora with dropout"])
def test_a_model_whose_layers_are_one_function_trains_bitwise_the_same(adapter, monkeypatch):
    model = make_model(
        TOY, TOY.architecture.presets["tiny"], dtype=torch.bfloat16, adapter=ADAPTERS[adapter]
    )
    policies = ("none", "full", "attn_only", "attn_only(self)")
    with as_on_a_gpu(monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(lora_linear, "_is_frozen_linear", lambda base: False)
            expected = outcome(TOY, model, toy_items(2), BlockEngine())
        for policy in policies:
            found = outcome(TOY, model, toy_items(2), BlockEngine(policy=policy))
            assert found.differences(expected) == [], policy


def test_a_recompute_of_such_a_model_leaves_out_the_last_frozen_product(monkeypatch):
    """Under `full`: every other frozen product of its blocks is computed again, once."""
    model = make_model(
        TOY, TOY.architecture.presets["tiny"], dtype=torch.bfloat16, adapter=ADAPTERS["lora"]
    )
    counts = []
    with as_on_a_gpu(monkeypatch):
        for policy in ("none", "full"):
            calls = list[int]()
            with monkeypatch.context() as patch:
                patch.setattr(lora_linear.F, "linear", partial(noted_linear, F.linear, calls))
                outcome(TOY, model, toy_items(2), BlockEngine(policy=policy))
            counts.append(Counter(calls))
    for block in model.blocks():
        frozen = {
            name: module.base_layer.weight
            for name, module in block.named_modules()
            if hasattr(module, "lora_A")
        }
        again = {
            name
            for name, weight in frozen.items()
            if counts[1][weight.data_ptr()] > counts[0][weight.data_ptr()]
        }
        assert frozen.keys() - again == {"mlp.2"}
        assert all(
            counts[1][weight.data_ptr()] <= 2 * counts[0][weight.data_ptr()]
            for weight in frozen.values()
        )


def noted_linear(
    linear: Callable[..., Tensor], calls: list[int], x: Tensor, weight: Tensor, *bias: Tensor
) -> Tensor:
    calls.append(weight.data_ptr())
    return linear(x, weight, *bias)


def test_small_products_and_other_dtypes_stay_fp32(monkeypatch):
    monkeypatch.setattr(lora_linear, "TENSOR_CORES_FROM", 40)
    down, up = torch.zeros(2, 8), torch.zeros(4, 2)

    def is_split(x: Tensor, down: Tensor = down) -> bool:
        return _split_for(settings_in_force().kernels, x, down, up) is not None

    with as_on("cuda"):
        assert is_split(torch.zeros(5, 8).bfloat16())
        assert not is_split(torch.zeros(4, 8).bfloat16())
        assert not is_split(torch.zeros(5, 8).half())
        assert not is_split(torch.zeros(5, 8).bfloat16(), down.bfloat16())
        with block_settings(BlockSettings(kernels="triton")):
            assert is_split(torch.zeros(1, 8).bfloat16())
            assert not is_split(torch.zeros(1, 8).half())
    assert not is_split(torch.zeros(5, 8).bfloat16())


@pytest.mark.parametrize(
    ("kernels", "dtype", "tokens", "launches", "outputs"),
    [
        ("torch", torch.bfloat16, 20_480, 49, 1),
        ("torch", torch.bfloat16, 1_024, 17, 4),
        ("torch", torch.float16, 20_480, 17, 4),
        ("torch", torch.float32, 20_480, 12, 2),
        ("triton", torch.bfloat16, 20_480, 13, 1),
        ("triton", torch.bfloat16, 1_024, 13, 1),
    ],
)
def test_a_layer_is_as_few_launches_and_bytes_on_a_gpu_as_counted(
    kernels, dtype, tokens, launches, outputs
):
    """All operations of a forward and a backward but views, the frozen layer's two included; the
    forward's peak, by the output's size.

    Parts take none of it, and torch makes them of large products alone; an fp32 product is in one
    part, converted once for two products.
    """
    with fake_tensors("cuda") as meter, block_settings(BlockSettings(kernels=kernels)):
        x = torch.empty(tokens, 512, dtype=dtype, requires_grad=True)
        down, up = torch.empty(4, 512, requires_grad=True), torch.empty(512, 4, requires_grad=True)
        weight = torch.empty(512, 512, dtype=dtype)
        meter.kernels.clear()
        meter.restart_peak()
        before = meter.total(x.device)
        out = low_rank_sum(x, down, up, 1.0, partial(F.linear, weight=weight))
        assert (meter.peak[x.device] - before) / out.nbytes == pytest.approx(outputs, rel=0.1)
        out.backward(x.detach())
    assert meter.kernels.total() == launches


def test_what_is_kept_for_backward_is_the_input_as_it_came():
    """peft keeps an fp32 copy of a bf16 input per target."""
    layer, saved = layer_of(torch.bfloat16), []
    x = torch.randn(1, 50, 32).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    large = [
        t
        for t in saved
        if t.numel() >= x.numel() and not isinstance(t, nn.Parameter) and not t._is_view()
    ]
    assert {t.dtype for t in large} == {torch.bfloat16}


def test_dora_and_disabled_adapters_stay_with_peft():
    dora = layer_of(torch.float32, use_dora=True)
    x = torch.randn(2, 3, 32)
    assert not torch.equal(dora(x), dora.base_layer(x))
    plain = layer_of(torch.float32)
    plain.enable_adapters(False)
    assert torch.equal(plain(x), plain.base_layer(x))


@pytest.mark.parametrize(
    ("rows", "length", "width", "is_hopper", "ours"),
    [
        (64, 192, 64, True, True),
        (64, 24, 64, True, True),
        (64, 192, 64, False, False),
        (63, 192, 64, True, False),  # few elements
        (64, 384, 64, True, False),  # a rank that was not measured
        (64, 42, 72, True, False),  # rows that begin between two multiples of 16 bytes
        (64, 48, 68, True, False),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_kernel_adds_products_only_on_hopper_and_of_sizes_that_were_measured(
    rows, length, width, is_hopper, ours, transposed, monkeypatch
):
    added = []

    def add(total, left, right):
        added.append(right.shape)
        total.addmm_(left, right)

    monkeypatch.setattr(bf16_parts.kernels, "add_product", add)
    monkeypatch.setattr(bf16_parts.hopper, "is_hopper", lambda x: is_hopper)
    monkeypatch.setattr(bf16_parts, "KERNEL_ADDS_FROM", 64 * 64)
    total, left, right = (
        torch.ones(shape).bfloat16() for shape in ((rows, width), (rows, length), (length, width))
    )
    right = right.T.contiguous().T if transposed else right
    assert bf16_parts.IN_KERNELS.add(total, left, right) is total
    assert bool((total == 1 + length).all()) and bool(added) is ours
    assert bf16_parts.IN_TORCH.add(total, left, right) is total and len(added) == ours
