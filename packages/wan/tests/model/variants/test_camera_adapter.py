"""A camera's path added to the tokens of a clip, against recordings of DiffSynth-Studio, and in a
batch, of which that keeps one sample."""

from dataclasses import replace

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.testing.world import make_model
from ditkit_wan.conditioning.camera import moving, path_of
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

FUN = {"latents": "latents", "y": "y", "text": "context", "image": "clip_feature"}
ARCH = WanArch(
    dim=24, ffn_dim=32, heads=2, layers=2, in_channels=8, out_channels=4, text_dim=20,
    text_tokens=6, freq_dim=16,
    image_dim=8, camera_channels=24,
)  # fmt: skip


def item(
    seed: int, direction: str, size: tuple[int, int, int] = (2, 4, 6)
) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    made = {
        "latents": draw(4, *size),
        "y": draw(4, *size),
        "text": draw(3, 20),
        "image": draw(5, 8),
    }
    if direction:
        frames, height, width = 1 + 4 * (size[0] - 1), 8 * size[1], 8 * size[2]
        made["camera_path"] = path_of(moving(direction, "0.3", frames), height=height, width=width)
    return made


def run(model, *items):
    with torch.no_grad():
        return model(
            WAN.training.make_inputs(
                [one["latents"] for one in items], torch.full((len(items),), 0.4), items, 1.0
            )
        )


def test_outputs_and_gradients_equal_the_recordings(recording):
    recorded = recording("diffsynth_camera_fp32")
    model = recorded.model(camera_channels=2)
    recorded.check(model, "posed", FUN | {"camera": "control_camera_latents_input"})
    recorded.check(model, "bare", FUN)


def test_each_sample_of_a_batch_has_its_own_camera_or_none():
    """1e-5: padding changes the order of summation."""
    model = make_model(WAN, ARCH)
    items = [item(0, "Left"), item(1, "Up", (1, 6, 8)), item(2, ""), item(0, "In")]
    together = run(model, *items)
    assert [velocity.shape for velocity in together] == [one["latents"].shape for one in items]
    for one, velocity in zip(items, together, strict=True):
        (alone,) = run(model, one)
        torch.testing.assert_close(velocity, alone, rtol=1e-5, atol=1e-5)
    # the same clip under another camera
    assert (together[0] - together[3]).norm() > 1e-3 * together[0].norm()


def test_two_alike_samples_are_both_kept():
    """Batches of one size take the way without padding."""
    model = make_model(WAN, ARCH)
    pair = [item(0, "Left"), item(3, "RightDown")]
    for one, velocity in zip(pair, run(model, *pair), strict=True):
        torch.testing.assert_close(velocity, run(model, one)[0], rtol=1e-5, atol=1e-5)


def test_a_path_with_fewer_poses_than_frames_is_refused():
    model, one = make_model(WAN, ARCH), item(0, "Left")
    with pytest.raises(UserError, match="a pose for each frame"):
        run(model, one | {"camera_path": one["camera_path"][:1]})


def test_with_the_vae_of_2_2_a_latent_pixel_has_the_rays_of_16_pixels():
    arch = replace(ARCH, token_times=True)
    model, one = make_model(WAN, arch), item(0, "Left")
    one["camera_path"] = path_of(moving("Left", "0.3", 5), height=64, width=96)
    make = WAN.for_arch(arch).training.make_inputs
    inputs = make([one["latents"]], torch.full((1,), 0.4), [one], 1.0)
    assert inputs.camera is not None and inputs.camera[0].shape == (24, 2, 64, 96)
    assert model.embed.control_adapter.conv.weight.shape == (24, 24 * 256, 2, 2)
    with torch.no_grad():
        (velocity,) = model(inputs)
    assert velocity.shape == one["latents"].shape
    with pytest.raises(UserError, match="a pose for each frame"):
        run(model, one)  # rays of a VAE of 8 pixels


def test_a_plan_has_the_path_of_the_whole_clip():
    planned = WAN.training.empty_item(
        WAN.architecture.presets["fun-v1.1-control-camera-14b"], (81, 480, 832), ()
    )
    assert planned["camera_path"].shape == (81, 16)
    assert planned["y"].shape == (16, 21, 60, 104)
