"""The dtypes of a run: how they are configured, refused and shown, and what they change besides the
model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toy_jobs import toy_job
from toy_training import ToyBatch, toy_model

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import initialise, inject
from ditkit_core.config.resume import compare
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import (
    PLACES,
    Precision,
    PrecisionConfig,
    compute_fp32_in_fp32,
    dtype_name,
    precision_of,
    set_precision,
)
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.linear import CastLinear
from ditkit_core.planner.profiler import profile
from ditkit_core.run.checks import check_settings, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, toy_items
from ditkit_core.testing.world import make_model, outcome
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OPTIMIZERS, OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, accumulate_gradients, training_step

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
REFERENCE = {"residual": "matmul", "rotary": "fp64", "timestep": "fp32"}


def dtypes(precision: Precision) -> dict[str, torch.dtype]:
    return {place: getattr(precision, place) for place in PLACES}


def chosen(matmul: torch.dtype = BF16, **fields: Any) -> Precision:
    return PrecisionConfig(**fields).precision(matmul, REFERENCE)


@pytest.mark.parametrize("matmul", [BF16, FP32, FP64, torch.float16])
def test_by_default_all_but_matmuls_and_attention_is_fp32_or_wider(matmul: torch.dtype) -> None:
    island = FP64 if matmul == FP64 else FP32
    expected = dict.fromkeys(PLACES, island) | {
        "matmul": matmul,
        "attention": matmul,
        "timestep": FP64,
    }
    assert dtypes(Precision(matmul=matmul)) == expected == dtypes(chosen(matmul))


@pytest.mark.parametrize("matmul", [BF16, FP32, FP64])
def test_fast_lowers_the_stream_to_the_matmuls_and_nothing_else(matmul: torch.dtype) -> None:
    default, fast = dtypes(Precision(matmul=matmul)), dtypes(chosen(matmul, preset="fast"))
    assert fast == default | dict.fromkeys(("norms", "modulation", "residual", "entry"), matmul)


def test_reference_is_the_familys_and_never_narrower_than_an_fp64_model() -> None:
    found = chosen(preset="reference")
    assert (found.residual, found.rotary, found.timestep, found.norms) == (BF16, FP64, FP32, FP32)
    assert set(dtypes(chosen(FP64, preset="reference")).values()) == {FP64}


def test_a_place_that_is_set_goes_before_the_preset() -> None:
    assert chosen(preset="fast", residual="fp32") == replace(
        chosen(preset="fast"), residual=FP32, entry=FP32
    )
    assert chosen(FP64, head="bf16").head == BF16


def test_the_stream_enters_as_it_goes_on_unless_set() -> None:
    assert Precision(residual=BF16).entry == BF16
    both = Precision(entry=BF16)
    assert both.residual == FP32 and both.norms_of(BF16) == BF16 and both.norms_of(FP32) == FP32


@pytest.mark.parametrize("place", [place for place in PLACES if place != "matmul"])
def test_fp16_is_refused_where_it_overflows_or_underflows(place: str) -> None:
    if place in ("timestep", "rotary_tables"):
        assert getattr(chosen(**{place: "fp16"}), place) == torch.float16
        return
    with pytest.raises(
        UserError, match=f"precision.{place} = fp16: .*(65504|loss scaler).*; set bf16 or fp32"
    ):
        chosen(**{place: "fp16"})


def test_a_preset_that_would_put_the_stream_into_fp16_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"preset = fast with model.dtype = fp16: values exceed 65504.* in norms; set precision.norms",
    ):
        chosen(torch.float16, preset="fast")
    assert (
        chosen(
            torch.float16, preset="fast", norms="bf16", modulation="fp32", residual="bf16"
        ).residual
        == BF16
    )


def test_the_line_names_every_place_and_what_it_runs_in() -> None:
    line = chosen(residual="bf16").described()
    assert line.startswith(
        "timestep fp64, rotary tables fp32, rotary fp32, qk norms fp32, norms fp32, modulation "
        "fp32, residual bf16"
    )
    assert line.endswith("reduction fp32, matmul bf16") and line.count(", ") == len(PLACES) - 1
    assert dtype_name(torch.int8) == "int8"


def test_the_line_says_what_the_optimizer_holds_and_no_sum_that_is_not_made() -> None:
    assert "optimizer 8 bits" in chosen().described(
        averages_in_8_bits=OPTIMIZERS["adamw8bit"].averages_in_8_bits
    )
    assert "optimizer fp32" in chosen().described(
        averages_in_8_bits=OPTIMIZERS["adafactor"].averages_in_8_bits
    )
    assert "accumulation fp32" in chosen().described()
    assert "accumulation" not in chosen().described(fused_backward=True)


def run_with(*, optim: OptimConfig | None = None, **fields: Any) -> RunContext:
    config = RunConfig(precision=PrecisionConfig(**fields), optim=optim or OptimConfig())
    return create_run(TOY, replace(config, model=replace(config.model, preset="tiny")))


@pytest.mark.parametrize(
    ("fields", "optim", "message"),
    [
        ({"optimizer": "bf16"}, OptimConfig(), "moments and updates are fp32.*adamw8bit"),
        (
            {"optimizer": "fp32"},
            OptimConfig(name="adamw8bit"),
            "fp32: .*adamw8bit stores its moments in 8 bits",
        ),
        ({"reduction": "bf16"}, OptimConfig(), "and here each rank has all weights"),
        (
            {"accumulation": "bf16"},
            OptimConfig(fused_backward=True),
            "applies each gradient at once",
        ),
    ],
)
def test_a_place_that_the_run_would_not_honour_is_refused(
    fields: dict[str, Any], optim: OptimConfig, message: str
) -> None:
    run = run_with(optim=optim, **fields)
    run = create_run(TOY, replace(run.config, train=replace(run.config.train, clip_norm=0.0)))
    with pytest.raises(UserError, match=message):
        check_training(run, here=False)
    check_training(run_with(optimizer="fp32", reduction="fp32", accumulation="fp32"), here=False)


def test_a_command_refuses_an_impossible_dtype_before_anything() -> None:
    with pytest.raises(UserError, match="65504"):
        check_settings(run_with(residual="fp16"))


def test_dtypes_may_change_between_parts_of_a_run_but_for_what_a_save_holds() -> None:
    changes = compare(
        {}, RunConfig(precision=PrecisionConfig(preset="fast", head="bf16", optimizer="fp32"))
    )
    assert [change.key for change in changes.stated] == ["precision.preset", "precision.head"]
    assert [change.key for change in changes.refused] == ["precision.optimizer"]


def test_parameters_are_kept_in_fp32_where_their_place_is_not_the_matmuls() -> None:
    for name, _ in ToyModel(ToyArch(), Precision()).named_parameters():
        assert TOY.precision.op_group_of(name) in PLACES
        assert TOY.precision.keep_fp32(name) == (TOY.precision.op_group_of(name) != "matmul")
    assert isinstance(TOY, ModelSpec)


def test_set_precision_reaches_every_stage() -> None:
    model, narrow = ToyModel(ToyArch(), Precision()), Precision(residual=BF16)
    set_precision(model, narrow)
    found = [precision_of(stage) for stage in (model, model.embed, *model.blocks(), model.head)]
    assert found == [narrow] * len(found)


def test_a_linear_layer_multiplies_in_its_inputs_dtype_and_gives_its_gradient_in_its_own() -> None:
    torch.manual_seed(0)
    cast, plain = CastLinear(6, 5), nn.Linear(6, 5)
    plain.load_state_dict(cast.state_dict())
    x = torch.randn(3, 6)
    assert torch.equal(cast(x), plain(x))
    narrow = cast(x.bfloat16())
    assert narrow.dtype == BF16 and torch.equal(narrow, plain.bfloat16()(x.bfloat16()))
    narrow.sum().backward()
    assert cast.weight.grad is not None and cast.weight.grad.dtype == cast.weight.dtype == FP32


def test_an_adapter_on_a_layer_of_another_place_stays_fp32() -> None:
    model: Any = ToyModel(ToyArch(), Precision(time_mlp=BF16, head=BF16)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(FP32 if TOY.precision.keep_fp32(name) else BF16)
    inject(model, AdapterConfig(rank=2, targets=("embed.time", "head.out")), {})
    initialise(model, 0, device_of=lambda name: torch.device("cpu"))
    items = toy_items(1)
    outputs = model(
        TOY.training.make_inputs([items[0]["latents"]], torch.tensor([0.7]), items, 1.0)
    )
    assert outputs[0].dtype == BF16
    outputs[0].float().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(gradients) == 4 and all(
        g is not None and g.dtype == FP32 for g in gradients.values()
    )


def micro_batches() -> list[ToyBatch]:
    items = toy_items(4)
    return [ToyBatch([f"clip {i}"], items[i : i + 1]) for i in range(4)]


def accumulated(dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The summed gradients of four micro-batches, as they are before the step."""
    model, trainable = toy_model()
    optimizer = NamedOptimizer(trainable, OptimConfig(), accumulation=dtype)
    accumulate_gradients(
        Model(model, BlockEngine(), TOY),
        micro_batches(),
        StepContext(step=0, seed=1, flow=FlowConfig()),
    )
    return dict(optimizer.gradients())


def test_gradients_are_summed_in_the_dtype_of_accumulation() -> None:
    plain, same, narrow, wide = (accumulated(dtype) for dtype in (None, FP32, BF16, FP64))
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert {gradient.dtype for gradient in narrow.values()} == {BF16}
    off = {name: float((narrow[name] - plain[name]).norm() / plain[name].norm()) for name in plain}
    # each sum is rounded, 2^-9 at most and three times: more than one rounding of the whole sum
    # alone
    once = {
        name: float((plain[name].bfloat16() - plain[name]).norm() / plain[name].norm())
        for name in plain
    }
    assert sum(off.values()) > 1.2 * sum(once.values()) and max(off.values()) < 2e-2
    assert {gradient.dtype for gradient in wide.values()} == {FP64}


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
@pytest.mark.parametrize("dtype", [BF16, FP64])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "split"])
def test_a_step_is_made_from_gradients_of_any_dtype_and_the_next_sums_in_it_again(
    dtype: torch.dtype, name: Any, rounding: Any
) -> None:
    """Of bf16 weights next to those that are kept in fp32, too, unless all are fp32."""
    model, trainable = toy_model()
    kept = {FP32}
    if rounding != "nearest":
        set_precision(model, Precision(matmul=BF16))
        model.get_submodule("layers").to(BF16)
        model.get_submodule("embed.patch").to(BF16)
        model.get_submodule("embed.text").to(BF16)
        kept = {FP32, BF16}
    optimizer = NamedOptimizer(
        trainable, OptimConfig(name=name, rounding=rounding), accumulation=dtype
    )
    before = {name: parameter.detach().clone() for name, parameter in trainable.items()}
    for step in range(2):
        training_step(
            Model(model, BlockEngine(), TOY),
            micro_batches(),
            optimizer,
            StepContext(step=step, seed=1, flow=FlowConfig()),
            lr=0.01,
            clip_norm=1.0,
        )
        optimizer.zero_grad()
        assert {parameter.grad_dtype for parameter in trainable.values()} == {dtype}
    assert all(not torch.equal(before[name], parameter) for name, parameter in trainable.items())
    assert {parameter.dtype for parameter in trainable.values()} == kept


@pytest.mark.parametrize("matmul", [BF16, FP32])
def test_a_model_says_what_its_gradients_are_summed_in(matmul: torch.dtype) -> None:
    """fp32, for trained bf16 weights too, unless set."""
    for accumulation, expected in ((None, FP32), (BF16, BF16)):
        precision = (
            Precision(matmul=matmul)
            if accumulation is None
            else Precision(matmul=matmul, accumulation=BF16)
        )
        model = ToyModel(ToyArch(), precision).to(matmul)
        optim = OptimConfig(rounding="stochastic" if matmul == BF16 else "nearest")
        TrainState(model, dict(model.named_parameters()), optim, EMAConfig())
        assert {parameter.grad_dtype for parameter in model.parameters()} == {expected}


@pytest.mark.slow
def test_a_plan_sees_half_the_stream_under_full() -> None:
    """What `full` keeps of a block is the stream that enters it; modulation and text are handed to
    all blocks, and kept once."""
    wide, narrow = (
        profile(toy_job(policy="full", precision=precision))
        for precision in (Precision(), Precision(residual=BF16))
    )
    assert (
        [block.kept for block in narrow.blocks] == [block.kept / 2 for block in wide.blocks] != []
    )
    assert all(
        0.4 < small / large < 0.75
        for small, large in zip(narrow.crossing, wide.crossing, strict=True)
    )


def test_an_engine_has_matmuls_sum_in_fp32() -> None:
    """Of a process that calls no command, such as a benchmark or another's training loop, too."""
    matmul = torch.backends.cuda.matmul
    torch.backends.cudnn.allow_tf32 = True
    matmul.allow_bf16_reduced_precision_reduction = (
        matmul.allow_fp16_reduced_precision_reduction
    ) = True
    matmul.allow_fp16_accumulation = True
    outcome(TOY, make_model(TOY, ToyArch(depth=1)), toy_items(1), BlockEngine())
    assert not (
        matmul.allow_bf16_reduced_precision_reduction
        or matmul.allow_fp16_reduced_precision_reduction
    )
    assert not (
        matmul.allow_fp16_accumulation or matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    )


@pytest.mark.parametrize("module", [torch.backends, torch.backends.cudnn])
def test_convolutions_have_no_tf32_whatever_is_set_for_all_of_torch(
    module: Any, monkeypatch: Any
) -> None:
    """torch's newer switch for several kinds of operation at once holds for those that have no
    setting of their own."""
    cudnn = torch.backends.cudnn
    compute_fp32_in_fp32()
    with monkeypatch.context() as m:
        m.setattr(module, "fp32_precision", "tf32")
        cudnn.allow_tf32 = True
        compute_fp32_in_fp32()
        assert {
            cudnn.conv.fp32_precision,
            cudnn.rnn.fp32_precision,
            torch.backends.cuda.matmul.fp32_precision,
        } == {"ieee"}
        assert not cudnn.allow_tf32  # reads that go by the older switches do not raise
