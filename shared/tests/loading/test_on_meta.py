"""From files to a model that is ready to train."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.adapters.inject import canonical_name, trainable_parameters
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.architecture import arch_here
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.model import fingerprints_of
from ditkit_core.testing.denied import denied
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToyModel, in_form, native_name

FP32 = Precision(matmul=torch.float32)
SPEC = altered(
    TOY, infer_arch=lambda config, index: ToyArch(depth=config["depth"], heads=config["heads"])
)
ONE = altered(SPEC, presets={"tiny": ToyArch()})  # the toy's own two differ in no shape


def weights(depth: int = 2, form: str = "official") -> dict[str, torch.Tensor]:
    """The toy's tensors as a file has them."""
    torch.manual_seed(0)
    return in_form(ToyModel(ToyArch(depth=depth), FP32).state_dict(), form)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base folder in diffusers layout, without a config.json."""
    folder = tmp_path / "base" / "transformer"
    folder.mkdir(parents=True)
    save_file(weights(), folder / "model.safetensors")
    return tmp_path / "base"


def lora(path: Path, *modules: str, alpha: float = 4.0, rank: int = 2) -> dict[str, torch.Tensor]:
    """Write a kohya file for modules of width 32; returns its tensors."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for module in modules:
        out = weights()[f"{module}.weight"].shape[0]
        flat = module.replace(".", "_")
        tensors |= {
            f"lora_unet_{flat}.lora_down.weight": torch.randn(rank, 32, generator=generator),
            f"lora_unet_{flat}.lora_up.weight": torch.randn(out, rank, generator=generator),
            f"lora_unet_{flat}.alpha": torch.tensor(alpha),
        }
    save_file(tensors, path)
    return tensors


def built(
    base: Path, *, spec=ONE, adapter=None, merge=(), precision=FP32, say=None, preset=""
) -> Model:
    return model_on_meta(
        spec, ModelPaths(base=str(base), preset=preset), adapter or AdapterConfig(rank=4),
        BaseConfig(merge=tuple(merge)),
        precision=precision, say=say or (lambda line: None),
    )  # fmt: skip


def prepared(base: Path, *, seed: int = 0, **how) -> Model:
    unloaded = built(base, **how)
    return load_weights(
        unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=seed
    )


def native(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        canonical_name(name): t for name, t in model.state_dict().items() if ".lora_" not in name
    }


def toy_inputs() -> ToyInputs:
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(4, 2, 3, 4, generator=generator)
    return ToyInputs([latents], torch.tensor([0.3]), [torch.randn(5, 8, generator=generator)])


def test_before_loading_the_model_is_checked_and_has_no_memory(base):
    unloaded = built(base)
    assert all(tensor.is_meta for tensor in unloaded.module.state_dict().values())
    assert unloaded.origin.stored.mapping.keys() == native(unloaded.module).keys()


def test_the_base_has_the_files_values_and_the_adapters_are_new(base):
    result = prepared(base)
    expected = {native_name(name): tensor for name, tensor in weights().items()}
    loaded = native(result.module)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert result.trainable.keys() == trainable_parameters(result.module).keys()
    assert len(result.trainable) == 26
    assert not any(parameter.is_meta for parameter in result.module.parameters())


def test_parameters_take_the_dtype_of_the_matmuls_except_those_kept_in_fp32_and_the_adapters(base):
    result = prepared(base, precision=Precision(matmul=torch.bfloat16))
    for name, parameter in result.module.named_parameters():
        wide = ".lora_" in name or TOY.precision.keep_fp32(canonical_name(name))
        assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name


def test_a_full_fine_tune_trains_every_parameter_in_the_dtypes_of_the_base(base):
    result = prepared(
        base, adapter=AdapterConfig(method="full"), precision=Precision(matmul=torch.bfloat16)
    )
    assert result.trainable.keys() == native(result.module).keys()
    for name, parameter in result.trainable.items():
        assert parameter.requires_grad
        assert parameter.dtype == (
            torch.float32 if TOY.precision.keep_fp32(name) else torch.bfloat16
        ), name


def test_two_preparations_are_bitwise_identical_and_another_seed_changes_the_adapters_alone(base):
    one, two, other = prepared(base), prepared(base), prepared(base, seed=1)
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, two.module.state_dict()[name]), name
        assert torch.equal(tensor, other.module.state_dict()[name]) == ("lora_A" not in name), name


@pytest.mark.parametrize("matmul", [torch.float32, torch.bfloat16])
def test_files_are_merged_in_fp32_before_the_base_is_rounded(base, tmp_path, matmul):
    tensors = lora(tmp_path / "a.safetensors", "blocks.0.qkv", "blocks.1.out")
    said = []
    result = prepared(
        base,
        merge=[f"{tmp_path / 'a.safetensors'}@0.5"],
        precision=Precision(matmul=matmul),
        say=said.append,
    )
    loaded = native(result.module)
    for module, flat in (("layers.0.qkv", "blocks_0_qkv"), ("layers.1.out", "blocks_1_out")):
        down, up = (tensors[f"lora_unet_{flat}.lora_{part}.weight"] for part in ("down", "up"))
        weight = weights()[module.replace("layers", "blocks") + ".weight"]
        assert torch.equal(
            loaded[f"{module}.weight"], torch.addmm(weight, up, down, alpha=0.5 * 2).to(matmul)
        )
    assert torch.equal(loaded["layers.0.out.weight"], weights()["blocks.0.out.weight"].to(matmul))
    assert said == [f"base.merge: 2 modules of {tmp_path / 'a.safetensors'} at strength 0.5"]


def test_merging_a_file_and_starting_from_it_give_the_same_model(base, tmp_path):
    lora(tmp_path / "a.safetensors", "blocks.0.qkv", "blocks.1.out")
    merged = prepared(base, merge=[str(tmp_path / "a.safetensors")])
    started = prepared(base, adapter=AdapterConfig(init=str(tmp_path / "a.safetensors")))
    plain = prepared(base)
    inputs = toy_inputs()
    torch.testing.assert_close(merged.module(inputs), started.module(inputs), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(merged.module(inputs)[0], plain.module(inputs)[0], rtol=1e-2)


def test_what_ranks_compare_has_every_file_of_the_model(base, tmp_path):
    """Two files of one name, too; each is known by its content."""
    paths = [
        tmp_path / name
        for name in ("a/cats.safetensors", "b/cats.safetensors", "start.safetensors")
    ]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        lora(path, "blocks.0.qkv")
    merge = tuple(str(path) for path in paths[:2])
    config = RunConfig(base=BaseConfig(merge=merge), adapter=AdapterConfig(init=str(paths[2])))
    run, source = create_run(ONE, config, ToyArch()), SafetensorsSource.open(base / "transformer")
    before, keys = (
        fingerprints_of(run.config, run.component, source),
        ["adapter.init", "base", "base.merge[0]", "base.merge[1]"],
    )
    assert sorted(before) == keys
    for path, key in zip(paths, ("base.merge[0]", "base.merge[1]", "adapter.init"), strict=True):
        lora(path, "blocks.0.qkv", alpha=2.0)
        after = fingerprints_of(run.config, run.component, source)
        assert {name for name in keys if after[name] != before[name]} == {key}
        before = after


def test_a_start_decides_rank_alpha_and_modules_and_says_so(base, tmp_path):
    tensors = lora(tmp_path / "a.safetensors", "blocks.0.qkv", "blocks.1.out")
    said = []
    result = prepared(
        base, adapter=AdapterConfig(rank=9, init=str(tmp_path / "a.safetensors")), say=said.append
    )
    assert (result.origin.adapter.rank, result.origin.adapter.alpha) == (2, 4.0)
    assert set(result.trainable) == {
        f"layers.{name}.lora_{part}.weight" for name in ("0.qkv", "1.out") for part in "AB"
    }
    assert torch.equal(
        result.trainable["layers.0.qkv.lora_B.weight"],
        tensors["lora_unet_blocks_0_qkv.lora_up.weight"],
    )
    assert len(said) == 1
    assert "rank 2, alpha 4" in said[0]


def test_modules_beyond_those_of_the_start_begin_as_new_ones(base, tmp_path):
    lora(tmp_path / "a.safetensors", "blocks.0.qkv")
    result = prepared(
        base, adapter=AdapterConfig(targets=("attention",), init=str(tmp_path / "a.safetensors"))
    )
    assert len(result.trainable) == 8
    assert result.trainable["layers.0.qkv.lora_B.weight"].any()
    assert not result.trainable["layers.1.qkv.lora_B.weight"].any()


def test_a_start_needs_an_adapter(base, tmp_path):
    with pytest.raises(UserError, match="needs adapter.method = 'lora'"):
        prepared(base, adapter=AdapterConfig(method="full", init=str(tmp_path / "a.safetensors")))


@pytest.mark.parametrize("where", ["merge", "init"])
def test_a_file_that_is_not_there_is_named(base, tmp_path, where):
    missing = str(tmp_path / "nothing.safetensors")
    kwargs = {"merge": [missing]} if where == "merge" else {"adapter": AdapterConfig(init=missing)}
    with pytest.raises(UserError, match="there is no .*nothing.safetensors"):
        prepared(base, **kwargs)


def test_the_preset_is_taken_by_its_name(base):
    result = prepared(base, spec=TOY, preset="dropout")
    assert (result.origin.preset, result.origin.arch) == ("dropout", ToyArch(dropout=0.2))
    with pytest.raises(
        UserError, match="model.preset = 'huge' is unknown; choose one of tiny, dropout"
    ):
        prepared(base, spec=TOY, preset="huge")


def test_the_architecture_is_read_from_config_json(base):
    save_file(weights(depth=3), base / "transformer" / "model.safetensors")
    config = base / "transformer" / "config.json"
    config.write_text(json.dumps(asdict(ToyArch(depth=3, heads=4))))
    result = prepared(base)
    assert (result.origin.preset, result.origin.arch, result.config_json) == (
        "",
        ToyArch(depth=3, heads=4),
        config,
    )
    config.write_text(json.dumps(asdict(ToyArch())))
    save_file(weights(), base / "transformer" / "model.safetensors")
    assert prepared(base).origin.preset == "tiny"


@pytest.mark.parametrize(
    "content", ["{}", "", "[1]", '{"depth": 2, "heads": ', '{"depth": "two"}', '{"heads": 0}']
)
def test_a_config_json_of_something_else_is_an_error(base, content):
    (base / "transformer" / "config.json").write_text(content)
    with pytest.raises(
        UserError, match="does not describe this model .* set model.preset to one of tiny"
    ):
        prepared(base)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"depth": 1000000000}', '{"depth": 2, "depth": 3}']
)
def test_a_config_json_that_would_take_all_time_or_memory_is_one_line(base, content):
    (base / "transformer" / "config.json").write_text(content)
    with pytest.raises(
        UserError,
        match="config.json does not describe this model .* set model.preset to one of tiny",
    ):
        prepared(base)


def test_the_config_json_of_another_family_is_named_by_its_class(base):
    (base / "transformer" / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    with pytest.raises(
        UserError,
        match=r"does not describe this model of toy \(WanTransformer3DModel: it has no depth\)",
    ):
        prepared(base)


def test_a_single_file_may_have_the_architecture_of_its_bases_config_json(base, tmp_path):
    config = base / "transformer" / "config.json"
    config.write_text(json.dumps(asdict(ToyArch(depth=3, heads=4))))
    save_file(weights(depth=3), tmp_path / "merged.safetensors")
    paths = ModelPaths(base=str(base), transformer=str(tmp_path / "merged.safetensors"))
    for spec in (
        SPEC,
        altered(SPEC, presets={"one": ToyArch(depth=3), "two": ToyArch(depth=3, dropout=0.5)}),
    ):
        assert arch_here(spec, paths) == ("", ToyArch(depth=3, heads=4))
    config.write_text(json.dumps(asdict(ToyArch(depth=4))))
    with pytest.raises(
        UserError, match="no preset fits the weights in .*merged.safetensors; set model.preset"
    ):
        arch_here(SPEC, paths)


@pytest.mark.parametrize(
    "part", ["transformer", "transformer/config.json", "transformer/model.safetensors"]
)
def test_a_base_without_permission_is_said_as_such(base, part):
    (base / "transformer" / "config.json").write_text(json.dumps(asdict(ToyArch())))
    with (
        denied(base / part),
        pytest.raises(UserError, match=r"transformer.*cannot be read .Permission denied"),
    ):
        prepared(base)


def test_a_config_json_in_its_authors_own_form_leaves_the_choice_to_the_shapes(base):
    (base / "transformer" / "config.json").write_text('{"num_layers": 2}')
    spec = altered(
        SPEC,
        presets={"deep": ToyArch(depth=3), "fits": ToyArch()},
        infer_arch=lambda config, index: None,
    )
    assert prepared(base, spec=spec).origin.preset == "fits"


def test_a_config_json_of_other_weights_is_blamed_itself(base):
    (base / "transformer" / "config.json").write_text(json.dumps(asdict(ToyArch(depth=3))))
    with pytest.raises(
        UserError,
        match=r"config\.json does not fit the weights, which have 2 layers where it has 3; take both",
    ):
        prepared(base)


def test_without_a_config_json_the_preset_is_the_one_whose_shapes_fit(base):
    spec = altered(
        SPEC, presets={"deep": ToyArch(depth=3), "fits": ToyArch(), "wide": ToyArch(dim=64)}
    )
    result = prepared(base, spec=spec)
    assert (result.origin.preset, result.origin.arch, result.config_json) == (
        "fits",
        ToyArch(),
        None,
    )
    with pytest.raises(
        UserError,
        match="tiny and dropout fit the weights in .*; set model.preset to one of tiny, dropout",
    ):
        prepared(base, spec=TOY)
    with pytest.raises(
        UserError, match="no preset fits the weights in .*; set model.preset to one of deep"
    ):
        prepared(base, spec=altered(SPEC, presets={"deep": ToyArch(depth=3)}))
    save_file(weights(form="diffusers"), base / "transformer" / "model.safetensors")
    assert prepared(base, spec=spec).origin.preset == "fits"


def test_every_form_of_the_base_is_the_same_model(base):
    official = native(prepared(base).module)
    save_file(weights(form="diffusers"), base / "transformer" / "model.safetensors")
    stacked = native(prepared(base).module)
    assert official.keys() == stacked.keys()
    assert all(torch.equal(stacked[name], tensor) for name, tensor in official.items())


def test_a_preset_that_does_not_fit_the_weights_is_an_error(base):
    spec = altered(SPEC, presets={"deep": ToyArch(depth=3)})
    with pytest.raises(
        UserError, match="the preset does not fit the weights, which have 2 layers where it has 3"
    ):
        prepared(base, spec=spec, preset="deep")
