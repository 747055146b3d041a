"""Sheets: prompts by checkpoints by strengths, in cells that are what each would be alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from report_pages import Page
from safetensors.torch import load_file, save_file
from toy_world import World
from two_experts import EXPERTS, TwoExperts

from ditkit_core.commands import cli
from ditkit_core.data.media.image import read_image
from ditkit_core.previews import sheet as previews
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import ToySampler, ToyTextEncoder


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with a run of two saves, which tests only read."""
    world = World(tmp_path_factory.mktemp("made"))
    assert world.train("a", 2, *SAVES) == 0
    return world


@pytest.fixture
def trained(made: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The same, as the working folder; what a test writes there has a name of its own."""
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The components that sheets have loaded."""
    loaded: list[str] = []
    load = previews.load_model

    def counted(unloaded: Any, *rest: Any) -> Any:
        loaded.append(unloaded.origin.stored.source.path.name)
        return load(unloaded, *rest)

    monkeypatch.setattr(previews, "load_model", counted)
    yield loaded


SAVES = (
    *("--save.every_steps", "1", "--save.keep_last", "9", "--optim.lr", "0.05"),
    *("--sample.captions", "0", "--export.dtype", "fp32"),
)
METHODS = {
    "lora": (),
    "dora": ("--adapter.use_dora", "true"),
    "lokr": ("--adapter.method", "lokr", "--adapter.dropout", "0"),
    "loha": ("--adapter.method", "loha", "--adapter.dropout", "0"),
}


def cells(folder: str | Path) -> dict[str, bytes]:
    """The samples of a sheet by their names without the key."""
    files = [*Path(folder).glob("*-seed-*-*.png"), *Path(folder).glob("*-seed-*-*.mp4")]
    return {file.name.rpartition("-")[0]: file.read_bytes() for file in files}


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removeprefix("error: ").strip()


def test_a_cell_is_bitwise_what_the_sample_command_writes_alone(
    world: World, loads: list[str]
) -> None:
    """And everything is loaded once, however many cells there are."""
    assert world.train("a", 3, *SAVES, "--optim.lr", "0.01") == 0
    prompts = ("--prompt", "a cat", "--prompt", "a dog")
    asked = ("sample", "--run", "a", *prompts, "--images", "2")
    decoders = list[ToySampler]()

    class Counting(ToySampler):
        num_unloads = 0

        def unload(self) -> None:
            self.num_unloads += 1

    def sampler(_: Any, device: torch.device, *__: Any) -> ToySampler:
        decoders.append(Counting(device))
        return decoders[-1]

    plain, world.spec = world.spec, altered(world.spec, sampler=sampler)
    before = world.text.loads
    assert world.run(*asked, "--steps", "1,latest,3", "--strengths", "0.5,1", "--out", "sheet") == 0
    assert loads == ["toy.safetensors"] and world.text.loads == before + 1
    assert [decoder.num_unloads for decoder in decoders] == [1]
    world.spec = plain
    sheet = cells("sheet")
    assert len(sheet) == 5 * 4
    for row in ("a-cat-seed-0", "a-cat-seed-1", "a-dog-seed-0", "a-dog-seed-1"):
        assert len({cell for name, cell in sheet.items() if name.endswith(row)}) == 5
    assert world.run(*asked, "--out", "alone") == 0
    for number, prompt in enumerate(("a-cat", "a-dog")):
        for seed in (0, 1):
            name = f"{prompt}-seed-{seed}"
            alone = Path(f"alone/sampled-001-step-000003-{number}-{name}.png")
            assert sheet[f"step-3-{name}"] == alone.read_bytes()
    one = ("sample", "--run", "a", "--prompt", "a dog", "--seed", "1", "--out", "one")
    assert world.run(*one, "--steps", "1", "--strengths", "0.5") == 0
    assert (
        all(sheet[name] == cell for name, cell in cells("one").items()) and len(cells("one")) == 2
    )
    file = "a/exports/a.safetensors"
    assert world.run("sample", "--adapter", f"{file}@0", *one[3:-2], "--out", "base") == 0
    (base,) = Path("base").glob("*.png")
    assert sheet["base-a-dog-seed-1"] == base.read_bytes()


def image(folder: str, pattern: str) -> torch.Tensor:
    (file,) = Path(folder).glob(pattern)
    return torch.from_numpy(read_image(file)).int()


@pytest.mark.parametrize("method", METHODS)
def test_a_strength_is_that_of_the_merged_file(trained: World, method: str) -> None:
    flags = METHODS[method]
    assert method == "lora" or trained.train(method, 2, *SAVES, *flags) == 0
    run = "a" if method == "lora" else method
    asked, out = ("sample", "--run", run, "--prompt", "a cat"), f"strengths-of-{method}"
    assert trained.run(*asked, *flags, "--strengths", "0.5,-2", "--out", out) == 0
    base = image(out, "base-*.png")
    for strength in ("0.5", "-2"):
        file, alone = f"{run}/exports/{run}.safetensors@{strength}", f"{out}-{strength}"
        assert trained.run("sample", *asked[3:], "--adapter", file, "--out", alone) == 0
        merged, cell = image(alone, "*.png"), image(out, f"step-2@{strength}-*.png")
        # of 255: the sum with the weight is rounded, or the sum of the two products
        assert (cell - merged).abs().max() <= 1 < (cell - base).abs().max()


def test_a_file_is_compared_at_strengths(
    trained: World, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = "a/exports/a.safetensors"
    asked = ("sample", "--adapter", file, "--prompt", "a cat")
    assert trained.run(*asked, "--strengths", "0.5,1", "--out", "of-a-file") == 0
    sheet = cells("of-a-file")
    assert [*sorted(sheet)] == ["a-a-cat-seed-0", "a@0.5-a-cat-seed-0", "base-a-cat-seed-0"]
    assert len(set(sheet.values())) == 3 and loads == ["toy.safetensors"]
    assert trained.run(*asked, "--out", "file-alone") == 0
    assert sheet["a-a-cat-seed-0"] == next(Path("file-alone").glob("*.png")).read_bytes()
    capsys.readouterr()
    assert trained.run(*asked, "--strengths", "1", "--adapter", f"{file}@0.5") == 1
    assert refusal(capsys).endswith("both say a strength; leave out @0.5")
    assert trained.run(*asked, "--run", "a", "--run", "a") == 1
    assert refusal(capsys).startswith("--adapter and several runs: a sheet is of one file")


def test_a_file_of_several_methods_is_refused_with_the_way_that_remains(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("a", 1, *SAVES, *METHODS["dora"]) == 0
    tensors = load_file("a/exports/a.safetensors")
    first = next(name for name in tensors if "dora_scale" in name or "magnitude" in name)
    del tensors[first]
    save_file(tensors, "mixed.safetensors")
    asked = ("sample", "--adapter", "mixed.safetensors", "--prompt", "a cat")
    assert world.run(*asked) == 0
    capsys.readouterr()
    assert world.run(*asked, "--strengths", "0.5,1") == 1
    assert refusal(capsys).endswith("with --adapter FILE@strength")


def test_files_of_experts_are_compared_at_strengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = TwoExperts(tmp_path)
    assert world.run("train", "--run.folder", "both", "--train.steps", "2", *SAVES) == 0
    high, low = (f"both/exports/both_{expert.name}.safetensors" for expert in EXPERTS)
    for out, files in {
        "two": ("--adapter", high, "--adapter-low", low),
        "one": ("--adapter-low", low),
    }.items():
        loads.clear()
        asked = ("sample", *files, "--prompt", "a")
        assert world.run(*asked, "--strengths", "0.5,1", "--out", out) == 0
        assert world.run(*asked, "--out", f"{out}-alone") == 0
        (alone,) = Path(f"{out}-alone").glob("*-0-a.png")
        sheet = cells(out)
        assert len(set(sheet.values())) == 3 and alone.read_bytes() in sheet.values()
        assert len(loads) == len(files) // 2


OTHERS = {
    "of another rank": ("--adapter.rank", "3", "--adapter.targets", "attention"),
    "dora": METHODS["dora"],
    "lokr": METHODS["lokr"],
    "streamed": ("--train.swap_blocks", "2", "--adapter.rank", "4"),
    "int8": ("--base.quantize", "int8", "--adapter.rank", "4"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_several_runs_share_a_loaded_base(trained: World, loads: list[str], other: str) -> None:
    flags, first, second = OTHERS[other], "a", f"b-{other.split()[-1]}"
    if other in ("streamed", "int8"):
        first = f"a-{other}"
        assert trained.train(first, 2, *SAVES, *flags[:2]) == 0
    assert trained.train(second, 2, *SAVES, *flags) == 0
    strengths = "0.5,1" if other == "of another rank" else "0.5"
    asked = ("--prompt", "a cat", "--steps", "1,2", "--strengths", strengths, "--out")
    assert trained.run("sample", "--run", first, "--run", second, *asked, f"{second}-both") == 0
    assert loads == ["toy.safetensors"]
    both = cells(f"{second}-both")
    assert len(both) == len(set(both.values())) == (9 if "," in strengths else 5)
    for run in (first, second):
        # The configuration is the first run's, whose adapter section is not the other's.
        out = f"{second}-{run}-alone"
        assert cli.run(trained.spec, "sample", ["--run", run, *asked, out]) == 0
        alone = cells(out)
        assert alone == {name: both[name if "base" in name else f"{run}-{name}"] for name in alone}


def test_experts_are_loaded_once_and_share_a_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = TwoExperts(tmp_path)
    assert world.run("train", "--run.folder", "both", "--train.steps", "2", *SAVES) == 0
    asked = ("sample", "--run", "both", "--prompt", "a", "--prompt", "b")
    assert world.run(*asked, "--steps", "1,2", "--strengths", "0.5,1", "--out", "sheet") == 0
    assert loads == [f"toy_{name}.safetensors" for name in (expert.name for expert in EXPERTS)]
    sheet = cells("sheet")
    assert len(sheet) == len(set(sheet.values())) == 10
    assert world.run(*asked, "--out", "alone") == 0
    for number, prompt in enumerate("ab"):
        alone = Path(f"alone/sampled-001-step-000002-{number}-{prompt}.png").read_bytes()
        assert sheet[f"step-2-{prompt}-seed-0"] == alone


def test_one_expert_is_compared_and_the_other_samples_with_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = TwoExperts(tmp_path)
    flags = ("--run.folder", "low", "--train.steps", "2", "--experts.train", "low_noise")
    assert world.run("train", *flags, *SAVES) == 0
    asked = ("sample", "--run", "low", "--prompt", "a")
    assert world.run(*asked, "--steps", "1,2", "--out", "sheet") == 0
    assert world.run(*asked, "--out", "alone") == 0
    alone = Path("alone/sampled-001-step-000002-0-a.png").read_bytes()
    assert len(cells("sheet")) == 3 and cells("sheet")["step-2-a-seed-0"] == alone


def test_a_full_fine_tune_is_compared_by_its_saves(
    world: World, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("a", 2, *SAVES, "--adapter.method", "full", "--optim.lr", "0.001") == 0
    asked = ("sample", "--run", "a", "--prompt", "a cat", "--adapter.method", "full")
    assert world.run(*asked, "--steps", "2,1", "--out", "sheet") == 0
    sheet = cells("sheet")
    assert len(set(sheet.values())) == 3 and len(loads) == 1
    assert world.run(*asked, "--out", "alone") == 0
    assert sheet["step-2-a-cat-seed-0"] == next(Path("alone").glob("*-0-a-cat.png")).read_bytes()
    capsys.readouterr()
    assert world.run(*asked, "--strengths", "0.5") == 1
    assert refusal(capsys).startswith("--strengths is for adapters, and this run trained all")


def test_a_sheet_continues_and_keeps_what_is_there(
    world: World,
    loads: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert world.train("a", 2, *SAVES) == 0
    asked = ("sample", "--run", "a", "--prompt", "a cat", "--steps", "1,2")
    folder = Path("a/samples/sheet")
    plain = world.spec

    class Stopped(ToySampler):
        num_decoded = 0

        def decode(self, latents: torch.Tensor, seed: int = 0) -> torch.Tensor:
            Stopped.num_decoded += 1
            if Stopped.num_decoded == 2:
                raise KeyboardInterrupt
            return super().decode(latents)

    world.spec = altered(plain, sampler=lambda _, device, *__: Stopped(device))
    assert world.run(*asked) == 130
    assert [*cells(folder)] == ["base-a-cat-seed-0"], "the first is there as soon as it is finished"
    page = Page((folder / "sheet.html").read_text(encoding="utf-8"))
    assert "1 of 3 samples" in page.shown and page.shown.count("not generated yet") == 2
    assert page.all("header")[0]["data-reload"]
    world.spec = plain
    stamps = {file: file.stat().st_mtime_ns for file in folder.glob("*-seed-*")}
    capsys.readouterr()
    assert world.run(*asked) == 0
    assert "2 samples generated, 1 kept" in capsys.readouterr().out
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in stamps.items())
    loads.clear()
    assert world.run(*asked) == 0 and loads == [], "nothing is left to generate"
    assert world.run(*asked, "--strengths", "1,2") == 0
    assert "2 samples generated, 3 kept" in capsys.readouterr().out
    for changed in (
        ("--sample.steps", "3"),
        ("--seed", "7"),
        ("--prompt", "a cat!"),
        ("--model.dtype", "bf16"),
        ("--data.fps", "3"),
    ):
        assert world.run(*asked, *changed) == 0
        kept = "3 kept" if changed[0] == "--prompt" else "0 kept"
        assert f"3 samples generated, {kept}" in capsys.readouterr().out, changed

    class OtherText(ToyTextEncoder):
        identity = "toy-text in another dtype"

    world.spec = altered(plain, text_encoder=lambda *_: OtherText())
    assert world.run(*asked) == 0
    assert "3 samples generated, 0 kept" in capsys.readouterr().out, "of another text encoder"


def test_the_page_and_the_image_show_every_cell(world: World) -> None:
    world.add("clips/0.png", (16, 16), "teal", "<b>picture</b>")
    assert world.train("a", 2, *SAVES) == 0
    prompts = ("--prompt", "<img src=x onerror=alert(1)> a long prompt " + "with many words " * 9)
    flags = (*prompts, "--prompt", "b", "--steps", "1,2", "--strengths", "0.5,1")
    assert world.run("sample", "--run", "a", *flags, "--sample.height", "32") == 0
    folder = Path("a/samples/sheet")
    page = Page((folder / "sheet.html").read_text(encoding="utf-8"))
    images = [image for image in page.all("img") if image["src"].startswith("data:image/jpeg")]
    assert len(images) == 10 and not page.all("video") and "10 of 10 samples" in page.shown
    assert all((folder / link["href"].replace("%40", "@")).is_file() for link in page.all("a"))
    assert "data-reload" not in page.all("header")[0]
    for label in ("base", "step 1 @ 0.5", "step 1", "step 2 @ 0.5", "step 2"):
        assert label in page.shown
    height, width, _ = read_image(folder / "sheet.png").shape
    assert width >= 5 * 16 and height >= 2 * 32


def test_videos_play_on_the_page_and_are_strips_in_the_image(world: World) -> None:
    assert world.train("a", 1, *SAVES) == 0
    flags = ("--prompt", "a cat", "--sample.frames", "9", "--strengths", "1")
    assert world.run("sample", "--run", "a", *flags) == 0
    folder = Path("a/samples/sheet")
    page = Page((folder / "sheet.html").read_text(encoding="utf-8"))
    assert [video["src"][:22] for video in page.all("video")] == ["data:video/mp4;base64,"] * 2
    assert len(cells(folder)) == 2 and read_image(folder / "sheet.png").shape[1] > 2 * 4 * 16


def test_what_is_asked_and_not_there_is_one_line(
    trained: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world = trained
    asked = ("sample", "--run", "a", "--prompt", "a cat")
    held_out = ("--held_out.clips", "1", "--held_out.every_steps", "1")
    assert world.train("b", 2, *SAVES, *held_out) == 0
    capsys.readouterr()
    for flags, line in {
        ("--steps", "1,7"): "--steps: a has no save 7; it has 1, 2; steps of the scheduler are --sample.steps",
        ("--steps", "lastest"): "--steps: a has no save lastest; it has 1, 2; did you mean latest?",
        ("--steps", "best"): "a has no save with a validation loss; set held_out.clips when you train, or name steps: it has 1, 2",
        ("--strengths", "200"): "--strengths: the strength 200 is not between -100 and 100",
        ("--strengths", "nan"): "--strengths: the strength nan is not between -100 and 100",
        ("--strengths", "high"): '--strengths must be numbers separated by commas (0.6,0.8,1), not "high"',
        ("--steps", "1", "--adapter", "a/exports/a.safetensors"): "--steps and --adapter: a sheet is of a run's saves; leave one of them out",
        ("--run", "nowhere", "--steps", "1"): "nowhere is not the folder of a run",
    }.items():  # fmt: skip
        assert world.run(*asked, *flags) in (1, 2)
        assert refusal(capsys).startswith(line), flags
    assert world.run("train", "--run", "a", "--run", "b") == 2
    assert (
        refusal(capsys) == "--run is given twice: a and b; give one (toy-sample compares several)"
    )
    assert world.run("sample", "--run", "b", "--prompt", "a", "--steps", "best,1,2") == 0
    assert (
        sum("best" in name for name in cells("b/samples/sheet")) == 1
        and len(cells("b/samples/sheet")) == 3
    )
    save = world.folder / "other.safetensors"
    save.write_bytes((world.folder / "toy.safetensors").read_bytes())
    assert world.train("c", 1, *SAVES, "--model.transformer", str(save)) == 0
    capsys.readouterr()
    assert world.run(*asked, "--run", "c") == 1
    assert refusal(capsys).startswith("c has another base than a: model.transformer = ")
