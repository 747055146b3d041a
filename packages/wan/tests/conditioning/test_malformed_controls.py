"""What goes with Wan's clips and is wrong: one clear line each, in the doctor's table, before
anything is encoded."""

import json
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conditions_help import image_file, sound_file, video_file
from media_files import sound_only
from one_line import check_line
from safetensors.torch import save_file

from ditkit_core.config.resolve import resolve
from ditkit_core.data.media.sound import decode_sound
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.diagnostics.doctor.findings import CheckReport
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY
from ditkit_wan.conditioning import music_features
from ditkit_wan.conditioning.columns import columns, conditioners
from ditkit_wan.presets import PRESETS

ROWS = np.zeros((90, 35), np.float32)
KEYS_COLUMN, KEYS = "wantodance_keyframes_mask", json.dumps([1] + [0] * 15)

Made = Callable[[Path], str]


def look(folder: Path, preset: str, *rows: dict[str, str]) -> CheckReport:
    """What the doctor says of a clip that is sound, and of one clip after the other with controls
    besides."""
    folder.mkdir(exist_ok=True)
    required = {"wantodance-14b": {"wantodance_music_path": "good.npy"},
        "fun-v1.1-control-1.3b": {"control_video": "good.mp4"},
                "fun-v1.1-control-camera-1.3b": {"camera_control_direction": "Left"},
                "animate-14b": {"animate_pose_video": "good.mp4",
                "animate_face_video": "good.mp4"}}.get(preset, {})  # fmt: skip
    np.save(folder / "good.npy", ROWS)
    lines = []
    for name, row in zip(["good", *clip_names(len(rows))], [{}, *rows], strict=True):
        video_file(folder / f"{name}.mp4", len(lines))
        lines.append(json.dumps({"file_name": f"{name}.mp4", "text": "x"} | required | row))
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model = PRESETS[preset]
    if model.animate:  # faces of 32 pixels
        model = replace(model, animate=replace(model.animate, face_channels=(4, 4, 4, 4)))
    spec = altered(
        TOY, columns=lambda arch: columns(model), fps=15.0,
        conditioners=lambda arch, *given: conditioners(model, *given),
    )  # fmt: skip
    flags = {
        "model.preset": "tiny",
        "data.folder": str(folder),
        "data.frames": 9,
        "data.height": 32,
        "data.width": 32,
    }
    flags |= {"run.folder": str(folder.parent / "run"), "data.on_bad": "skip"}
    return examine_dataset(create_run(spec, resolve(RunConfig, flags=flags)).data).checkup


def clip_names(count: int) -> list[str]:
    return [f"bad-{number:02}" for number in range(count)]


def refusals(found: CheckReport, count: int) -> list[str]:
    """Why each clip but the sound one is not trained, in their order."""
    assert found.samples == 1 and found.trainable, "the sound clip is trained"
    reasons = {row.name.removesuffix(".mp4"): row.reason for row in found.excluded}
    assert len(reasons) == len(found.excluded) and sorted(reasons) == clip_names(count)
    assert any(finding.code in ("D02", "D03") for finding in found.findings)
    return [reasons[name] for name in clip_names(count)]


def assert_refused(found: CheckReport, *says: tuple[str, ...]) -> None:
    """Whether each clip but the sound one is refused with a line that says these."""
    for reason, parts in zip(refusals(found, len(says)), says, strict=True):
        check_line(reason, *parts)


def saved(table: np.ndarray) -> Made:
    def make(folder: Path) -> str:
        np.save(folder / "bad.npy", table)
        return "bad.npy"

    return make


def of_bytes(name: str, data: bytes) -> Made:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return name

    return make


def hostile_header(folder: Path) -> str:
    """A table that says it has 10¹⁴ numbers, in a file of 200 bytes."""
    saved(ROWS[:1])(folder)
    data = (folder / "bad.npy").read_bytes()
    text = data[10:].split(b"\n")[0].replace(b"(1, 35)", b"(9999999999999, 35)").rstrip()
    length = len(data[10:].split(b"\n")[0])
    (folder / "bad.npy").write_bytes(data[:10] + text.ljust(length) + b"\n" + bytes(72))
    return "bad.npy"


def tensors(*names: str) -> Made:
    def make(folder: Path) -> str:
        save_file({name: torch.zeros(90, 35) for name in names}, folder / "bad.safetensors")
        return "bad.safetensors"

    return make


def cut(make: Made) -> Made:
    def shortened(folder: Path) -> str:
        path = folder / make(folder)
        path.write_bytes(path.read_bytes()[:-40])
        return path.name

    return shortened


def sound(value: float, count: int = 800) -> Made:
    def make(folder: Path) -> str:
        sound_file(folder / "bad.wav", np.full(count, value, np.float32))
        return "bad.wav"

    return make


def script(folder: Path) -> str:
    sound_file(folder / "other.wav", np.zeros(800, np.float32))
    (folder / "bad.wav").write_text("ffconcat version 1.0\nfile other.wav\n")
    return "bad.wav"


def silent_video(folder: Path) -> str:
    return Path(video_file(folder / "music.mp4", 3)).name


def directory(folder: Path) -> str:
    (folder / "bad.npy").mkdir()
    return "bad.npy"


def outside(folder: Path) -> str:
    np.save(folder.parents[1] / "outside.npy", ROWS)
    return "../../outside.npy"


MUSIC: dict[str, tuple[Made, str]] = {
    "not a number": (saved(np.full((90, 35), np.nan)), "not finite"),
    "infinite": (saved(np.full((90, 35), np.inf)), "not finite"),
    "infinite in single precision": (saved(np.full((90, 35), 1e300)), "not finite"),
    "no rows": (saved(np.zeros((0, 35))), "not rows of 35"),
    "34 columns": (saved(np.zeros((90, 34))), "not rows of 35"),
    "one row of numbers": (saved(np.zeros(35)), "not rows of 35"),
    "three axes": (saved(np.zeros((2, 90, 35))), "not rows of 35"),
    "too short": (saved(ROWS[:2]), "s of music"),
    "objects": (saved(np.array([{"a": 1}], dtype=object)), "cannot be read as features"),
    "texts": (saved(np.array(["x"])), "cannot be read as features"),
    "complex": (saved(np.zeros((90, 35), np.complex64)), "cannot be read as features"),
    "no bytes": (of_bytes("bad.npy", b""), "is empty"),
    "a text": (of_bytes("bad.npy", b"these are no numbers"), "cannot be read as features"),
    "cut": (cut(saved(ROWS)), "cannot be read as features"),
    "more numbers than memory": (hostile_header, "cannot be read as features"),
    "two tables": (tensors("a", "b"), "contains 2 tensors"),
    "tensors cut": (cut(tensors("a")), "cannot be read as features"),
    "tensors of text": (
        of_bytes("bad.safetensors", b"no tensors at all"),
        "cannot be read as features",
    ),
    "a folder": (directory, "is a folder"),
    "missing": (lambda folder: "gone.npy", "does not exist"),
    "outside": (outside, "leaves the dataset folder"),
    "another kind": (of_bytes("bad.pdf", b"%PDF"), "not of kind audio by its extension"),
    "sound not a number": (sound(np.nan), "not finite"),
    "sound infinite": (sound(np.inf), "not finite"),
    "sound of no samples": (sound(0.0, 0), "no sound"),
    "sound of text": (
        of_bytes("bad.wav", b"these are no samples\n" * 9),
        "cannot be decoded as sound",
    ),
    "sound of nothing": (of_bytes("bad.mp3", b""), "is empty"),
    "sound cut off": (
        of_bytes("bad.wav", b"RIFF\xff\xff\xff\xffWAVEfmt "),
        "cannot be decoded as sound",
    ),
    "a script called sound": (script, "cannot be decoded as sound"),
    "a video without sound": (silent_video, "no sound"),
}


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in cast:RuntimeWarning", "ignore:Casting complex"
)
def test_music_that_cannot_be_danced_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as if librosa were here: sound is looked at
    monkeypatch.setattr(music_features, "find_spec", lambda name: name)
    rows, says = [], []
    for case, (make, part) in MUSIC.items():
        folder = tmp_path / "set" / case
        folder.mkdir(parents=True)
        name = make(folder)
        rows.append({"wantodance_music_path": f"{case}/{name}"})
        says.append((part, Path(name).name))
    assert_refused(look(tmp_path / "set", "wantodance-14b", *rows), *says)


MASKS = {
    "1, 0, 0": "not a list of 0 and 1",
    "[1, 0]": "has 2 numbers",
    "[2" + ", 0" * 15 + "]": "not a list of 0 and 1",
    "[NaN]": "not a list of 0 and 1",
    "{}": "not a list of 0 and 1",
    "[" * 100_000: "not a list of 0 and 1",
    '["1"]': "not a list of 0 and 1",
}


def test_keyframes_that_are_no_mask_or_without_the_other_half(tmp_path: Path) -> None:
    video = {"wantodance_keyframes": "good.mp4"}
    rows = [video | {KEYS_COLUMN: mask} for mask in MASKS]
    found = look(tmp_path / "set", "wantodance-14b", *rows, video, {KEYS_COLUMN: KEYS})
    *of_masks, no_mask, no_video = refusals(found, len(MASKS) + 2)
    for reason, part in zip(of_masks, MASKS.values(), strict=True):
        check_line(reason, part)
    for reason in (no_mask, no_video):
        assert (
            "alone; give wantodance_keyframes and wantodance_keyframes_mask, or neither" in reason
        )


POSE = "0 0.5 0.9 0.5 0.5 0 0 1 0 0 0 0 1 0 0 0 0 1 0"
CAMERA: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "a first line alone": (b"https://example.com\n", "no camera pose"),
    "bytes": (bytes(range(256)), "cannot be read as a file of camera poses"),
    "UTF-16": (f"x\n{POSE}".encode("utf-16"), "cannot be read as a file of camera poses"),
    "18 numbers": (f"x\n{POSE[:-2]}".encode(), "line 2 is not a camera pose"),
    "not a number": (f"x\n{POSE.replace('0.9', 'nan')}".encode(), "line 2 is not a camera pose"),
    "words": (b"x\nleft left right", "line 2 is not a camera pose"),
    "flat": (f"x\n{' '.join(['0', '1', '1'] + ['0'] * 16)}".encode(), "has a singular matrix"),
}


def test_a_camera_path_that_is_none_or_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows, says = [], []
    for case, (data, part) in CAMERA.items():
        (tmp_path / "set" / f"{case}.pose").write_bytes(data)
        rows.append({"camera_file": f"{case}.pose"})
        says.append((part, f"{case}.pose"))
    rows += [
        {"camera_control_direction": "Sideways"},
        {"camera_control_direction": "Left", "camera_control_speed": "nan"},
    ]
    says += [("camera_control_direction",), ("camera_control_speed",)]
    found = look(tmp_path / "set", "fun-v1.1-control-camera-1.3b", *rows)
    for reason, parts in zip(refusals(found, len(rows)), says, strict=True):
        assert all(part in reason for part in parts) and "\n" not in reason, reason


def test_what_vace_is_conditioned_on(tmp_path: Path) -> None:
    rows, says = [], []
    for column in ("vace_video", "vace_video_mask", "vace_reference_image"):
        for kind in ("short", "sound", "cut", "folder", "missing", "npy"):
            folder = tmp_path / "set" / f"{column} {kind}"
            folder.mkdir(parents=True)
            name = unfit_file(folder, column, kind)
            rows.append({column: f"{folder.name}/{name}"})
            says.append((name,))
    assert_refused(look(tmp_path / "set", "vace-1.3b", *rows), *says)


def unfit_file(folder: Path, column: str, kind: str) -> str:
    """Write what a column cannot be; returns its name in the folder."""
    name = {"folder": "masks", "missing": "gone.mp4", "npy": "mask.npy"}.get(kind, "mask.mp4")
    if column == "vace_reference_image" and name == "mask.mp4":
        name = "mask.png"
    match kind:
        case "short" if name.endswith("mp4"):
            video_file(folder / name, 5, frames=3)
        case "sound":
            sound_only(folder / "mask.mp4").rename(folder / name)
        case "short" | "cut":
            path = Path(
                video_file(folder / name, 5)
                if name.endswith("mp4")
                else image_file(folder / name, 5)
            )
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "folder":
            (folder / name).mkdir()
        case "npy":
            np.save(folder / name, np.zeros((9, 32, 32)))
    return name


def test_what_is_sound_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    video_file(folder / "long.mp4", 4, frames=20)
    image_file(folder / "mask.png", 6, 8, 1000)
    given = {
        "vace_video": "long.mp4",
        "vace_video_mask": "mask.png",
        "vace_reference_image": "mask.png",
    }
    found = look(folder, "vace-1.3b", given)
    assert found.samples == 2 and found.excluded == (), (
        "masks and pictures of another size are fitted"
    )


@pytest.mark.parametrize("rate", [1, 8000, 11025, 44100, 192_000])
def test_sound_of_any_rate_is_decoded_as_it_is(tmp_path: Path, rate: int) -> None:
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.arange(-500, 500, dtype="<i2").tobytes())
    samples, found = decode_sound(path)
    assert found == rate and np.allclose(samples * 32768, np.arange(-500, 500), atol=0.5)


def test_what_animate_lacks_is_said_of_the_clip(tmp_path: Path) -> None:
    """Half of what a replacement needs, and a face that ends before its clip."""
    (tmp_path / "set").mkdir()
    video_file(tmp_path / "set" / "face.mp4", 3, 4)
    found = look(
        tmp_path / "set",
        "animate-14b",
        {"animate_inpaint_video": "good.mp4"},
        {"animate_face_video": "face.mp4"},
    )
    assert_refused(found, ("animate_mask_video", "background and mask together"), ("face.mp4",))
