"""Loss masks in the cache: at latent size, apart from their clips, and weighed when they are
read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from data_specs import CLIPS
from media_files import numbered_video, picture
from PIL import Image, ImageDraw
from toy_encoders import CountingEncoder
from toy_encoders import encode_with as encode

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BatchSize, TrainDataLoader
from ditkit_core.encoding.loss_masks import LOSS_WEIGHTS, weighted
from ditkit_core.errors import UserError


class World:
    """An image, a clip of five frames, and a cache."""

    def __init__(self, root: Path) -> None:
        self.folder, self.cache = root / "set", Cache(root / "cache")
        picture(self.folder / "a.png", (32, 32))
        numbered_video(self.folder / "b.mp4", frames=12)
        for name in "ab":
            (self.folder / f"{name}.txt").write_text(name)

    def mask(self, name: str, left: int, size: tuple[int, int] = (32, 32)) -> None:
        """Write a mask whose first columns are white."""
        image = Image.new("L", size)
        ImageDraw.Draw(image).rectangle((0, 0, left - 1, size[1]), fill=255)
        image.save(self.folder / f"{name}-mask.png")

    def encode(self, **given: Any) -> list[EncodedSample]:
        self.log: list[str] = []
        data = DataConfig(folder=str(self.folder), frames=5, height=32, width=32)
        samples = scan(data, CLIPS).samples
        media, text = CountingEncoder("media", self.log), CountingEncoder("text", self.log)
        return encode(
            samples, cache=self.cache, media_encoder=media, text_encoder=text, fps=16.0, **given
        )

    def entries(self, kind: str) -> set[str]:
        return {path.stem for path in self.cache.entries() if path.parts[-3] == kind}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_masks_are_cached_at_latent_size_and_change_nothing_else(world: World) -> None:
    before = world.encode()
    entries = world.entries("media"), world.entries("text")
    plain = [sample.load() for sample in before]
    world.mask("a", 12)
    masked, other = world.encode()
    assert world.log == [], "no clip and no caption is encoded again"
    assert (world.entries("media"), world.entries("text")) == entries and len(
        world.entries("mask")
    ) == 1
    item = masked.load()
    # latents are 8 pixels wide: one is white, half of the second, and none of the others
    assert item.pop(LOSS_WEIGHTS).tolist() == [[[[1, 0.5, 0, 0]] * 4]]
    assert item.keys() == plain[0].keys() and all(
        torch.equal(item[name], plain[0][name]) for name in item
    )
    assert masked.keys[:-1] == before[0].keys and masked.keys[-1].startswith("mask ")
    assert other == before[1] and LOSS_WEIGHTS not in other.load()
    assert masked.outline()[LOSS_WEIGHTS].shape == (1, 1, 4, 4)


def test_the_mask_of_a_window_has_the_windows_frames(world: World) -> None:
    """A mask that becomes brighter: each window is read from the place of its clip."""
    (world.folder / "a.png").unlink()
    numbered_video(world.folder / "b.mp4", frames=24, fps=16)
    numbered_video(world.folder / "b-mask.mp4", frames=24, fps=16)
    data = DataConfig(
        folder=str(world.folder), frames=5, height=32, width=32, windows="uniform", clips_per_file=3
    )
    samples = scan(data, CLIPS).samples
    assert [sample.start_seconds > 0 for sample in samples] == [False, True, True]
    media, text = (CountingEncoder(kind, []) for kind in ("media", "text"))
    encoded = encode(samples, cache=world.cache, media_encoder=media, text_encoder=text, fps=16.0)
    first, middle, last = (float(one.load()[LOSS_WEIGHTS].mean()) for one in encoded)
    assert first < middle < last


def test_the_weight_outside_is_no_part_of_the_cache_and_a_changed_mask_is_read_again(
    world: World,
) -> None:
    world.mask("b", 8, (64, 48))
    first = world.encode()[1]
    weights = world.encode(mask_weight=0.25)[1].load()[LOSS_WEIGHTS]
    assert weights.shape == (1, 2, 4, 4)
    assert torch.equal(weights, 0.25 + 0.75 * first.load()[LOSS_WEIGHTS])
    (entry,) = world.entries("mask")
    world.mask("b", 40, (64, 48))
    changed = world.encode()[1]
    assert world.entries("mask") > {entry} and changed.keys != first.keys
    assert not torch.equal(changed.load()[LOSS_WEIGHTS], first.load()[LOSS_WEIGHTS])


def test_a_damaged_entry_is_made_again(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.mask("a", 12)
    (sample, _) = world.encode()
    weights = sample.load()[LOSS_WEIGHTS]
    (file,) = (path for path in world.cache.entries() if path.parts[-3] == "mask")
    file.write_bytes(file.read_bytes()[:-8])
    assert torch.equal(sample.load()[LOSS_WEIGHTS], weights)
    assert "is damaged: it is removed, and encoded again" in capsys.readouterr().err


def test_samples_with_and_without_a_mask_share_micro_batches(world: World) -> None:
    for name in "cd":
        picture(world.folder / f"{name}.png", (32, 32), "teal")
        (world.folder / f"{name}.txt").write_text(name)
    (world.folder / "b.mp4").unlink()

    def order(samples: list[EncodedSample]) -> list[list[str]]:
        loader = TrainDataLoader(samples, seed=0, batch_size=BatchSize(samples=2))
        assert loader.num_shapes == 1
        return [loader.micro_batch(index).ids for index in range(6)]

    before = order(world.encode())
    world.mask("c", 12)
    assert order(world.encode()) == before


def test_a_mask_that_cannot_be_decoded_is_left_out_or_refused_with_its_clip(world: World) -> None:
    # the header of a torn JPEG is whole
    image = picture(world.folder / "a-mask.jpg", (320, 320), "white")
    image.write_bytes(image.read_bytes()[:-500])
    with pytest.raises(UserError, match=r"a-mask\.jpg cannot be read as an image"):
        world.encode()
    left_out: list[tuple[str, str]] = []
    kept = world.encode(on_bad=lambda sample, error: left_out.append((sample.id, str(error))))
    assert [sample.id for sample in kept] == ["b"]
    assert left_out[0][0] == "a" and "a-mask.jpg" in left_out[0][1]


def test_latents_in_front_of_the_clip_are_outside() -> None:
    item = weighted({"latents": torch.zeros(3, 4, 2, 2)}, torch.ones(1, 2, 2, 2), 0.5)
    assert item[LOSS_WEIGHTS][0, :, 0, 0].tolist() == [0.5, 0.5, 1, 1]
