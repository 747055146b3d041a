"""VACE's context: against diffusers' pipeline, and the cases that it has no test for."""

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

from ditkit_core.data.media.clip import read_clip, write_image, write_video
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Conditioner
from ditkit_wan.conditioning.media import fitted
from ditkit_wan.conditioning.vace import Vace, mask_channels

LATENT = (1 + FRAMES // 4, HEIGHT // 8, WIDTH // 8)


def mask_file(path: Path, frames: int = FRAMES) -> str:
    """Black, with a white part that moves and does not end on a row of latents, and grey that is
    neither."""
    white = torch.zeros(3, frames, HEIGHT, WIDTH)
    for frame in range(frames):
        white[:, frame, 5:21, frame : frame + 20] = 1.0
    white[:, :, 26:] = 0.4
    write_video(path, white, 16.0)
    return str(path)


@cache
def pipeline(checkpoint: Path) -> Any:
    """diffusers' pipeline with the tiny VAE; of its transformer it asks the patch size alone."""
    from types import SimpleNamespace

    from diffusers import AutoencoderKLWan, WanVACEPipeline

    vae = AutoencoderKLWan.from_pretrained(checkpoint / "vae")
    made = WanVACEPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=None, transformer=None
    )
    made.transformer = SimpleNamespace(config=SimpleNamespace(patch_size=(1, 2, 2)))
    return made


def of_diffusers(
    checkpoint: Path, video: torch.Tensor, mask: torch.Tensor, references: list[torch.Tensor]
) -> torch.Tensor:
    theirs = pipeline(checkpoint)
    # it puts each reference in front of those before it, where the official code keeps their order
    pictures = [[picture[:, 0] for picture in reversed(references)]]
    with torch.no_grad():
        latents = theirs.prepare_video_latents(video[None], mask[None], pictures, device=CPU)
    return torch.cat([latents, theirs.prepare_masks(mask[None], pictures)], dim=1)[0]


def read(path: str) -> torch.Tensor:
    return read_clip(Path(path), frames=FRAMES, fps=16.0, height=HEIGHT, width=WIDTH)


@pytest.mark.parametrize("count", [0, 2])
def test_the_context_is_that_of_diffusers(checkpoint: Path, tmp_path: Path, count: int) -> None:
    files = {
        "vace_video": video_file(tmp_path / "v.mp4", 1),
        "vace_video_mask": mask_file(tmp_path / "m.mp4"),
    }
    columns = ("vace_reference_image", "vace_reference_image_2")[:count]
    files |= {
        column: image_file(tmp_path / f"{column}.png", 2 + i, 40, 40)
        for i, column in enumerate(columns)
    }
    conditioner = Vace(tiny_vae(checkpoint))
    assert isinstance(conditioner, Conditioner) and conditioner.uses(
        controls(None, files)
    ) == tuple(files)
    made = encoded(conditioner, controls(None, files))
    pictures = [fitted(Path(files[column]), HEIGHT, WIDTH, canvas=1.0) for column in columns]
    mask = (read(files["vace_video_mask"]) + 1) / 2
    expected = of_diffusers(checkpoint, read(files["vace_video"]), mask, pictures)
    assert made["vace"].shape == (96, count + LATENT[0], *LATENT[1:])
    # diffusers multiplies with the inverse deviation where we divide; masks are bitwise the same
    assert torch.equal(made["vace"][32:], expected[32:]) and made["vace"][32:].unique().numel() > 2
    torch.testing.assert_close(made["vace"], expected, atol=1e-5, rtol=1e-5)
    assert ("vace_reference" in made) == bool(count)
    if count:
        assert torch.equal(made["vace_reference"], made["vace"][:16, :count])
        assert (made["vace"][16:, :count] == 0).all()


def test_an_image_is_scaled_to_fit_on_white_as_diffusers_does(
    checkpoint: Path, tmp_path: Path
) -> None:
    from PIL import Image

    for height, width in ((40, 40), (16, 64), (HEIGHT, WIDTH)):
        path = image_file(tmp_path / f"{height}.png", height, height, width)
        theirs = pipeline(checkpoint).preprocess_conditions(
            reference_images=Image.open(path),
            height=HEIGHT,
            width=WIDTH,
            num_frames=1,
            dtype=torch.float32,
            device=CPU,
        )[2][0][0]
        torch.testing.assert_close(
            fitted(Path(path), HEIGHT, WIDTH, canvas=1.0)[:, 0], theirs, atol=1e-6, rtol=0
        )
    with pytest.raises(UserError, match="is a video; a reference is an image"):
        fitted(Path(video_file(tmp_path / "v.mp4", 1)), HEIGHT, WIDTH, canvas=1.0)


def test_channels_of_a_mask_are_its_rows_and_columns_of_eight_and_its_nearest_frames() -> None:
    mask = torch.arange(9 * 16 * 24, dtype=torch.float32).view(9, 16, 24)
    channels = mask_channels(mask)
    assert channels.shape == (64, 3, 2, 3)
    for place in ((0, 0), (3, 5), (7, 7)):
        for frame, nearest in enumerate((1, 4, 7)):  # the middles of thirds of nine frames
            assert torch.equal(
                channels[8 * place[0] + place[1], frame],
                mask[nearest, place[0] :: 8, place[1] :: 8],
            )


def test_without_a_video_all_is_grey_and_without_a_mask_all_is_made_anew(
    checkpoint: Path, tmp_path: Path
) -> None:
    vae = tiny_vae(checkpoint)
    conditioner = Vace(vae)
    nothing = controls(tmp_path / "unread.mp4")
    assert conditioner.uses(nothing) == ("",)
    context = encoded(conditioner, nothing)["vace"]
    video = video_file(tmp_path / "v.mp4", 1)
    whole = encoded(conditioner, controls(None, {"vace_video": video}))["vace"]
    vae.load()
    grey = vae.encode([torch.zeros(3, FRAMES, HEIGHT, WIDTH)])[0]["latents"]
    assert (
        torch.equal(context[:16], grey)
        and torch.equal(context[16:32], grey)
        and (context[32:] == 1).all()
    )
    assert torch.equal(whole[:16], grey) and torch.equal(
        whole[16:32], vae.encode([read(video)])[0]["latents"]
    )


def test_an_image_stands_for_all_frames_and_a_short_video_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    half = torch.zeros(3, HEIGHT, WIDTH)
    half[:, :, WIDTH // 2 :] = 1.0
    write_image(tmp_path / "m.png", half)
    video = video_file(tmp_path / "v.mp4", 1)
    files = {"vace_video": video, "vace_video_mask": str(tmp_path / "m.png")}
    context = encoded(Vace(tiny_vae(checkpoint)), controls(None, files))["vace"]
    assert (context[32:, :, :, :3] == 0).all() and (context[32:, :, :, 3:] == 1).all()
    short = controls(None, {"vace_video": video_file(tmp_path / "short.mp4", 1, frames=4)})
    with pytest.raises(UserError, match=r"short\.mp4"):
        encoded(Vace(tiny_vae(checkpoint)), short)
    still = encoded(
        Vace(tiny_vae(checkpoint)), controls(None, {"vace_video": str(tmp_path / "m.png")})
    )["vace"]
    vae = tiny_vae(checkpoint)
    vae.load()
    assert torch.equal(
        still[16:32], vae.encode([(half[:, None] * 2 - 1).expand(-1, FRAMES, -1, -1)])[0]["latents"]
    )


def test_a_sample_that_is_given_nothing_has_a_context_too(checkpoint: Path, tmp_path: Path) -> None:
    from ditkit_core.encoding.cache import Cache
    from ditkit_core.encoding.encode import Conditioning

    conditioner = Vace(tiny_vae(checkpoint))
    cache = Cache(tmp_path / "cache")
    made = Conditioning(conditioners=[conditioner]).tensors(controls(None), cache)
    assert torch.equal(made["vace"], encoded(conditioner, controls(None))["vace"])
    video = controls(None, {"vace_video": video_file(tmp_path / "v.mp4", 1)})
    other = Conditioning(conditioners=[conditioner]).tensors(video, cache)
    assert (
        not torch.equal(other["vace"], made["vace"])
        and len(list(cache.folder.rglob("*.safetensors"))) == 2
    )
