"""Adapter files as the export command works on them: converted, reduced, merged, and what each
refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.adapters.files import keys
from ditkit_core.adapters.files import write as adapter_writer
from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.commands import cli
from ditkit_core.engine.placement import place_blocks
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.adapter_formats import (
    ADAPTER_FORMS,
    FORMATS,
    PREFIXES,
    VERIFIED,
    KeyFormat,
)
from ditkit_core.models.adapter_programs import AdapterRules, ProgramRow
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.testing.combinations import every_value
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToyModel, in_form

SPEC = altered(TOY, presets={"tiny": ToyArch()})
LAYERS = layers_of(ToyModel, ToyArch())
MODULES = [name for name in LAYERS if name.startswith("layers.")]
FORMS = ("official", "diffusers", "diffsynth", "musubi")
RANK = 4


def factors(module: str, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [out, rank] of a module."""
    generator = torch.Generator().manual_seed(MODULES.index(module))
    out, width = LAYERS[module]
    return torch.randn(rank, width, generator=generator), torch.randn(
        out, rank, generator=generator
    )


def key(module: str) -> str:
    return module.replace("layers.", "blocks.")


def official(path: Path, modules: list[str] = MODULES, **header: str) -> Path:
    tensors = {}
    for module in modules:
        down, up = factors(module)
        tensors |= {
            f"diffusion_model.{key(module)}.lora_A.weight": down,
            f"diffusion_model.{key(module)}.lora_B.weight": up,
        }
    save_file(tensors, path, header or None)
    return path


def kohya(path: Path, alpha: float) -> Path:
    tensors = {}
    for module in MODULES:
        stem = f"lora_unet_{key(module).replace('.', '_')}"
        down, up = factors(module)
        tensors |= {
            f"{stem}.lora_down.weight": down,
            f"{stem}.lora_up.weight": up,
            f"{stem}.alpha": torch.tensor(alpha),
        }
    save_file(tensors, path)
    return path


def run(*argv: object, spec: Any = SPEC) -> int:
    return cli.run(spec, "export", [str(argument) for argument in argv])


def convert(path: Path, out: Path, *argv: object, spec: Any = SPEC) -> Path:
    assert run("--adapter", path, "--out", out, *argv, spec=spec) == 0
    return out


def scaled(path: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each module, with the scale in B."""
    file = open_adapter(path, SPEC.architecture.names, LAYERS)
    return {
        name: (file.read(name).down, file.read(name).up.double() * module.scale)
        for name, module in file.modules.items()
    }


def same(one: Path, other: Path) -> bool:
    """Whether two files multiply to the same numbers, bitwise."""
    ours, theirs = scaled(one), scaled(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name][0], theirs[name][0]) and torch.equal(ours[name][1], theirs[name][1])
        for name in ours
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "base.safetensors"
    save_file(
        in_form(ToyModel(ToyArch(), Precision(matmul=torch.float32)).state_dict(), "official"), path
    )
    return path


def outputs(transformer: Path, *merge: str) -> torch.Tensor:
    """What the model makes of fixed inputs, with adapters merged in as a run merges them."""
    unloaded = model_on_meta(
        SPEC, ModelPaths(transformer=str(transformer), preset="tiny"), AdapterConfig(method="full"),
        BaseConfig(merge=merge),
        precision=Precision(matmul=torch.float32),
    )  # fmt: skip
    model = load_weights(
        unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=0
    ).module
    generator = torch.Generator().manual_seed(2)
    latents, text = (
        torch.randn(4, 2, 3, 4, generator=generator),
        torch.randn(5, 8, generator=generator),
    )
    with torch.no_grad():
        return run_plain(model, ToyInputs([latents], torch.tensor([0.3]), [text]))[0]


@pytest.mark.parametrize(("first", "second"), every_value(FORMS, [*FORMS[1:], FORMS[0]]))
def test_any_form_becomes_any_other_and_is_the_same_adapter_bitwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    source = official(tmp_path / "x.safetensors")
    once = convert(source, tmp_path / "1.safetensors", "--to", first)
    assert "products of the written matrices are bitwise identical" in capsys.readouterr().out
    twice = convert(once, tmp_path / "2.safetensors", "--to", second)
    assert "products of the written matrices are bitwise identical" in capsys.readouterr().out
    back = convert(twice, tmp_path / "3.safetensors", "--to", "official")
    assert same(source, once) and same(source, twice) and same(source, back)
    original, returned = load_file(source), load_file(back)
    assert original.keys() == returned.keys()
    assert all(torch.equal(original[name], returned[name]) for name in original)


@pytest.mark.parametrize("form", FORMS)
def test_a_converted_file_gives_a_base_the_same_bits(base: Path, tmp_path: Path, form: str) -> None:
    source = official(tmp_path / "x.safetensors")
    file = convert(source, tmp_path / "y.safetensors", "--to", form)
    expected = outputs(base, str(source))
    assert torch.equal(outputs(base, str(file)), expected)
    assert not torch.equal(outputs(base), expected)


@pytest.mark.parametrize(
    ("form", "example"),
    [
        ("official", "diffusion_model.blocks.0.qkv.lora_A.weight"),
        ("diffusers", "transformer.transformer_blocks.0.to_q.lora_A.weight"),
        ("diffsynth", "blocks.0.qkv.lora_A.default.weight"),
        ("musubi", "lora_unet_blocks_0_qkv.lora_down.weight"),
    ],
)
def test_each_form_has_its_readers_keys(tmp_path: Path, form: str, example: str) -> None:
    tensors = load_file(
        convert(official(tmp_path / "x.safetensors"), tmp_path / "y.safetensors", "--to", form)
    )
    assert example in tensors
    alphas = {name: float(tensor) for name, tensor in tensors.items() if name.endswith(".alpha")}
    assert set(alphas.values()) == ({RANK} if form == "musubi" else set())
    assert ("lora_unet_blocks_0_qkv.alpha" in alphas) == (form == "musubi")


def test_a_form_is_a_row_of_the_table_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = KeyFormat(
        name="made_up",
        title="a made-up program (net__)",
        prefixes=("net__",),
        down=".lora.down.weight",
        up=".lora.up.weight",
        naming="diffusers",
        underscores=True,
        scale="alpha",
        aliases=("made-up-trainer",),
    )
    monkeypatch.setitem(FORMATS, "made_up", row)
    monkeypatch.setitem(ADAPTER_FORMS, "made_up", row)
    monkeypatch.setattr(keys, "PREFIXES", ["net__", *PREFIXES])
    source = official(tmp_path / "x.safetensors")
    file = convert(source, tmp_path / "y.safetensors", "--to", "made_up")
    assert "net__transformer_blocks_0_to_q.lora.down.weight" in load_file(file)
    assert "net__transformer_blocks_0_to_q.alpha" in load_file(file)
    back = convert(file, tmp_path / "z.safetensors", "--to", "official")
    assert same(source, file) and same(source, back)
    capsys.readouterr()
    assert run("--inspect", file) == 0
    assert "in the form of a made-up program (net__)" in capsys.readouterr().out
    assert run("--adapter", source, "--to", "made-up-traner") == 2
    assert "did you mean made_up?" in capsys.readouterr().err


def test_the_names_of_a_file_without_prefixes_are_the_familys(tmp_path: Path) -> None:
    spec = altered(SPEC, names=replace(SPEC.architecture.names, bare="diffusers"))
    file = convert(
        official(tmp_path / "x.safetensors"),
        tmp_path / "y.safetensors",
        "--to",
        "diffsynth",
        spec=spec,
    )
    assert "transformer_blocks.0.to_q.lora_A.default.weight" in load_file(file)
    assert same(tmp_path / "x.safetensors", file)


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_that_is_a_power_of_two_is_kept_bitwise(tmp_path: Path, form: str) -> None:
    source = kohya(tmp_path / "x.safetensors", alpha=1.0)
    file = convert(source, tmp_path / "y.safetensors", "--to", form)
    assert same(source, file)
    back = convert(file, tmp_path / "z.safetensors", "--to", "musubi")
    assert same(source, back)


def test_another_scale_is_kept_where_the_form_has_a_place_for_it_and_rounded_into_b_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = kohya(tmp_path / "x.safetensors", alpha=1.2)
    again = convert(source, tmp_path / "again.safetensors", "--to", "musubi")
    assert "bitwise identical" in capsys.readouterr().out
    original, written = load_file(source), load_file(again)
    assert original.keys() == written.keys() and all(
        torch.equal(original[name], written[name]) for name in original
    )
    folded = convert(source, tmp_path / "folded.safetensors", "--to", "official")
    assert "(rounded to fp32)" in capsys.readouterr().out
    assert not same(source, folded)
    for name, (down, up) in scaled(folded).items():
        torch.testing.assert_close(down, factors(name)[0], rtol=0, atol=0)
        torch.testing.assert_close(up, factors(name)[1].double() * 0.3, rtol=1e-6, atol=0)


def test_bf16_rounds_and_the_size_of_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = official(tmp_path / "x.safetensors")
    half = convert(source, tmp_path / "y.safetensors", "--dtype", "bf16")
    said = capsys.readouterr().out
    assert "(rounded to bf16)" in said and {
        tensor.dtype for tensor in load_file(half).values()
    } == {torch.bfloat16}
    worst = float(said.split("equal up to ")[1].split()[0])
    dense = [
        (up @ down.double(), factors(name)[1] @ factors(name)[0])
        for name, (down, up) in scaled(half).items()
    ]
    assert worst == pytest.approx(max(float((a - b).norm() / b.norm()) for a, b in dense), rel=0.1)
    again = convert(half, tmp_path / "z.safetensors", "--to", "musubi")
    assert same(half, again), "bf16 goes round without another rounding"


def test_a_file_goes_on_in_its_own_form_and_dtype_next_to_itself(tmp_path: Path) -> None:
    convert(
        official(tmp_path / "x.safetensors"),
        tmp_path / "k.safetensors",
        "--to",
        "musubi",
        "--dtype",
        "bf16",
    )
    assert run("--adapter", tmp_path / "k.safetensors", "--rank", "2") == 0
    tensors = load_file(tmp_path / "k_rank2.safetensors")
    assert tensors["lora_unet_blocks_0_qkv.lora_down.weight"].shape == (2, 32)
    assert tensors["lora_unet_blocks_0_qkv.lora_down.weight"].dtype == torch.bfloat16


def test_headers_keep_what_is_still_true(tmp_path: Path) -> None:
    header = {
        "base": "b",
        "ss_network_dim": "4",
        "ss_network_alpha": "4",
        VERIFIED: "diffusers, as trained",
        "sshs_model_hash": "1",
        "modelspec.hash_sha256": "2",
        "modelspec.title": "t",
        "ditkit.config": '[data]\nfolder = "/srv/somebody/cats"\n',  # as older versions wrote it
    }
    source = official(tmp_path / "x.safetensors", **header)
    for form in ("musubi", "diffusers", "official"):
        with safe_open(
            convert(source, tmp_path / f"{form}.safetensors", "--to", form, "--rank", "2"), "pt"
        ) as file:
            found = file.metadata()
        assert (found["base"], found["modelspec.title"]) == ("b", "t")
        assert found["ditkit.config"] == '[data]\nfolder = "cats"\n'
        assert "sshs_model_hash" not in found and "modelspec.hash_sha256" not in found
        assert found.get("ss_network_dim") == ("2" if form == "musubi" else None)
        assert found.get("ss_network_alpha") == ("2" if form == "musubi" else None)
        assert VERIFIED not in found, "of the other file"
        assert json.loads(found["made_from"]) == {
            "file": "x.safetensors",
            "form": form,
            "rank": "2",
        }
        assert ("lora_adapter_metadata" in found) == (form == "diffusers")


def test_a_lower_rank_is_the_nearest_product_and_says_what_it_keeps(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = kohya(tmp_path / "x.safetensors", alpha=2.0)
    file = convert(source, tmp_path / "y.safetensors", "--rank", "2", "--to", "official")
    said = capsys.readouterr().out
    kept = []
    for name, (down, up) in scaled(file).items():
        dense = 0.5 * factors(name)[1].double() @ factors(name)[0].double()
        u, s, vh = torch.linalg.svd(dense)
        torch.testing.assert_close(
            up @ down.double(), u[:, :2] * s[:2] @ vh[:2], rtol=1e-5, atol=1e-5
        )
        kept.append(float(s[:2].square().sum() / s.square().sum()))
    assert f"worst {min(kept):.2%}" in said and f"of {len(MODULES)} modules" in said
    convert(source, tmp_path / "z.safetensors", "--rank", "auto:0.8")
    for name, (down, _) in scaled(tmp_path / "z.safetensors").items():
        s = torch.linalg.svdvals(factors(name)[1].double() @ factors(name)[0].double())
        shares = s.square().cumsum(0) / s.square().sum()
        assert len(down) == int((shares < 0.8).sum()) + 1


def test_readers_that_want_all_of_a_block_get_zeros_and_they_go_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def all_of_a_block(form: str, modules: Any) -> list[str]:
        return [name for name in MODULES if form == "musubi" and name not in modules]

    programs = (
        ProgramRow(program="one", when=lambda modules: len(modules) == len(MODULES)),
        ProgramRow(program="one", misreads="rejects it"),
        ProgramRow(program="other", misreads="loads nothing"),
    )
    spec = altered(SPEC, rules=AdapterRules(fillers=all_of_a_block, programs=programs))
    source = official(tmp_path / "x.safetensors", MODULES[:2])
    file = convert(source, tmp_path / "y.safetensors", "--to", "musubi", spec=spec)
    said = capsys.readouterr().out
    assert f"{len(MODULES) - 2} modules are written as zeros" in said
    assert "loaded whole by one (other loads nothing)" in said
    found = scaled(file)
    assert set(found) == set(MODULES) and all(not found[name][1].any() for name in MODULES[2:])
    assert same(source, convert(file, tmp_path / "z.safetensors", "--to", "official", spec=spec))


@pytest.mark.parametrize("form", ["official", "diffusers"])
@pytest.mark.parametrize("strength", [None, 0.5])
def test_a_file_is_merged_into_a_base_without_a_run(
    base: Path, tmp_path: Path, form: str, strength: float | None
) -> None:
    source = kohya(tmp_path / "x.safetensors", alpha=2.0)
    flags = [] if strength is None else ["--strength", strength]
    argv = ["--adapter", source, "--merge", "--base", base, "--to", form, "--dtype", "fp32", *flags]
    assert run(*argv) == 0
    merged = tmp_path / "x_merged" / f"transformer_{form}"
    assert torch.equal(outputs(merged), outputs(base, f"{source}@{strength or 1.0}"))
    assert run(*argv) == 1, "nothing is written over"


def test_dora_goes_where_it_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = official(tmp_path / "x.safetensors")
    tensors = load_file(source)
    for module in MODULES:
        tensors[f"diffusion_model.{key(module)}.dora_scale"] = (
            torch.rand(LAYERS[module][0], 1) + 0.5
        )
    save_file(tensors, source)
    assert run("--adapter", source, "--to", "musubi") == 1
    assert "do not reproduce DoRA" in capsys.readouterr().err
    file = open_adapter(
        convert(source, tmp_path / "y.safetensors", "--to", "diffusers"),
        SPEC.architecture.names,
        LAYERS,
    )
    for module in MODULES:
        magnitude = file.read(module).magnitude
        assert magnitude is not None
        assert torch.equal(
            magnitude, tensors[f"diffusion_model.{key(module)}.dora_scale"].flatten()
        )
    assert run("--adapter", source, "--rank", "2", "--to", "diffusers") == 1
    assert "DoRA" in capsys.readouterr().err


def test_dora_goes_to_comfyui_and_back_with_the_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = official(tmp_path / "x.safetensors")
    tensors = load_file(source)
    for module in MODULES:
        tensors[f"diffusion_model.{key(module)}.dora_scale"] = (
            torch.rand(LAYERS[module][0], 1) + 0.5
        )
    save_file(tensors, source)
    flags = ("--base", base, "--dtype", "fp32")
    theirs = convert(
        source, tmp_path / "theirs.safetensors", "--to", "diffusers", "--dtype", "fp32"
    )
    capsys.readouterr()
    assert run("--adapter", theirs, "--to", "official") == 1
    error = capsys.readouterr().err
    assert (
        "the base is needed to convert them: give --base FILE" in error and error.count("\n") == 1
    )
    comfy = convert(theirs, tmp_path / "comfy.safetensors", "--to", "official", *flags)
    assert "dora_scale" in min(load_file(comfy)) and load_file(comfy).keys() == tensors.keys()
    capsys.readouterr()
    assert run("--inspect", comfy, "--json") == 0
    assert (
        "as ComfyUI computes it" in json.loads(capsys.readouterr().out)["metadata"]["ditkit.dora"]
    )
    back = convert(comfy, tmp_path / "back.safetensors", "--to", "diffusers", *flags)
    for name, tensor in load_file(back).items():
        torch.testing.assert_close(tensor, load_file(theirs)[name], rtol=1e-5, atol=1e-6)
    for file in (source, theirs, back):
        torch.testing.assert_close(
            outputs(base, str(file)), outputs(base, str(comfy)), rtol=1e-4, atol=1e-5
        )


def test_of_a_file_with_an_adapter_for_each_expert_one_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the form stacks the others, at twice the rank
    modules = [name for name in MODULES if name.endswith(("qkv", "mlp.0"))]
    one = load_file(
        convert(
            official(tmp_path / "x.safetensors", modules),
            tmp_path / "y.safetensors",
            "--to",
            "diffusers",
        )
    )
    both = one | {
        name.replace("transformer.", "transformer_2.", 1): 2 * tensor
        for name, tensor in one.items()
    }
    alphas = json.dumps({"transformer.lora_alpha": 4, "transformer_2.lora_alpha": 2})
    save_file(both, tmp_path / "both.safetensors", {"lora_adapter_metadata": alphas})
    capsys.readouterr()
    assert run("--adapter", tmp_path / "both.safetensors", "--to", "official") == 1
    assert (
        "an adapter for each of transformer and transformer_2; choose one with --part"
        in capsys.readouterr().err
    )
    for part, factor in (("transformer", 1), ("transformer_2", 4 * 0.5)):
        out = tmp_path / f"{part}.safetensors"
        convert(tmp_path / "both.safetensors", out, "--to", "official", "--part", part)
        for name, (down, up) in scaled(out).items():
            torch.testing.assert_close(
                up @ down.double(), factor * (factors(name)[1].double() @ factors(name)[0].double())
            )


def test_a_file_that_says_something_else_never_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writer halves every B, and its own comparison knows nothing of it: that of products
    does."""
    honest = adapter_writer._rounded

    def halved(adapter: Any, dtype: torch.dtype, *, with_alpha: bool) -> Any:
        result = honest(adapter, dtype, with_alpha=with_alpha)
        return replace(result, matrices=replace(result.matrices, up=result.matrices.up / 2))

    monkeypatch.setattr(adapter_writer, "_rounded", halved)
    source = official(tmp_path / "x.safetensors")
    assert run("--adapter", source, "--to", "musubi") == 1
    assert "product differs by 5.0e-01" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]
