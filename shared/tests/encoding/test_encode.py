"""The encode stage: each thing once, one encoder at a time, nothing stale."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from data_specs import CLIPS
from media_files import numbered_video, picture
from PIL import Image
from toy_encoders import CountingEncoder
from toy_encoders import encode_with as encode

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, Sample, scan
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import PromptFiles, text_key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.missing import _check_finite
from ditkit_core.errors import EnvironmentFault, UserError


class World:
    """A dataset folder, a cache, and encoders that are new at every start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "set"
        self.cache = Cache(root / "cache")
        for i, name in enumerate(("a", "b", "c")):
            numbered_video(self.folder / f"{name}.mp4", frames=12 + 2 * i)
            (self.folder / f"{name}.txt").write_text(f"caption {name}")
        picture(self.folder / "d.png")
        (self.folder / "d.txt").write_text("caption d")

    def dataset(self, **settings: Any) -> Dataset:
        config = DataConfig(
            **{"folder": str(self.folder), "frames": 5, "height": 32, "width": 32, **settings}
        )
        return scan(config, CLIPS)

    def start(
        self,
        *,
        prepare: Callable[[CountingEncoder, CountingEncoder], None] = lambda media, text: None,
        identity: str = "v1",
        **settings: Any,
    ) -> list[EncodedSample]:
        self.log: list[str] = []
        self.media = CountingEncoder("media", self.log, identity)
        self.text = CountingEncoder("text", self.log)
        prepare(self.media, self.text)
        data = {name: settings.pop(name) for name in ("height", "width") if name in settings}
        given = {"fps": 16.0, **settings}
        samples = self.dataset(**data).samples
        return encode(
            samples, cache=self.cache, media_encoder=self.media, text_encoder=self.text, **given
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


FIRST = ["load media", *["media"] * 4, "unload media", "load text", *["text"] * 5, "unload text"]


def test_everything_is_encoded_once_and_one_encoder_at_a_time(world: World) -> None:
    encoded = world.start()
    assert world.log == FIRST
    assert world.text.items == ["", "caption a", "caption b", "caption c", "caption d"]
    assert [sample.id for sample in encoded] == ["a", "b", "c", "d"]
    item = encoded[0].load()
    assert set(item) == {"latents", "text"}
    assert torch.equal(item["latents"], world.media.items[0][:, ::4, ::8, ::8])
    assert item["text"][0, 0] == len("caption a")
    assert encoded[3].load()["latents"].shape == (3, 1, 4, 4)


def test_the_empty_caption_is_there_for_dropout(world: World) -> None:
    sample = world.start()[0]
    dropped = sample.load(drop_caption=True)
    assert dropped["text"].tolist() == [[0, 0]]
    assert torch.equal(dropped["latents"], sample.load()["latents"])


def test_a_complete_cache_loads_no_encoder(world: World) -> None:
    first = world.start()
    assert world.start() == first
    assert world.log == []


@pytest.mark.parametrize(
    ("stopped", "stop_after"), [("media", 0), ("text", 1), ("media", 3), ("text", 3)]
)
def test_a_stage_that_was_killed_continues_where_it_stopped(
    world: World, stopped: str, stop_after: int
) -> None:
    def stop(media: CountingEncoder, text: CountingEncoder) -> None:
        (media if stopped == "media" else text).stop_after = stop_after

    with pytest.raises(KeyboardInterrupt):
        world.start(prepare=stop)
    assert world.log[-1] == f"unload {stopped}"
    before = world.log.count(stopped)
    assert before == stop_after
    world.start()
    assert world.log.count(stopped) == FIRST.count(stopped) - before
    assert ("load media" in world.log) == (stopped == "media")


def test_a_changed_caption_encodes_one_caption(world: World) -> None:
    world.start()
    (world.folder / "b.txt").write_text("another caption")
    world.start()
    assert world.log == ["load text", "text", "unload text"]
    assert world.text.items == ["another caption"]


def test_a_changed_clip_encodes_one_clip(world: World) -> None:
    world.start()
    numbered_video(world.folder / "b.mp4", frames=20)
    world.start()
    assert world.log == ["load media", "media", "unload media"]


def test_images_that_change_places_keep_their_latents(world: World) -> None:
    """Of one size and time, as uncompressed images of one archive are."""
    for name, colour in (("e", "red"), ("f", "blue")):
        picture(world.folder / f"{name}.bmp", colour=colour)
        (world.folder / f"{name}.txt").write_text(f"caption {name}")
        os.utime(world.folder / f"{name}.bmp", (1.6e9, 1.6e9))

    def latents() -> list[torch.Tensor]:
        return [sample.load()["latents"] for sample in world.start() if sample.id in ("e", "f")]

    red, blue = latents()
    spare = (world.folder / "e.bmp").rename(world.root / "spare")
    (world.folder / "f.bmp").rename(world.folder / "e.bmp")
    spare.rename(world.folder / "f.bmp")
    now = latents()
    assert torch.equal(now[0], blue) and torch.equal(now[1], red) and not torch.equal(red, blue)
    assert "load media" not in world.log, "both are in the cache"


def test_renaming_and_copying_encode_nothing(world: World) -> None:
    world.start()
    for suffix in (".mp4", ".txt"):
        (world.folder / f"a{suffix}").rename(world.folder / f"renamed{suffix}")
        shutil.copy(world.folder / f"b{suffix}", world.folder / f"copy{suffix}")
    assert [sample.id for sample in world.start()] == ["b", "c", "copy", "d", "renamed"]
    assert world.log == []


@pytest.mark.parametrize(
    "settings", [{"height": 16}, {"width": 16}, {"fps": 12.0}, {"identity": "v2"}]
)
def test_another_transform_or_encoder_encodes_the_clips_again(
    world: World, settings: dict[str, Any]
) -> None:
    first = world.start()
    second = world.start(**settings)
    images_too = "fps" not in settings  # a still image has no frame rate
    assert world.log.count("media") == (4 if images_too else 3) and "text" not in world.log
    assert (first[3].media_key != second[3].media_key) == images_too


def test_samples_of_other_sizes_are_encoded_at_their_own(world: World) -> None:
    first = world.start()
    samples = [replace(s, height=48) if s.id in "bd" else s for s in world.dataset().samples]
    media = CountingEncoder("media")
    again = encode(
        samples,
        cache=world.cache,
        media_encoder=media,
        text_encoder=CountingEncoder("text"),
        fps=16.0,
    )
    assert [item.shape for item in media.items] == [(3, 5, 48, 32), (3, 1, 48, 32)]
    changed = [a.id for a, b in zip(first, again, strict=True) if a.media_key != b.media_key]
    assert changed == ["b", "d"]


def test_all_of_several_captions_are_encoded_each_once(world: World) -> None:
    samples = [replace(s, captions=("x", s.captions[0], "y")) for s in world.dataset().samples]
    text = CountingEncoder("text")
    encoded = encode(
        samples,
        cache=world.cache,
        media_encoder=CountingEncoder("media"),
        text_encoder=text,
        fps=16.0,
    )
    assert text.items == ["", "x", "caption a", "y", "caption b", "caption c", "caption d"]
    features = [encoded[2].load(caption=number)["text"].tolist() for number in range(3)]
    assert features == [[[1, ord("x")]], [[9, sum(map(ord, "caption c"))]], [[1, ord("y")]]]


def test_a_torn_entry_is_encoded_again(world: World) -> None:
    world.start()
    path = next((world.cache.folder / "media").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:50])
    world.start()
    assert world.log == ["load media", "media", "unload media"]


def test_an_entry_lost_while_training_is_one_line(world: World) -> None:
    encoded = world.start()
    shutil.rmtree(world.cache.folder / "media")
    with pytest.raises(UserError, match="no longer contains media of 'a'; start again"):
        encoded[0].load()


def test_extra_captions_are_found_by_their_key(world: World) -> None:
    world.start(extra_prompts=[PromptFiles("a prompt"), PromptFiles("caption a")])
    assert world.text.items.count("caption a") == 1
    tensors = world.cache.get("text", text_key("a prompt", world.text))
    assert tensors is not None and tensors["text"][0, 0] == len("a prompt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_name_the_clip_and_are_not_kept(
    world: World, value: float
) -> None:
    def spoil(media: CountingEncoder, text: CountingEncoder) -> None:
        media.result = value

    with pytest.raises(
        UserError, match=r"latents of .*a\.mp4 are not finite; download the VAE's weights again"
    ):
        world.start(prepare=spoil)
    assert not list(world.cache.folder.rglob("*.safetensors"))
    assert world.log[-1] == "unload media"


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("text", "encode.text_dtype"),
        ("media", "download the VAE's"),
        ("music", "correct the file of its music"),
    ],
)
def test_what_is_not_finite_is_worded_by_its_kind(kind: str, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        _check_finite({"part": torch.tensor([float("nan")])}, "a.npy", kind)


def damage(path: Path) -> None:
    """Break the pixels of a video but not its timestamps, so that only decoding finds out."""
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 4
    data[start : start + 400] = bytes([255]) * 400
    path.write_bytes(bytes(data))


def test_a_clip_that_cannot_be_decoded_is_an_error_or_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = world.dataset().samples
    monkeypatch.setattr(world, "dataset", lambda: Dataset(samples=samples, excluded=[], fps=16.0))
    damage(world.folder / "a.mp4")
    with pytest.raises(UserError, match=r"a\.mp4"):
        world.start()
    assert world.log == []  # found before an encoder was loaded
    left_out: list[tuple[Sample, UserError]] = []
    encoded = world.start(on_bad=lambda sample, error: left_out.append((sample, error)))
    assert [sample.id for sample in encoded] == ["b", "c", "d"]
    ((sample, error),) = left_out
    assert sample.id == "a" and "a.mp4" in str(error)
    assert "caption a" not in world.text.items


def test_progress_counts_what_is_missing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()
    (world.folder / "b.txt").write_text("another caption")
    seen: list[list[Any]] = []

    @contextmanager
    def watch(stage: str, total: int) -> Iterator[Callable[[float], None]]:
        seen.append([stage, total, 0])

        def advance(amount: float) -> None:
            seen[-1][2] += amount

        yield advance

    world.start(progress=watch)
    assert seen == [["text", 1, 1]], (
        "little is read to know the clips, and no line is said about it"
    )
    seen.clear()
    monkeypatch.setattr("ditkit_core.encoding.encode._LONG_HASH_BYTES", 0)
    world.start(progress=watch)
    assert seen == [["hash", 4, 4]]


def test_a_cache_that_grows_large_is_reported_and_one_that_cannot_fit_is_warned_of(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.start()
    assert "the cache" not in capsys.readouterr().out, "a small one is not"
    monkeypatch.setattr("ditkit_core.encoding.missing._WORTH_REPORTING_BYTES", 0)
    shutil.rmtree(world.cache.folder)
    world.start()
    told = capsys.readouterr()
    assert [line for line in told.out.splitlines() if "the cache" in line] == [
        (
            f"the cache {world.cache.folder} will grow by about 0.0 GB for 2 more entries of kind "
            f"media"
        ),
        f"the cache {world.cache.folder} will grow by about 0.0 GB for 3 more entries of kind text",
    ]
    assert told.err == ""
    monkeypatch.setattr(
        "ditkit_core.encoding.missing.shutil.disk_usage",
        lambda folder: shutil._ntuple_diskusage(9, 9, 0),
    )
    shutil.rmtree(world.cache.folder)
    world.start()
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2 and all(
        "only 0.0 GB are free; make room, or set encode.cache" in line for line in warned
    )


def test_windows_of_a_file_are_encoded_each_and_the_first_is_that_of_a_whole_file(
    world: World,
) -> None:
    whole = {sample.id: sample.media_key for sample in world.start()}
    samples = world.dataset(windows="uniform", clips_per_file=2).samples
    media, text = CountingEncoder("media"), CountingEncoder("text")
    encoded = encode(samples, cache=world.cache, media_encoder=media, text_encoder=text, fps=16.0)
    keys = {sample.id: sample.media_key for sample in encoded}
    assert keys["b#0"] == whole["b"] != keys["b#1"]
    assert len(media.items) == sum(id.endswith("#1") for id in keys) == 3 and text.items == []
    assert encoded[0].repeats == 1.0


def test_a_trigger_word_encodes_captions_and_no_clip(world: World) -> None:
    world.start()
    samples = world.dataset(trigger="ohwx").samples
    media, text = CountingEncoder("media"), CountingEncoder("text")
    encode(samples, cache=world.cache, media_encoder=media, text_encoder=text, fps=16.0)
    assert (media.items, len(text.items)) == ([], 4)
    assert all(caption.startswith("ohwx caption ") for caption in text.items)


def test_an_entry_damaged_after_encoding_is_encoded_again_when_it_is_read(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [sample.load() for sample in world.start()]
    for path in sorted(world.cache.folder.rglob("*.safetensors")):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    world.cache = Cache(world.cache.folder)  # a new process
    samples = world.start()
    assert world.log == [], "their headers are right"
    capsys.readouterr()
    for sample, right in zip(samples, before, strict=True):
        item = sample.load()
        assert item.keys() == right.keys() and all(
            torch.equal(item[name], right[name]) for name in right
        )
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 * len(samples) and all(
        "is damaged: it is removed, and encoded again" in line for line in said
    )


def test_a_shortage_stops_encoding_even_where_bad_clips_are_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = world.dataset().samples

    def short(*args: object, **settings: object) -> None:
        av.error.err_check(-errno.EAGAIN, "a.mp4")

    monkeypatch.setattr(av, "open", short)
    left_out: list[Sample] = []
    encoders = {name: CountingEncoder(name, []) for name in ("media", "text")}
    with pytest.raises(EnvironmentFault, match="memory, threads or open files are short"):
        encode(
            samples,
            cache=world.cache,
            media_encoder=encoders["media"],
            text_encoder=encoders["text"],
            fps=16.0,
            on_bad=lambda sample, error: left_out.append(sample),
        )
    assert not left_out


def test_each_sample_is_encoded_mirrored_too_with_its_references_and_mask(world: World) -> None:
    """The plain ones keep their keys, and nothing plain is encoded again."""
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    for name in ("e.png", "reference.png"):
        Image.fromarray(noise if name == "e.png" else noise // 2).save(world.root / name)
    mask = np.zeros((32, 32), np.uint8)
    mask[:, :8] = 255
    Image.fromarray(mask).save(world.root / "mask.png")
    sample = Sample(
        id="e", media=world.root / "e.png", captions=("an edit",), frames=1, height=32, width=32,
        references=(world.root / "reference.png",), mask=world.root / "mask.png",
    )  # fmt: skip

    def start(flips: bool) -> EncodedSample:
        world.media, world.text = CountingEncoder("media"), CountingEncoder("text")
        (found,) = encode(
            [sample], cache=world.cache, media_encoder=world.media, text_encoder=world.text,
            fps=16.0, flips=flips,
            reference_size=lambda height, width, count: (height, width),
        )  # fmt: skip
        return found

    plain = start(False)
    assert plain.mirrored is None
    both = start(True)
    assert len(world.media.items) == 2, "the image and its reference, mirrored"
    mirrored = both.mirrored
    assert (
        mirrored is not None
        and mirrored.id == both.id == "e"
        and mirrored.text_keys == both.text_keys
    )
    assert both.keys[: len(plain.keys)] == plain.keys and len(both.keys) == 2 * len(plain.keys)
    assert not {*plain.keys} & {key for key in mirrored.keys if key not in plain.text_keys}
    flipped = torch.from_numpy(noise[:, ::-1].copy()).permute(2, 0, 1)[:, None].float() / 127.5 - 1
    assert torch.equal(world.media.items[0], flipped)
    item, other = both.load(), mirrored.load()
    assert torch.equal(item["loss_weights"].flip(-1), other["loss_weights"])
    assert not torch.equal(item["reference.0"], other["reference.0"])
    start(True)
    assert not world.media.items


def test_another_crop_is_another_entry_of_clip_and_mask_and_captions_stay(world: World) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (32, 64, 3), np.uint8)
    for name in ("e.png", "mask.png"):
        Image.fromarray(noise).save(world.root / name)
    sample = Sample(
        id="e", media=world.root / "e.png", captions=("a hat",), frames=1, height=32, width=32,
        mask=world.root / "mask.png",
    )  # fmt: skip

    def start(crop: Crop) -> EncodedSample:
        world.media, world.text = CountingEncoder("media"), CountingEncoder("text")
        (found,) = encode(
            [replace(sample, crop=crop)], cache=world.cache, media_encoder=world.media,
            text_encoder=world.text, fps=16.0,
        )  # fmt: skip
        return found

    centre, left = start(CENTRE), start(Crop(0.0, 0.5))
    expected = torch.from_numpy(noise[:, :32]).permute(2, 0, 1)[:, None].float() / 127.5 - 1
    assert torch.equal(world.media.items[0], expected) and not world.text.items
    assert centre.media_key != left.media_key and centre.text_keys == left.text_keys
    assert {*centre.keys} & {*left.keys} == {*centre.text_keys}
    assert not torch.equal(centre.load()["loss_weights"], left.load()["loss_weights"])
    start(Crop(0.0, 0.5))
    assert not world.media.items


def test_a_sample_that_fails_is_left_out_once_with_both_ways(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = world.dataset().samples
    damage(world.folder / "b.mp4")
    left_out: list[str] = []
    encoded = encode(
        samples, cache=world.cache, media_encoder=CountingEncoder("media"),
        text_encoder=CountingEncoder("text"),
        fps=16.0, flips=True, on_bad=lambda sample, error: left_out.append(sample.id),
    )  # fmt: skip
    assert left_out == ["b"] and [sample.id for sample in encoded] == ["a", "c", "d"]
    assert all(sample.mirrored is not None for sample in encoded)
