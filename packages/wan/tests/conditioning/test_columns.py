"""Which columns and conditioners an architecture has, and that they give what the model takes."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conditions_help import (
    CPU,
    controls,
    encoded,
    encoded_by_one,
    image_file,
    sound_file,
    video_file,
)

from ditkit_core.data.columns import OF_THE_MODEL, reference_columns
from ditkit_core.data.control_files import control_headers, control_values
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import named_columns
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.conditioning.columns import columns, conditioners
from ditkit_wan.demo.models import IMAGE_DIM, SPEECH_DIM, SPEECH_STATES
from ditkit_wan.model.inputs import IN_FRONT
from ditkit_wan.presets import PRESETS, SpeechArch, WanArch
from ditkit_wan.spec import WAN

FRAMES, SIDE = 5, 32
PICTURES = ["input_image", "end_image"]
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "t2v-1.3b": ([], []),
    "t2v-a14b": ([], []),
    "i2v-14b-480p": (PICTURES, ["y", "image"]),
    "flf2v-14b-720p": (PICTURES, ["y", "image"]),
    "i2v-a14b": (PICTURES, ["y"]),
    "ti2v-5b": (["input_image"], ["first_frame"]),
    "vace-1.3b": (
        ["vace_video", "vace_video_mask", "vace_reference_image", "vace_reference_image_2",
        "vace_reference_image_3"],
        ["vace"],
    ),
    "fun-v1.1-control-1.3b": (["control_video", "input_image", "reference_image"], ["y",
    "reference", "image"]),
    "fun-v1.1-control-camera-1.3b": (
        ["input_image", "camera_control_direction", "camera_control_speed", "camera_file"],
        ["camera_path", "y", "image"],
    ),
    "s2v-14b": (["input_audio", "reference_image", "s2v_pose_video", "motion_video"], ["audio",
    "reference", "pose"]),
    "animate-14b": (
        ["reference_image", "animate_pose_video", "animate_face_video", "animate_inpaint_video",
        "animate_mask_video"],
        ["y", "pose", "face", "image"],
    ),
    "fun-v1.1-inp-1.3b": (PICTURES, ["y", "image"]),
    "fun-inp-a14b": (PICTURES, ["y"]),
    "fun-inp-5b": (PICTURES, ["y", "first_frame"]),
    "fun-control-a14b": (["control_video", *PICTURES, "reference_image"], ["y", "reference"]),
    "fun-control-5b": (["control_video", *PICTURES, "reference_image"], ["y", "first_frame",
    "reference"]),
    "fun-control-camera-a14b": (
        ["input_image", "camera_control_direction", "camera_control_speed", "camera_file"],
        ["camera_path", "y"],
    ),
    "fun-control-camera-5b": (
        ["input_image", "camera_control_direction", "camera_control_speed", "camera_file"],
        ["camera_path", "y", "first_frame"],
    ),
    "wantodance-14b": (
        [
            "wantodance_music_path", "wantodance_reference_image", "wantodance_keyframes",
            "wantodance_keyframes_mask",
        ],
        ["music", "y", "image", "refimage"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("preset", EXPECTED)
def test_every_variant_encodes_what_its_model_takes(
    preset: str,
    checkpoint: Path,
    vae_2_2_folder: Path,
    clip_folder: Path,
    speech_folder: Path,
    tmp_path: Path,
) -> None:
    names, tensors = EXPECTED[preset]
    arch = narrowed(preset)
    assert [column.name for column in columns(arch)] == names
    assert all(column.doc.endswith(".") for column in columns(arch))
    vae = vae_2_2_folder if arch.token_times else checkpoint / "vae"
    paths = ModelPaths(
        vae=str(vae), image_encoder=str(clip_folder), audio_encoder=str(speech_folder)
    )
    found = conditioners(arch, paths, CPU, VaeMode())
    clip = video_file(tmp_path / "clip.mp4", 1)
    files = {
        column.name: value
        for column in columns(arch)
        if (value := given(column.name, column.kind, tmp_path))
    }
    item: dict[str, torch.Tensor] = {}
    for conditioner in found:
        wanted = controls(
            clip,
            files,
            frames=FRAMES,
            height=SIDE,
            width=SIDE,
            fps=15.0 if arch.music else 16.0,
        )
        assert set(conditioner.uses(wanted)) <= {"", *files}
        if conditioner.uses(wanted):
            item |= encoded(conditioner, wanted)
    outlined = WAN.training.empty_item(arch, (FRAMES, SIDE, SIDE), ())
    assert [name for name in item if name not in IN_FRONT] == tensors
    for name in tensors:  # music may be of any length, VACE's references are in front
        ours, theirs = item[name].shape, outlined[name].shape
        if name == "music":
            assert ours[1] == theirs[1]
        else:
            assert ours == theirs if name != "vace" else ours[0] == theirs[0]
    assert len({conditioner.kind for conditioner in found}) == len(found)


def narrowed(preset: str) -> WanArch:
    """An architecture for the narrow encoders of tests."""
    arch = PRESETS[preset]
    speech = SpeechArch(features=SPEECH_DIM, states=SPEECH_STATES) if arch.speech else None
    # faces of 32 pixels
    animate = arch.animate and replace(arch.animate, face_channels=(4, 4, 4, 4))
    image_dim = IMAGE_DIM if arch.image_dim else 0
    return replace(arch, image_dim=image_dim, text_dim=32, speech=speech, animate=animate)


def given(name: str, kind: str, folder: Path) -> str:
    """A value for a column: the smallest that its conditioner takes, "" for those that stand for
    another."""
    import numpy as np

    if name == "motion_video":
        return ""  # one of 73 frames: see test_speech.py
    if kind == "video":
        return video_file(folder / f"{name}.mp4", 2)
    if kind == "image":
        return image_file(folder / f"{name}.png", 3, SIDE, SIDE)
    if name == "input_audio":
        return sound_file(folder / "speech.wav", np.zeros(16_000, np.float32), 16_000)
    if kind == "audio":
        np.save(folder / "music.npy", np.zeros((30, 35), np.float32))
        return str(folder / "music.npy")
    return {
        "camera_control_direction": "Left",
        "wantodance_keyframes_mask": str([1] + [0] * (FRAMES - 1)),
    }.get(name, "")


def test_the_vae_of_another_model_is_refused_before_anything_is_encoded(checkpoint: Path) -> None:
    components = ModelPaths(base=str(checkpoint))
    arch = PRESETS["ti2v-5b"]
    with pytest.raises(UserError, match="makes 16 latent channels and the model takes 48"):
        conditioners(arch, components, CPU, VaeMode())
    special = replace_fields(arch)
    for make in (
        special.auxiliary.media_encoder,
        lambda *given: special.auxiliary.sampler(*given[:2], torch.float32, ()),
    ):
        with pytest.raises(UserError, match=r"wan2\.2_vae\.safetensors"):
            make(components, CPU, VaeMode())
    with pytest.raises(UserError, match="makes 16 latent channels"):
        WAN.auxiliary.models(arch, components)
    assert (
        replace_fields(PRESETS["t2v-1.3b"])
        .auxiliary.media_encoder(components, CPU, VaeMode())
        .identity
    )


def replace_fields(arch: Any) -> Any:
    return WAN.for_arch(arch)


STILL = "a still image"
VIDEOS = [
    ("fun-v1.1-control-1.3b", "control_video", {}),
    ("vace-1.3b", "vace_video", {}),
    ("vace-1.3b", "vace_video_mask", {}),
    ("s2v-14b", "s2v_pose_video", {}),
    ("animate-14b", "animate_pose_video", {"animate_face_video": "unread.mp4"}),
    ("animate-14b", "animate_face_video", {"animate_pose_video": "unread.mp4"}),
    *(
        (
            "animate-14b",
            first,
            {second: STILL, "animate_pose_video": "unread.mp4", "animate_face_video": "unread.mp4"},
        )
        for first, second in itertools.permutations(("animate_inpaint_video", "animate_mask_video"))
    ),
    ("wantodance-14b", "wantodance_keyframes", {"wantodance_keyframes_mask": str([1] * FRAMES)}),
]


@pytest.mark.parametrize(("preset", "column", "other_columns"), VIDEOS)
def test_a_still_image_in_place_of_a_video_stays_on_screen(
    preset: str,
    column: str,
    other_columns: dict[str, str],
    checkpoint: Path,
    clip_folder: Path,
    speech_folder: Path,
    tmp_path: Path,
) -> None:
    arch = narrowed(preset)
    encoders = {"image_encoder": str(clip_folder), "audio_encoder": str(speech_folder)}
    where = ModelPaths(vae=str(checkpoint / "vae"), **encoders)
    still = image_file(tmp_path / "still.png", 1)
    (tmp_path / "same").mkdir()
    for number in range(FRAMES):
        image_file(tmp_path / "same" / f"{number}.png", 1)
    others = {name: still if value == STILL else value for name, value in other_columns.items()}
    read = 0
    for conditioner in conditioners(arch, where, CPU, VaeMode()):
        # what a still clip is given its sound as is of no concern here
        if conditioner.kind in ("music", "speech"):
            continue
        given = [
            controls(video_file(tmp_path / "v.mp4", 2), {column: file, **others}, frames=FRAMES)
            for file in (still, str(tmp_path / "same"))
        ]
        if column not in conditioner.uses(given[0]):
            continue
        conditioner.check(given[0])
        ours, theirs = encoded_by_one(conditioner, *given)
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )
        read += 1
    assert read


def test_every_column_of_videos_is_tried_with_a_still() -> None:
    named = {
        (column.name)
        for arch in PRESETS.values()
        for column in columns(arch)
        if column.kind == "video"
    }
    assert named == {column for _, column, _ in VIDEOS} | {"motion_video"}, (
        "which a still cannot be: see test_speech.py"
    )


def test_names_of_other_trainers_are_accepted_once() -> None:
    for preset in PRESETS:
        shared = {
            name: meant
            for name, meant in named_columns(columns(PRESETS[preset])).items()
            if len(meant) > 1
        }
        assert set(shared) == (
            {"src_ref_images", "object_file_path"} if preset.startswith("vace") else set()
        ), "lists"
        assert all({column.kind for column in meant} == {"image"} for meant in shared.values())
    fun = {column.name: column for column in columns(PRESETS["fun-v1.1-control-1.3b"])}
    assert "control_file_path" in fun["control_video"].aliases and fun["control_video"].required
    assert "last_image" in columns(PRESETS["flf2v-14b-720p"])[1].aliases


def test_columns_as_other_trainers_call_them() -> None:
    """musubi's and VideoX-Fun's names, where a model has one column that they can mean."""
    meant = {
        "fun-v1.1-control-1.3b": {"control_path": "control_video",
        "control_file_path": "control_video"},
        "fun-v1.1-control-camera-1.3b": {"control_file_path": "camera_file"},
        "vace-1.3b": {
            "control_path": "vace_video", "control_file_path": "vace_video",
            "object_file_path": "vace_reference_image",
        },
    }  # fmt: skip
    for preset in EXPECTED:
        known = columns(PRESETS[preset])
        for name in OF_THE_MODEL:
            row = {"video": "a.mp4", "text": "a cat", name: "b"}
            headers = control_headers("here", row, known, media=("video",), other=OF_THE_MODEL)
            if name in meant.get(preset, {}):
                assert control_values("here", row, known, headers) == {meant[preset][name]: "b"}
            elif known:
                with pytest.raises(
                    UserError,
                    match=f"here has a column '{name}', .* rename it to .*{known[-1].name}",
                ):
                    reference_columns(
                        "here", row, edits=False, model_columns=[each.name for each in known]
                    )
            else:
                assert (headers, reference_columns("here", row, edits=False)) == ({}, ())
    for preset, column in (("fun-v1.1-control-1.3b", "control_video"), ("vace-1.3b", "vace_video")):
        assert values(preset, control_path_0="b") == {column: "b"}
        with pytest.raises(
            UserError, match=f"'control_path_1', .* rename it to '{column}', or remove it"
        ):
            values(preset, control_path_0="b", control_path_1="c")


def values(preset: str, **row: Any) -> dict[str, str]:
    known = columns(PRESETS[preset])
    return control_values("here", row, known, control_headers("here", row, known))


def test_references_of_vace_are_a_list_and_columns_of_their_own() -> None:
    first, second, third = own = [f"vace_reference_image{each}" for each in ("", "_2", "_3")]
    for name in ("src_ref_images", "object_file_path"):
        assert values("vace-1.3b", **{name: ["1", "2"]}) == {first: "1", second: "2"}
        assert values("vace-1.3b", **{name: "1", second: "2"}) == {first: "1", second: "2"}
        assert values("vace-1.3b", **{name: ["2", "3"], first: "1"}) == dict(
            zip(own, "123", strict=True)
        )
        with pytest.raises(
            UserError,
            match=f"'{name}' names 3 files, but this model takes 1 besides {first}, {third}",
        ):
            values("vace-1.3b", **{name: ["2", "3", "4"], first: "1", third: "2"})
    with pytest.raises(
        UserError, match="'src_ref_images' and 'object_file_path', which mean the same"
    ):
        values("vace-1.3b", src_ref_images="1", object_file_path="2")
    with pytest.raises(UserError, match="'vace_video' and 'src_video', which mean the same"):
        values("vace-1.3b", vace_video="1", src_video="2")
