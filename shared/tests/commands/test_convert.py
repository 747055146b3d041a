"""What the export command says of files: what they are, and what is wrong with them or with the
flags."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_world import World

from ditkit_core.adapters.files.export import VERIFIED_LATER
from ditkit_core.commands import cli
from ditkit_core.commands.options import ExportOptions, parse_rank
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import FORMATS, VERIFIED
from ditkit_core.models.adapter_programs import AdapterRules, ProgramRow
from ditkit_core.models.other_models import OTHER_MODELS, OtherModel
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import Expert
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form

RULES = AdapterRules(
    programs=(
        ProgramRow(program="one"),
        *(
            ProgramRow(program="other", forms=(form,), misreads=f"rejects {form}")
            for form in FORMATS
        ),
    )
)
BLOOM = OtherModel(name="Bloom", keys="double_blocks")
NAMES = replace(TOY.architecture.names, others=(BLOOM, *OTHER_MODELS))
SPEC = altered(
    TOY,
    names=NAMES,
    presets={"small": ToyArch(), "deep": ToyArch(depth=3), "wide": ToyArch(dim=64)},
    rules=RULES,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def run(*argv: object) -> int:
    return cli.run(SPEC, "export", [str(argument) for argument in argv])


def adapter(
    path: Path, *, width: int = 32, blocks: tuple[int, ...] = (0, 1), **extra: torch.Tensor
) -> Path:
    tensors = {}
    for block in blocks:
        tensors[f"lora_unet_blocks_{block}_out.lora_down.weight"] = torch.ones(4, width) * (
            block + 1
        )
        tensors[f"lora_unet_blocks_{block}_out.lora_up.weight"] = torch.ones(width, 4)
        tensors[f"lora_unet_blocks_{block}_out.alpha"] = torch.tensor(2.0)
    save_file({**tensors, **extra}, path, {"ss_title": "x" * 500})
    return path


def transformer(path: Path, arch: ToyArch, form: str = "official") -> Path:
    torch.manual_seed(0)
    save_file(in_form(ToyModel(arch, Precision(matmul=torch.float32)).state_dict(), form), path)
    return path


def test_an_adapter_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = adapter(tmp_path / "x.safetensors")
    assert run("--inspect", path, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    size = 0.5 * 4 * 32  # a matrix of ones of rank 1, 4 times, at half strength
    assert (
        about["kind"] == "adapter"
        and about["form"] == "musubi"
        and about["matrices"] == "lora_down, lora_up"
    )
    assert (about["ranks"], about["scales"], about["alpha"]) == ({"4": 2}, {"0.5": 2}, "keys")
    assert about["presets"] == ["small", "deep"], "the wide one has other shapes"
    assert about["bytes"] == path.stat().st_size
    (kind,) = about["modules"]
    found = about["modules"][kind]
    assert (kind, found["number"], found["blocks"], found["shape"]) == (
        "layers.*.out",
        2,
        "0-1",
        [32, 32],
    )
    assert (found["norm"]["least"], found["norm"]["largest"]) == (
        pytest.approx(size),
        pytest.approx(2 * size),
    )
    assert about["norm"] == pytest.approx(5**0.5 * size)
    assert about["readers"] == {"one": "", "other": "rejects musubi"} and not about["not_finite"]
    assert run("--inspect", path) == 0
    text = capsys.readouterr().out
    assert (
        "musubi, kohya (lora_unet_)" in text
        and "one: loads all of it" in text
        and "other: rejects musubi" in text
    )
    assert (
        "rank 4, alpha: keys, scale 0.5" in text
        and "fits small, deep" in text
        and "blocks 0-1" in text
    )
    assert "header ss_title: xxx" in text and max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize("part", ["lora_up.weight", "dora_scale"])
def test_gaps_in_the_blocks_and_damage_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    path = adapter(tmp_path / "x.safetensors", blocks=(0, 2))
    tensors = load_file(path)
    tensors.setdefault(f"lora_unet_blocks_2_out.{part}", torch.ones(32, 1))[3] = float("nan")
    tensors["lora_unet_blocks_0_out.lora_up.weight"] *= 0
    save_file(tensors, path)
    assert run("--inspect", path) == 0
    text = capsys.readouterr().out
    assert "blocks 0, 2" in text and "fits deep" in text and "DAMAGED: 1 modules" in text
    assert "1 modules change nothing: layers.0.out" in text
    for flags in (
        ["--to", "official"],
        ["--merge", "--base", transformer(tmp_path / "b.safetensors", ToyArch(depth=3))],
    ):
        assert run("--adapter", path, *flags) == 1
        error = capsys.readouterr().err
        assert "values of 1 of 2 modules are not finite (NaN or infinite): layers.2.out" in error
    assert {file.name for file in tmp_path.iterdir()} == {"x.safetensors", "b.safetensors"}


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_a_whole_transformer_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    path = transformer(tmp_path / "x.safetensors", ToyArch(depth=3), form)
    assert run("--inspect", path, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    model = ToyModel(ToyArch(depth=3), Precision())
    assert (about["kind"], about["form"], about["presets"]) == ("transformer", form, ["deep"])
    assert about["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert about["dtypes"] == {"float32": about["tensors"]}
    assert run("--inspect", path) == 0
    assert f"whole transformer, {form} names" in capsys.readouterr().out


def test_a_file_is_held_against_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = adapter(tmp_path / "x.safetensors", width=48, blocks=(0,))
    base = transformer(tmp_path / "b.safetensors", ToyArch())
    assert run("--inspect", path, "--base", base, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["presets"] == [] and about["fits_base"] is False
    assert run("--adapter", path, "--to", "official", "--base", base) == 1
    error = capsys.readouterr().err
    assert "does not fit the base: 1 of 1 modules, layers.0.out [48, 48] is [32, 32] there" in error
    assert run("--adapter", path, "--to", "official") == 0
    assert "fits no preset of toy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "parts",
    [
        {"lokr_w1": (4, 4), "lokr_w2": (12, 12)},
        {"lokr_w1": (4, 4), "lokr_w2_a": (12, 2), "lokr_w2_b": (2, 12)},
        {"hada_w1_a": (48, 2), "hada_w1_b": (2, 48), "hada_w2_a": (48, 2), "hada_w2_b": (2, 48)},
    ],
)
def test_a_lokr_or_loha_that_fits_no_preset_is_converted_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: dict[str, tuple[int, int]]
) -> None:
    path, stem = tmp_path / "x.safetensors", "diffusion_model.blocks.0.out"
    save_file({f"{stem}.{part}": torch.ones(shape) for part, shape in parts.items()}, path)
    assert run("--adapter", path, "--to", "musubi", "--out", tmp_path / "y.safetensors") == 0
    assert (
        "fits no preset of toy: names are converted, sizes are not checked"
        in capsys.readouterr().err
    )
    assert (tmp_path / "y.safetensors").exists()


def test_an_adapter_is_taken_out_of_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = transformer(tmp_path / "base.safetensors", ToyArch())
    tensors = load_file(base)
    changed = ("blocks.0.qkv.weight", "blocks.1.mlp.2.weight")
    added = {}
    for name in changed:
        out, width = tensors[name].shape
        added[name] = 0.1 * torch.randn(out, 3) @ torch.randn(3, width)
        tensors[name] = tensors[name] + added[name]
    tensors["blocks.0.qkv.bias"] = tensors["blocks.0.qkv.bias"] + 0.5
    save_file(tensors, tmp_path / "tuned.safetensors")
    argv = ["--extract", tmp_path / "tuned.safetensors", "--base", base, "--dtype", "fp32"]
    assert run(*argv, "--rank", 3, "--out", tmp_path / "a.safetensors") == 0
    said = capsys.readouterr()
    assert "residual: 0.00% of the norm" in said.out and "of 2 modules" in said.out
    assert "parameters that differ" in said.err and "layers.0.qkv.bias" in said.err
    found = load_file(tmp_path / "a.safetensors")
    assert len(found) == 4
    for name in changed:
        stem = f"diffusion_model.{name.removesuffix('.weight')}"
        torch.testing.assert_close(
            found[f"{stem}.lora_B.weight"] @ found[f"{stem}.lora_A.weight"],
            added[name],
            rtol=1e-4,
            atol=1e-5,
        )
    assert run(*argv, "--rank", 1, "--out", tmp_path / "b.safetensors") == 0
    left = float(capsys.readouterr().out.split("residual: ")[1].split("%")[0]) / 100
    spectra = [torch.linalg.svdvals(matrix.double()) for matrix in added.values()]
    expected = sum(float(s[1:].square().sum()) for s in spectra) / sum(
        float(s.square().sum()) for s in spectra
    )
    assert left == pytest.approx(expected**0.5, abs=2e-4)
    assert run(*argv, "--rank", "auto:0.9999", "--out", tmp_path / "c.safetensors") == 0
    assert load_file(tmp_path / "c.safetensors")[
        "diffusion_model.blocks.0.qkv.lora_A.weight"
    ].shape == (3, 32)


def test_a_lokr_is_not_converted_into_a_form_whose_readers_misread_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = ToyArch().dim
    parts = {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(layer // 4, layer // 4)}
    path = tmp_path / "x.safetensors"
    save_file(
        {f"diffusion_model.blocks.0.out.{part}": tensor for part, tensor in parts.items()}, path
    )

    def check(form: str, modules: Collection[str]) -> None:
        raise UserError(f"programs that read the {form} form ignore {min(modules)}")

    for number, (spec, status) in enumerate(((SPEC, 0), (altered(SPEC, check=check), 1))):
        out = tmp_path / f"{number}.safetensors"
        argv = ["--adapter", path, "--to", "official", "--out", out]
        assert cli.run(spec, "export", [str(argument) for argument in argv]) == status
        assert out.exists() == (status == 0)
    printed = capsys.readouterr()
    assert "1 modules of a lokr; its factors are bitwise identical" in printed.out
    assert "programs that read the official form ignore layers.0.out" in printed.err


@pytest.mark.parametrize("method", ["lokr", "loha"])
def test_only_a_lora_is_extracted(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = transformer(tmp_path / "base.safetensors", ToyArch())
    assert run("--extract", base, "--base", base, "--adapter.method", method, "--rank", 4) == 1
    assert f"--extract makes a LoRA, and adapter.method = {method}" in capsys.readouterr().err


def test_what_does_not_differ_has_nothing_to_extract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = transformer(tmp_path / "base.safetensors", ToyArch())
    assert run("--extract", base, "--base", base, "--rank", 2) == 1
    assert "do not differ: there is nothing to extract" in capsys.readouterr().err
    other = transformer(tmp_path / "other.safetensors", ToyArch(dim=64))
    assert run("--extract", other, "--base", base, "--rank", 2) == 1
    assert "does not fit the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--to", "kohya"], "--to on the command line must be one of official, diffusers, diffsynth, musubi, not \"kohya\"; did you mean musubi?"),
        (["--adapter", "x", "--to", "difusers"], "did you mean diffusers?"),
        (["--adapter", "x"], "FILE needs an operation"),
        (["--adapter", "x", "--inspect", "y"], "one file can be given at a time"),
        (["--inspect", "x", "--to", "official"], "--inspect writes nothing, and --to"),
        (["--adapter", "x", "--merge", "--rank", "4"], "a merged adapter has no rank"),
        (["--extract", "x", "--base", "y"], "--extract needs the rank"),
        (["--extract", "x", "--base", "y", "--rank", "4", "--merge"], "leave one of them out"),
        (["--rank", "4"], "--rank is for a file"),
        (["--rank", "0", "--adapter", "x"], "--rank must be a whole number above 0"),
        (["--rank", "auto:1.5", "--adapter", "x"], "--rank must be a whole number above 0"),
        (["--strength", "0.5", "--adapter", "x", "--to", "official"], "add --adapter FILE --merge"),
        (["--base", "x"], "--base goes with"),
        (["--json"], "--json prints the result of --inspect"),
        (["--part", "transformer_2"], "--part chooses an expert in a file"),
        (["--adapter", "x", "--to", "official", "--step", "3"], "--step is for a run"),
        (["--adapter", "x", "--demo", "--to", "official"], "--demo is for a run"),
        (["--adapter", "x", "--dtype", "fp8_scaled"], "is for whole transformers"),
        (["--adapter", "x", "--too", "official"], "unknown key --too"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert run(*argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_ranks_are_numbers_or_shares() -> None:
    assert (parse_rank("16"), parse_rank("auto:0.95"), parse_rank("auto:1")) == (
        (16, 1.0),
        (None, 0.95),
        (None, 1.0),
    )
    for text in ("", "-1", "1.5", "auto", "auto:", "auto:0", "auto:nan", "other:0.5", "4:0.5"):
        with pytest.raises(UserError):
            parse_rank(text)
    assert not ExportOptions(to="official", merge=True).on_files


def broken(path: Path, what: str) -> Path:
    """A file that is no adapter of the toy, or none that can be read."""
    if what == "pickle":
        file = path.with_suffix(".pt")
        file.write_bytes(b"\x80\x02}q\x00.")
        return file
    if what == "missing":
        return path
    if what == "half written":
        adapter(path).write_bytes(path.read_bytes()[:-100])
    elif what == "text":
        path.write_text("not a safetensors file at all")
    elif what == "empty":
        save_file({}, path)
    elif what == "transformer":
        transformer(path, ToyArch())
    elif what == "another model":
        save_file({"diffusion_model.double_blocks.0.x.lora_A.weight": torch.ones(2, 2)}, path)
    elif what == "unknown model":
        save_file({"diffusion_model.somewhere.lora_A.weight": torch.ones(2, 2)}, path)
    elif what == "lokr":
        save_file({"lora_unet_blocks_0_out.lokr_w1": torch.ones(2, 2)}, path)
    elif what == "whole weights":
        adapter(path, **{"lora_unet_blocks_0_out.set_weight": torch.ones(32, 32)})
    elif what == "half a module":
        save_file({"lora_unet_blocks_0_out.lora_down.weight": torch.ones(4, 32)}, path)
    elif what == "another module":
        adapter(path, **{"lora_unet_blocks_0_gate.lora_down.weight": torch.ones(4, 32)})
    elif what == "other ranks":
        adapter(
            path,
            **{
                "lora_unet_blocks_0_qkv.lora_down.weight": torch.ones(4, 32),
                "lora_unet_blocks_0_qkv.lora_up.weight": torch.ones(96, 5),
            },
        )
    elif what == "no matrices":
        save_file(
            {
                f"lora_unet_blocks_0_out.lora_{part}.weight": torch.ones(())
                for part in ("down", "up")
            },
            path,
        )
    elif what == "no vae":
        save_file(
            {
                f"decoder.{name}.weight": torch.ones(2, 2)
                for name in ("conv_in", "up_blocks.0.resnets.0.conv1")
            },
            path,
        )
    elif what == "a text encoder":
        save_file({"encoder.block.0.layer.0.SelfAttention.k.weight": torch.ones(2, 2)}, path)
    return path


BROKEN = {
    "pickle": "is a pickle, and reading a pickle runs the code in it",
    "missing": "there is no",
    "half written": "is truncated or damaged",
    "text": "contains only the text 'not a safetensors file at all'",
    "empty": "is empty; name a LoRA file",
    "transformer": "is a whole transformer, not an adapter; extract its difference",
    "another model": "is a LoRA of another model (its names look like those of Bloom)",
    "unknown model": "is a LoRA of another model: diffusion_model.somewhere",
    "lokr": "lokr_w1 [2, 2] are not a LoKr or LoHa of the layer's [1, 1]",
    "whole weights": "contains whole weights besides low-rank matrices",
    "half a module": "but no up matrix for layers.0.out",
    "another module": "1 of 7 keys fit no adapter of this model",
    "other ranks": "do not fit the layer's",
    "no matrices": "do not fit the layer's",
    "no vae": "is not a LoRA (its names look like those of a VAE)",
    "a text encoder": "is not a LoRA (its names look like those of a text encoder)",
}


@pytest.mark.parametrize(("what", "message"), BROKEN.items())
def test_a_file_that_is_no_adapter_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, message: str
) -> None:
    path = broken(tmp_path / "x.safetensors", what)
    before = set(tmp_path.iterdir())
    assert run("--adapter", path, "--to", "official") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert set(tmp_path.iterdir()) == before, "nothing is written"
    if what != "transformer":
        assert run("--inspect", path) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_written_over_and_a_rank_only_falls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = adapter(tmp_path / "x.safetensors"), tmp_path / "folder"
    folder.mkdir()
    for flags, message in (
        (["--to", "official", "--out", path], " exists; name another one with --out"),
        (["--to", "official", "--out", folder], "is not a file name"),
        (["--to", "official", "--out", tmp_path / "y.bin"], "is not a file name"),
        (["--rank", "4"], "has rank 4 at most, and a rank can only be reduced"),
        (["--rank", "64"], "has rank 4 at most"),
        (["--to", "official", "--part", "transformer_2"], "has no adapter for transformer_2"),
        (["--merge"], "--merge needs the base: give --base FILE"),
        (["--merge", "--base", tmp_path / "no.safetensors"], "there is no such file or folder"),
        (["--merge", "--base", path, "--strength", "1e9"], "--strength 1e+09 is not between"),
        (["--merge", "--base", path, "--to", "musubi"], "is not written in the form musubi"),
        (
            ["--merge", "--base", path, "--out", path],
            "names a file, and a whole transformer is written into a folder",
        ),
        (
            ["--merge", "--base", path, "--out", tmp_path / "y.safetensors"],
            "names a file, and a whole transformer is",
        ),
        (["--to", "official", "--model.preset", "tall"], "model.preset = 'tall' is unknown"),
    ):
        before = path.read_bytes()
        assert run("--adapter", path, *flags) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert path.read_bytes() == before and {file.name for file in tmp_path.iterdir()} == {
            "x.safetensors",
            "folder",
        }


def test_presets_that_differ_in_no_weight_need_not_be_distinguished(tmp_path: Path) -> None:
    spec = altered(SPEC, presets={"small": ToyArch(), "the same": ToyArch(dropout=0.1)})
    path, base = (
        adapter(tmp_path / "x.safetensors"),
        transformer(tmp_path / "base.safetensors", ToyArch()),
    )
    assert (
        cli.run(
            spec,
            "export",
            ["--adapter", str(path), "--merge", "--base", str(base), "--dtype", "fp32"],
        )
        == 0
    )
    folder = tmp_path / "x_merged" / "transformer_official"
    merged, before = load_file(folder / "diffusion_pytorch_model.safetensors"), load_file(base)
    added = merged["blocks.1.out.weight"] - before["blocks.1.out.weight"]
    torch.testing.assert_close(added, torch.full((32, 32), 0.5 * 4 * 2))


def test_an_adapter_of_one_expert_is_not_merged_into_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shapes do not tell them apart, and names do: the adapter's, and the folder's of a pair or the
    base's own."""
    high = Expert(name="high_noise", part="transformer", min_sigma=0.5, max_sigma=1.0, guidance=1.0)
    low = Expert(name="low_noise", part="transformer_2", min_sigma=0.0, max_sigma=0.5, guidance=1.0)
    spec = altered(SPEC, experts=lambda arch: (high, low))
    bases = ("pair/transformer", "pair/transformer_2", "alone/transformer", "x_high_noise_model")
    for name in bases:
        (tmp_path / name).mkdir(parents=True)
        transformer(tmp_path / name / "model.safetensors", ToyArch())
    path = adapter(tmp_path / "cat_low_noise.safetensors")
    for name, is_right in zip(bases, (False, True, True, False), strict=True):
        argv = [
            "--adapter",
            path,
            "--merge",
            "--base",
            tmp_path / name,
            "--out",
            tmp_path / "out" / name,
        ]
        assert cli.run(spec, "export", list(map(str, argv))) == (0 if is_right else 1), name
        error = capsys.readouterr().err
        assert (
            not error
            if is_right
            else "named after the low_noise expert" in error and "is the high_noise one" in error
        )
    argv = [
        "--adapter",
        path,
        "--merge",
        "--base",
        tmp_path / bases[-1],
        "--out",
        tmp_path / "out" / "one",
    ]
    assert run(*argv) == 0, "where there are no experts, none is meant"


def test_an_adapter_of_another_size_is_distinguished_by_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = adapter(tmp_path / "x.safetensors", width=64)
    base = transformer(tmp_path / "base.safetensors", ToyArch())
    assert run("--adapter", path, "--merge", "--base", base) == 1
    error = capsys.readouterr().err
    assert "layers.0.out [64, 64] is [32, 32] there; the adapter fits wide" in error
    assert not list(tmp_path.glob("*merged*"))


def test_a_run_exports_the_other_forms_and_asks_diffusers_of_those_it_reads(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def verify(file: Path, *_: object) -> str:
        seen.append(file.name)
        return f"{file.name} was looked at"

    rules = AdapterRules(
        programs=(
            ProgramRow(program="diffusers", forms=("diffsynth",), misreads="loads nothing"),
            ProgramRow(program="diffusers"),
        )
    )
    world.spec = altered(world.spec, verify=verify, rules=rules)
    forms = (
        "--export.forms",
        '["official", "musubi", "diffsynth"]',
        "--export.dtype",
        "fp32",
        "--sample.captions",
        "0",
    )
    assert world.train("run", 1, *forms, "--export.merged", "true") == 0
    exports = world.folder / "run" / "exports"
    files = ["run.safetensors", "run_musubi.safetensors", "run_diffsynth.safetensors"]
    assert {file.name for file in exports.glob("run*")} - set(files) == {
        f"run-step-000001{form}.safetensors" for form in ("", "_musubi", "_diffsynth")
    }
    assert {folder.name for folder in exports.glob("transformer_*")} == {"transformer_official"}
    said = capsys.readouterr().out
    # The finished files are those of the last save, byte by byte: they are compared once, and named
    # both times.
    assert sorted(seen) == ["run-step-000001.safetensors", "run-step-000001_musubi.safetensors"]
    assert all(f"verified: {name} was looked at" in said for name in [*seen, *files[:2]])
    assert (
        f"{files[2]} was read back, and is not verified with diffusers, which loads nothing" in said
    )
    assert (
        "transformer_official was read back, and is not verified with diffusers, which has no such "
        "model" in said
    )
    headers = {name: SafetensorsSource.open(exports / name).metadata[VERIFIED] for name in files}
    assert headers == dict.fromkeys(files[:2], VERIFIED_LATER) | {
        files[2]: "no reader: diffusers loads nothing"
    }
    assert world.run("export", "--run", str(world.folder / "run"), "--to", "diffsynth") == 0
    assert (
        "step-000001_diffsynth.safetensors: loaded whole by no program that is known (diffusers "
        "loads nothing)" in (capsys.readouterr().out)
    )
    assert (
        run(
            "--adapter",
            exports / files[1],
            "--to",
            "official",
            "--out",
            world.folder / "again.safetensors",
        )
        == 0
    )
    ours, again = load_file(exports / files[0]), load_file(world.folder / "again.safetensors")
    assert ours.keys() == again.keys() and all(
        torch.equal(ours[name], again[name]) for name in ours
    )
    assert world.run("export", "--run", str(world.folder / "run"), "--merge", "--to", "musubi") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: a whole transformer is not written in the form musubi; set export.forms = "
        "['official', 'diffusers'] "
        "(for the export command: --to official or --to diffusers)"
    )
