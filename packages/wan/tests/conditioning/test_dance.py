"""What WanToDance is conditioned on: features of music from tables and from sound, and the moments
that are given."""

import json
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conditions_help import (
    CPU,
    FRAMES,
    HEIGHT,
    WIDTH,
    controls,
    encoded,
    image_file,
    sound_file,
    tiny_vae,
    video_file,
)
from safetensors.torch import save_file

from ditkit_core.data.media.clip import read_clip
from ditkit_core.data.media.sound import decode_sound
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Conditioner
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.conditioning import music_features
from ditkit_wan.conditioning.columns import conditioners
from ditkit_wan.conditioning.dance import Keyframes, Music
from ditkit_wan.conditioning.images import known_frames_mask
from ditkit_wan.demo.models import IMAGE_DIM
from ditkit_wan.encoders.clip import ImageEncoder
from ditkit_wan.encoders.keyframes import KeyframeVae
from ditkit_wan.model.variants.music import frame_steps
from ditkit_wan.presets import PRESETS

ROWS = 90


def features(rows: int = ROWS) -> np.ndarray:
    return np.arange(rows * 35, dtype=np.float64).reshape(rows, 35)


def test_the_music_of_a_window_is_its_rows_thirty_a_second(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", features())
    save_file({"features": torch.from_numpy(features()).float()}, tmp_path / "m.safetensors")
    for name in ("m.npy", "m.safetensors"):
        files = {"wantodance_music_path": str(tmp_path / name)}
        given = controls("clip.mp4", files, frames=30, fps=15.0, start_seconds=0.5)
        assert isinstance(Music(), Conditioner) and Music().uses(given) == (
            "wantodance_music_path",
        )
        music = encoded(Music(), given)["music"]
        assert music.dtype == torch.float32 and torch.equal(
            music, torch.from_numpy(features()[15:75]).float()
        )
    # at a quarter of the rate, four rows to a frame: how the model tells keyframes from a clip
    keyframes = controls("clip.mp4", files, frames=17, fps=7.5)
    assert len(encoded(Music(), keyframes)["music"]) == 68
    with pytest.raises(UserError, match="clip.mp4 has no wantodance_music_path"):
        Music().uses(controls("clip.mp4"))


def test_music_that_ends_a_moment_early_is_filled_and_that_ends_too_early_refused(
    tmp_path: Path,
) -> None:
    np.save(tmp_path / "m.npy", features(85))
    part = music_features.window(tmp_path / "m.npy", start_seconds=0.0, seconds=3.0)
    assert part.shape == (90, 35) and torch.equal(part[85:], part[84:85].expand(5, -1))
    for start, seconds in ((0.0, 3.5), (2.9, 3.0)):
        with pytest.raises(UserError, match="has 2.8 s of music"):
            music_features.window(tmp_path / "m.npy", start_seconds=start, seconds=seconds)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((5, 35), np.nan), "not finite"),
        (np.zeros((5, 34)), "not rows of 35"),
        (np.zeros(35), "not rows of 35"),
        (np.zeros((0, 35)), "not rows of 35"),
        (np.array([{"a": 1}], dtype=object), "cannot be read as features"),
        (np.array(["x"]), "cannot be read as features"),
    ],
)
def test_a_table_that_is_no_music_is_one_line(
    tmp_path: Path, table: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "m.npy", table)
    with pytest.raises(UserError, match=message) as caught:
        music_features.read(tmp_path / "m.npy")
    assert "\n" not in str(caught.value)


def test_a_damaged_or_absent_table_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.npy").write_bytes(b"\x93NUMPY\x01\x00")
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 20)
    save_file({"a": torch.zeros(2, 35), "b": torch.zeros(2, 35)}, tmp_path / "two.safetensors")
    for name, message in (
        ("m.npy", "cannot be read"), ("m.safetensors", "cannot be read"), ("absent.npy", "cannot be read"),
        ("two.safetensors", "contains 2 tensors"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            music_features.read(tmp_path / name)


@pytest.mark.parametrize("shape", [(10**12, 35), (10**30, 35), (-1, 35), (11, 35)])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_a_header_is_believed_as_far_as_there_are_bytes(
    tmp_path: Path,
    shape: tuple[int, int],
    version: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open(tmp_path / "m.npy", "wb") as file:
        np.lib.format.write_array(file, features(10), version=version)
    content = (tmp_path / "m.npy").read_bytes()
    fits = f"({shape[0]}, 35), }}".encode()
    start = content.index(b"(10, 35), }")
    patched = content[:start] + fits + content[start + len(fits) :]
    assert len(patched) == len(content)
    (tmp_path / "m.npy").write_bytes(patched)
    monkeypatch.setattr(
        np, "load", lambda *given, **options: pytest.fail("loaded before it was looked at")
    )
    with pytest.raises(UserError, match="cannot be read as features") as caught:
        music_features.read(tmp_path / "m.npy")
    assert "\n" not in str(caught.value)


def test_no_more_sound_is_decoded_than_a_clip_needs(tmp_path: Path) -> None:
    samples = np.sin(np.arange(80_000) / 20).astype(np.float32) / 2
    path = Path(sound_file(tmp_path / "m.wav", samples))
    part, rate = decode_sound(path, until_seconds=1.5)
    assert len(part) == 1.5 * rate == 12_000 and np.abs(part - samples[:12_000]).max() < 1e-6
    whole, _ = decode_sound(path, until_seconds=1e9)
    assert len(whole) == 80_000
    asked = []

    def heard(path: Path, *, until_seconds: float) -> tuple[np.ndarray, int]:
        asked.append(until_seconds)
        return samples, 8000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(music_features, "decode_sound", heard)
        music_features.check(path, start_seconds=0.5, seconds=2.0)
    assert asked == [2.5]


def test_sound_is_decoded_to_the_mean_of_its_channels(tmp_path: Path) -> None:
    samples = np.sin(np.arange(4000) / 20).astype(np.float32) / 2
    decoded, rate = decode_sound(Path(sound_file(tmp_path / "m.wav", samples)))
    assert rate == 8000 and decoded.dtype == np.float32 and np.abs(decoded - samples).max() < 1e-6
    with wave.open(str(tmp_path / "mono.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(22050)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    decoded, rate = decode_sound(tmp_path / "mono.wav")
    assert rate == 22050 and np.abs(decoded - samples).max() < 1e-4


def test_sound_that_is_none_is_one_line(tmp_path: Path) -> None:
    bad = np.zeros(4000, np.float32)
    bad[100] = np.nan
    (tmp_path / "torn.wav").write_bytes(b"RIFF")
    cases = {
        sound_file(tmp_path / "nan.wav", bad): "not finite numbers",
        sound_file(tmp_path / "none.wav", bad[:0]): "no sound in it|cannot be decoded",
        str(tmp_path / "torn.wav"): "cannot be decoded",
        str(tmp_path / "absent.mp3"): "cannot be decoded",
        video_file(tmp_path / "silent.mp4", 1): "has no sound",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            music_features.read(Path(path))
        assert "\n" not in str(caught.value)


def test_features_of_sound_are_as_the_official_code_computes_them_or_need_librosa(
    tmp_path: Path,
) -> None:
    time = np.arange(8000 * 4) / 8000
    beats = 0.3 * np.sin(2 * np.pi * 220 * time) * (np.sin(2 * np.pi * 2 * time) > 0)
    path = Path(sound_file(tmp_path / "m.wav", beats.astype(np.float32)))
    try:
        import librosa
    except ImportError:
        with pytest.raises(
            UserError, match=r"librosa.*is not installed; install librosa, or give a \.npy"
        ):
            music_features.read(path)
        return
    found = music_features.read(path)
    data = librosa.resample(beats.astype(np.float32), orig_sr=8000, target_sr=30 * 512)
    assert found.shape == (121, 35) and torch.isin(found[:, 33:], torch.tensor([0.0, 1.0])).all()
    expected = librosa.onset.onset_strength(y=data, sr=22050)
    torch.testing.assert_close(found[:, 0], torch.from_numpy(expected), atol=1e-4, rtol=1e-4)


def test_keyframes_are_a_video_and_a_list_of_which_are_given(
    checkpoint: Path, tmp_path: Path
) -> None:
    vae = tiny_vae(checkpoint)
    marks = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    files = {
        "wantodance_keyframes": video_file(tmp_path / "k.mp4", 1, frames=13),
        "wantodance_keyframes_mask": json.dumps(marks),
    }
    given = controls(None, files, start_seconds=4 / 16)
    assert Keyframes(vae).uses(given) == tuple(files)
    y = encoded(Keyframes(vae), given)["y"]
    vae.load()
    window = read_clip(
        Path(files["wantodance_keyframes"]),
        frames=FRAMES,
        fps=16.0,
        height=HEIGHT,
        width=WIDTH,
        start_seconds=0.25,
    )
    assert torch.equal(y[4:], vae.encode([window])[0]["latents"])
    assert torch.equal(
        y[:4], known_frames_mask([bool(mark) for mark in marks[4:]], HEIGHT // 8, WIDTH // 8)
    )
    for text, message in (
        ("[1, 0]", "has 2 numbers"),
        ("[2]", "not a list of 0 and 1"),
        ("yes", "not a list of 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            encoded(Keyframes(vae), controls(None, files | {"wantodance_keyframes_mask": text}))
    with pytest.raises(UserError, match="wantodance_keyframes_mask alone"):
        Keyframes(vae).uses(controls("clip.mp4", {"wantodance_keyframes_mask": "[1]"}))


def test_clip_sees_the_moment_that_the_keyframes_begin_with_and_next_to_it_who_dances(
    checkpoint: Path, tmp_path: Path, clip_folder: Path
) -> None:
    arch = replace(PRESETS["wantodance-14b"], image_dim=IMAGE_DIM, text_dim=32)
    where = ModelPaths(vae=str(checkpoint / "vae"), image_encoder=str(clip_folder))
    found = {each.kind: each for each in conditioners(arch, where, CPU, VaeMode())}
    seen, dancer = found["clip-vision"], found["clip-vision-dancer"]
    files = {
        "wantodance_keyframes": video_file(tmp_path / "k.mp4", 1, frames=13),
        "wantodance_keyframes_mask": json.dumps([1] + [0] * 12),
        "wantodance_reference_image": image_file(tmp_path / "d.png", 2),
    }
    clip = ImageEncoder(where, CPU, torch.float32)
    clip.load()

    def tokens(path: str, start: float = 0.0) -> torch.Tensor:
        shown = read_clip(
            Path(path), frames=1, fps=16.0, height=HEIGHT, width=WIDTH, start_seconds=start
        )
        return clip.encode([shown])[0]["image"]

    given = controls("clip.mp4", files, start_seconds=4 / 16)
    assert seen.uses(given) == ("wantodance_keyframes",) and dancer.uses(given) == (
        "wantodance_reference_image",
    )
    assert torch.equal(encoded(seen, given)["image"], tokens(files["wantodance_keyframes"], 4 / 16))
    assert torch.equal(
        encoded(dancer, given)["refimage"], tokens(files["wantodance_reference_image"])
    )
    without = controls(
        "clip.mp4", {"wantodance_reference_image": files["wantodance_reference_image"]}
    )
    assert seen.uses(without) == ("wantodance_reference_image",) and seen.uses(
        controls("clip.mp4")
    ) == ("",)
    assert torch.equal(encoded(seen, without)["image"], tokens(files["wantodance_reference_image"]))


@pytest.mark.parametrize(
    ("fps", "instead"), [(24.0, "30"), (12.0, "15"), (16.0, "15"), (60.0, "30"), (7.0, "7.5")]
)
def test_a_frame_rate_that_no_whole_number_of_rows_makes_is_refused(
    tmp_path: Path, fps: float, instead: str
) -> None:
    np.save(tmp_path / "m.npy", features())
    given = controls("clip.mp4", {"wantodance_music_path": str(tmp_path / "m.npy")}, fps=fps)
    for ask in (Music().uses, Music().check):
        with pytest.raises(UserError, match=rf"data.fps = {fps:g}: .*; set {instead}$") as caught:
            ask(given)
    assert "\n" not in str(caught.value)


def test_rates_that_the_model_knows_and_stills_follow_from_the_number_of_rows(
    tmp_path: Path,
) -> None:
    np.save(tmp_path / "m.npy", features())
    files = {"wantodance_music_path": str(tmp_path / "m.npy")}
    for fps, step in ((30.0, 1), (29.97, 1), (15.0, 2), (10.0, 3), (7.5, 4), (6.0, 5)):
        music = encoded(Music(), controls("clip.mp4", files, fps=fps))["music"]
        assert frame_steps([music], [torch.zeros(16, 1 + FRAMES // 4, 8, 8)]) == (step,)
    for preset, step in (("wantodance-14b", 1), ("wantodance-14b-global", 4)):
        arch = PRESETS[preset].music
        assert arch is not None
        music = encoded(Music(arch.fps), controls("still.png", files, frames=1, fps=0.0))["music"]
        assert frame_steps([music], [torch.zeros(16, 1, 8, 8)]) == (step,), (
            "a still of the global model is a keyframe"
        )
    assert Music(30.0).identity != Music(7.5).identity, (
        "or one would be given the other's rows of a still"
    )


def test_a_video_of_keyframes_alone_is_one_of_a_quarter_of_the_rate(
    checkpoint: Path, tmp_path: Path
) -> None:
    """What DiffSynth's recipe has as video: n frames, of which each is a keyframe, for 4 (n - 1) +
    1 frames of the clip."""
    (tmp_path / "dance").mkdir()
    pictures = [image_file(tmp_path / "dance" / f"{number}.png", number) for number in range(3)]
    (tmp_path / "dance" / "fps.txt").write_text("1.875")
    clip = read_clip(tmp_path / "dance", frames=FRAMES, fps=7.5, height=HEIGHT, width=WIDTH)
    vae = KeyframeVae(ModelPaths(base=str(checkpoint)), CPU)
    vae.load()
    latents = vae.encode([clip])[0]["latents"]
    stills = [
        read_clip(Path(path), frames=1, fps=1.0, height=HEIGHT, width=WIDTH) for path in pictures
    ]
    plain = tiny_vae(checkpoint)
    plain.load()
    assert torch.equal(
        latents, torch.cat([plain.encode([still])[0]["latents"] for still in stills], 1)
    )


def test_without_keyframes_the_dancer_is_the_first_moment_and_the_rest_is_black(
    checkpoint: Path, tmp_path: Path
) -> None:
    vae = tiny_vae(checkpoint)
    files = {"wantodance_reference_image": image_file(tmp_path / "d.png", 1)}
    given = controls("clip.mp4", files)
    assert Keyframes(vae).uses(given) == ("wantodance_reference_image",) and Keyframes(vae).uses(
        controls("clip.mp4")
    ) == ("",)
    y = encoded(Keyframes(vae), given)["y"]
    vae.load()
    seen = -torch.ones(3, FRAMES, HEIGHT, WIDTH)
    seen[:, :1] = read_clip(
        Path(files["wantodance_reference_image"]), frames=1, fps=1.0, height=HEIGHT, width=WIDTH
    )
    assert torch.equal(y[4:], vae.encode([seen])[0]["latents"])
    assert torch.equal(
        y[:4], known_frames_mask([True] + [False] * (FRAMES - 1), HEIGHT // 8, WIDTH // 8)
    )
