"""Images that a clip begins and ends with: against diffusers' pipeline, and against the definition
written out."""

from functools import cache
from pathlib import Path
from typing import Any

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

from ditkit_core.data.media.clip import read_clip
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import FirstFrame
from ditkit_core.models.conditions import Conditioner
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.conditioning.images import ClipVision, FirstLast, known_frames_mask
from ditkit_wan.encoders.clip import ImageEncoder


def pixels(path: str) -> torch.Tensor:
    return read_clip(Path(path), frames=1, fps=1.0, height=HEIGHT, width=WIDTH)


@cache
def pipeline(checkpoint: Path) -> Any:
    """diffusers' image-to-video pipeline of a VAE alone."""
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline

    vae = AutoencoderKLWan.from_pretrained(checkpoint / "vae")
    return WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=None, image_processor=None,
        image_encoder=None, transformer=None
    )  # fmt: skip


def of_diffusers(
    checkpoint: Path, first: torch.Tensor, last: torch.Tensor | None, frames: int
) -> torch.Tensor:
    """`y` as diffusers' image-to-video pipeline makes it, without the transformer."""
    with torch.no_grad():
        return pipeline(checkpoint).prepare_latents(
            first[None, :, 0], 1, 16, HEIGHT, WIDTH, frames, torch.float32, CPU,
            last_image=None if last is None else last[None, :, 0],
        )[1][0]  # fmt: skip


@pytest.mark.parametrize(("frames", "end"), [(5, False), (5, True), (9, True)])
def test_y_is_that_of_diffusers(checkpoint: Path, tmp_path: Path, frames: int, end: bool) -> None:
    files = {"input_image": image_file(tmp_path / "a.png", 1)}
    if end:
        files["end_image"] = image_file(tmp_path / "b.png", 2)
    conditioner = FirstLast(tiny_vae(checkpoint), both=False)
    given = controls(None, files, frames=frames)
    assert isinstance(conditioner, Conditioner) and conditioner.uses(given) == tuple(files)
    y = encoded(conditioner, given)["y"]
    theirs = of_diffusers(
        checkpoint,
        pixels(files["input_image"]),
        pixels(files["end_image"]) if end else None,
        frames,
    )
    assert y.shape == (20, 1 + frames // 4, HEIGHT // 8, WIDTH // 8)
    assert torch.equal(y[:4], theirs[:4])
    # diffusers multiplies with the inverse deviation where we divide
    torch.testing.assert_close(y[4:], theirs[4:], atol=1e-6, rtol=1e-6)


def test_the_mask_has_a_channel_for_each_pixel_frame_of_a_latent_one() -> None:
    for frames in (5, 9, 17):
        mask = known_frames_mask([True] + [False] * (frames - 2) + [True], 2, 3)
        assert mask.shape == (4, 1 + frames // 4, 2, 3)
        assert (mask[:, 0] == 1).all() and (mask[3, -1] == 1).all()
        assert mask.sum() == 5 * 2 * 3  # four channels of the first latent frame, one of the last
    each = known_frames_mask([True, False, True, False, False, True, False, False, False], 1, 1)[
        :, :, 0, 0
    ]
    assert each.T.tolist() == [[1, 1, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert (known_frames_mask([True], 1, 1) == 1).all()


def test_frames_that_are_not_given_are_grey_pixels_not_zero_latents(
    checkpoint: Path, tmp_path: Path
) -> None:
    vae = tiny_vae(checkpoint)
    clip = video_file(tmp_path / "clip.mp4", 3)
    y = encoded(FirstLast(vae, both=False), controls(clip))["y"]
    vae.load()
    seen = torch.zeros(3, FRAMES, HEIGHT, WIDTH)
    seen[:, :1] = pixels(clip)
    assert torch.equal(y[4:], vae.encode([seen])[0]["latents"])
    assert y[4:, 1:].abs().max() > 0.1


def test_a_clip_stands_for_the_images_that_it_has_not(checkpoint: Path, tmp_path: Path) -> None:
    clip = video_file(tmp_path / "clip.mp4", 3, frames=14)
    begin = FirstLast(tiny_vae(checkpoint), both=False)
    both = FirstLast(tiny_vae(checkpoint), both=True)
    window = controls(clip, start_seconds=2 / 16)
    own = read_clip(
        Path(clip), frames=FRAMES, fps=16.0, height=HEIGHT, width=WIDTH, start_seconds=2 / 16
    )
    assert begin.uses(window) == ("",) and both.uses(window) == ("",)
    for conditioner, last in ((begin, None), (both, own[:, -1:])):
        theirs = of_diffusers(checkpoint, own[:, :1], last, FRAMES)
        torch.testing.assert_close(encoded(conditioner, window)["y"], theirs, atol=1e-6, rtol=1e-6)
    named = controls(clip, {"end_image": image_file(tmp_path / "b.png", 2)})
    assert begin.uses(named) == ("", "end_image")
    assert begin.identity != both.identity
    with pytest.raises(
        UserError,
        match="image to video needs an image: set it in sample.controls, or with --control input_image=FILE",
    ):
        begin.uses(controls(None))


def test_a_still_is_known_whole(checkpoint: Path, tmp_path: Path) -> None:
    still = image_file(tmp_path / "a.png", 1)
    y = encoded(FirstLast(tiny_vae(checkpoint), both=True), controls(still, frames=1, fps=0.0))["y"]
    assert y.shape == (20, 1, HEIGHT // 8, WIDTH // 8) and (y[:4] == 1).all()


def test_a_first_frame_is_the_clips_own_first_latent_and_nothing_without_an_image(
    checkpoint: Path, tmp_path: Path
) -> None:
    clip = video_file(tmp_path / "clip.mp4", 3)
    vae = tiny_vae(checkpoint)
    conditioner = FirstFrame(vae)
    assert conditioner.optional and isinstance(conditioner, Conditioner)
    first = encoded(conditioner, controls(clip))["first_frame"]
    vae.load()
    whole = vae.encode(
        [read_clip(Path(clip), frames=FRAMES, fps=16.0, height=HEIGHT, width=WIDTH)]
    )[0]["latents"]
    torch.testing.assert_close(first, whole[:, :1], atol=1e-5, rtol=1e-5)
    assert conditioner.uses(controls(None)) == () and conditioner.uses(controls(clip)) == ("",)
    named = controls(clip, {"input_image": image_file(tmp_path / "a.png", 1)})
    assert conditioner.uses(named) == ("input_image",)
    assert not torch.equal(encoded(conditioner, named)["first_frame"], first)


def test_two_kinds_on_one_vae_have_keys_of_their_own(checkpoint: Path) -> None:
    vae = tiny_vae(checkpoint)
    kinds = [FirstLast(vae, both=True), FirstLast(vae, both=False), FirstFrame(vae)]
    assert len({each.identity for each in kinds}) == 3
    tiled = type(vae)(ModelPaths(base=str(checkpoint)), CPU, mode=VaeMode(tiled=True))
    assert FirstFrame(tiled).identity != kinds[2].identity


def test_clip_sees_the_first_then_the_last_image(tmp_path: Path, clip_folder: Path) -> None:
    encoder = ImageEncoder(ModelPaths(image_encoder=str(clip_folder)), CPU, torch.float32)
    files = {
        "input_image": image_file(tmp_path / "a.png", 1),
        "end_image": image_file(tmp_path / "b.png", 2),
    }
    both = ClipVision(encoder, ("input_image", "end_image"))
    one = ClipVision(encoder, ("input_image",))
    assert isinstance(both, Conditioner) and both.uses(controls(None, files)) == (
        "input_image",
        "end_image",
    )
    tokens = encoded(both, controls(None, files))["image"]
    assert tokens.shape == (2 * encoder.tokens, encoder.dim)
    encoder.load()
    for half, path in zip(tokens.chunk(2), files.values(), strict=True):
        assert torch.equal(half, encoder.encode([pixels(path)])[0]["image"])
    assert torch.equal(encoded(one, controls(None, files))["image"], tokens[: encoder.tokens])
    clip = video_file(tmp_path / "clip.mp4", 3)
    own = encoded(both, controls(clip))["image"]
    assert not torch.equal(*own.chunk(2)) and both.uses(controls(clip)) == ("",)
    assert both.identity != one.identity


def test_clip_sees_what_diffusers_shows_it(tmp_path: Path, clip_folder: Path) -> None:
    from transformers import CLIPVisionModel

    files = {"input_image": image_file(tmp_path / "a.png", 1)}
    encoder = ImageEncoder(ModelPaths(image_encoder=str(clip_folder)), CPU, torch.float32)
    tokens = encoded(ClipVision(encoder, ("input_image",)), controls(None, files))["image"]
    theirs: Any = CLIPVisionModel.from_pretrained(clip_folder)
    square = torch.nn.functional.interpolate(
        pixels(files["input_image"]).transpose(0, 1), size=(224, 224), mode="bicubic"
    )
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    with torch.no_grad():
        expected = theirs((square / 2 + 0.5 - mean) / std, output_hidden_states=True).hidden_states[
            -2
        ][0]
    torch.testing.assert_close(tokens, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="image to video needs an image"):
        ClipVision(encoder, ("input_image",)).uses(controls(None))
