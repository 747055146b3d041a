"""The early look at paths refuses nothing that the work would accept; what it refuses is tried in
test_cli_imports.py."""

from pathlib import Path

import pytest

from ditkit_core.adapters.files.export_names import ExportName
from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.preflight import check_paths, check_run_file
from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.run.config import RunConfig

COMPONENTS = ("vae", "text_encoder", "tokenizer", "transformer")
PARTS = {f"model.{name}": "here" for name in COMPONENTS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()


def refusal(init_from: str = "", components: tuple[str, ...] = COMPONENTS, **flags: str) -> str:
    flags = {"data.folder": "here", "run.folder": "run"} | flags
    try:
        check_paths(
            "train",
            "",
            resolve(RunConfig, flags=flags),
            TrainOptions(init_from=init_from),
            components,
        )
    except UserError as error:
        return str(error)
    return ""


def test_a_base_is_not_asked_for_parts_that_have_a_path_of_their_own() -> None:
    assert refusal(**PARTS, **{"model.base": "./gone"}) == ""
    assert refusal(**PARTS | {"model.vae": ""}, **{"model.base": "./gone"}).startswith(
        "model.base = './gone'"
    )
    assert refusal(**PARTS | {"model.vae": "./gone"}, **{"model.base": "./gone"}).startswith(
        "model.vae = './gone'"
    )
    assert (
        refusal(
            **{"model.base": "Wan-AI/Wan2.1/inner"},
            **PARTS | {"model.transformer": "a/b/c.safetensors"},
        )
        == ""
    )


def test_a_name_that_no_export_could_bear_is_refused() -> None:
    for name in ("n" * 200, "é" * 100):
        assert refusal(**{"run.folder": f"here/{name}"}) == ""
        longest = ExportName(
            run=name, expert="high_noise", by_command=True, step=10**6, form="diffsynth"
        )
        write_text(longest.at(RunFolder(Path("here"))), "")
        said = refusal(**{"run.folder": f"here/{name}."})
        assert (
            said
            == f"run.folder: the name {name[:20]}... has 201 bytes, and exports get this name; rename the folder or choose one with at most 200 bytes"
        )


def test_a_folder_next_to_the_run_file_is_named_with_the_path_that_finds_it(tmp_path: Path) -> None:
    (tmp_path / "project" / "clips").mkdir(parents=True)
    config = resolve(RunConfig, flags={"data.folder": "clips", "run.folder": "run", **PARTS})
    with pytest.raises(
        UserError, match=r"paths start at the working directory; did you mean project/clips\?$"
    ):
        check_paths(
            "train", "", config, TrainOptions(), COMPONENTS, run_file=Path("project/run.toml")
        )


def test_a_file_given_as_the_folder_of_clips_is_called_one() -> None:
    Path("a.mp4").touch()
    assert (
        refusal(**{"data.folder": "a.mp4"})
        == "data.folder a.mp4 is a file; name the folder that it is in"
    )


@pytest.mark.parametrize(
    ("command", "name", "answer"),
    [
        (
            "sample",
            "runs/cats",
            "runs/cats is no run file, but the folder of a run: --run runs/cats",
        ),
        (
            "train",
            "base",
            "base is no run file, but a model in diffusers layout: --model.base base",
        ),
        (
            "train",
            "here",
            (
                "here is no run file, but a folder; a folder of clips and captions is --data.folder "
                "here"
            ),
        ),
        (
            "export",
            "cats.bin",
            "cats.bin is no run file, but a file of weights: --inspect cats.bin describes it",
        ),
        ("sample", "cats.bin", "--adapter cats.bin samples with a LoRA"),
        ("train", "cats.bin", "--adapter.init cats.bin trains a LoRA further"),
    ],
)
def test_what_is_given_in_place_of_a_run_file_is_answered_with_its_flag(
    command: str, name: str, answer: str
) -> None:
    Path("runs/cats").mkdir(parents=True)
    Path("runs/cats/config.toml").touch()
    Path("base").mkdir()
    Path("base/model_index.json").touch()
    Path("cats.bin").write_bytes(b"\x40\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError) as error:
        check_run_file(command, Path(name))
    assert answer in str(error.value)
    Path("run.toml").write_text("[train]\n")
    check_run_file(command, Path("run.toml"))
    check_run_file(command, Path("gone.toml"))


def test_a_run_with_a_save_does_not_need_the_run_that_it_started_from() -> None:
    assert refusal("gone") == "--init-from gone does not exist; correct the path"
    Path("run/state/step-000010").mkdir(parents=True)
    assert refusal("gone") == ""


def test_a_path_that_no_architecture_of_the_family_reads_is_not_looked_at() -> None:
    gone = PARTS | {"model.text_encoder": "./gone"}
    assert refusal(**gone).startswith("model.text_encoder = './gone'")
    assert refusal(components=("vae", "transformer"), **gone) == ""


@pytest.mark.parametrize("verb", ["plan", "fit"])
def test_a_plan_of_a_demo_that_is_not_written_says_how_to_write_it(verb: str) -> None:
    def planned(**flags: str) -> None:
        given = {"model.base": "run/inputs/checkpoint", "run.folder": "run"} | flags
        check_paths(
            "train", verb, resolve(RunConfig, flags=given), TrainOptions(demo=True), COMPONENTS
        )

    with pytest.raises(
        UserError, match=f"--{verb} writes nothing, .* write it with --demo --check"
    ):
        planned()
    planned(**{"model.preset": "t2v-1.3b"})
    Path("run/inputs/checkpoint").mkdir(parents=True)
    planned()
