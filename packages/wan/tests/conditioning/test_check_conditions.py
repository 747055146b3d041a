"""Whatever is wrong with what goes with a clip shows in `check`, which takes no weights, and says
what encoding would say."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conditions_help import CPU, controls, encoded, image_file, tiny_vae, video_file

from ditkit_core.errors import MissingDependency, UserError
from ditkit_core.models.conditions import ClipInputs, Conditioner
from ditkit_core.models.encoders import VaeMode
from ditkit_wan.conditioning import control as control_conditions
from ditkit_wan.conditioning import dance as dance_conditions
from ditkit_wan.conditioning import images as image_conditions
from ditkit_wan.conditioning import vace as vace_conditions
from ditkit_wan.conditioning.columns import conditioners
from ditkit_wan.presets import PRESETS
from ditkit_wan.spec import WAN

CAMERA, DANCE, CONTROL = "fun-v1.1-control-camera-1.3b", "wantodance-14b", "fun-v1.1-control-1.3b"
Files = dict[str, str]
RATES = {DANCE: 30.0}


def checked(preset: str, given: ClipInputs) -> None:
    """As the doctor asks: without a file of the model."""
    for conditioner in conditioners(PRESETS[preset], None, CPU, VaeMode()):
        assert isinstance(conditioner, Conditioner)
        conditioner.check(given)


def table(path: Path, rows: int = 90, width: int = 35, value: float = 0.5) -> str:
    np.save(path, np.full((rows, width), value, np.float32))
    return str(path)


def torn(path: Path) -> str:
    image_file(path, 1)
    path.write_bytes(path.read_bytes()[:200])
    return str(path)


def poses(path: Path, text: str = "a b c") -> str:
    path.write_text(f"header\n{text}\n")
    return str(path)


GOOD: dict[str, Callable[[Path], Files]] = {
    "t2v-1.3b": lambda folder: {},
    "i2v-14b-480p": lambda folder: {},
    "i2v-a14b": lambda folder: {"input_image": image_file(folder / "p.png", 2)},
    "flf2v-14b-720p": lambda folder: {"end_image": image_file(folder / "p.png", 2)},
    "ti2v-5b": lambda folder: {"input_image": image_file(folder / "p.png", 2)},
    "vace-1.3b": lambda folder: {
        "vace_video": video_file(folder / "v.mp4", 3),
        "vace_reference_image": image_file(folder / "p.png", 2),
    },
    CONTROL: lambda folder: {
        "control_video": video_file(folder / "v.mp4", 3),
        "reference_image": image_file(folder / "p.png", 2),
    },
    CAMERA: lambda folder: {"camera_control_direction": "LeftUp", "camera_control_speed": "0.01"},
    DANCE: lambda folder: {"wantodance_music_path": table(folder / "m.npy")},
}  # fmt: skip


@pytest.mark.parametrize("preset", GOOD)
def test_what_is_sound_passes_without_a_file_of_the_model(preset: str, tmp_path: Path) -> None:
    checked(
        preset,
        controls(
            video_file(tmp_path / "clip.mp4", 1, frames=24),
            GOOD[preset](tmp_path),
            height=32,
            width=64,
            fps=RATES.get(preset, 16.0),
        ),
    )


BAD: dict[str, tuple[str, Callable[[Path], Files], str]] = {
    "direction": (CAMERA, lambda folder: {"camera_control_direction": "Forward"},
    "camera_control_direction = 'Forward'"),
    "speed": (
        CAMERA, lambda folder: {"camera_control_direction": "Left", "camera_control_speed": "fast"},
        "is not a number",
    ),
    "poses": (CAMERA, lambda folder: {"camera_file": poses(folder / "p.txt")},
    "line 2 is not a camera pose"),
    "no path": (CAMERA, lambda folder: {}, "has no camera_control_direction and no camera_file"),
    "music of NaN": (DANCE, lambda folder: {"wantodance_music_path": table(folder / "m.npy",
    value=np.nan)}, "not finite"),
    "music too narrow": (DANCE, lambda folder: {"wantodance_music_path": table(folder / "m.npy",
    width=34)}, "rows of 35"),
    "no music": (DANCE, lambda folder: {}, "has no wantodance_music_path"),
    "mask alone": (
        DANCE,
        lambda folder: {"wantodance_music_path": table(folder / "m.npy"),
        "wantodance_keyframes_mask": "[1]"},
        "wantodance_keyframes_mask alone",
    ),
    "mask too short": (
        DANCE,
        lambda folder: {
            "wantodance_music_path": table(folder / "m.npy"),
            "wantodance_keyframes_mask": json.dumps([1, 0, 1]),
            "wantodance_keyframes": video_file(folder / "k.mp4", 4, fps=30.0),
        },
        "has 3 numbers",
    ),
    "control too short": (CONTROL, lambda folder: {"control_video": video_file(folder / "v.mp4", 3,
    frames=5)}, "v.mp4"),
    "no control": (CONTROL, lambda folder: {}, "has no control_video"),
    "start torn": ("i2v-14b-480p", lambda folder: {"input_image": torn(folder / "p.png")}, "p.png"),
    "end torn": ("flf2v-14b-720p", lambda folder: {"end_image": torn(folder / "p.png")}, "p.png"),
    "reference a video": (
        "vace-1.3b", lambda folder: {"vace_reference_image": video_file(folder / "v.mp4", 3)},
        "is a video",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_without_weights(name: str, tmp_path: Path) -> None:
    preset, files, says = BAD[name]
    clip = video_file(tmp_path / "clip.mp4", 1, fps=RATES.get(preset, 16.0))
    with pytest.raises(UserError, match=says) as caught:
        checked(preset, controls(clip, files(tmp_path), fps=RATES.get(preset, 16.0)))
    assert "\n" not in str(caught.value)


def test_a_window_is_looked_at_where_it_begins(tmp_path: Path) -> None:
    files = {"control_video": video_file(tmp_path / "v.mp4", 3, frames=12)}
    clip = video_file(tmp_path / "clip.mp4", 1, frames=24)
    checked(CONTROL, controls(clip, files))
    with pytest.raises(UserError, match=r"v\.mp4"):
        checked(CONTROL, controls(clip, files, start_seconds=0.5))
    music = {"wantodance_music_path": table(tmp_path / "m.npy", rows=10)}
    checked(DANCE, controls(clip, music, fps=30.0))
    with pytest.raises(UserError, match=r"0\.3 s of music and the clip needs 0\.8 s"):
        checked(DANCE, controls(clip, music, fps=30.0, start_seconds=0.5))


@pytest.mark.slow
def test_a_check_says_what_encoding_says(checkpoint: Path, tmp_path: Path) -> None:
    vae = tiny_vae(checkpoint)
    made = {
        "direction": control_conditions.Camera(), "music too narrow": dance_conditions.Music(),
        "mask too short": dance_conditions.Keyframes(vae),
        "control too short": control_conditions.Control(vae),
        "start torn": image_conditions.FirstLast(vae, both=False),
        "reference a video": vace_conditions.Vace(vae),
    }  # fmt: skip
    clip = video_file(tmp_path / "clip.mp4", 1, frames=24)
    for name, conditioner in made.items():
        given = controls(clip, BAD[name][1](tmp_path), fps=RATES.get(BAD[name][0], 16.0))
        said = []
        for work in (conditioner.check, lambda given, made=conditioner: encoded(made, given)):
            with pytest.raises(UserError) as caught:
                work(given)
            said.append(str(caught.value))
        assert said[0] == said[1], name


@pytest.mark.skipif(find_spec("librosa") is not None, reason="librosa is installed")
def test_sound_without_librosa_is_no_samples_fault(tmp_path: Path) -> None:
    given = controls("clip.mp4", {"wantodance_music_path": "m.wav"}, fps=30.0)
    with pytest.raises(MissingDependency, match="install librosa"):
        dance_conditions.Music().uses(given)


def test_only_models_that_look_take_an_image_encoder() -> None:
    looking = {
        name
        for name, arch in PRESETS.items()
        if WAN.auxiliary.components(arch) == ("image_encoder",)
    }
    assert "i2v-14b-480p" in looking and "i2v-a14b" not in looking and "t2v-14b" not in looking
    assert looking == {name for name, arch in PRESETS.items() if arch.image_dim}
