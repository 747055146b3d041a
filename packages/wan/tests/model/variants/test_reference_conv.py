"""A reference image in front of a clip, against recordings of DiffSynth-Studio, and in a batch."""

from dataclasses import replace

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.testing.world import make_model
from ditkit_wan.model.inputs import WanInputs
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

FUN = {"latents": "latents", "y": "y", "text": "context", "image": "clip_feature"}
ARCH = WanArch(
    dim=24, ffn_dim=32, heads=2, layers=2, in_channels=12, out_channels=4, text_dim=20,
    text_tokens=6, freq_dim=16,
    image_dim=8, ref_conv=True,
)  # fmt: skip


def item(
    seed: int, size: tuple[int, int, int] = (2, 4, 6), *, reference: bool = True
) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    made = {
        "latents": draw(4, *size),
        "y": draw(8, *size),
        "text": draw(3, 20),
        "image": draw(5, 8),
    }
    picture = draw(16, 1, *size[1:])
    return made | {"reference": picture} if reference else made


def run(model, *items, sigma=0.4, **extra):
    inputs = WAN.training.make_inputs(
        [one["latents"] for one in items], torch.full((len(items),), sigma), items, 1.0
    )
    with torch.no_grad():
        return model(inputs._replace(**extra))


def test_outputs_and_gradients_equal_the_recordings(recording):
    recorded = recording("diffsynth_ref_conv_fp32")
    model = recorded.model(ref_conv=True)
    recorded.check(model, "referenced", FUN | {"reference": "reference_latents"})
    recorded.check(model, "bare", FUN)


def test_each_sample_of_a_batch_has_its_own_reference_or_none():
    """Sizes and references differ: what is computed for one is not what another gets. 1e-5: padding
    changes the order of summation."""
    model = make_model(WAN, ARCH)
    items = [item(0), item(1, (1, 6, 8)), item(2, reference=False), item(3)]
    together = run(model, *items)
    for one, velocity in zip(items, together, strict=True):
        (alone,) = run(model, one)
        assert velocity.shape == one["latents"].shape
        torch.testing.assert_close(velocity, alone, rtol=1e-5, atol=1e-5)
    (moved,) = run(model, item(0) | {"reference": item(3)["reference"]})
    assert (moved - together[0]).norm() > 1e-2 * together[0].norm()


def test_the_tokens_of_a_reference_have_the_time_of_the_last_of_the_clip():
    """As VideoX-Fun has it where timesteps differ by token. Equal times for all are what one time
    is."""
    model = make_model(WAN, ARCH)
    one, num = item(0), 2 * 2 * 3
    (plain,) = run(model, one)
    (spread,) = run(model, one, timestep=torch.full((1, num), 400.0))
    torch.testing.assert_close(spread, plain, rtol=1e-5, atol=1e-5)
    times = torch.linspace(0, 400, num)[None]
    carry = model.embed(
        WAN.training.make_inputs([one["latents"]], torch.tensor([0.4]), [one], 1.0)._replace(
            timestep=times
        )
    )
    assert carry.grids == ((3, 2, 3),) and carry.tokens.shape[1] == 6 + num
    assert carry.time.shape[1] == 6 + num
    assert torch.equal(carry.time[0, :6], carry.time[0, -1:].expand(6, -1))
    assert not torch.equal(carry.time[0, 6], carry.time[0, -1])


def test_the_tokens_of_a_reference_have_the_clips_time_where_its_first_frame_is_clean():
    """Two times and a choice by token are what a time per token is; one sample of the batch has no
    clean frame, one no reference."""
    arch = replace(ARCH, token_times=True)
    model, random = make_model(WAN, arch), torch.Generator().manual_seed(0)
    items = [item(0), item(1, (1, 6, 8)), item(2, reference=False), item(3)]
    for one, has_first in zip(items, (True, False, True, False), strict=True):
        height, width = one["latents"].shape[2:]
        if "reference" in one:
            one["reference"] = torch.randn(48, 1, height, width, generator=random)
        if has_first:
            one["first_frame"] = torch.randn(4, 1, height, width, generator=random)
    together = run(model, *items)
    for one, velocity in zip(items, together, strict=True):
        torch.testing.assert_close(velocity, run(model, one)[0], rtol=1e-5, atol=1e-5)
        frame, num = one["latents"][0, 0].numel() // 4, one["latents"][0].numel() // 4
        times = torch.full((1, num), 400.0)
        times[:, : frame if "first_frame" in one else 0] = 0
        (spread,) = run(model, one, timestep=times, late=None)
        torch.testing.assert_close(spread, velocity, rtol=1e-5, atol=1e-5)


def test_a_reference_is_counted_as_tokens():
    assert WAN.training.num_tokens(item(0)) == WAN.training.num_tokens(item(0, reference=False)) + 6
    planned = WAN.training.empty_item(
        WAN.architecture.presets["fun-v1.1-control-1.3b"], (81, 480, 832), ()
    )
    assert planned["reference"].shape == (16, 1, 60, 104)
    assert planned["y"].shape == (32, 21, 60, 104)


@pytest.mark.parametrize("shape", [(16, 1, 4, 8), (4, 1, 4, 6), (16, 2, 4, 6)])
def test_a_reference_of_another_size_is_refused(shape):
    with pytest.raises(UserError, match="encode it at the size of the clip"):
        run(make_model(WAN, ARCH), item(0) | {"reference": torch.zeros(shape)})


def test_a_model_without_a_place_for_it_refuses_it():
    plain = WanArch(
        dim=24,
        ffn_dim=32,
        heads=2,
        layers=1,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        text_tokens=6,
    )
    model = make_model(WAN, plain)
    given = WanInputs(
        [torch.zeros(4, 1, 4, 4)],
        torch.zeros(1),
        [torch.zeros(1, 20)],
        reference=[torch.zeros(16, 1, 4, 4)],
    )
    with pytest.raises(UserError, match="'reference', and this model takes none"):
        model(given)
