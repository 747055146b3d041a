"""What a model is conditioned on besides text: encoded once, kept apart by all that it depends on,
left out where it is optional."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import numbered_video, picture
from torch import Tensor
from toy_encoders import CountingEncoder
from toy_encoders import encode_with as encode

from ditkit_core.config.resolve import resolve
from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import read_clip
from ditkit_core.encoding import cache
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import Conditioning
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BatchSize, TrainDataLoader
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.loading.model import Model
from ditkit_core.models.conditions import ClipInputs, Column
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run, with_config
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.sampling.prompts import choose_prompts, control_files
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.flow_matching import NoisedBatch, velocity_errors

COLUMNS = (
    Column(name="start", kind="image", aliases=("input_image",)),
    Column(name="direction", kind="text"),
)


class StartPicture:
    """The mean of the image in `start`, or of the clip's first frame, and a number for
    `direction`."""

    kind, optional, items_at_once, identity = "start", False, 1, "v1"

    def __init__(self, log: list[str]) -> None:
        self.log, self.num_asked = log, 0

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        self.num_asked += 1
        own = () if controls.clip is None else ("",)
        named = tuple(column for column in ("start", "direction") if column in controls.files)
        if not own and "start" not in controls.files:
            raise UserError("nothing to start from; give start=FILE")
        return named if "start" in controls.files else (*own, *named)

    def check(self, controls: ClipInputs) -> None:
        if self.uses(controls):
            self.encode([controls])

    def load(self) -> None:
        self.log.append("load start")

    def encode(
        self, items: Sequence[ClipInputs], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        (item,) = items
        self.log.append("start")
        path = Path(item.files["start"]) if "start" in item.files else item.clip
        assert path is not None
        frames = item.frames if path.suffix == ".mp4" else 1
        rate, begin = (item.fps, item.start_seconds) if path.suffix == ".mp4" else (0.0, 0.0)
        clip = read_clip(
            path, frames=frames, fps=rate, height=item.height, width=item.width, start_seconds=begin
        )
        advance(1.0)
        direction = float(len(item.files.get("direction", "")))
        return [{"start": torch.tensor([float(clip[:, 0].mean()), direction])}]

    def unload(self) -> None:
        self.log.append("unload start")


class World:
    """Two clips, an image, a cache."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, Cache(root / "cache")
        self.clips = [
            numbered_video(root / f"{name}.mp4", frames=frames)
            for name, frames in (("a", 24), ("b", 30))
        ]
        self.picture = picture(root / "start.png", (32, 32), "red")
        self.log: list[str] = []

    def sample(self, index: int, **given: Any) -> Sample:
        clip = self.clips[index]
        return Sample(
            id=clip.stem, media=clip, captions=("x",), frames=5, height=32, width=32, **given
        )

    def encode(
        self, *samples: Sample, sounds: Sequence[str] = (), **given: Any
    ) -> list[EncodedSample]:
        self.log.clear()
        self.conditioner = StartPicture(self.log)
        conditioning = Conditioning(
            conditioners=[self.conditioner], texts=["direction"], sounds=sounds
        )
        return encode(
            samples, cache=self.cache, media_encoder=CountingEncoder("media"),
            text_encoder=CountingEncoder("text"),
            fps=16.0, conditioning=conditioning, **given,
        )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


ENCODED_ONCE = ["load start", "start", "unload start"]


def test_a_condition_is_encoded_once_and_becomes_part_of_the_item(world: World) -> None:
    (sample,) = world.encode(world.sample(0))
    assert world.log == ENCODED_ONCE and world.conditioner.num_asked == 1
    assert sample.load()["start"].shape == sample.outline()["start"].shape == (2,)
    world.encode(world.sample(0))
    assert world.log == []


def test_sound_that_earlier_versions_read_otherwise_is_another_condition(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image in `start` is not read for its sound, so only a sample that starts from its own
    clip is encoded again."""
    own, named = world.sample(0), world.sample(1, controls={"start": str(world.picture)})
    monkeypatch.setattr(cache, "sound_changes_since_first", lambda path: "")
    before = world.encode(own, named, sounds=[""])
    assert before == world.encode(own, named)
    monkeypatch.setattr(cache, "sound_changes_since_first", lambda path: "placed")
    world.cache = Cache(world.root / "cache")
    (world.cache.folder / "hashes.json").unlink(missing_ok=True)
    after = world.encode(own, named, sounds=[""])
    assert world.log == ENCODED_ONCE
    assert [sample.conditions for sample in after][1] == before[1].conditions
    assert after[0].conditions != before[0].conditions and after[0].media_key == before[0].media_key


def test_another_window_file_text_or_identity_is_another_condition(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for given in (
        {}, {"start_seconds": 0.25}, {"controls": {"start": str(world.picture)}},
        {"controls": {"direction": "left"}}, {"controls": {"direction": "up"}},
    ):  # fmt: skip
        (sample,) = world.encode(world.sample(0, **given))
        assert world.log == ENCODED_ONCE, given
        keys.append(sample.conditions[0].key)
    picture(world.picture, (32, 32), "navy")
    keys.append(
        world.encode(world.sample(0, controls={"start": str(world.picture)}))[0].conditions[0].key
    )
    monkeypatch.setattr(StartPicture, "identity", "v2")
    keys.append(world.encode(world.sample(0))[0].conditions[0].key)
    assert len(set(keys)) == 7


def test_a_condition_that_reads_an_image_alone_is_shared_by_clips(world: World) -> None:
    one, other = world.encode(
        *(world.sample(i, controls={"start": str(world.picture)}) for i in range(2))
    )
    assert world.log == ENCODED_ONCE
    assert one.conditions == other.conditions and one.media_key != other.media_key


def test_a_window_begins_where_it_begins(world: World) -> None:
    first, later = (
        world.encode(world.sample(0, start_seconds=start))[0].load() for start in (0.0, 0.25)
    )
    frames = read_clip(world.clips[0], frames=9, fps=16.0, height=32, width=32)
    assert first["start"][0] == frames[:, 0].mean() != frames[:, 4].mean()
    assert later["start"][0] == frames[:, 4].mean()
    assert torch.equal(later["latents"], frames[:, 4:9][:, ::4, ::8, ::8])


def test_what_cannot_be_encoded_is_left_out_if_asked(world: World) -> None:
    broken = world.root / "broken.png"
    broken.write_bytes(b"no picture")
    samples = [world.sample(0, controls={"start": str(broken)}), world.sample(1)]
    with pytest.raises(UserError, match="broken.png"):
        world.encode(*samples)
    told: list[str] = []
    (kept,) = world.encode(
        *samples, on_bad=lambda sample, error: told.append(f"{sample.id} {error}")
    )
    assert (
        kept.id == "b" and len(told) == 1 and told[0].startswith("a ") and "broken.png" in told[0]
    )


def test_optional_conditions_are_dropped_by_sample_and_step_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(dropout: float) -> list[bool]:
        encoded = world.encode(world.sample(0), world.sample(1))
        data = TrainDataLoader(
            encoded, seed=0, batch_size=BatchSize(samples=2), control_dropout=dropout
        )
        return ["start" in item for index in range(20) for item in data.micro_batch(index).items]

    assert all(given(1.0))  # it is not optional
    monkeypatch.setattr(StartPicture, "optional", True)
    assert all(given(0.0)) and not any(given(1.0))
    half = given(0.5)
    assert 10 < sum(half) < 30 and half == given(0.5)


def test_assembly_is_part_of_every_item(world: World) -> None:
    def with_mark(item: Any) -> dict[str, Tensor]:
        return {**item, "latents": torch.cat([item["latents"][:, :1], item["latents"]], 1)}

    (sample,) = world.encode(world.sample(0), assemble=with_mark)
    assert sample.load()["latents"].shape == sample.outline()["latents"].shape == (3, 3, 4, 4)


def test_velocity_is_learnt_where_the_mask_is() -> None:
    model = make_model(TOY, TOY.architecture.presets["tiny"])
    items = toy_items(2)
    sigma, noise = torch.tensor([0.3, 0.6]), [torch.randn_like(item["latents"]) for item in items]
    toy, batch = Model(model, BlockEngine(), TOY), NoisedBatch(items, sigma, noise)
    plain = velocity_errors(toy, batch, 1.0)
    halves = []
    for part in (slice(None, None, 2), slice(1, None, 2)):
        mask = torch.zeros(items[0]["latents"].shape[-1])
        mask[part] = 1
        masked = replace(toy, spec=altered(TOY, loss_mask=lambda item, mask=mask: mask))
        halves.append(velocity_errors(masked, batch, 1.0))
    shares = [
        len(range(items[0]["latents"].shape[-1])[part])
        for part in (slice(None, None, 2), slice(1, None, 2))
    ]
    mean = sum(half * share for half, share in zip(halves, shares, strict=True)) / sum(shares)
    torch.testing.assert_close(mean, plain)  # summed in another order
    assert not torch.equal(halves[0], plain)


def test_files_of_a_sample_are_checked(tmp_path: Path) -> None:
    there = str(picture(tmp_path / "cat.png"))
    config = SampleConfig(prompts=("a cat",), controls=(f"input_image={there}", "direction=left"))
    assert control_files(config, COLUMNS) == {"start": there, "direction": "left"}
    (scene,) = choose_prompts(config, [], size=(5, 32, 32), size_step=16, columns=COLUMNS)
    assert scene.controls(16.0).files == control_files(config, COLUMNS) and scene.clip is None
    for wrong, named in (
        ("cat.png", "column=path"), ("inputimage=cat.png", "did you mean 'input_image'"), ("start=no.png", "no.png"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=named):
            control_files(SampleConfig(controls=(wrong,)), COLUMNS)
    with pytest.raises(UserError, match="twice"):
        control_files(SampleConfig(controls=(f"start={there}", f"input_image={there}")), COLUMNS)
    with pytest.raises(UserError, match="it has none"):
        control_files(SampleConfig(controls=(f"start={there}",)), ())


def test_captions_are_sampled_with_what_goes_with_their_clips(world: World) -> None:
    samples = [
        world.sample(0),
        world.sample(1, controls={"start": str(world.picture)}, start_seconds=0.25),
    ]
    without = choose_prompts(SampleConfig(captions=2), samples, size=(5, 32, 32), size_step=16)
    assert len(without) == 1 and without[0].clip is None  # they have one caption
    scenes = choose_prompts(
        SampleConfig(captions=2), samples, size=(5, 32, 32), size_step=16, columns=COLUMNS
    )
    assert [scene.clip for scene in scenes] == world.clips
    assert scenes[1].files == {"start": str(world.picture)} and scenes[1].start_seconds == 0.25


def test_an_architecture_may_differ_from_its_family() -> None:
    def variant(spec: ModelSpec, arch: ToyArch) -> ModelSpec:
        return altered(spec, size=(1, 48, 64), size_step=48) if arch.dim > 8 else spec

    spec = replace(TOY, variant=variant)
    small = replace(TOY.architecture.presets["tiny"], dim=8)
    spec = altered(spec, presets={"tiny": TOY.architecture.presets["tiny"], "small": small})
    config = resolve(RunConfig, flags={"model.preset": "tiny"})
    run = create_run(spec, config)
    assert (run.config.data.height, run.config.data.width, run.spec.data.size_step) == (48, 64, 48)
    assert with_config(run, run.config).spec.data.size_step == 48
    unknown = create_run(spec, RunConfig())
    assert unknown.arch is None and unknown.spec.data.size_step == TOY.data.size_step
    known = unknown.with_arch(TOY.architecture.presets["tiny"])
    assert known.spec.data.size_step == 48 and known.config.data.height == 48
    assert unknown.with_arch(small).config.data.height == TOY.data.size[1]
