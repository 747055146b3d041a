"""What a run hands to other programs: loaded again, it is the trained model."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import (
    SHARD_BYTES,
    check_export,
    export_adapter,
    export_merged,
)
from ditkit_core.adapters.inject import canonical_name
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource, StoredTensor
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.testing.combinations import every_pair
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToyModel, in_form, native_name

SPEC = altered(TOY, presets={"tiny": ToyArch()})
BOTH = ("official", "diffusers")
FP32 = Precision(matmul=torch.float32)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    torch.manual_seed(0)
    save_file(in_form(ToyModel(ToyArch(), FP32).state_dict(), "official"), folder / "x.safetensors")
    return folder


def prepared(
    base: Path, adapter: AdapterConfig | None = None, *, merge=(), precision=FP32
) -> Model:
    unloaded = model_on_meta(
        SPEC, ModelPaths(transformer=str(base)), adapter or AdapterConfig(rank=4),
        BaseConfig(merge=tuple(merge)), precision=precision
    )  # fmt: skip
    return load_weights(
        unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=0
    )


def trained(base: Path, adapter: AdapterConfig | None = None, *, precision=FP32) -> Model:
    """As after some steps: every trained parameter has moved."""
    result = prepared(base, adapter, precision=precision)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in result.trainable.items():
        step = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data += step.abs() if "magnitude" in name else step.to(parameter.dtype)
    return result


def outputs(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    latents, text = (
        torch.randn(4, 2, 3, 4, generator=generator),
        torch.randn(5, 8, generator=generator),
    )
    with torch.no_grad():
        return model.eval()(ToyInputs([latents], torch.tensor([0.3]), [text]))[0]


def stored_in(path: Path) -> dict[str, StoredTensor]:
    return dict(SafetensorsSource.open(path).tensors)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize(
    "adapter",
    [AdapterConfig(rank=4), AdapterConfig(rank=4, alpha=3.0), AdapterConfig(rank=4, use_rslora=True, targets=("attention",))],
    ids=["alpha=rank", "alpha=3", "rslora"],
)  # fmt: skip
def test_an_exported_adapter_merged_into_the_base_is_the_trained_model(
    base, tmp_path, form, adapter
):
    model = trained(base, adapter).module
    config = ExportConfig(forms=(form,), dtype="fp32")
    (file,) = export_adapter(model, SPEC, tmp_path / "exports", "adapter", config, metadata={})
    again = prepared(base, merge=[str(file)]).module
    assert (outputs(model) - outputs(prepared(base).module)).norm() > 0.02 * outputs(model).norm()
    torch.testing.assert_close(outputs(again), outputs(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", BOTH)
def test_training_goes_on_from_an_exported_adapter_where_it_stopped(base, tmp_path, form):
    model = trained(base, AdapterConfig(rank=4, alpha=3.0)).module
    config = ExportConfig(forms=(form,), dtype="fp32")
    (file,) = export_adapter(model, SPEC, tmp_path, "adapter", config, metadata={})
    again = prepared(base, AdapterConfig(init=str(file)))
    torch.testing.assert_close(outputs(again.module), outputs(model), rtol=1e-4, atol=1e-5)


def test_files_are_named_by_form_and_step_and_carry_what_the_caller_says(base, tmp_path):
    model = trained(base).module
    metadata = {"base": json.dumps("x"), "versions": json.dumps({"torch": "2"})}
    files = export_adapter(
        model, SPEC, tmp_path / "e", "adapter", ExportConfig(forms=BOTH), metadata=metadata
    )
    files += export_adapter(
        model, SPEC, tmp_path / "e", "adapter-step-000020", ExportConfig(), metadata=metadata
    )
    names = [
        "adapter.safetensors",
        "adapter_diffusers.safetensors",
        "adapter-step-000020.safetensors",
    ]
    assert [file.name for file in files] == names
    assert {file.name for file in (tmp_path / "e").iterdir()} == set(names)
    for file in files:
        with safe_open(file, "pt") as stored:
            assert stored.metadata().items() >= metadata.items()
        assert {tensor.dtype for tensor in stored_in(file).values()} == {torch.bfloat16}


def test_what_could_not_be_exported_is_refused_before_training():
    check_export(SPEC, ExportConfig(forms=BOTH), AdapterConfig())
    check_export(SPEC, ExportConfig(), AdapterConfig(method="full", use_dora=True))
    check_export(SPEC, ExportConfig(forms=BOTH), AdapterConfig(use_dora=True))
    with pytest.raises(
        UserError, match="'comfy' is not a form of this model; choose one of official, diffusers"
    ):
        check_export(SPEC, ExportConfig(forms=("comfy",)), AdapterConfig())


@pytest.mark.parametrize(
    "bad", [{"dtype": "fp16"}, {"forms": ()}, {"forms": ("official", "official")}], ids=str
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError, match="export."):
        ExportConfig(**bad)


@pytest.mark.parametrize(
    ("shard_bytes", "form", "use_dora"), every_pair([10**9, 20_000, 1], BOTH, [False, True])
)
def test_a_merged_transformer_is_the_trained_model(base, tmp_path, form, shard_bytes, use_dora):
    model = trained(base, AdapterConfig(rank=4, alpha=3.0, use_dora=use_dora)).module
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = ExportConfig(forms=(form,), dtype="fp32", merged=True)
    (folder,) = export_merged(
        model, SPEC, tmp_path / "e", config, metadata={}, shard_bytes=shard_bytes
    )
    assert folder == tmp_path / "e" / f"transformer_{form}"
    again = prepared(folder, AdapterConfig(method="full")).module
    torch.testing.assert_close(outputs(again), outputs(model), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    files = sorted(folder.glob("*.safetensors"))
    sizes = [sum(t.num_bytes for t in stored_in(file).values()) for file in files]
    if len(files) > 1:
        assert all(
            size <= shard_bytes or len(stored_in(file)) == 1
            for size, file in zip(sizes, files, strict=True)
        )
        index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
        assert set(index["weight_map"].values()) == {file.name for file in files}
    else:
        assert files == [folder / "diffusion_pytorch_model.safetensors"]
    assert (len(files) > 1) == (shard_bytes < 10**9)


def test_the_official_form_is_one_file_of_any_size(base, tmp_path, monkeypatch):
    """ComfyUI reads a model from one file, and would find the names of the others missing."""
    monkeypatch.setitem(SHARD_BYTES, "diffusers", 20_000)
    official, diffusers = export_merged(
        trained(base).module, SPEC, tmp_path, ExportConfig(forms=BOTH), metadata={}
    )
    assert BOTH == ("official", "diffusers") and len(list(diffusers.glob("*.safetensors"))) > 1
    assert [file.name for file in official.iterdir()] == ["diffusion_pytorch_model.safetensors"]


def test_a_full_fine_tune_is_exported_whole_in_its_dtypes(base, tmp_path):
    model = trained(
        base, AdapterConfig(method="full"), precision=Precision(matmul=torch.bfloat16)
    ).module
    (folder,) = export_merged(
        model, SPEC, tmp_path / "e", ExportConfig(), metadata={"config": "{}"}
    )
    again = prepared(
        folder, AdapterConfig(method="full"), precision=Precision(matmul=torch.bfloat16)
    ).module
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    stored = {native_name(key): t.dtype for key, t in stored_in(folder).items()}
    assert stored == {
        n: torch.float32 if SPEC.precision.keep_fp32(n) else torch.bfloat16
        for n in model.state_dict()
    }


def test_a_second_export_leaves_nothing_of_the_first(base, tmp_path):
    model = trained(base).module
    config = ExportConfig(merged=True)
    export_merged(model, SPEC, tmp_path, config, metadata={}, shard_bytes=20_000)
    (folder,) = export_merged(model, SPEC, tmp_path, config, metadata={})
    assert [file.name for file in folder.iterdir()] == ["diffusion_pytorch_model.safetensors"]


def test_the_config_json_goes_with_the_form_whose_readers_want_it(base, tmp_path):
    (tmp_path / "config.json").write_text('{"depth": 2, "_name_or_path": "/srv/mine/base"}')
    folders = export_merged(
        trained(base).module,
        SPEC,
        tmp_path,
        ExportConfig(forms=BOTH),
        metadata={},
        config_json=tmp_path / "config.json",
    )
    assert [(folder / "config.json").exists() for folder in folders] == [False, True]
    assert json.loads((folders[1] / "config.json").read_text()) == {
        "depth": 2,
        "_name_or_path": "base",
    }


def test_a_merged_transformer_has_no_trace_of_the_adapter_in_its_names(base, tmp_path):
    model = trained(base).module
    (folder,) = export_merged(model, SPEC, tmp_path, ExportConfig(), metadata={})
    natives = {native_name(key) for key in stored_in(folder)}
    assert natives == {canonical_name(name) for name in model.state_dict() if ".lora_" not in name}


@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(base, tmp_path, monkeypatch, what):
    model = trained(base).module

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="cannot write .*No space left") as error:
        if what == "adapter":
            export_adapter(model, SPEC, tmp_path / "e", "adapter", ExportConfig(), metadata={})
        else:
            export_merged(model, SPEC, tmp_path / "e", ExportConfig(), metadata={})
    assert "\n" not in str(error.value)
    assert [file for file in (tmp_path / "e").rglob("*") if file.is_file()] == []
