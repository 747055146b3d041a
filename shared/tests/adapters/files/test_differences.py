"""Files with differences of whole parameters next to low-rank matrices, and names that torch's
wrappers or other programs write."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.adapters.files.differences import described
from ditkit_core.adapters.files.identify import find_adapter, layers_of, parameters_of
from ditkit_core.adapters.files.inspect import inspect_file, inspection_text
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.commands import cli
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form

BUILD, ARCH, NAMES = TOY.architecture.build, ToyArch(), TOY.architecture.names
LAYERS, PARAMETERS = layers_of(BUILD, ARCH), parameters_of(BUILD, ARCH)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LORA = {
    "diffusion_model.blocks.0.out.lora_A.weight": values(4, 32),
    "diffusion_model.blocks.0.out.lora_B.weight": values(32, 4),
}
DIFFERENCES = {
    "diffusion_model.blocks.0.out.diff_b": values(32),
    "diffusion_model.blocks.0.qkv.diff": values(96, 32),
    "lora_unet_blocks_1_qkv.b_norm": values(96),
    "blocks.1.mlp.0.diff_b": values(64),
}
CHANGED = {"layers.0.out.bias", "layers.0.qkv.weight", "layers.1.qkv.bias", "layers.1.mlp.0.bias"}


def file_of(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, path)
    return path


def base_of(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    state = ToyModel(ARCH, Precision(matmul=torch.float32)).state_dict()
    save_file(in_form(state, "official"), path)
    return dict(state)


def run(*argv: object) -> int:
    return cli.run(TOY, "export", [str(argument) for argument in argv])


def test_merging_adds_differences_at_the_strength_and_the_low_rank_product_with_them(
    tmp_path: Path,
) -> None:
    file = open_adapter(
        file_of(tmp_path / "x.safetensors", LORA | DIFFERENCES),
        NAMES,
        LAYERS,
        parameters=PARAMETERS,
    )
    assert (
        set(file.differences) == CHANGED
        and described(list(file.differences)) == "3 biases, 1 weight"
    )
    edits = merge_into([(file, 0.5)])
    assert set(edits) == CHANGED | {"layers.0.out.weight"}
    by_name = dict(
        zip(
            (
                "layers.0.out.bias",
                "layers.0.qkv.weight",
                "layers.1.qkv.bias",
                "layers.1.mlp.0.bias",
            ),
            DIFFERENCES.values(),
            strict=True,
        )
    )
    for name, edit in edits.items():
        parameter = values(*PARAMETERS[name])
        expected = (
            parameter + 0.5 * by_name[name]
            if name in by_name
            else parameter
            + 0.5
            * LORA["diffusion_model.blocks.0.out.lora_B.weight"]
            @ LORA["diffusion_model.blocks.0.out.lora_A.weight"]
        )
        edit(parameter)
        torch.testing.assert_close(parameter, expected)
    assert merge_into([(file, 0.0)]) == {}


def test_a_bias_of_b_has_the_scale_of_its_lora(tmp_path: Path) -> None:
    extra = {
        "diffusion_model.blocks.0.out.alpha": torch.tensor(2.0),
        "diffusion_model.blocks.0.out.lora_B.bias": values(32),
    }
    file = open_adapter(
        file_of(tmp_path / "x.safetensors", LORA | extra), NAMES, LAYERS, parameters=PARAMETERS
    )
    bias = torch.zeros(32)
    merge_into([(file, 1.0)])["layers.0.out.bias"](bias)
    torch.testing.assert_close(bias, 0.5 * values(32))


@pytest.mark.parametrize(
    ("key", "shape"), [("diffusion_model.blocks.0.gone.diff", (4,)), ("diffusion_model.blocks.0.out.diff_b", (31,)), ("diffusion_model.blocks.0.out.diff_m", (32,))]
)  # fmt: skip
def test_a_difference_of_another_model_is_refused(
    tmp_path: Path, key: str, shape: tuple[int, ...]
) -> None:
    path = file_of(tmp_path / "x.safetensors", LORA | {key: values(*shape)})
    with pytest.raises(
        UserError, match=rf"1 differences fit no parameter of this model: {key} \[{shape[0]}\]"
    ):
        open_adapter(path, NAMES, LAYERS, parameters=PARAMETERS)


@pytest.mark.parametrize("keys", [("diff_b",), ("diff_b", "diff_m"), ("diff",)])
def test_wherever_nothing_is_merged_they_are_refused_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, ...]
) -> None:
    path = file_of(
        tmp_path / "x.safetensors",
        LORA | {f"diffusion_model.blocks.0.out.{key}": values(32) for key in keys},
    )
    answers = []
    with pytest.raises(UserError) as error:
        open_adapter(path, NAMES, LAYERS)  # as adapter.init, sample.adapter and base.assistant do
    answers.append(str(error.value))
    assert run("--adapter", path, "--to", "diffusers") == 1
    answers.append(capsys.readouterr().err.removeprefix("error: ").strip())
    assert answers[0] == answers[1]
    assert answers[0].startswith(
        f"{path} also adds differences to whole weights, biases or norms ({len(keys)} keys: "
    )
    assert answers[0].endswith(
        f"set base.merge, or merge it into a transformer with the export command: --adapter {path} "
        f"--merge --base BASE"
    )


def test_inspect_says_that_they_are_there(tmp_path: Path) -> None:
    about = inspect_file(file_of(tmp_path / "x.safetensors", LORA | DIFFERENCES), TOY)
    assert about["differences"] == 4 and about["presets"]
    assert (
        "also adds differences to whole weights, biases or norms, by 4 keys: of ditkit, base.merge "
        "and --merge" in inspection_text(about)
    )
    assert "differences to" not in inspection_text(
        inspect_file(file_of(tmp_path / "y.safetensors", LORA), TOY)
    )


def test_the_export_command_and_a_run_merge_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, base = (
        file_of(tmp_path / "x.safetensors", LORA | DIFFERENCES),
        tmp_path / "base.safetensors",
    )
    state = base_of(base)
    assert (
        run(
            "--adapter",
            path,
            "--merge",
            "--base",
            base,
            "--dtype",
            "fp32",
            "--strength",
            "0.5",
            "--out",
            tmp_path / "out",
        )
        == 0
    )
    assert (
        "1 modules and differences of 3 biases, 1 weight merged at strength 0.5"
        in capsys.readouterr().out
    )
    merged = load_file(
        tmp_path / "out" / "transformer_official" / "diffusion_pytorch_model.safetensors"
    )
    model = model_on_meta(
        TOY,
        ModelPaths(transformer=str(base), preset="tiny"),
        AdapterConfig(rank=2),
        BaseConfig(merge=(f"{path}@0.5",)),
        precision=Precision(matmul=torch.float32),
    )
    for name in PARAMETERS:
        (official,) = NAMES.from_native["official"](name)
        read = model.origin.stored.read(name)
        assert torch.equal(merged[official.name].view_as(read), read)
        assert torch.equal(read, state[name]) == (name not in CHANGED | {"layers.0.out.weight"})


@pytest.mark.parametrize(
    "wrapped", ["_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."]
)
def test_names_with_the_marks_of_a_wrapper_are_the_models_own(tmp_path: Path, wrapped: str) -> None:
    inside = (
        (lambda name: f"{wrapped}{name}")
        if wrapped == "module."
        else (lambda name: name.replace("blocks.0.", f"blocks.0.{wrapped}"))
    )
    base_of(tmp_path / "base.safetensors")
    state = load_file(tmp_path / "base.safetensors")
    file_of(
        tmp_path / "wrapped.safetensors", {inside(name): tensor for name, tensor in state.items()}
    )
    assert set(SafetensorsSource.open(tmp_path / "wrapped.safetensors").tensors) == set(state)
    found = find_adapter(
        file_of(tmp_path / "x.safetensors", {inside(key): tensor for key, tensor in LORA.items()}),
        TOY,
    )
    assert list(found.file.modules) == ["layers.0.out"] and torch.equal(
        found.file.read("layers.0.out").up, values(32, 4)
    )


def test_a_tensor_that_is_there_with_and_without_a_wrapper_is_refused(tmp_path: Path) -> None:
    path = file_of(
        tmp_path / "x.safetensors", {"a.weight": values(2), "_orig_mod.a.weight": values(2)}
    )
    with pytest.raises(
        UserError, match=r"has 'a.weight' twice, with and without the marks of a wrapper"
    ):
        SafetensorsSource.open(path)


@pytest.mark.parametrize(
    ("stem", "form"),
    [
        ("lora_unet_blocks_0.out", "musubi"),
        ("lora_unet_blocks_0__orig_mod_out", "musubi"),
        ("lora_unet__orig_mod_blocks_0_out", "musubi"),
        ("lycoris_blocks_0_out", "lycoris"),
        ("lycoris_blocks.0.out", "lycoris"),
    ],
)
def test_names_of_other_programs_are_read_and_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stem: str, form: str
) -> None:
    down, up = LORA.values()
    path = file_of(
        tmp_path / "x.safetensors",
        {
            f"{stem}.lora_down.weight": down,
            f"{stem}.lora_up.weight": up,
            f"{stem}.alpha": torch.tensor(4.0),
        },
    )
    about = inspect_file(path, TOY)
    assert about["form"] == form and "adapter in the form of" in inspection_text(about)
    assert run("--adapter", path, "--to", "official") == 0
    assert torch.equal(
        load_file(tmp_path / "x_official.safetensors")[
            "diffusion_model.blocks.0.out.lora_B.weight"
        ],
        up,
    )


def test_a_file_of_differences_alone_is_inspected_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As LyCORIS' `full` writes it."""
    path, base = file_of(tmp_path / "x.safetensors", DIFFERENCES), tmp_path / "base.safetensors"
    state = base_of(base)
    about = inspect_file(path, TOY)
    assert about["presets"] and "differences of whole parameters, by 4 keys" in inspection_text(
        about
    )
    assert (
        run(
            "--adapter",
            path,
            "--merge",
            "--base",
            base,
            "--dtype",
            "fp32",
            "--out",
            tmp_path / "out",
        )
        == 0
    )
    assert "0 modules and differences of 3 biases, 1 weight merged" in capsys.readouterr().out
    merged = load_file(
        tmp_path / "out" / "transformer_official" / "diffusion_pytorch_model.safetensors"
    )
    changed = state["layers.0.qkv.weight"] + values(96, 32)
    assert torch.equal(merged["blocks.0.qkv.weight"], changed)
    edits = merge_into([(open_adapter(path, NAMES, LAYERS, parameters=PARAMETERS), 1.0)])
    assert set(edits) == CHANGED
    assert run("--adapter", path, "--to", "official") == 1
    assert "which only merging can use" in capsys.readouterr().err


def test_a_strength_stands_behind_the_file_or_in_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, base = file_of(tmp_path / "x.safetensors", LORA), tmp_path / "base.safetensors"
    base_of(base)
    merge = ("--merge", "--base", base, "--dtype", "fp32", "--out")
    assert run("--adapter", f"{path}@0.5", *merge, tmp_path / "behind") == 0
    assert run("--adapter", path, "--strength", "0.5", *merge, tmp_path / "flag") == 0
    name = "transformer_official/diffusion_pytorch_model.safetensors"
    behind, flag = (load_file(tmp_path / folder / name) for folder in ("behind", "flag"))
    assert all(torch.equal(behind[key], flag[key]) for key in flag)
    capsys.readouterr()
    assert run("--adapter", f"{path}@0.5", "--strength", "2", *merge, tmp_path / "two") == 1
    assert "are two; give one" in capsys.readouterr().err
    assert run("--adapter", f"{path}@0.5", "--to", "official") == 1
    assert "a strength is for --merge" in capsys.readouterr().err


def test_differences_that_fit_no_preset_are_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.safetensors", {"diffusion_model.blocks.0.out.diff_b": values(31)})
    with pytest.raises(UserError, match="1 differences fit no parameter of this model"):
        inspect_file(path, TOY)
