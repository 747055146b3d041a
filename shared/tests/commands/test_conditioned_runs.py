"""Runs of a model that is conditioned on more than text: what is sampled of it, class images, what
is left out of it, what its plan counts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import numbered_video, picture
from torch import Tensor
from toy_world import World

from ditkit_core.config.resolve import resolve
from ditkit_core.data.media.clip import read_clip
from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.models.conditions import ClipInputs, Column, Conditioner
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.plans.planned_step import largest_bucket
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch


class Start:
    """The brightness of the image in `start`, or of the clip's own first frame; or nothing where
    there is neither, if that may be."""

    kind, identity, items_at_once = "start", "v1", 1

    def __init__(self, *, optional: bool = False, needed: bool = True) -> None:
        self.optional, self.needed = optional, needed

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        if "start" in controls.files:
            return ("start",)
        if controls.clip is None and self.needed:
            raise UserError("nothing to start from; give start=FILE")
        return ("",)

    def load(self) -> None:
        """There are no weights."""

    def unload(self) -> None:
        """There are no weights."""

    def encode(
        self, items: Sequence[Any], advance: Any = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        (item,) = items
        path = Path(item.files["start"]) if "start" in item.files else item.clip
        advance(1.0)
        if path is None:
            return [{"start": torch.zeros(1)}]
        return [
            {
                "start": read_clip(
                    path, frames=1, fps=1.0, height=item.height, width=item.width
                ).mean()[None]
            }
        ]


START = Column(name="start", kind="image")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    world.seen = []  # type: ignore[attr-defined]
    return world


def told(world: World, conditioner: Conditioner, column: Column = START, **fields: Any) -> None:
    """Let the model be told of a column, and remember what it is given in training."""

    def seeing(
        noised: Any, sigma: Any, items: Sequence[Mapping[str, Tensor]], guidance: float
    ) -> Any:
        if torch.is_grad_enabled() and not noised[0].is_meta:
            world.seen.append([item.get("start") for item in items])  # type: ignore[attr-defined]
        return TOY.training.make_inputs(noised, sigma, items, guidance)

    world.spec = altered(
        world.spec,
        make_inputs=seeing,
        columns=lambda arch: (column,),
        conditioners=lambda *_: (conditioner,),
        **fields,
    )


def given(world: World) -> list[bool]:
    """Of each sample that was trained since, whether it had its condition."""
    found = [start is not None for batch in world.seen for start in batch]  # type: ignore[attr-defined]
    world.seen.clear()  # type: ignore[attr-defined]
    return found


QUIET = ("--sample.captions", "0")
PROMPT = ("--prior.prompt", "a class", "--prior.images", "2", *QUIET)


def test_class_images_that_cannot_be_sampled_from_text_are_refused_while_nothing_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    told(world, Start())
    assert world.train("run", 1, *PROMPT) == 1
    error = capsys.readouterr().err
    assert "nothing to start from" in error and "prior.folder" in error and error.count("\n") == 1
    told(world, Start(needed=False), replace(START, required=True))
    for i in range(5):
        picture(world.folder / "starts" / f"{i}.png")
    assert world.train("run", 1, *PROMPT, "--data.controls", "start=starts") == 1
    assert "has no start" in capsys.readouterr().err
    assert (world.media.loads, world.text.loads) == (0, 0)


def test_class_images_are_generated_with_the_condition_of_having_none(world: World) -> None:
    told(world, Start(needed=False))
    jobs: list[Any] = []
    sampler = world.spec.auxiliary.sampler

    def recording(*arguments: Any) -> Any:
        made = sampler(*arguments)
        denoise = made.denoise
        made.denoise = lambda job: jobs.append(job) or denoise(job)  # type: ignore[method-assign, func-returns-value]
        return made

    world.spec = altered(world.spec, sampler=recording)
    assert world.train("run", 2, *PROMPT) == 0
    assert len(jobs) == 2 and all(
        torch.equal(job.conditions["start"], torch.zeros(1)) for job in jobs
    )
    assert len(list((world.folder / "run" / "prior").glob("*.png"))) == 2


def test_class_images_of_a_folder_start_from_themselves_or_from_what_its_metadata_names(
    world: World,
) -> None:
    told(world, Start())
    world.add("class/a.png", (16, 16), "white", "a class")
    assert world.train("own", 2, "--prior.folder", "class", *QUIET) == 0
    assert (
        all(given(world))
        and json.loads((world.folder / "own" / "data.json").read_text())["prior: a"]
    )
    told(world, Start(), replace(START, required=True))
    for i in range(5):
        picture(world.folder / "starts" / f"{i}.png")
    flags = ("--data.controls", "start=starts", "--prior.folder", "class", *QUIET)
    assert world.train("without", 1, *flags) == 1
    picture(world.folder / "class" / "of" / "a.png", (16, 16), "black")
    line = {"image": "a.png", "text": "a class", "start": "of/a.png"}
    (world.folder / "class" / "metadata.jsonl").write_text(json.dumps(line))
    world.seen.clear()  # type: ignore[attr-defined]
    assert world.train("named", 2, *flags) == 0
    brightness = {round(float(start), 3) for batch in world.seen for start in batch}  # type: ignore[attr-defined]
    assert -1.0 in brightness, "the class picture starts from the black one"


def test_optional_conditions_are_left_out_as_the_model_would_have_it_and_said(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    told(world, Start(optional=True), control_dropout=0.5)
    for i in range(4):
        world.add(f"class/{i}.png", (16, 16), "white", "a class")
    flags = ("--train.batch_size", "4", "--prior.folder", "class", *QUIET)
    assert world.train("run", 6, *flags) == 0
    assert (
        "train.control_dropout = 0.5: 50% of the samples are trained without start"
        in capsys.readouterr().out
    )
    pairs = given(world)
    instance = [had for i, had in enumerate(pairs) if i // 4 % 2 == 0]
    prior = [had for i, had in enumerate(pairs) if i // 4 % 2]
    assert 0 < sum(instance) < len(instance) and 0 < sum(prior) < len(prior)
    assert world.train("always", 2, *flags, "--train.control_dropout", "0") == 0
    assert all(given(world))
    assert world.train("never", 2, *flags, "--train.control_dropout", "1") == 0
    assert not any(given(world))
    assert "control_dropout = -1" in (world.folder / "run" / "config.toml").read_text()


@pytest.mark.parametrize("share", [-0.5, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(UserError, match=r"train.control_dropout = .* must be in \[0, 1\], or -1"):
        resolve(RunConfig, flags={"train.control_dropout": share})


def run_of(folder: Path, **flags: Any) -> RunContext:
    columns = (START, Column(name="pose", kind="video"))
    spec = altered(TOY, columns=lambda arch: columns)
    given = {
        "model.preset": "tiny",
        "data.folder": str(folder),
        "data.frames": 5,
        "data.height": 32,
        "data.width": 32,
    }
    return create_run(spec, resolve(RunConfig, flags={**given, "data.fps": 16.0, **flags}))


def test_a_caption_is_sampled_no_longer_than_its_clip_and_what_goes_with_it(tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    for name, frames in (("a", 9), ("b", 14), ("c", 14)):
        numbered_video(clips / f"{name}.mp4", frames=frames, fps=16)
        (clips / f"{name}.txt").write_text(name)
        numbered_video(tmp_path / "poses" / f"{name}.mp4", frames=9 if name == "c" else 14, fps=16)
    flags = {"sample.captions": 3, "data.controls": (f"pose={tmp_path / 'poses'}",)}

    def frames(said: list[str], **more: Any) -> list[int]:
        run = run_of(clips, **flags, **more)
        return [
            scene.frames
            for scene in sample_prompts(run.data, run.data.dataset.samples, said.append)
        ]

    said: list[str] = []
    own = run_of(clips, **flags, **{"data.frames": 9})
    assert [scene.frames for scene in sample_prompts(own.data, own.data.dataset.samples)] == [
        9,
        9,
        9,
    ]
    assert frames(said) == [5, 5, 5] and not said
    assert frames(said, **{"sample.frames": 9}) == [9, 9, 9] and not said
    assert frames(said, **{"sample.frames": 13}) == [5, 13, 5]
    assert (
        len(said) == 2 and "clips/a.mp4 has 9 frames at 16 fps, and 13 would be needed" in said[0]
    )
    assert "poses/c.mp4 has 9 frames" in said[1]


def test_a_clip_that_was_shortened_is_sampled_as_long_as_it_is_trained(tmp_path: Path) -> None:
    numbered_video(tmp_path / "a.mp4", frames=6, fps=16)
    (tmp_path / "a.txt").write_text("a")
    run = run_of(tmp_path, **{"data.frames": 13, "data.short_clips": "shorten"})
    (scene,) = sample_prompts(run.data, run.data.dataset.samples)
    assert scene.frames == 5


def test_edits_that_are_not_here_are_planned_with_one_reference_each(tmp_path: Path) -> None:
    """Of the size that the family gives one reference: without it the plan of an edit would be the
    plan of a plain image."""
    spec = altered(TOY, reference_size=lambda height, width, count: (height // 2, width // count))
    flags = {"data.folder": "elsewhere", "data.height": 64, "data.width": 48, "data.buckets": False}
    plain, edits = (
        create_run(
            spec, resolve(RunConfig, flags={**flags, "data.references": references}), ToyArch()
        )
        for references in ("", "before")
    )
    assert largest_bucket(plain.data, plain.arch).references == ()
    bucket = largest_bucket(edits.data, edits.arch)
    assert bucket.references == ((32, 48),)
    assert (
        "with references 32x48" in bucket.described() and "one reference each" in bucket.described()
    )


def test_what_is_in_front_of_a_clip_is_planned(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "clips" / f"{name}.png", (32, 32), "red")
        (tmp_path / "clips" / f"{name}.txt").write_text(name)
    picture(tmp_path / "starts" / "b.png")
    run = run_of(tmp_path / "clips", **{"data.controls": (f"start={tmp_path / 'starts'}",)})
    assert {references for _, references in largest_bucket(run.data, run.arch).shapes} == {()}
    spec = altered(run.spec, columns=lambda arch: (replace(START, in_front=True),))
    run = create_run(spec, run.request.config)
    assert {references for _, references in largest_bucket(run.data, run.arch).shapes} == {
        (),
        ((32, 32),),
    }
