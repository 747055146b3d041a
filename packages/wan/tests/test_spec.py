"""What the spec makes of noised latents, noise levels and items: the timestep in full precision,
the text next to the latents."""

import pytest
import torch

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.testing.specs import altered
from ditkit_core.testing.world import make_model, train_shortly
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

ARCH = WanArch(
    dim=24,
    ffn_dim=32,
    heads=2,
    layers=1,
    in_channels=4,
    out_channels=4,
    text_dim=20,
    text_tokens=6,
    freq_dim=16,
)


def items(count: int = 1) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        {
            "latents": torch.randn(4, 2, 4, 6, generator=random),
            "text": torch.randn(3, 20, generator=random),
        }
        for _ in range(count)
    ]


def test_the_timestep_is_a_thousand_times_the_noise_level_in_fp32():
    """731.25 and 900.5 have no bf16 form: the nearest are 732 and 900."""
    made = WAN.training.make_inputs(
        [item["latents"] for item in items(2)], torch.tensor([0.73125, 0.9005]), items(2), 1.0
    )
    assert made.timestep.dtype == torch.float32
    assert made.timestep.tolist() == [731.25, 900.5]


@pytest.mark.parametrize("latents", [torch.bfloat16, torch.float32])
def test_a_bf16_model_sees_a_timestep_that_moves_by_a_half(latents):
    """bf16 has a step of 4 there: a timestep rounded to it moves the output by nothing."""
    model = make_model(WAN, ARCH, dtype=torch.bfloat16)
    (item,) = items()

    def velocity(sigma: float) -> torch.Tensor:
        with torch.no_grad():
            return model(
                WAN.training.make_inputs(
                    [item["latents"].to(latents)], torch.tensor([sigma]), [item], 1.0
                )
            )[0]

    assert torch.equal(velocity(0.9), velocity(0.9))
    assert not torch.equal(velocity(0.9), velocity(0.9005))


def test_training_in_bf16_hands_over_timesteps_in_fp32():
    seen = []

    def spied(*given):
        seen.append(WAN.training.make_inputs(*given).timestep)
        return WAN.training.make_inputs(*given)

    model = make_model(WAN, ARCH, dtype=torch.bfloat16)
    train_shortly(altered(WAN, make_inputs=spied), model, items(2), BlockEngine())
    assert {len(timestep) for timestep in seen} == {1, 2}, (
        "held-out clips one by one, and micro-batches"
    )
    assert {timestep.dtype for timestep in seen} == {torch.float32}
    drawn = torch.cat([timestep for timestep in seen if len(timestep) == 2])
    assert drawn.max() > 1 and not torch.equal(drawn, drawn.bfloat16().float())


def test_text_moves_to_the_device_of_the_latents():
    made = WAN.training.make_inputs(
        [item["latents"].to("meta") for item in items(2)], torch.tensor([0.5, 0.6]), items(2), 1.0
    )
    assert [text.device.type for text in made.text] == ["meta", "meta"]
    assert [text.shape for text in made.text] == [(3, 20), (3, 20)]
