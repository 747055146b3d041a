"""A frozen base in 8 or 4 bits: torchao's values, nothing kept, adapters as over any other base."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_world import World, equal

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter, export_merged
from ditkit_core.adapters.inject import adapter_layers, canonical_name
from ditkit_core.config.resolve import resolve
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.nn.quantized_layouts import LAYOUTS, quantized_layout
from ditkit_core.nn.quantized_linear import (
    QuantizedLinear,
    dense_weight,
    final_dtype,
    quantized_weights,
)
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.run.checks import check_run
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.combinations import daily, every_value
from ditkit_core.testing.conformance_quantized import KINDS
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form
from ditkit_core.weights import load
from ditkit_core.weights.quantize import check_compute_on, check_quantize

FP32 = Precision(matmul=torch.float32)
CPU = torch.device("cpu")


def quantized(weight: torch.Tensor, kind: str, bias: bool = False) -> QuantizedLinear:
    layer = QuantizedLinear(weight.shape[1], weight.shape[0], kind, bias=bias)
    layer.set_weight(weight.float().clone())
    if bias:
        nn.init.normal_(layer.bias.requires_grad_(False))
    return layer


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Values


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_torchaos(kind, source):
    """Codes, scales and the dequantized weight in every dtype, of the fp32 values of a weight as it
    is stored."""
    from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    weight = 0.03 * drawn(128, 640, dtype=source)
    theirs = nn.Linear(640, 128, bias=False)
    theirs.weight.data = weight.float()
    config = {
        "int8": Int8WeightOnlyConfig,
        "fp8": Float8WeightOnlyConfig,
        "nf4": NF4WeightOnlyConfig,
    }[kind]
    quantize_(theirs, config())
    ours, held = quantized(weight, kind), theirs.weight
    if kind == "nf4":
        assert torch.equal(ours.weight.flatten(), held.quantized_data)
        assert torch.equal(ours.weight_scale, held.quantized_scalers)
    else:
        assert torch.equal(ours.weight.view(torch.uint8), held.qdata.view(torch.uint8))
        assert torch.equal(ours.weight_scale, held.scale)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = held.get_original_weight().to(dtype) if kind == "nf4" else held.dequantize(dtype)
        assert torch.equal(ours.dequantize(dtype), expected), dtype


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_equal_weights_stay_numbers(kind):
    """torchao makes NaN of rows of zeros in fp8, and of equal scales in NF4."""
    zero, equal_ones = torch.zeros(4, 64), torch.full((4, 64), 0.5)
    assert torch.equal(quantized(zero, kind).dequantize(), zero)
    # 1/127.5 / 2
    torch.testing.assert_close(
        quantized(equal_ones, kind).dequantize(), equal_ones, rtol=0.004, atol=0
    )
    some = drawn(4, 64)
    some[1] = 0
    found = quantized(some, kind).dequantize()
    # NF4 has no zero scale next to others, but zero is a level of it
    assert torch.isfinite(found).all() and not found[1].any()


def test_nf4_holds_sizes_that_are_no_multiple_of_its_groups():
    """torchao takes multiples of 16384 weights alone; a group of scales may be shorter here."""
    weight = 0.1 * drawn(48, 68)  # 51 blocks
    layer = quantized(weight, "nf4")
    assert layer.weight.shape == (48, 34) and layer.weight_scale.shape == (51,)
    assert (layer.dequantize() - weight).norm() < 0.1 * weight.norm()


def test_bytes_per_weight():
    """8 bits and a scale to a row; 4 bits, an 8-bit scale to 64 weights and an fp32 one to 256 of
    those, and 2 KiB of table."""
    sizes = {}
    for kind in KINDS:
        sizes[kind] = sum(
            value.nbytes for value in quantized(drawn(512, 1024), kind).values().values()
        )
    num = 512 * 1024
    assert sizes == {
        "int8": num + 4 * 512,
        "fp8": num + 4 * 512,
        "nf4": num // 2 + num // 64 + num // 4096 + 4 + 2048,
    }


# Products


# Relative errors of a product with 1024 normally distributed weights to a row. int8: rounding to
# the 255 steps between the ends of a row, some 3.3 deviations each: 3.3 / 127.5 / sqrt(12) =
# 0.0075. fp8: rounding to 3 bits of fraction, at most 1/16 and 0.026 in the mean of squares. NF4:
# 16 levels; QLoRA's authors' own. The bf16 rounding of weight and result, 0.003, is below all.
BOUNDS = {"int8": (0.006, 0.009), "fp8": (0.02, 0.03), "nf4": (0.08, 0.1)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_against_bf16_is_that_of_the_rounding(kind):
    weight, x = (
        0.03 * drawn(512, 1024, dtype=torch.bfloat16),
        drawn(64, 1024, dtype=torch.bfloat16, seed=1),
    )
    layer, low, high = quantized(weight, kind), *BOUNDS[kind]
    results = []
    for product in (lambda x: x @ weight.T, layer):
        given = x.clone().requires_grad_()
        out = product(given)
        out.backward(drawn(64, 512, dtype=torch.bfloat16, seed=2))
        results.append((out.detach().float(), given.grad.float()))
    for dense, found in zip(*results, strict=True):
        assert low < float((found - dense).norm() / dense.norm()) < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_dequantized_weight(kind, dtype):
    layer, dense = (
        quantized(drawn(32, 64), kind, bias=True),
        nn.Linear(64, 32).requires_grad_(False),
    )
    dense.weight.data, layer.bias.data = layer.dequantize(dtype), layer.bias.to(dtype)
    dense.bias.data = layer.bias.data
    x = drawn(3, 5, 64, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = layer(ours), dense(theirs)
    assert out.dtype == dtype and torch.equal(out, expected) and torch.equal(layer(x), expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_is_given_nothing_to_keep(kind):
    """torchao's own forward has it keep the dequantized weight, a saved tensor per layer."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = quantized(drawn(32, 64), kind, bias=True)(drawn(8, 64).requires_grad_())
        assert saved == []
        dense = nn.Linear(64, 32).requires_grad_(False)(drawn(8, 64).requires_grad_())
        assert [tuple(tensor.shape) for tensor in saved] in ([(32, 64)], [(64, 32)])
    assert out.requires_grad and dense.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_run_it_with_the_final_dtypes(kind):
    """What the planner does: parameters on `meta` say their dtypes, and are replaced by fake ones
    of a device."""
    with torch.device("meta"):
        layer = QuantizedLinear(64, 32, kind, bias=True)
    dtypes = {name: final_dtype(layer, name, torch.bfloat16) for name in layer._parameters}
    about = LAYOUTS[kind].about(32, 64)
    assert dtypes == {name: dtype for name, (_, dtype) in about.items()} | {"bias": torch.bfloat16}
    assert final_dtype(nn.Linear(2, 2), "weight", torch.bfloat16) == torch.bfloat16
    with FakeTensorMode():
        for name, parameter in layer._parameters.items():
            fake = torch.empty(parameter.shape, dtype=dtypes[name], device="cpu:1")
            layer._parameters[name] = nn.Parameter(fake, requires_grad=False)
        x = torch.empty(8, 64, dtype=torch.bfloat16, device="cpu:1", requires_grad=True)
        out = layer(x)
        out.sum().backward()
        assert out.dtype == torch.bfloat16 and x.grad.device == torch.device("cpu:1")


# A whole model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base", torch.float32)


def write_base(folder: Path, dtype: torch.dtype, arch: ToyArch | None = None) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    state = in_form(ToyModel(arch or ToyArch(), FP32).state_dict(), "official")
    save_file(
        {name: (tensor / 4).to(dtype) for name, tensor in state.items()}, folder / "x.safetensors"
    )
    return folder


def prepared(
    base,
    kind,
    *,
    adapter=None,
    merge=(),
    arch=None,
    precision=FP32,
    compute="dtype",
    say=lambda line: None,
) -> Model:
    spec = altered(TOY, presets={"tiny": arch or ToyArch()})
    unloaded = model_on_meta(
        spec, ModelPaths(transformer=str(base)), adapter or AdapterConfig(rank=4),
        BaseConfig(quantize=kind, compute=compute, merge=tuple(merge)), precision=precision,
        say=say,
    )  # fmt: skip
    return load_weights(unloaded, placement=place_blocks(unloaded.module, [CPU]), seed=0)


def state_of(base: Path) -> dict[str, torch.Tensor]:
    """The base's weights by our names, in fp32."""
    return {
        canonical_name(name): tensor.float()
        for name, tensor in prepared(base, "none").module.state_dict().items()
        if ".lora_" not in name
    }


def parents(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that a parameter is in."""
    path = name.split(".")[:-1]
    return [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_quantizes_blocks_that_are_streamed(base, kind, gpu, monkeypatch):
    """They stay on the host, whose cores take minutes for billions of weights."""
    expected, devices = prepared(base, kind).module, []

    def recorded_layout(name):
        layout = quantized_layout(name)

        def quantize(weight, gather):
            devices.append(weight.device)
            return layout.quantize(weight, gather)

        return replace(layout, quantize=quantize)

    monkeypatch.setattr(load, "quantized_layout", recorded_layout)
    unloaded = model_on_meta(
        TOY,
        ModelPaths(transformer=str(base), preset="tiny"),
        AdapterConfig(rank=4),
        BaseConfig(quantize=kind),
        precision=FP32,
    )
    placement = replace(place_blocks(unloaded.module, [gpu.device]), streamed=frozenset({1}))
    model = load_weights(unloaded, placement=placement, seed=0)
    layers = quantized_weights(model.module)
    assert devices == [gpu.device] * len(layers)
    with model.readable():
        for name, layer in quantized_weights(expected).items():
            values = layers[name].values()
            assert all(
                torch.equal(value.cpu(), values[part].cpu())
                for part, value in layer.values().items()
            ), name
            in_second = any(
                module is model.module.blocks()[1] for module in parents(model.module, name)
            )
            assert {value.device for value in values.values()} == {
                CPU if in_second else gpu.device
            }, name


@pytest.mark.parametrize(
    ("dtype", "kind"),
    every_value(
        [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
        [*KINDS],
    ),
)
def test_a_file_is_quantized_from_the_values_that_it_has(tmp_path, kind, dtype):
    base = write_base(tmp_path / "base", dtype)
    original, model = state_of(base), prepared(base, kind, precision=Precision()).module
    for name, layer in quantized_weights(model).items():
        # held as it is: rounding it to another scale would cost
        if kind == "fp8" and dtype == torch.float8_e4m3fn:
            assert torch.equal(layer.dequantize(), original[name]), name
        else:
            expected = quantized(original[name], kind).values()
            assert all(
                torch.equal(value, expected[part]) for part, value in layer.values().items()
            ), name
        bias = name.replace("weight", "bias")
        assert layer.bias.dtype == torch.bfloat16 and torch.equal(
            layer.bias.float(), original[bias].bfloat16().float()
        )


def test_the_whole_model_never_exists_in_16_bits(tmp_path):
    """At its highest, loading holds the quantized base, and for one matrix a few copies in fp32."""
    arch = ToyArch(dim=64, depth=12)
    base = write_base(tmp_path / "base", torch.bfloat16, arch)
    with MemoryTracker() as ledger:
        model = prepared(base, "int8", arch=arch, precision=Precision()).module
        peak = ledger.peak[CPU]
    held = sum(parameter.nbytes for parameter in model.parameters())
    dense = sum(
        2 * (p.numel() if p.dtype == torch.int8 else 0)
        for name, p in model.named_parameters()
        if "base_layer" in name
    )
    largest = 4 * 3 * 64 * 64
    assert peak <= held + 4 * largest < dense


def test_adapters_are_merged_before_it_is_quantized(base, tmp_path):
    model = prepared(base, "none").module
    for layer in adapter_layers(model).values():
        layer.lora_B["default"].weight.data = drawn(*layer.lora_B["default"].weight.shape)
    (file,) = export_adapter(
        model, TOY, tmp_path, "adapter", ExportConfig(dtype="fp32"), metadata={}
    )
    merged = prepared(base, "int8", merge=[str(file)])
    dense = prepared(base, "none", merge=[str(file)]).module
    for name, layer in quantized_weights(merged.module).items():
        expected = adapter_layers(dense)[name.removesuffix(".weight")].base_layer.weight
        assert torch.equal(layer.weight, quantized(expected, "int8").weight), name
        assert torch.equal(merged.origin.stored.read(name), expected)


def test_what_is_quantized_is_said(base):
    lines: list[str] = []
    prepared(base, "int8", say=lines.append)
    assert lines == [
        "base.quantize = int8: 12 matrices of 2 blocks; the base takes 0.03 MiB instead of 0.10 MiB"
    ]
    odd = ToyArch(dim=36, text_dim=8)  # 36 * 36 is no multiple of 64
    lines.clear()
    folder = write_base(base.parent / "odd", torch.float32, odd)
    model = prepared(folder, "nf4", arch=odd, say=lines.append).module
    assert "stay as they are, layers.0.qkv the first" in lines[0] and "\n" not in lines[0]
    layer = model.get_submodule("layers.0.qkv")
    assert type(layer.base_layer) is nn.Linear


def test_training_the_base_itself_is_refused(base):
    with pytest.raises(
        UserError, match="set base.quantize = none, or adapter.method = lora"
    ) as caught:
        prepared(base, "nf4", adapter=AdapterConfig(method="full"))
    assert "\n" not in str(caught.value)
    check_quantize("none", "full")
    check_quantize("fp8", "lora")


@pytest.mark.parametrize("kind", KINDS)
def test_a_dora_starts_from_the_norms_that_it_multiplies_with(base, kind):
    model = prepared(base, kind, adapter=AdapterConfig(rank=4, use_dora=True)).module
    for name, layer in adapter_layers(model).items():
        norms = torch.linalg.vector_norm(dense_weight(layer.base_layer), dim=1)
        torch.testing.assert_close(
            layer.lora_magnitude_vector["default"].weight.data, norms, msg=name
        )
        x = drawn(3, layer.in_features)
        # B is zero: it is its base
        torch.testing.assert_close(layer(x), layer.base_layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "adapter"),
    every_value(
        ["official", "diffusers"], [AdapterConfig(rank=4), AdapterConfig(rank=4, use_dora=True)]
    ),
)
def test_a_merged_model_is_the_original_with_the_adapter(base, tmp_path, form, adapter):
    """As users of the adapter have it: not the rounded base."""
    folders = []
    for kind in ("none", "nf4"):
        result = prepared(base, kind, adapter=adapter)
        for layer in adapter_layers(result.module).values():
            layer.lora_B["default"].weight.data = drawn(*layer.lora_B["default"].weight.shape)
            if adapter.use_dora:
                layer.lora_magnitude_vector["default"].weight.data.fill_(0.7)
        config = ExportConfig(forms=(form,), dtype="fp32")
        folders += export_merged(
            result.module, TOY, tmp_path / kind, config, metadata={},
            original=result.origin.stored.read
        )  # fmt: skip
    dense, ours = (prepared(folder, "none").module.state_dict() for folder in folders)
    assert equal(ours, dense)


# Runs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("quantized"))


def stored_run(world, kind):
    """The adapter of a run over a base of this kind, which two tests compare with."""
    if not (world.folder / f"{kind} whole" / "exports").exists():
        assert world.train(f"{kind} whole", 3, "--base.quantize", kind) == 0
    return world.adapter(f"{kind} whole")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_over_a_quantized_base_is_continued_bitwise(world, kind, capsys):
    whole, quantize = stored_run(world, kind), ("--base.quantize", kind)
    capsys.readouterr()
    assert world.train(f"{kind} parts", 2, *quantize) == 0
    assert world.train(f"{kind} parts", 3, *quantize, "--train.checkpointing", "full") == 0
    said = capsys.readouterr().out
    assert said.count(f"base.quantize = {kind}: 12 matrices of 2 blocks") == 2
    assert equal(whole, world.adapter(f"{kind} parts"))


def test_an_adapter_that_was_trained_over_one_kind_starts_over_another(world):
    whole = stored_run(world, "nf4")
    file = world.folder / "nf4 whole" / "exports" / "nf4 whole.safetensors"
    again = ("--adapter.init", str(file), "--base.quantize", "int8")
    assert world.train("nf4 again", 1, *again) == 0
    assert world.adapter("nf4 again").keys() == whole.keys()


@pytest.mark.parametrize("kind", daily(["int8", "fp8"], "int8"))
def test_a_run_that_computes_in_8_bits_is_continued_bitwise(world, kind, capsys):
    """Under any policy and streaming; the exported adapter is not the one that products in fp32
    train."""
    quantize = ("--base.quantize", kind)
    computed = (*quantize, "--base.compute", kind)
    assert world.train(f"{kind} computed", 3, *computed) == 0
    streamed = ("--train.swap_blocks", "1", "--train.checkpointing", "attn_only(self)")
    assert world.train(f"{kind} computed parts", 2, *computed, *streamed) == 0
    assert world.train(f"{kind} computed parts", 3, *computed, "--train.checkpointing", "full") == 0
    said = capsys.readouterr().out
    assert (
        said.count(
            f"base.compute = {kind}: 12 matrices are multiplied in 8 bits, forward and backward\n"
        )
        == 3
    )
    whole = world.adapter(f"{kind} computed")
    assert equal(whole, world.adapter(f"{kind} computed parts"))
    assert not equal(whole, stored_run(world, kind))
    assert (
        f"matmul fp32 (frozen base {kind})"
        in (world.folder / f"{kind} computed" / "report.html").read_text()
    )


def test_layers_of_other_sizes_keep_their_products_and_are_counted(tmp_path):
    base, lines = write_base(tmp_path / "odd", torch.float32, ToyArch(dim=24)), []
    result = prepared(base, "int8", compute="int8", arch=ToyArch(dim=24), say=lines.append)
    layers = quantized_weights(result.module)
    assert not any(layer.in_8_bits for layer in layers.values())
    first = next(iter(layers)).removesuffix(".weight")
    assert lines[-1] == (
        "base.compute = int8: 0 matrices are multiplied in 8 bits, forward and backward; 12 in "
        "model.dtype, because their sizes are no "
        f"multiples of 16, {first} the first"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--base.compute", "int8"), "base.compute = int8 multiplies the int8 codes of a quantized base, and this base is stored in model.dtype; set base.quantize = int8"),
        (("--base.compute", "fp8", "--base.quantize", "nf4"), "this base is stored in nf4; set base.quantize = fp8"),
        (("--base.compute", "int8", "--adapter.method", "full"), "adapter.method = full trains the base; leave base.compute out"),
        (("--base.compute", "bf16"), "base.compute"),
    ],
)  # fmt: skip
def test_products_that_a_base_does_not_have_are_refused_before_anything_is_written(
    world, flags, message, capsys
):
    assert world.train("refused", 1, *flags) != 0
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1
    assert not (world.folder / "refused").exists()


def test_gpus_that_do_not_multiply_8_bits_are_refused(monkeypatch):
    gpu = torch.device("cuda:1")
    for capability, compute, message in (
        (
            (8, 6),
            "fp8",
            (
                "needs a GPU of the generation Ada or later, compute capability 8.9, and cuda:1 has "
                "8.6; leave base.compute out, or "
            ),
        ),
        (
            (7, 0),
            "int8",
            "Turing or later, compute capability 7.5, and cuda:1 has 7.0; leave base.compute out$",
        ),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        with pytest.raises(UserError, match=message):
            check_compute_on(compute, [CPU, gpu])
        check_compute_on("dtype", [gpu])
        check_compute_on(compute, [CPU])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_compute_on("fp8", [gpu])


def test_a_run_on_such_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    flags = {
        "base.quantize": "fp8",
        "base.compute": "fp8",
        "encode.device": "cpu",
        "model.preset": "tiny",
    }
    check_run(create_run(TOY, resolve(RunConfig, flags={**flags, "train.device": "cpu"})))
    with pytest.raises(UserError, match="compute capability 8.9, and cuda:1 has 8.6"):
        check_run(create_run(TOY, resolve(RunConfig, flags={**flags, "train.device": "cuda:1"})))


def test_a_full_fine_tune_is_refused_before_anything_is_written(world, capsys):
    assert world.train("full", 1, "--base.quantize", "fp8", "--adapter.method", "full") == 1
    assert "adapter.method = lora" in capsys.readouterr().err
    assert not (world.folder / "full").exists()
