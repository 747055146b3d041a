"""What goes with clips is looked at before anything is encoded: by the doctor, by training, and for
what is to be sampled."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from doctor_codes import codes, error, errors
from media_files import numbered_video, picture
from toy_controls import Guided
from toy_world import World

from ditkit_core.data.dataset import Sample
from ditkit_core.diagnostics.doctor.findings import BucketRow
from ditkit_core.diagnostics.doctor.rules import (
    check_control_videos,
    check_silence,
    check_sounds,
    check_uses,
)
from ditkit_core.models.conditions import Column


@pytest.fixture
def world(tmp_path: Path) -> Guided:
    return Guided(tmp_path)


def trained(world: Guided, name: str) -> set[str]:
    return json.loads((world.folder / name / "data.json").read_text()).keys() - {
        "(base weights)",
        "(empty caption)",
        "(digest)",
    }


def test_a_sound_dataset_is_accepted_and_trained(world: Guided) -> None:
    status, found = world.check()
    assert status == 0 and codes(found) == [] and found["excluded"] == []
    assert len(world.way.asked) >= 4
    assert world.train("a", 1) == 0


def test_texts_and_tables_that_cannot_be_encoded_are_excluded_as_training_does(
    world: Guided, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "clips" / "poses.txt").write_text("no number")
    world.put("far.png", direction="Forward")
    world.put("table.png", poses="poses.txt")
    world.put("lost.png")
    status, found = world.check()
    reasons = {each["name"]: each["reason"] for each in found["excluded"]}
    assert status == 1 and codes(found) == ["D03"] * 3 and set(reasons) == {"far", "table", "lost"}
    assert "use left or right" in reasons["far"] and "is no number" in reasons["table"]
    assert "has no direction and no poses" in reasons["lost"]
    assert found["steps"], "what is left was tried"
    lenient = ("--data.on_bad", "skip")
    status, found = world.check(*lenient)
    assert status == 0 and found["samples"] == 4
    capsys.readouterr()
    assert world.train("skip", 1, *lenient) == 0
    assert trained(world, "skip") == {"0", "1", "2", "3"}
    assert "left out: far: direction = 'Forward'" in capsys.readouterr().err
    assert world.train("strict", 1) == 1 and "has no direction and no poses" in error(capsys)
    world.lines = world.lines[:4]
    world.put("far.png", direction="Forward")
    assert world.train("strict", 1) == 1 and "far.png: direction = 'Forward'" in error(capsys)


def test_what_has_no_condition_is_said_before_any_clip_is_encoded(
    world: Guided, capsys: pytest.CaptureFixture[str]
) -> None:
    world.put("lost.png")
    assert world.train("a", 1, "--sample.captions", "0") == 1
    assert "has no direction" in error(capsys) and (world.media.loads, world.text.loads) == (0, 0)


def test_a_control_is_looked_at_where_its_window_begins(world: Guided) -> None:
    numbered_video(world.clips / "long.mp4", frames=24)
    numbered_video(world.clips / "other.mp4", frames=24)
    world.list("long.mp4", direction="left", control_video="other.mp4")
    flags = (
        "--data.frames",
        "5",
        "--data.fps",
        "16",
        "--data.windows",
        "all",
        "--data.on_bad",
        "skip",
    )
    world.check(*flags)
    starts = {
        asked.start_seconds
        for asked in world.way.asked
        if asked.clip and asked.clip.name == "long.mp4"
    }
    assert starts == {0.0, 0.3125, 0.625}


def test_what_is_to_be_sampled_is_checked_before_anything_is_encoded(
    world: Guided, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ("--sample.prompts", '["a cat"]')
    assert world.train("a", 1, *prompt) == 1
    assert "a drawing has no direction" in error(capsys) and world.media.loads == 0
    status, found = world.check(*prompt)
    assert status == 1 and codes(found) == ["D21"] and "a drawing has no direction" in errors(found)
    for given, says in (
        ("direction=up", "use left or right"),
        ("poses=gone.txt", "does not exist"),
    ):
        control = (*prompt, "--sample.controls", f'["{given}"]')
        loads = world.media.loads
        assert world.train("a", 1, *control) == 1
        assert says in error(capsys) and world.media.loads == loads
        status, found = world.check(*control)
        assert status == 1 and codes(found) == ["D21"] and says in errors(found)
    assert world.train("a", 1, *prompt, "--sample.controls", '["direction=left"]') == 0
    loads = world.text.loads
    assert world.run("sample", "--run.folder", str(world.folder / "a"), "--prompt", "another") == 1
    assert "a drawing has no direction" in error(capsys) and world.text.loads == loads


def test_captions_of_clips_that_are_left_out_are_not_sampled(world: Guided) -> None:
    world.put("0.bad.png", direction="up")
    assert world.train("a", 1, "--data.on_bad", "skip", "--sample.captions", "2") == 0
    drawn = json.loads((world.folder / "a" / "samples" / "step-000001.json").read_text())["samples"]
    assert len(drawn) == 2 and not any("bad" in each["prompt"] for each in drawn)


@pytest.mark.parametrize("flags", [(), ("--audit-precision",)])
def test_nothing_that_can_be_encoded_is_one_line(
    world: Guided, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    for line in world.lines:
        line["direction"] = "up"
    world.put("last.png", direction="down")
    assert world.train("a", 1, "--data.on_bad", "skip", *flags) == 1
    said = error(capsys)
    assert (
        "none of 5 samples can be encoded" in said
        and "use left or right" in said
        and "and 2 more" in said
    )


def test_what_is_not_installed_is_said_once_and_leaves_no_sample_out(
    world: Guided, capsys: pytest.CaptureFixture[str]
) -> None:
    world.way.lacks = "a library"
    assert world.train("a", 1, "--data.on_bad", "skip", "--sample.captions", "0") == 1
    said = capsys.readouterr().err
    assert said.count("a library is not installed") == 1 and "left out" not in said
    assert (world.media.loads, world.text.loads) == (0, 0)
    status, found = world.check("--data.on_bad", "skip")
    assert (
        status == 1
        and found["excluded"] == []
        and codes(found) == ["D21"]
        and found["samples"] == 4
    )


def test_masks_are_read_counted_and_compared_with_their_clips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    for i, colour in enumerate(("white", "black", "gray")):
        picture(tmp_path / "masks" / f"{i}.png", (16, 16), colour)
    flags = (
        "--data.masks",
        str(tmp_path / "masks"),
        "--data.on_bad",
        "skip",
        "--sample.captions",
        "0",
    )

    def check(*more: str) -> tuple[int, dict[str, Any]]:
        status = world.train("run", 1, "--check", *flags, *more)
        return status, json.loads((tmp_path / "run" / "check.json").read_text())

    status, found = check()
    white, black, grey = found["masks"]
    assert (white, black) == (1, 0) and abs(grey - 128 / 255) < 1e-3
    assert (
        "loss masks: 3 samples, 0 % to 100 % of their pixels learnt in full"
        in capsys.readouterr().out
    )
    assert "loss masks: 3 samples" in (tmp_path / "run" / "check.html").read_text()
    told = {each["where"]: each["what"] for each in found["findings"] if each["code"] == "D29"}
    assert status == 0 and told.keys() == {"0", "1"}
    assert "white everywhere: it is learnt as without one" in told["0"]
    assert "black everywhere: nothing of it is learnt" in told["1"]
    found = check("--train.mask_weight", "0.5")[1]
    assert any(
        "black everywhere: all of it has the weight 0.5" in each["what"]
        for each in found["findings"]
    )

    picture(tmp_path / "masks" / "2.png", (16, 32), "gray")
    torn = picture(tmp_path / "masks" / "3.jpg", (160, 160), "gray")
    torn.write_bytes(torn.read_bytes()[:-200])
    status, found = check()
    reasons = {each["name"]: each["reason"] for each in found["excluded"]}
    assert status == 0 and len(found["masks"]) == 2 and reasons.keys() == {"2.png", "3"}
    assert (
        "2.png has 32 x 16 pixels" in reasons["2.png"]
        and "3.jpg cannot be read as an image" in reasons["3"]
    )


def with_sound(path: Path, seconds: float, delay: float = 0.0, volume: float = 1.0) -> Path:
    """A second of video with a sound track, which may begin later or be quiet."""
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("libx264", rate=24)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("flac", rate=16000, layout="mono")
        for number in range(24):
            frame = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), 10 * number, np.uint8), format="rgb24"
            )
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode(None))
        samples = np.sin(np.arange(round(16000 * seconds)) / 20).astype(np.float32)
        track = av.AudioFrame.from_ndarray(
            (samples * volume * 20000).astype(np.int16)[None], format="s16", layout="mono"
        )
        track.sample_rate, track.pts, track.time_base = (
            16000,
            round(16000 * delay),
            Fraction(1, 16000),
        )
        container.mux(sound.encode(track))
        container.mux(sound.encode(None))
    return path


@pytest.mark.parametrize(
    ("seconds", "delay", "warned"),
    [(1.0, 0.0, False), (1.6, 0.0, True), (0.5, 0.0, True), (0.5, 0.5, False)],
)
def test_speech_that_is_not_as_long_as_its_clip_is_warned_of(
    tmp_path: Path, seconds: float, delay: float, warned: bool
) -> None:
    clip = with_sound(tmp_path / "clip.mkv", seconds, delay)
    sample = Sample(id="clip", media=clip, captions=("x",), frames=5, height=48, width=64)
    speech, music = (
        Column(name="sound", kind="audio", in_step=in_step) for in_step in (True, False)
    )
    assert [finding.code for finding in check_sounds(sample, [speech])] == ["D19"] * warned
    assert list(check_sounds(sample, [music])) == []
    beside = replace(sample, controls={"sound": str(with_sound(tmp_path / "speech.mkv", 1.6))})
    (finding,) = check_sounds(beside, [speech])
    assert "speech.mkv lasts 1.60 s and its clip 1.00 s" in finding.observation


@pytest.mark.parametrize(
    ("volume", "delay", "is_silent"),
    [
        (1.0, 0.0, False),
        (0.01, 0.0, False),
        (0.001, 0.0, True),
        (0.0, 0.0, True),
        (1.0, 0.5, True),
        (1.0, 0.1, False),
    ],
)
def test_sound_that_is_silent_during_its_clip_is_warned_of(
    tmp_path: Path, volume: float, delay: float, is_silent: bool
) -> None:
    """The first five of 24 frames a second: sound that begins after these is as silent as none."""
    clip = with_sound(tmp_path / "clip.mkv", 1.0, delay, volume)
    sample = Sample(id="clip", media=clip, captions=("x",), frames=5, height=48, width=64)
    speech, music = (
        Column(name="sound", kind="audio", in_step=in_step) for in_step in (True, False)
    )
    found = list(check_silence(sample, [speech], 24.0))
    assert [finding.code for finding in found] == ["D34"] * is_silent
    assert all(
        "its sound track is silent from 0.00 s to 0.21 s" in finding.observation
        for finding in found
    )
    assert list(check_silence(sample, [music], 24.0)) == [], "music is always a file"
    beside = replace(
        sample, media=with_sound(tmp_path / "loud.mkv", 1.0), controls={"sound": str(clip)}
    )
    for column in (speech, music):
        assert [finding.where for finding in check_silence(beside, [column], 24.0)] == [
            "clip"
        ] * is_silent
    later = replace(sample, start_seconds=0.6)
    assert bool(list(check_silence(later, [speech], 24.0))) == (volume < 0.01)
    table = replace(sample, controls={"sound": str(tmp_path / "features.npy")})
    np.save(tmp_path / "features.npy", np.zeros((2, 35)))
    assert list(check_silence(table, [music], 24.0)) == []


@pytest.mark.parametrize(("micro_batches", "is_many"), [(250, False), (1000, True)])
def test_a_run_that_uses_each_sample_very_often_is_noted(micro_batches: int, is_many: bool) -> None:
    row = BucketRow(
        dataset="data",
        frames=1,
        height=64,
        width=64,
        references=0,
        samples=1,
        held_out=0,
        tokens=16,
        batch_size=1,
        micro_batches=1,
    )
    found = list(check_uses([row], micro_batches))
    assert [(finding.code, finding.severity, finding.where) for finding in found] == [
        ("D35", "note", "1 sample")
    ] * is_many
    assert all("uses each 1,000 times" in finding.observation for finding in found)
    assert not list(check_uses([replace(row, samples=20, micro_batches=20)], 2000))


def test_a_mask_video_at_another_rate_is_warned_of(tmp_path: Path) -> None:
    clip = numbered_video(tmp_path / "clip.mp4", frames=24, fps=24)
    mask = numbered_video(tmp_path / "mask.mp4", frames=24, fps=12)
    sample = Sample(
        id="clip", media=clip, captions=("x",), frames=5, height=48, width=64, mask=mask
    )
    (finding,) = check_control_videos(sample, ())
    assert (
        finding.code == "D19"
        and "has as many frames as its clip, at 12 in a second and not 24" in finding.observation
    )
