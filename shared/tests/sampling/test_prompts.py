"""What is sampled: prompts and captions, sizes, seeds, references, guidance; and which files come
of it."""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_specs import CLIPS
from media_files import picture
from safetensors.torch import save_file
from torch import Tensor

from ditkit_core.commands import cli
from ditkit_core.data.dataset import Sample
from ditkit_core.data.media import image as still
from ditkit_core.data.media.clip import probe
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column
from ditkit_core.models.encoders import Decoder, Denoiser, GenerationRequest
from ditkit_core.models.protocol import run_plain
from ditkit_core.models.spec import ModelSpec, SampleDefaults
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.sampling.denoise import single_stage
from ditkit_core.sampling.prompts import SamplePrompt, choose_prompts, control_files, requests_of
from ditkit_core.sampling.render import (
    GAP,
    SHEET_FRAMES,
    PromptRequest,
    SampleFiles,
    contact_sheet,
    grid,
    render_samples,
)
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, ToyTextEncoder
from ditkit_core.testing.world import make_model

GUIDED = SampleDefaults(steps=50, guidance=5.0)
EMBEDDED = SampleDefaults(steps=50, guidance=4.0, guided_by="embedding")
DISTILLED = SampleDefaults(steps=4, guidance=1.0, guided_by="nothing")


class RecordingSampler:
    """Remembers what it was asked for, and draws the seed as a brightness."""

    decoded = "whole"

    def __init__(self) -> None:
        self.jobs: list[GenerationRequest] = []
        self.training: list[bool] = []
        self.value: float | None = None
        self.loaded = False

    @property
    def decoder(self) -> Decoder:
        return self

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        self.jobs.append(job)
        for step in range(job.steps):
            denoiser = yield 1 - step / job.steps
            assert denoiser.guidance == job.guidance
            self.training.append(denoiser.model.training)  # type: ignore[attr-defined]
        return torch.full(
            (3, job.frames, job.height, job.width),
            0.1 * job.seed if self.value is None else self.value,
        )

    def decode(self, latents: Tensor, seed: int = 0) -> Tensor:
        self.loaded = True
        return latents

    def unload(self) -> None:
        self.loaded = False


def sample(
    name: str, *captions: str, size: tuple[int, int] = (16, 16), references: tuple[Path, ...] = ()
) -> Sample:
    return Sample(
        id=name, media=Path(f"{name}.png"), captions=captions, frames=1, height=size[0],
        width=size[1], references=references
    )  # fmt: skip


# What the section says


@pytest.mark.parametrize(
    "name", ["captions", "steps", "guidance", "shift", "frames", "height", "width"]
)
def test_a_negative_setting_is_refused(name: str) -> None:
    kind = type(getattr(SampleConfig(), name))
    with pytest.raises(UserError, match=rf"sample\.{name} = -1.* must be at least 0"):
        SampleConfig(**{name: kind(-1)})
    with pytest.raises(UserError, match=r"sample\.images = 0 must be at least 1"):
        SampleConfig(images=0)


def test_what_the_model_cannot_sample_is_refused_with_the_nearest_that_it_can() -> None:
    def check(frame_step: int = 4, takes_references: bool = False, **settings: Any) -> None:
        config = SampleConfig(**settings)
        size = (lambda height, width, count: (16, 16)) if takes_references else None
        config.check(replace(CLIPS, frame_step=frame_step, reference_size=size))

    check(frames=5, height=32, width=48)
    check(frame_step=0)
    check(frame_step=0, frames=1)
    check(takes_references=True, references=("a.png",))
    with pytest.raises(UserError, match="multiple of 4; try 5"):
        check(frames=6)
    with pytest.raises(UserError, match=r"sample\.frames = 5: this model generates images"):
        check(frame_step=0, frames=5)
    with pytest.raises(UserError, match=r"sample\.width = 50 must be a multiple of 16; try 48"):
        check(width=50)
    with pytest.raises(
        UserError, match=r"sample\.references: this model takes no reference images"
    ):
        check(references=("a.png",))


@pytest.mark.parametrize("defaults", [GUIDED, EMBEDDED, DISTILLED])
def test_zero_means_the_models_own_steps_and_guidance(defaults: SampleDefaults) -> None:
    said: list[str] = []
    config = SampleConfig().resolved(defaults, said.append)
    assert (config.steps, config.guidance) == (defaults.steps, defaults.guidance) and not said
    assert config.uses_negative(defaults) == (defaults is GUIDED)
    config = SampleConfig(steps=7, guidance=1.0).resolved(defaults, said.append)
    assert (
        (config.steps, config.guidance) == (7, 1.0)
        and not said
        and not config.uses_negative(defaults)
    )


def test_what_a_model_does_not_use_is_said_in_one_line() -> None:
    said: list[str] = []
    config = SampleConfig(guidance=3.0).resolved(DISTILLED, said.append)
    assert (
        config.guidance == 1.0 and len(said) == 1 and "sample.guidance = 3 is not used" in said[0]
    )
    assert (
        SampleConfig(guidance=3.0, negative="blur").resolved(GUIDED, said.append).guidance == 3.0
        and len(said) == 1
    )
    assert (
        SampleConfig(guidance=3.0, negative="blur").resolved(EMBEDDED, said.append).guidance == 3.0
    )
    assert (
        len(said) == 2
        and "sample.negative is not used" in said[1]
        and not any("\n" in line for line in said)
    )


def test_the_negative_prompt_is_the_authors_unless_another_is_given_or_none() -> None:
    own = replace(GUIDED, negative="blurry")
    negatives = {
        given: SampleConfig(negative=given).resolved(own, pytest.fail).negative
        for given in ("", "red")
    }
    assert SampleConfig().resolved(own, pytest.fail).negative == "blurry" and negatives == {
        "": "",
        "red": "red",
    }
    assert SampleConfig().resolved(EMBEDDED, pytest.fail).negative == ""


def test_captions_take_the_place_of_prompts_with_their_own_size_and_references() -> None:
    edited = Path("before.png")
    samples = [
        sample("a", "a cat", "a pet"), sample("b", "a cat"), sample("c", "a cat",
        references=(edited,)),
        sample("d", "a dog", size=(32, 48)), sample("e", "a bird"),
    ]  # fmt: skip
    scenes = choose_prompts(SampleConfig(captions=3), samples, size=(5, 64, 64), size_step=16)
    assert scenes == [
        SamplePrompt(prompt="a cat", references=(), frames=5, height=16, width=16),
        SamplePrompt(prompt="a cat", references=(edited,), frames=5, height=16, width=16),
        SamplePrompt(prompt="a dog", references=(), frames=5, height=32, width=48),
    ]
    (scene,) = choose_prompts(
        SampleConfig(captions=1, height=80, frames=1), samples, size=(5, 64, 64), size_step=16
    )
    assert (scene.frames, scene.height, scene.width) == (1, 80, 16)
    assert choose_prompts(SampleConfig(captions=0), samples, size=(5, 64, 64), size_step=16) == []


def test_what_is_given_takes_the_place_of_what_a_clip_says_in_another_way(tmp_path: Path) -> None:
    columns = [
        Column(name="way", kind="text"), Column(name="speed", kind="text"), Column(name="cat",
        kind="text"),
        Column(name="path", kind="table", aliases=("poses",), alternative_to=("way", "speed")),
    ]  # fmt: skip
    file = str(tmp_path / "p.txt")
    Path(file).write_text("1")

    def drawn(own: dict[str, str], *given: str) -> Mapping[str, str]:
        config = SampleConfig(controls=given)
        (found,) = choose_prompts(
            config,
            [replace(sample("a", "x"), controls=own)],
            size=(5, 16, 16),
            size_step=16,
            columns=columns,
        )
        return found.files

    moved, whole = (
        {"way": "Left", "speed": "1", "cat": "c"},
        {"way": "Left", "path": "own.txt", "cat": "c"},
    )
    assert drawn(whole) == whole, "what a clip has is left to the model"
    assert (
        drawn(moved, f"poses={file}") == {"cat": "c", "path": file} == drawn(whole, f"path={file}")
    )
    assert drawn(whole, "way=Up") == {"way": "Up", "cat": "c"} and drawn(moved, "way=Up") == {
        **moved,
        "way": "Up",
    }
    assert drawn(whole, "speed=2") == {"way": "Left", "speed": "2", "cat": "c"}
    assert drawn(whole, "cat=d") == {**whole, "cat": "d"}
    for other in ("way", "speed"):
        with pytest.raises(
            UserError, match=f"path and {other} give the same condition; leave one of them out"
        ):
            drawn({}, f"{other}=Up", f"poses={file}")


def test_prompts_have_the_size_of_training_or_the_shape_of_a_reference(
    tmp_path: Path,
) -> None:
    """Of the first one, or of the one that the model says."""

    def size(shape_reference: int = 0, **settings: Any) -> tuple[int, int]:
        config = SampleConfig(prompts=("a cat", "a cat"), **settings)
        first, second = choose_prompts(
            config, [], size=(1, 64, 64), size_step=16, shape_reference=shape_reference
        )
        assert first == second and first.references == tuple(map(Path, config.references))
        return first.height, first.width

    wide = str(picture(tmp_path / "wide.png", (100, 400), "red"))
    square = str(picture(tmp_path / "square.png", (50, 50), "red"))
    assert size() == (64, 64)
    assert size(references=(wide, square)) == (32, 128)
    assert size(-1, references=(square, wide)) == (32, 128)
    assert size(-1, references=(wide, square)) == (64, 64) == size(-1)
    with pytest.raises(
        UserError, match=r"sample\.references: .*gone\.png does not exist; correct the path"
    ):
        size(references=(wide, str(tmp_path / "gone.png")), height=32)
    assert size(references=(square, wide)) == (64, 64)
    assert size(references=(wide,), height=48, width=16) == (48, 16) and size(
        references=(wide,), width=16
    ) == (64, 16)
    with pytest.raises(UserError, match=r"missing\.png"):
        size(references=(str(tmp_path / "missing.png"),))


# What becomes of it


def draw(
    folder: Path, scenes: Sequence[SamplePrompt], sampler: RecordingSampler, **settings: Any
) -> list[Path]:
    model = make_model(TOY, ToyArch())
    steps: list[None] = []
    config = SampleConfig(**({"steps": 2, "guidance": 3.0} | settings))

    def conditions(text: str) -> Mapping[str, Tensor]:
        return {"text": torch.tensor([float(len(text))])}

    requests = [
        PromptRequest(number=number, prompt=scene.prompt, job=job)
        for number, scene in enumerate(scenes)
        for job in requests_of(
            scene,
            config,
            conditions=conditions(scene.prompt),
            negative=conditions("unwanted"),
            references=[torch.tensor(float(len(path.name))) for path in scene.references],
        )
    ]
    to = SampleFiles(folder=folder, stem="step-000002", fps=8.0, images=config.images)
    files = render_samples(
        single_stage(model, run_plain), sampler, requests, to, lambda: steps.append(None)
    )
    assert model.training and not any(sampler.training) and not sampler.loaded
    assert len(steps) == 2 * len(sampler.jobs) == 2 * len(scenes) * config.images
    return files


def scene(
    prompt: str, frames: int = 1, size: tuple[int, int] = (8, 8), references: tuple[Path, ...] = ()
) -> SamplePrompt:
    return SamplePrompt(
        prompt=prompt, references=references, frames=frames, height=size[0], width=size[1]
    )


def test_each_prompt_is_sampled_with_as_many_seeds_as_asked_and_all_of_it_in_a_grid(
    tmp_path: Path,
) -> None:
    sampler = RecordingSampler()
    files = draw(tmp_path, [scene("A cat!"), scene("a dog")], sampler, images=3, seed=2)
    names = [
        f"step-000002-{n}-{slug}-seed-{seed}.png"
        for n, slug in ((0, "a-cat"), (1, "a-dog"))
        for seed in (2, 3, 4)
    ]
    assert [file.name for file in files] == [*names, "step-000002-grid.png"]
    assert [job.seed for job in sampler.jobs] == [2, 3, 4, 2, 3, 4]
    assert still.read_image(files[1])[0, 0, 0] == round(255 * 0.3)
    whole = still.read_image(files[-1])  # a row for each prompt, a column for each seed
    assert whole.shape == (2 * 8 + GAP, 3 * 8 + 2 * GAP, 3)
    assert [int(value) for value in whole[0, :: 8 + GAP, 0]] == [
        round(255 * v) for v in (0.2, 0.3, 0.4)
    ]
    assert (whole[0] == whole[8 + GAP]).all() and (whole[8 : 8 + GAP] == 255).all()


def test_one_image_has_no_grid(tmp_path: Path) -> None:
    assert [file.name for file in draw(tmp_path, [scene("a cat")], RecordingSampler())] == [
        "step-000002-0-a-cat.png"
    ]
    assert (
        json.loads((tmp_path / "step-000002.json").read_text())["shown"]
        == "step-000002-0-a-cat.png"
    )


def test_a_model_that_samples_every_fourth_frame_samples_as_many_seconds(tmp_path: Path) -> None:
    class Keyframes(RecordingSampler):
        def decode(self, latents: Tensor, seed: int = 0) -> Tensor:
            return super().decode(latents)[:, ::4]

    for kind, frames in ((Keyframes, 6), (RecordingSampler, 21)):
        file, _ = draw(tmp_path / kind.__name__, [scene("a dance", 21)], kind())
        info = probe(file)
        assert round(info.seconds * info.fps) == frames and info.seconds == pytest.approx(
            21 / 8, abs=2e-3
        )


def test_videos_have_a_contact_sheet_with_a_row_for_each(tmp_path: Path) -> None:
    class Brightening(RecordingSampler):
        """Frame i of n as bright as i / n."""

        def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
            pixels = yield from super().denoise(job)
            return pixels * 0 + torch.arange(job.frames).view(1, -1, 1, 1) / max(job.frames, 1)

    scenes = [scene("a cat", 21), scene("", 5), scene("still")]
    files = draw(tmp_path, scenes, Brightening(), seed=3)
    assert [file.name for file in files] == [
        "step-000002-0-a-cat.mp4", "step-000002-1-sample.mp4", "step-000002-2-still.png",
        "step-000002-sheet.png",
    ]  # fmt: skip
    assert all(file.stat().st_size for file in files)
    whole = still.read_image(files[-1])
    assert whole.shape == (3 * 8 + 2 * GAP, SHEET_FRAMES * 8 + (SHEET_FRAMES - 1) * GAP, 3)
    rows = [[int(value) for value in whole[y, :: 8 + GAP, 0]] for y in (0, 8 + GAP, 2 * (8 + GAP))]
    assert rows[0] == [round(255 * i / 21) for i in (0, 4, 8, 12, 16, 20)], (
        "the first, the last, and four between"
    )
    assert rows[1] == [*(round(255 * i / 5) for i in range(5)), 255] and rows[2] == [0, *[255] * 5]
    listed = json.loads((tmp_path / "step-000002.json").read_text())
    assert listed["shown"] == "step-000002-sheet.png"
    assert listed["samples"] == [
        {"file": file.name, "prompt": asked.prompt, "seed": 3, "decoded": "whole"}
        for file, asked in zip(files[:3], scenes, strict=True)
    ]


def test_frames_of_a_contact_sheet_are_small() -> None:
    clips = [torch.full((3, 2, 640, 1280), 0.5), torch.zeros(3, 1, 64, 32)]
    whole = contact_sheet(clips)
    assert whole.shape == (3, 2 * 160 + GAP, 2 * 320 + GAP)
    assert torch.allclose(whole[:, :160, :320], torch.tensor(0.5))
    assert whole[0, 164 + 48 : 164 + 112, 144:176].sum() == 0


def test_a_job_says_all_that_the_section_and_the_scene_say(tmp_path: Path) -> None:
    sampler = RecordingSampler()
    asked = scene("a cat", size=(16, 8), references=(Path("one.png"), Path("second.png")))
    draw(tmp_path, [asked], sampler, shift=2.0, guidance=6.0, seed=9)
    (job,) = sampler.jobs
    assert (job.frames, job.height, job.width) == (1, 16, 8)
    assert (job.steps, job.guidance, job.shift, job.seed) == (2, 6.0, 2.0, 9)
    assert [float(latents) for latents in job.references] == [7.0, 10.0] and job.conditions[
        "text"
    ] == 5
    assert job.negative is not None and job.negative["text"] == 8


def test_a_sample_that_is_not_finite_names_its_prompt(tmp_path: Path) -> None:
    sampler = RecordingSampler()
    sampler.value = float("nan")
    with pytest.raises(UserError, match="the sample of 'a cat' is not finite"):
        draw(tmp_path, [scene("a cat")], sampler)
    assert not sampler.loaded


def test_images_of_different_sizes_are_in_the_middle_of_equal_cells() -> None:
    pictures = [torch.zeros(3, 2, 6), torch.zeros(3, 4, 2), torch.zeros(3, 4, 6)]
    whole = grid(pictures)
    assert whole.shape == (3, 4 + GAP + 4, 6 + GAP + 6)
    assert (
        whole[0, 1:3, :6].sum() == 0 and whole[0, 0, :6].min() == 1 and whole[0, 3, :6].min() == 1
    )
    assert (
        whole[0, :4, 6 + GAP + 2 : 6 + GAP + 4].sum() == 0 and whole[0, :4, 6 + GAP + 1].min() == 1
    )
    assert whole[0, 4 + GAP :, :6].sum() == 0 and whole[0, 4 + GAP :, 6:].min() == 1
    assert grid(pictures, columns=3).shape == (3, 4, 3 * 6 + 2 * GAP) and torch.equal(
        grid(pictures[:1]), pictures[0]
    )


# The whole command


class World:
    """A toy that draws still images and edits, a run of it, and the sample command."""

    def __init__(self, folder: Path, defaults: SampleDefaults):
        self.folder, self.sampler = folder, RecordingSampler()
        self.spec: ModelSpec = altered(
            TOY, sampler=lambda *_: self.sampler, sample_defaults=lambda arch: defaults,
            frame_step=0, size=(1, 16, 16),
            reference_size=lambda height, width, count: (8, 8 * count),
        )  # fmt: skip
        model: ToyModel = make_model(TOY, TOY.architecture.presets["tiny"])  # type: ignore[assignment]
        state = {
            TOY.architecture.names.from_native["official"](name)[0].name: t
            for name, t in model.state_dict().items()
        }
        save_file(state, folder / "toy.safetensors")
        (folder / "clips").mkdir()
        for i, colour in enumerate(("teal", "red", "navy")):
            picture(folder / "clips" / f"{i}.png", (16, 16), colour)
            (folder / "clips" / f"{i}.txt").write_text(f"picture number {i}")
        assert self.run("train", "--train.steps", "1", "--sample.captions", "2") == 0

    def run(self, command: str, *flags: str) -> int:
        common = {
            "run.folder": "run", "model.preset": "tiny", "model.transformer": "toy.safetensors",
            "model.dtype": "fp32",
            "data.folder": "clips", "adapter.rank": "2", "log.tensorboard": "false",
            "encode.cache": "cache",
        }  # fmt: skip
        return cli.run(
            self.spec, command, [*(f"--{name}={value}" for name, value in common.items()), *flags]
        )


def test_a_finished_run_samples_captions_with_the_models_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, GUIDED)
    assert [(job.steps, job.guidance, job.frames, job.height) for job in world.sampler.jobs] == [
        (50, 5.0, 1, 16)
    ] * 2
    assert all(job.negative is not None for job in world.sampler.jobs)
    names = sorted(path.name for path in Path("run/samples").iterdir())
    assert names == [
        "step-000001-0-picture-number-0.png", "step-000001-1-picture-number-1.png",
        "step-000001-grid.png", "step-000001.json",
    ]  # fmt: skip


def test_the_authors_negative_prompt_guides_and_a_stored_empty_one_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world, encoder = World(tmp_path, replace(GUIDED, negative="blurry")), ToyTextEncoder()

    def negatives() -> list[torch.Tensor]:
        found = [job.negative["text"] for job in world.sampler.jobs if job.negative is not None]
        world.sampler.jobs.clear()
        return found

    blurry, empty = (encoder.encode([text])[0]["text"] for text in ("blurry", ""))
    assert all(torch.equal(each, blurry) for each in negatives())
    file = Path("run/config.toml")  # as a version wrote it whose default was the empty text
    file.write_text(file.read_text().replace('negative = "default"', 'negative = ""'))
    assert world.run("sample", "--run", "run", "--prompt", "a") == 0
    assert all(torch.equal(each, empty) for each in negatives())
    assert world.run("sample", "--run", "run", "--prompt", "a", "--sample.negative", "default") == 0
    assert all(torch.equal(each, blurry) for each in negatives())


def test_the_sample_command_edits_references_and_samples_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, DISTILLED)
    world.sampler.jobs.clear()
    samples = Path("run/samples")
    trained = {path: path.read_bytes() for path in samples.iterdir()}
    for name in ("one", "two"):
        picture(tmp_path / f"{name}.png", (32, 32), "gold")
    flags = [
        "--reference",
        "one.png",
        "--reference",
        "two.png",
        "--images",
        "2",
        "--seed",
        "5",
        "--sample.guidance",
        "3",
    ]
    capsys.readouterr()
    assert world.run("sample", "--prompt", "make it blue", *flags) == 0
    said = capsys.readouterr()
    assert [job.seed for job in world.sampler.jobs] == [5, 6]
    for job in world.sampler.jobs:
        assert job.negative is None and (job.steps, job.guidance) == (4, 1.0)
        assert [tuple(latents.shape) for latents in job.references] == [(4, 1, 2, 4)] * 2
    assert "make-it-blue-seed-6.png" in said.out and "grid.png" in said.out
    assert "sample.guidance = 3 is not used" in said.out + said.err
    first = {path: path.read_bytes() for path in samples.iterdir()}
    assert world.run("sample", "--prompt", "a dog", "--images", "2") == 0
    now = {path: path.read_bytes() for path in samples.iterdir()}
    assert {path: now[path] for path in first} == first and {
        path: now[path] for path in trained
    } == trained
    shown = sorted(path.name for path in samples.glob("*-grid.png"))
    assert shown == [f"{name}step-000001-grid.png" for name in ("sampled-001-", "sampled-002-", "")]
    capsys.readouterr()
    assert world.run("sample", "--prompt", "a", "--reference", "nowhere.png") == 1
    error = capsys.readouterr().err
    assert "nowhere.png" in error and error.count("\n") == 1


def test_the_home_of_a_user_that_is_not_there_is_one_line() -> None:
    control = SampleConfig(prompts=("x",), controls=("input_image=~nobody.at.all/a.png",))
    with pytest.raises(UserError, match="input_image = ~nobody.at.all/a.png does not exist"):
        control_files(control, [Column(name="input_image", kind="image")])
