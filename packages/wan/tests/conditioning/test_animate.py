"""What Animate is conditioned on besides text, against the official code's steps, and what lacks a
file."""

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
    tiny_vae,
    video_file,
)
from PIL import Image

from ditkit_core.data.media.clip import read_clip
from ditkit_core.errors import UserError
from ditkit_core.models.encoders import VaeMode
from ditkit_wan.conditioning.animate import (
    BodyPoses,
    Faces,
    Subject,
    SubjectVision,
    mask_channels,
    reference_image,
)
from ditkit_wan.conditioning.columns import columns, conditioners
from ditkit_wan.presets import PRESETS

ARCH = PRESETS["animate-14b"]
REPLACED = ("animate_inpaint_video", "animate_mask_video")


def official_mask(frames: int, height: int, width: int, given: torch.Tensor | None) -> torch.Tensor:
    """`get_i2v_mask` of wan/animate.py without frames of a segment before, step by step."""
    mask = torch.zeros(1, frames, height, width) if given is None else given.clone()
    mask = torch.cat([mask[:, :1].repeat_interleave(4, 1), mask[:, 1:]], 1)
    return mask.view(1, mask.shape[1] // 4, 4, height, width).transpose(1, 2)[0]


def test_of_a_clip_nothing_is_given_but_its_reference(checkpoint: Path, tmp_path: Path) -> None:
    vae = tiny_vae(checkpoint)
    files = {"reference_image": image_file(tmp_path / "r.png", 1)}
    tensors = encoded(Subject(vae), controls(video_file(tmp_path / "c.mp4", 2), files))
    vae.load()
    reference = vae.encode([reference_image(controls(None, files))])[0]["latents"]
    grey = vae.encode([torch.zeros(3, FRAMES, HEIGHT, WIDTH)])[0]["latents"]
    assert torch.equal(tensors["animate_reference"], reference) and tensors["y"].shape == (
        20,
        4,
        HEIGHT // 8,
        WIDTH // 8,
    )
    masks, latents = tensors["y"][:4], tensors["y"][4:]
    assert (
        torch.equal(latents, torch.cat([reference, grey], 1))
        and masks[:, 0].eq(1).all()
        and not masks[:, 1:].any()
    )


def test_a_character_is_replaced_in_its_background(checkpoint: Path, tmp_path: Path) -> None:
    """The mask is white where it is generated; the model is given the rest, thinned to the size of
    latents as the official code does."""
    vae, picture = tiny_vae(checkpoint), np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[4:20, 8:30] = 255
    Image.fromarray(picture).save(tmp_path / "m.png")
    files = {
        "animate_inpaint_video": video_file(tmp_path / "b.mp4", 3),
        "animate_mask_video": str(tmp_path / "m.png"),
    }
    given = controls(video_file(tmp_path / "c.mp4", 2), files)
    assert Subject(vae).uses(given) == ("", *REPLACED)
    tensors = encoded(Subject(vae), given)
    kept = 1 - torch.from_numpy(picture[..., 0] / 255).float().expand(1, FRAMES, -1, -1)
    small = torch.nn.functional.interpolate(
        kept[0][:, None], size=(HEIGHT // 8, WIDTH // 8), mode="nearest"
    )[:, 0]
    assert torch.equal(
        tensors["y"][:4, 1:], official_mask(FRAMES, HEIGHT // 8, WIDTH // 8, small[None])
    )
    vae.load()
    background = read_clip(
        Path(files["animate_inpaint_video"]), frames=FRAMES, fps=16.0, height=HEIGHT, width=WIDTH
    )
    assert torch.equal(tensors["y"][4:, 1:], vae.encode([background])[0]["latents"])


def test_a_mask_that_changes_has_a_channel_for_each_frame() -> None:
    moving = torch.rand(FRAMES, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
    small = torch.nn.functional.interpolate(
        moving[:, None], size=(HEIGHT // 8, WIDTH // 8), mode="nearest"
    )[:, 0]
    assert torch.equal(
        mask_channels(moving, 8), official_mask(FRAMES, HEIGHT // 8, WIDTH // 8, small[None])
    )


def test_a_reference_is_fitted_on_black_and_mirrored_with_its_clip(tmp_path: Path) -> None:
    files = {"reference_image": image_file(tmp_path / "r.png", 1, HEIGHT, WIDTH // 2)}
    pixels = reference_image(controls(None, files))
    assert pixels.shape == (3, 1, HEIGHT, WIDTH)
    assert pixels[..., : WIDTH // 4].eq(-1).all() and pixels[..., 3 * WIDTH // 4 :].eq(-1).all()
    assert pixels[..., WIDTH // 4 : 3 * WIDTH // 4].gt(-1).any()
    assert torch.equal(reference_image(controls(None, files, is_mirrored=True)), pixels.flip(-1))


def test_a_face_is_bytes_of_every_frame_of_the_window(tmp_path: Path) -> None:
    path = video_file(tmp_path / "f.mp4", 5, 2 * FRAMES)
    given = controls(
        video_file(tmp_path / "c.mp4", 2, 2 * FRAMES),
        {"animate_face_video": path},
        start_seconds=0.25,
    )
    face = encoded(Faces(32), given)["face"]
    expected = read_clip(
        Path(path), frames=FRAMES, fps=16.0, height=32, width=32, start_seconds=0.25
    )
    assert face.dtype == torch.uint8 and face.shape == (3, FRAMES, 32, 32)
    assert (face.float() / 127.5 - 1 - expected).abs().max() <= 0.5 / 127.5 + 1e-6


def test_what_lacks_a_file_is_said_before_anything_is_encoded(
    checkpoint: Path, tmp_path: Path
) -> None:
    clip = video_file(tmp_path / "c.mp4", 2)
    vae = tiny_vae(checkpoint)
    with pytest.raises(
        UserError, match="has no animate_pose_video, which this model moves by; add that column"
    ):
        BodyPoses(vae).uses(controls(clip))
    with pytest.raises(
        UserError, match="has no animate_face_video, which this model takes expressions from"
    ):
        Faces(512).uses(controls(clip))
    with pytest.raises(
        UserError,
        match="has no animate_mask_video, and a character is replaced by background and mask together",
    ):
        Subject(vae).uses(controls(clip, {"animate_inpaint_video": clip}))
    with pytest.raises(UserError, match="animation needs an image: set it in sample.controls"):
        Subject(vae).uses(controls(None))
    with pytest.raises(UserError, match=r"p\.mp4"):
        BodyPoses(vae).check(
            controls(clip, {"animate_pose_video": video_file(tmp_path / "p.mp4", 1, 4)})
        )


def test_its_columns_have_the_names_of_other_trainers_and_each_is_encoded() -> None:
    named = {column.name: column for column in columns(ARCH)}
    assert list(named) == ["reference_image", "animate_pose_video", "animate_face_video", *REPLACED]
    assert [name for name, column in named.items() if column.required] == [
        "animate_pose_video",
        "animate_face_video",
    ]
    aliases = {alias for column in named.values() for alias in column.aliases}
    # VideoX-Fun
    assert {
        "control_file_path",
        "face_file_path",
        "ref_file_path",
        "background_file_path",
        "mask_file_path",
    } <= aliases
    # the authors' preprocessing
    assert {"src_pose", "src_face", "src_ref", "src_bg", "src_mask"} <= aliases
    chosen = conditioners(ARCH, None, CPU, VaeMode())
    assert [type(conditioner) for conditioner in chosen] == [
        Subject,
        BodyPoses,
        Faces,
        SubjectVision,
    ]
    assert len({conditioner.kind for conditioner in chosen}) == 4


def test_clip_sees_the_reference_as_the_vae_does(tmp_path: Path) -> None:
    files = {"reference_image": image_file(tmp_path / "r.png", 1, HEIGHT, WIDTH // 2)}
    given = controls(video_file(tmp_path / "c.mp4", 2), files)
    vision = conditioners(ARCH, None, CPU, VaeMode())[-1]
    assert isinstance(vision, SubjectVision) and vision.uses(given) == ("reference_image",)
    assert torch.equal(vision.images(given)[0], reference_image(given))
