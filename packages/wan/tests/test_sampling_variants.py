"""Samples of each variant that starts from more than text, against diffusers' pipelines with the
same weights and noise."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conditions_help import CPU, controls, encoded, image_file
from conditions_help import noise as colours
from PIL import Image

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.data.media.clip import read_clip, write_image, write_video
from ditkit_core.engine.placement import place_blocks
from ditkit_core.io.rng import generator
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.encoders import GenerationRequest, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.testing.sampling import generate_latents
from ditkit_wan.conditioning.columns import conditioners
from ditkit_wan.demo.write import write_checkpoint
from ditkit_wan.encoders.text import TextEncoder
from ditkit_wan.presets import PRESETS
from ditkit_wan.sampling import WanSampler, default_shift
from ditkit_wan.spec import WAN
from ditkit_wan.variants import experts

FRAMES, SIDE = 5, 64
ASKED = {
    "prompt": "a red circle", "negative_prompt": "blue", "height": SIDE, "width": SIDE,
    "num_frames": FRAMES,
    "num_inference_steps": 3, "guidance_scale": 4.0, "output_type": "latent",
}  # fmt: skip


class Sampled:
    """A variant's checkpoint, our model with its weights, and our sampler over it."""

    def __init__(self, folder: Path, variant: str):
        write_checkpoint(folder, ["a red circle", "blue"], variant)
        self.folder, self.components = folder, ModelPaths(base=str(folder), dtype="fp32")
        precision = Precision(matmul=torch.float32)
        made = model_on_meta(
            WAN, self.components, AdapterConfig(method="full"), BaseConfig(), precision=precision
        )
        self.arch = made.module.embed.arch
        self.model = load_weights(made, placement=place_blocks(made.module, [CPU]), seed=0).module
        self.sampler = WanSampler(self.components, CPU, arch=self.arch)

    def latents(
        self, files: dict[str, str], fps: float = 16.0, **changes: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What we draw, and the conditions that we drew with."""
        text = TextEncoder(self.components, CPU, torch.float32)
        text.load()
        given = controls(None, files, frames=FRAMES, height=SIDE, width=SIDE, fps=fps)
        conditions: dict[str, torch.Tensor] = dict(text.encode(["a red circle"])[0])
        for conditioner in conditioners(self.arch, self.components, CPU, VaeMode()):
            if conditioner.uses(given):
                conditions |= encoded(conditioner, given)
        job = GenerationRequest(
            conditions=conditions, negative=text.encode(["blue"])[0], frames=FRAMES, height=SIDE,
            width=SIDE, steps=3,
            guidance=4.0, shift=0.0, seed=7,
        )  # fmt: skip
        return generate_latents(
            self.sampler, replace(job, **changes), self.model, run_plain
        ), conditions

    def pipeline(self, name: str, **more: Any) -> Any:
        import diffusers

        made = getattr(diffusers, name).from_pretrained(self.folder, local_files_only=True, **more)
        made.set_progress_bar_config(disable=True)
        return made


@pytest.fixture
def sampled(tmp_path: Path) -> Callable[[str], Sampled]:
    return lambda variant: Sampled(tmp_path / variant, variant)


def opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def noise(channels: int, frames: int, side: int) -> torch.Tensor:
    return torch.randn((1, channels, frames, side, side), generator=generator(7, "sample"))


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # fp32 in two orders of summation, amplified by guidance; diffusers' sinusoid is fp32 where ours
    # is fp64
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() / theirs.std() < 2e-4


@pytest.mark.parametrize("variant", ["i2v", pytest.param("flf2v", marks=pytest.mark.slow)])
def test_a_video_from_images_is_that_of_diffusers(
    sampled: Any, tmp_path: Path, variant: str
) -> None:
    ours = sampled(variant)
    files = {"input_image": image_file(tmp_path / "a.png", 1, SIDE, SIDE)}
    if variant == "flf2v":
        files["end_image"] = image_file(tmp_path / "b.png", 2, SIDE, SIDE)
    latents, conditions = ours.latents(files)
    pictures = dict(zip(("image", "last_image"), map(opened, files.values()), strict=False))
    pipeline = ours.pipeline("WanImageToVideoPipeline")
    tokens = conditions["image"].unflatten(0, (len(files), -1))
    # it crops images for CLIP to a square, where the authors squeeze them
    pipeline.encode_image = lambda *given: tokens
    theirs = pipeline(**ASKED, **pictures, latents=noise(16, 2, SIDE // 8)).frames[0]
    agree(latents, theirs)


@pytest.mark.slow
def test_a_video_from_a_clean_first_frame_is_that_of_diffusers(
    sampled: Any, tmp_path: Path
) -> None:
    ours = sampled("ti2v")
    picture = image_file(tmp_path / "a.png", 1, SIDE, SIDE)
    latents, conditions = ours.latents({"input_image": picture})
    pipeline = ours.pipeline(
        "WanImageToVideoPipeline", image_encoder=None, image_processor=None, expand_timesteps=True
    )
    theirs = pipeline(**ASKED, image=opened(picture), latents=noise(48, 2, SIDE // 16)).frames[0]
    assert torch.equal(latents[:, :1], conditions["first_frame"])
    agree(latents, theirs)
    from_text, none = ours.latents({})
    assert set(none) == {"text"} and not torch.equal(from_text, latents)
    agree(
        from_text, ours.pipeline("WanPipeline")(**ASKED, latents=noise(48, 2, SIDE // 16)).frames[0]
    )


def test_vace_samples_its_references_and_cuts_them_off_as_diffusers_does(
    sampled: Any, tmp_path: Path
) -> None:
    ours = sampled("vace")
    video = str(tmp_path / "v.mp4")
    write_video(Path(video), colours(1, FRAMES, SIDE, SIDE), 16.0)
    mask = torch.zeros(3, FRAMES, SIDE, SIDE)
    mask[:, :, :20, 9:40] = 1.0
    write_video(tmp_path / "m.mp4", mask, 16.0)
    files = {
        "vace_video": video, "vace_video_mask": str(tmp_path / "m.mp4"),
        "vace_reference_image": image_file(tmp_path / "r.png", 2, SIDE, SIDE),
    }  # fmt: skip
    latents, conditions = ours.latents(files)
    pipeline = ours.pipeline("WanVACEPipeline")

    def frames(path: str) -> list[Image.Image]:
        pixels = read_clip(Path(path), frames=FRAMES, fps=16.0, height=SIDE, width=SIDE)
        shown = ((pixels + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
        return [Image.fromarray(picture) for picture in shown]

    theirs = pipeline(
        **ASKED, video=frames(video), mask=frames(files["vace_video_mask"]), latents=noise(16, 3,
        SIDE // 8),
        reference_images=[opened(files["vace_reference_image"])],
    ).frames[0]  # fmt: skip
    assert conditions["vace"].shape[1] == 3 and latents.shape[1] == 2
    agree(latents, theirs[:, 1:])  # it cuts when it decodes


def shown(path: str, side: int = SIDE) -> list[Image.Image]:
    """The frames of a video, as a pipeline of diffusers takes them."""
    pixels = read_clip(Path(path), frames=FRAMES, fps=30.0, height=side, width=side)
    pictures = ((pixels + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
    return [Image.fromarray(picture) for picture in pictures]


@pytest.mark.parametrize("mode", ["animate", pytest.param("replace", marks=pytest.mark.slow)])
def test_an_animated_character_is_that_of_diffusers(
    sampled: Any, tmp_path: Path, mode: str
) -> None:
    """Each step of one segment; the reference image is denoised as a frame in front, and guidance
    shows a black face."""
    ours = sampled("animate")
    files = {"reference_image": image_file(tmp_path / "r.png", 2, SIDE, SIDE)}
    columns = [
        "animate_pose_video",
        "animate_face_video",
        *(("animate_inpaint_video",) if mode == "replace" else ()),
    ]
    for number, column in enumerate(columns):
        files[column] = str(tmp_path / f"{column}.mp4")
        write_video(Path(files[column]), colours(3 + number, FRAMES, SIDE, SIDE), 30.0)
    if mode == "replace":
        mask = torch.zeros(3, SIDE, SIDE)
        mask[:, :24, 16:40] = 1.0
        files["animate_mask_video"] = str(tmp_path / "m.png")
        write_image(tmp_path / "m.png", mask)
    latents, conditions = ours.latents(files, fps=30.0)
    pipeline = ours.pipeline("WanAnimatePipeline")
    # it crops images for CLIP to a square
    pipeline.encode_image = lambda *given: conditions["image"][None]
    steps: list[torch.Tensor] = []

    def noted(
        pipeline: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        steps.append(tensors["latents"][0].clone())
        return tensors

    more = (
        {
            "background_video": shown(files["animate_inpaint_video"]),
            "mask_video": [opened(files["animate_mask_video"])] * FRAMES,
        }
        if mode == "replace"
        else {}
    )
    pipeline(
        **{name: value for name, value in ASKED.items() if name != "num_frames"},
        image=opened(files["reference_image"]), pose_video=shown(files["animate_pose_video"]),
        face_video=shown(files["animate_face_video"], 32), segment_frame_length=FRAMES, mode=mode,
        latents=noise(16, 3, SIDE // 8),
        callback_on_step_end=noted, **more,
    )  # fmt: skip
    assert latents.shape[1] == 2 and len(steps) == 3
    agree(latents, steps[-1][:, 1:])


def test_noise_levels_are_shifted_as_each_variants_authors_do() -> None:
    # generate.py of Wan2.1 and the configurations of Wan2.2
    expected = {
        "t2v-1.3b": 5, "t2v-14b": 5, "i2v-14b-720p": 5, "flf2v-14b-720p": 16, "vace-1.3b": 16,
        "vace-14b": 16,
        "t2v-a14b": 12, "i2v-a14b": 5, "ti2v-5b": 5, "fun-v1.1-inp-14b": 5, "fun-inp-a14b": 5,
        "fun-control-a14b": 5,
        "fun-control-camera-a14b": 5, "fun-inp-5b": 5, "fun-control-5b": 5, "vace-fun-a14b": 12,
    }  # fmt: skip
    for preset, shift in expected.items():
        assert default_shift(PRESETS[preset], 720, 1280) == shift, preset
    assert (
        default_shift(PRESETS["i2v-14b-480p"], 480, 832)
        == default_shift(PRESETS["i2v-14b-480p"], 832, 480)
        == 3
    )
    assert default_shift(PRESETS["fun-v1.1-control-1.3b"], 480, 832) == 3
    assert (
        default_shift(PRESETS["wantodance-14b"], 480, 320)
        == default_shift(PRESETS["wantodance-14b"], 1280, 720)
        == 5
    )
    assert (
        default_shift(PRESETS["i2v-a14b"], 480, 832) == 5
        and default_shift(PRESETS["t2v-14b"], 480, 832) == 5
    )
    pairs = [arch for arch in PRESETS.values() if experts(arch)]
    # `denoiser_stages`: ranks that divide them take each step of samples of several sizes together
    for arch in pairs:
        assert len({default_shift(arch, height, height) for height in (64, 480, 1280)}) == 1
    assert len(pairs) == 6
    assert (
        default_shift(PRESETS["animate-14b"], 480, 832)
        == default_shift(PRESETS["animate-14b"], 720, 1280)
        == 5
    )


@pytest.mark.slow
def test_without_a_schedulers_configuration_a_variant_is_sampled_with_its_own_shift(
    sampled: Any,
) -> None:
    ours = sampled("vace")
    alone = WanSampler(ModelPaths(vae=str(ours.folder / "vae")), CPU, arch=ours.arch)
    explicit, _ = ours.latents({}, shift=16.0)
    ours.sampler = alone
    assert torch.equal(ours.latents({})[0], explicit)
