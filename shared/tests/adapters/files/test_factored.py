"""LoKr and LoHa in files: ComfyUI's and peft's computation, training on, merging, other names, and
what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter, export_merged
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.commands import cli
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToyModel, in_form, official_name

SPEC = altered(TOY, presets={"tiny": ToyArch()})
FP32 = Precision(matmul=torch.float32)
SETTINGS = {
    "lokr": AdapterConfig(
        method="lokr", rank=2, alpha=3.0, decompose_factor=4, targets=("qkv", "out")
    ),
    "lokr, both": AdapterConfig(method="lokr", rank=1, decompose_both=True, targets=("qkv", "out")),
    "lokr, whole": AdapterConfig(method="lokr", rank=64, alpha=16.0, targets=("qkv", "out")),
    "lokr, two ranks": AdapterConfig(
        method="lokr", rank=2, rank_pattern=("qkv=3",), targets=("qkv", "out")
    ),
    "loha": AdapterConfig(method="loha", rank=4, alpha=3.0, targets=("qkv", "out")),
}
every = pytest.mark.parametrize("settings", SETTINGS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("base") / "x.safetensors"
    save_file(in_form(ToyModel(ToyArch(), FP32).state_dict(), "official"), path)
    return path


def prepared(base: Path, adapter: AdapterConfig, *, merge: tuple[str, ...] = ()) -> Model:
    sections = (ModelPaths(transformer=str(base)), adapter, BaseConfig(merge=merge))
    unloaded = model_on_meta(SPEC, *sections, precision=FP32)
    return load_weights(
        unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=0
    )


def trained(base: Path, settings: str) -> Model:
    result, generator = prepared(base, SETTINGS[settings]), torch.Generator().manual_seed(1)
    for parameter in result.trainable.values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return result


def export(result: Model, folder: Path, form: str = "official", dtype: str = "fp32") -> Path:
    (file,) = export_adapter(
        result.module,
        SPEC,
        folder,
        "adapter",
        ExportConfig(forms=(form,), dtype=dtype),
        metadata={},
    )
    return file


def outputs(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    latents, text = (
        torch.randn(4, 2, 3, 4, generator=generator),
        torch.randn(5, 8, generator=generator),
    )
    with torch.no_grad():
        return model.eval()(ToyInputs([latents], torch.tensor([0.3]), [text]))[0]


def run(*argv: object) -> int:
    return cli.run(SPEC, "export", [str(argument) for argument in argv])


def changed_by_comfyui(tensors: dict[str, Tensor], key: str, shape: torch.Size) -> Tensor:
    """What ComfyUI adds to a weight, from the description of its computation: alpha over the rank
    of the last low-rank factor, or 1."""
    own = {
        name.removeprefix(f"{key}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{key}.")
    }
    if "hada_w1_a" in own:
        change = (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
        dim = len(own["hada_w1_b"])
    else:
        dim, factors = None, []
        for name in ("lokr_w1", "lokr_w2"):
            if name in own:
                factors.append(own[name])
            else:
                dim = len(own[f"{name}_b"])
                factors.append(own[f"{name}_a"] @ own[f"{name}_b"])
        change = torch.kron(*factors).reshape(shape)
    return change * (own["alpha"].item() / dim if "alpha" in own and dim else 1.0)


@every
def test_comfyui_makes_of_a_file_what_peft_makes_of_the_model(
    base: Path, tmp_path: Path, settings: str
) -> None:
    result = trained(base, settings)
    file = export(result, tmp_path)
    tensors = load_file(file)
    for name, layer in adapter_layers(result.module).items():
        weight = layer.base_layer.weight
        key = f"diffusion_model.{official_name(f'{name}.weight')[: -len('.weight')]}"
        found = changed_by_comfyui(tensors, key, weight.shape)
        assert found.norm() > 0.01 * weight.norm(), name
        torch.testing.assert_close(
            found, layer.get_delta_weight("default").detach(), rtol=1e-5, atol=1e-6, msg=name
        )
    with safe_open(file, "pt") as opened:
        assert "diffusers has no reader" in opened.metadata()["ditkit.reader"]


@every
def test_training_goes_on_from_a_file_where_it_stopped(
    base: Path, tmp_path: Path, settings: str
) -> None:
    result = trained(base, settings)
    again = prepared(base, AdapterConfig(init=str(export(result, tmp_path))))
    assert again.origin.adapter.method == SETTINGS[settings].method
    assert again.trainable.keys() == result.trainable.keys()
    torch.testing.assert_close(outputs(again.module), outputs(result.module), rtol=1e-5, atol=1e-6)


@every
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_a_file_merged_into_the_base_is_the_model(
    base: Path, tmp_path: Path, settings: str, strength: float
) -> None:
    result = trained(base, settings)
    merged = prepared(
        base, AdapterConfig(targets=("query",)), merge=(f"{export(result, tmp_path)}@{strength}",)
    )
    for layer in adapter_layers(result.module).values():
        layer.scaling["default"] *= strength
    torch.testing.assert_close(outputs(merged.module), outputs(result.module), rtol=1e-4, atol=1e-5)


@every
def test_the_merged_transformer_is_the_model(base: Path, tmp_path: Path, settings: str) -> None:
    result = trained(base, settings)
    config = ExportConfig(forms=("official",), dtype="fp32")
    (folder,) = export_merged(result.module, SPEC, tmp_path, config, metadata={})
    again = prepared(next(folder.glob("*.safetensors")), AdapterConfig())
    torch.testing.assert_close(outputs(again.module), outputs(result.module), rtol=1e-4, atol=1e-5)


@every
def test_names_are_converted_there_and_back_without_a_bit(
    base: Path, tmp_path: Path, settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = export(trained(base, settings), tmp_path, dtype="bf16")
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    assert run("--adapter", file, "--to", "musubi", "--out", there) == 0
    assert "its factors are bitwise identical" in capsys.readouterr().out
    assert run("--adapter", there, "--to", "official", "--out", back) == 0
    before, after = load_file(file), load_file(back)
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    assert all(name.startswith("lora_unet_") for name in load_file(there))
    capsys.readouterr()
    assert run("--inspect", there, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["matrices"] == {"lokr": "LoKr", "loha": "LoHa"}[SETTINGS[settings].method]
    assert about["presets"] == ["tiny"] and about["norm"] > 0 and not about["not_finite"]
    assert run("--adapter", file, "--rank", "1") == 1
    assert "merge it, then --extract" in capsys.readouterr().err
    merged = tmp_path / "merged"
    assert (
        run("--adapter", file, "--merge", "--base", base, "--dtype", "fp32", "--out", merged) == 0
    )
    assert (outputs(prepared(next(merged.rglob("*.safetensors")),
        AdapterConfig()).module) - outputs(prepared(base,
        AdapterConfig()).module)).norm() > 0.01  # fmt: skip


def kohya(path: Path, **parts: Tensor) -> Path:
    save_file({f"lora_unet_blocks_0_out.{part}": tensor for part, tensor in parts.items()}, path)
    return path


def test_an_alpha_counts_over_a_low_rank_factor_and_not_without_one(
    base: Path, tmp_path: Path
) -> None:
    """As in ComfyUI and LyCORIS, whose files of whole factors have an alpha without a meaning."""
    w1, a, b = torch.randn(4, 4), torch.randn(8, 2), torch.randn(2, 8)
    low = kohya(
        tmp_path / "low.safetensors", lokr_w1=w1, lokr_w2_a=a, lokr_w2_b=b, alpha=torch.tensor(1.0)
    )
    whole = kohya(
        tmp_path / "whole.safetensors", lokr_w1=w1, lokr_w2=a @ b, alpha=torch.tensor(9e9)
    )
    before = prepared(base, AdapterConfig()).module.layers[0].out.weight.detach()
    for file, scale in ((low, 0.5), (whole, 1.0)):
        again = prepared(base, AdapterConfig(targets=("query",)), merge=(str(file),))
        found = again.module.layers[0].out.weight - before
        torch.testing.assert_close(found, scale * torch.kron(w1, a @ b), rtol=1e-4, atol=1e-5)


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "half a factor": ({"lokr_w1": torch.ones(4, 4), "lokr_w2_a": torch.ones(8, 2)},
    "are not a LoKr or LoHa of the layer"),
    "both": (
        {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(8, 8), "lokr_w2_a": torch.ones(8, 2),
        "lokr_w2_b": torch.ones(2, 8)},
        "are not a LoKr or LoHa of the layer",
    ),
    "magnitudes": ({"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(8, 8),
    "dora_scale": torch.ones(32, 1)}, "is of another method"),
    "convolutions": ({"lokr_w1": torch.ones(4, 4), "lokr_t2": torch.ones(2, 2, 3, 3)},
    "a LoKr or LoHa of convolutions"),
    "not a matrix": ({"hada_w1_a": torch.ones(()), "hada_w1_b": torch.ones(1)},
    "are not a LoKr or LoHa of the layer"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_lokr_of_the_model_is_refused_in_a_line(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, says = BAD[what]
    assert run("--inspect", kohya(tmp_path / "x.safetensors", **parts)) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_factors_that_no_setting_makes_are_merged_but_not_trained(
    base: Path, tmp_path: Path
) -> None:
    odd = kohya(
        tmp_path / "odd.safetensors", lokr_w1=torch.randn(2, 16), lokr_w2=torch.randn(16, 2)
    )
    with pytest.raises(
        UserError, match=r"no adapter.decompose_factor makes its factors; merge it with base.merge"
    ):
        prepared(base, AdapterConfig(init=str(odd)))
    prepared(base, AdapterConfig(targets=("query",)), merge=(str(odd),))
    with pytest.raises(UserError, match="which has no adapter.dropout"):
        prepared(base, AdapterConfig(init=str(odd), dropout=0.1))


def test_factors_of_a_file_are_not_replaced_without_a_word(base: Path, tmp_path: Path) -> None:
    file = str(export(trained(base, "lokr"), tmp_path))
    for given in ({"decompose_factor": 2}, {"decompose_both": True}):
        with pytest.raises(
            UserError,
            match="has the factors of adapter.decompose_factor = 4 and decompose_both = false",
        ):
            prepared(base, AdapterConfig(method="lokr", init=file, **given))
    assert (
        prepared(
            base, AdapterConfig(method="lokr", init=file, decompose_factor=4)
        ).origin.adapter.decompose_factor
        == 4
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "lokr", "dropout": 0.1}, "are for adapter.method = lora, and this one is lokr"),
        (
            {"method": "loha", "use_dora": True},
            "use_dora are for adapter.method = lora, and this one is loha",
        ),
        (
            {"method": "loha", "decompose_factor": 4},
            "are for adapter.method = lokr, and this one is loha",
        ),
        ({"method": "lokr", "decompose_factor": 0}, "must be at least 1, or -1"),
    ],
)
def test_settings_that_a_method_does_not_have_are_refused(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        AdapterConfig(**fields)


def test_a_form_with_several_layers_in_one_name_is_refused_and_others_are_named(
    base: Path, tmp_path: Path
) -> None:
    """The toy's diffusers names have q, k and v apart, and its own layer has them in one."""
    result = trained(base, "loha")
    with pytest.raises(
        UserError, match=r"the diffusers form has .*to_q for more or less than one layer"
    ) as caught:
        export(result, tmp_path, "diffusers")
    assert "set export.forms = ['official', 'musubi']" in str(caught.value) and not list(
        tmp_path.iterdir()
    )


def test_a_file_of_another_size_is_refused(base: Path, tmp_path: Path) -> None:
    file = kohya(tmp_path / "x.safetensors", lokr_w1=torch.ones(4, 4), lokr_w2=torch.ones(8, 9))
    with pytest.raises(UserError, match=r"are not a LoKr or LoHa of the layer's \[32, 32\]"):
        prepared(base, AdapterConfig(), merge=(str(file),))


def test_rows_of_a_fused_file_are_merged_into_the_layers_that_they_belong_to(
    base: Path, tmp_path: Path
) -> None:
    """A file may have one LoHa for a third of our fused layer's rows and none for the others, which
    is refused; for all three it is merged."""
    torch.manual_seed(3)
    tensors = {}
    for part in "qkv":
        sizes = {
            "hada_w1_a": (32, 2),
            "hada_w1_b": (2, 32),
            "hada_w2_a": (32, 2),
            "hada_w2_b": (2, 32),
        }
        tensors |= {
            f"transformer.transformer_blocks.0.to_{part}.{name}": torch.randn(size)
            for name, size in sizes.items()
        }
    save_file(tensors, tmp_path / "x.safetensors")
    before = prepared(base, AdapterConfig()).module.layers[0].qkv.base_layer.weight.detach()
    after = prepared(
        base, AdapterConfig(targets=("query",)), merge=(str(tmp_path / "x.safetensors"),)
    )
    change = after.module.layers[0].qkv.weight.detach() - before
    stem = "transformer.transformer_blocks.0.to_"
    expected = [
        changed_by_comfyui(tensors, f"{stem}{part}", torch.Size((32, 32))) for part in "qkv"
    ]
    torch.testing.assert_close(change, torch.cat(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="layers.0.qkv"):
        prepared(base, AdapterConfig(init=str(tmp_path / "x.safetensors")))
    save_file(
        {name: tensor for name, tensor in tensors.items() if "to_q" in name},
        tmp_path / "y.safetensors",
    )
    with pytest.raises(UserError, match="some rows of layers.0.qkv have a loha"):
        prepared(base, AdapterConfig(), merge=(str(tmp_path / "y.safetensors"),))


def test_a_mixed_file_is_merged_unless_a_part_of_it_is_damaged(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(export(trained(base, "lokr"), tmp_path))
    lora = {"lora_A": torch.ones(2, 32), "lora_B": torch.ones(32, 2)}
    tensors |= {
        f"diffusion_model.{official_name('layers.0.query')}.{part}.weight": each
        for part, each in lora.items()
    }
    save_file(tensors, tmp_path / "mixed.safetensors")
    flags = ("--merge", "--base", base, "--dtype", "fp32", "--out", tmp_path / "merged")
    lora["lora_B"][3, 1] = torch.nan
    save_file(tensors, tmp_path / "damaged.safetensors")
    assert run("--adapter", tmp_path / "damaged.safetensors", *flags) == 1
    assert (
        "values of 1 of 6 modules are not finite (NaN or infinite): layers.0.query"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "merged").exists()
    assert run("--adapter", tmp_path / "mixed.safetensors", *flags) == 0


def test_a_small_file_that_stands_for_a_huge_change_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "hada_w1_a": (40_000, 1),
        "hada_w1_b": (1, 40_000),
        "hada_w2_a": (40_000, 1),
        "hada_w2_b": (1, 40_000),
    }
    file = kohya(
        tmp_path / "x.safetensors", **{name: torch.ones(size) for name, size in parts.items()}
    )
    assert run("--inspect", file) == 1
    assert "are not a LoKr or LoHa of the layer" in capsys.readouterr().err


def test_an_alpha_of_zero_changes_nothing_and_cannot_be_trained(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "lokr_w1": torch.ones(4, 4),
        "lokr_w2_a": torch.ones(8, 2),
        "lokr_w2_b": torch.ones(2, 8),
    }
    file = kohya(tmp_path / "x.safetensors", **parts, alpha=torch.tensor(0.0))
    assert run("--inspect", file) == 0
    assert "1 modules change nothing" in capsys.readouterr().out
    with pytest.raises(UserError, match="its scale is not above 0"):
        prepared(base, AdapterConfig(init=str(file)))


def test_a_file_of_another_method_and_patterns_next_to_it_are_refused(
    base: Path, tmp_path: Path
) -> None:
    lokr = str(export(trained(base, "lokr"), tmp_path / "lokr"))
    lora = str(export(prepared(base, AdapterConfig(rank=2)), tmp_path / "lora"))
    for started, says in (
        (
            AdapterConfig(method="lokr", init=lora),
            "has a lora, which adapter.method = lokr cannot start from",
        ),
        (
            AdapterConfig(method="loha", init=lokr),
            "has a lokr, which adapter.method = loha cannot start from",
        ),
        (
            AdapterConfig(method="lokr", init=lokr, rank_pattern=("qkv=1",)),
            "decides ranks and alphas by layer",
        ),
    ):
        with pytest.raises(UserError, match=says):
            prepared(base, started)
