"""A model from its files, as any program has it: frozen or trained, streamed, and with an adapter
that comes and goes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditkit_core.adapters.config import AdapterConfig, LoraConfig
from ditkit_core.api.load import load
from ditkit_core.distributed.ranks import RanksConfig
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.loading.model import Model
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, official_name, toy_items
from ditkit_core.testing.world import make_model

SPEC: ModelSpec = altered(TOY, presets={"tiny": ToyArch()})
LORA = LoraConfig(r=4, lora_alpha=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("toy") / "toy.safetensors"
    state = make_model(TOY, ToyArch()).state_dict()
    save_file({official_name(name): tensor.contiguous() for name, tensor in state.items()}, file)
    return file


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that does something."""
    model = with_values(load(SPEC, base, LORA, dtype="fp32"))
    return model.save_adapter(
        tmp_path_factory.mktemp("adapter") / "trained.safetensors", dtype="fp32"
    )


def with_values(model: Model) -> Model:
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    return model


def prediction(model: Model) -> torch.Tensor:
    items, random = toy_items(2), torch.Generator().manual_seed(2)
    noised = [torch.randn(item["latents"].shape, generator=random) for item in items]
    with torch.no_grad():
        return torch.stack(list(model(noised, torch.tensor([0.3, 0.8]), items)))


def test_a_path_may_be_a_file_or_a_value(base: Path) -> None:
    by_file, by_value = (
        load(SPEC, path, dtype="fp32") for path in (base, ModelPaths(transformer=str(base)))
    )
    assert torch.equal(prediction(by_file), prediction(by_value))
    assert torch.equal(
        prediction(by_file), prediction(Model(make_model(TOY, ToyArch()), BlockEngine(), TOY))
    )


def test_without_an_adapter_nothing_is_trained_and_all_weights_can_be(base: Path) -> None:
    frozen = load(SPEC, str(base))
    assert list(frozen.parameters()) == [] and not any(
        each.requires_grad for each in frozen.module.parameters()
    )
    with pytest.raises(UserError, match="the model has no adapter to save; load it with one"):
        frozen.save_adapter("none.safetensors")
    full = load(SPEC, base, AdapterConfig(method="full"), dtype="fp32")
    assert len(list(full.parameters())) == len(list(full.module.parameters())) and not full.adapts


def test_streamed_blocks_and_policies_change_no_bit(base: Path, trained: Path) -> None:
    plain = load(SPEC, base, trained, dtype="fp32")
    streamed = load(SPEC, base, trained, dtype="fp32", swap_blocks=(1,), checkpointing="full")
    assert (
        streamed.streamer is not None
        and str(streamed.engine.schedule.policies([None, None])[0]) == "full"
    )
    assert torch.equal(prediction(plain), prediction(streamed))
    for model in (plain, streamed):
        items = toy_items(2)
        noised = [item["latents"] for item in items]
        sum(
            velocity.square().sum() for velocity in model(noised, torch.tensor([0.3, 0.8]), items)
        ).backward()
    gradients = [
        [parameter.grad for parameter in model.parameters()] for model in (plain, streamed)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    with pytest.raises(
        UserError, match=r"load_adapter\(path\) does not work on a model that streams blocks"
    ):
        streamed.load_adapter(trained)
    with pytest.raises(UserError, match="call load again with another `devices`"):
        streamed.to("cpu")


def test_an_execution_and_keywords_say_the_same(base: Path) -> None:
    execution = Execution(checkpointing="attn_only", precision=Precision(matmul=torch.float32))
    one, other = (
        load(SPEC, base, LORA, execution=execution),
        load(SPEC, base, LORA, dtype="fp32", checkpointing="attn_only"),
    )
    assert torch.equal(prediction(one), prediction(other)) and one.engine == other.engine
    changed = load(SPEC, base, LORA, execution=execution, checkpointing="full")
    assert (
        str(changed.engine.schedule.policies([None])[0]) == "full"
        and changed.matmul_dtype == torch.float32
    )
    with pytest.raises(UserError, match="no argument 'checkpoint'; did you mean checkpointing"):
        load(SPEC, base, checkpoint="full")


def test_an_adapter_is_read_by_load_by_a_frozen_model_and_over_another_one(
    base: Path, trained: Path
) -> None:
    expected = prediction(load(SPEC, base, trained, dtype="fp32"))
    frozen = load(SPEC, base, dtype="fp32")
    assert not torch.equal(prediction(frozen), expected)
    frozen.load_adapter(trained)
    other = load(SPEC, base, LORA, dtype="fp32", seed=3)
    before = list(other.parameters())
    other.load_adapter(str(trained))
    assert all(one is another for one, another in zip(before, other.parameters(), strict=True)), (
        "an optimizer has them"
    )
    assert torch.equal(prediction(frozen), expected) and torch.equal(prediction(other), expected)
    state, again = frozen.state_dict(), load(SPEC, base, trained, dtype="fp32").state_dict()
    assert state.keys() == again.keys() and all(
        torch.equal(state[name], again[name]) for name in state
    )


def test_a_file_of_another_layout_is_refused_and_changes_nothing(base: Path, trained: Path) -> None:
    wider = with_values(load(SPEC, base, LoraConfig(r=8), dtype="fp32"))
    fewer = with_values(
        load(SPEC, base, LoraConfig(r=4, lora_alpha=8, target_modules="qkv"), dtype="fp32")
    )
    for model, reason in (
        (wider, "has rank 4 and scale 1 for layers.0.qkv, and the model's adapter has 8 and 1"),
        (fewer, "adapts other layers than the model's adapter"),
    ):
        before = prediction(model)
        with pytest.raises(UserError, match=reason):
            model.load_adapter(trained)
        assert torch.equal(prediction(model), before)


def test_a_dora_and_a_lokr_are_saved_and_read(base: Path, tmp_path: Path) -> None:
    for name, adapter in (
        ("dora", LoraConfig(r=4, use_dora=True)),
        ("lokr", AdapterConfig(method="lokr", rank=2)),
    ):
        model = with_values(load(SPEC, base, adapter, dtype="fp32"))
        file = model.save_adapter(tmp_path / f"{name}.safetensors", dtype="fp32")
        again = load(SPEC, base, dtype="fp32")
        again.load_adapter(file)
        torch.testing.assert_close(prediction(again), prediction(model), rtol=1e-5, atol=1e-6)


def test_a_file_has_its_name_its_dtype_and_a_form(base: Path, tmp_path: Path) -> None:
    model = with_values(load(SPEC, base, LORA))
    assert {
        tensor.dtype
        for tensor in load_file(model.save_adapter(tmp_path / "a.safetensors")).values()
    } == {torch.bfloat16}
    names = load_file(model.save_adapter(tmp_path / "b.safetensors", form="diffusers"))
    assert all(name.startswith("transformer.") for name in names)
    with pytest.raises(UserError, match="'cats.pt' does not end with .safetensors"):
        model.save_adapter("cats.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_a_merged_file_is_part_of_the_base(base: Path, trained: Path) -> None:
    merged = load(SPEC, base, dtype="fp32", merge=[trained])
    torch.testing.assert_close(
        prediction(merged),
        prediction(load(SPEC, base, trained, dtype="fp32")),
        rtol=1e-4,
        atol=1e-5,
    )


def test_ranks_need_processes_and_a_context_the_command(base: Path) -> None:
    with pytest.raises(
        UserError, match=r"ranks\.shard = 2 needs as many processes: start with torchrun"
    ):
        load(SPEC, base, LORA, ranks=RanksConfig(shard=2))
    with pytest.raises(UserError, match=r"ranks\.context = 2 is for the train command"):
        load(SPEC, base, LORA, ranks=RanksConfig(context=2))


def test_a_lora_takes_peft_s_names_or_ours_and_not_both() -> None:
    ours = AdapterConfig(rank=16, alpha=32.0, targets=("qkv", "out"), dropout=0.1, use_dora=True)
    theirs = LoraConfig(
        r=16, lora_alpha=32.0, target_modules=["qkv", "out"], lora_dropout=0.1, use_dora=True
    )
    assert vars(theirs) == vars(ours)
    assert (theirs.r, theirs.lora_alpha, theirs.target_modules, theirs.lora_dropout) == (
        16,
        32.0,
        ("qkv", "out"),
        0.1,
    )
    assert LoraConfig(r=16).lora_alpha == 16 and LoraConfig(
        target_modules="all-linear"
    ).targets == ("*",)
    with pytest.raises(UserError, match="r and rank are two names of one setting"):
        LoraConfig(r=4, rank=4)
    with pytest.raises(UserError, match="no argument 'lora_rank'; choose among r,"):
        LoraConfig(lora_rank=4)
