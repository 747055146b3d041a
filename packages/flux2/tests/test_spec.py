"""What the spec makes of noised latents, noise levels and items, and what it says of each
architecture."""

import math
from dataclasses import replace

import pytest
import torch

from ditkit_core.adapters.inject import target_modules
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.spec import SampleDefaults
from ditkit_core.testing.specs import altered
from ditkit_core.testing.world import make_model, train_shortly
from ditkit_flux2.presets import PRESETS, Flux2Arch
from ditkit_flux2.spec import FLUX2

ARCH = Flux2Arch(
    dim=32, heads=2, double_layers=2, single_layers=2, text_dim=12, text_tokens=5, guidance=False,
    in_channels=6,
    out_channels=6, freq_dim=16, axes=(4, 4, 4, 4),
)  # fmt: skip


def items(count: int = 1, references: int = 0) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        {
            "latents": torch.randn(6, 1, 2, 3, generator=random),
            "text": torch.randn(5, 12, generator=random),
        }
        | {
            f"reference.{k}": torch.randn(6, 1, 2, 2 + k, generator=random)
            for k in range(references)
        }
        for _ in range(count)
    ]


def made(given: list[dict[str, torch.Tensor]], sigma: torch.Tensor, guidance: float = 1.0):
    return FLUX2.training.make_inputs([item["latents"] for item in given], sigma, given, guidance)


def test_the_noise_level_is_handed_over_as_it_is():
    """993.7 thousandths have no bf16 form: the nearest are 992 and 996."""
    sigma = torch.tensor([0.9937, 0.0005])
    assert made(items(2), sigma).sigma is sigma


@pytest.mark.parametrize("latents", [torch.bfloat16, torch.float32])
def test_a_bf16_model_sees_a_noise_level_that_moves_by_half_a_thousandth(latents):
    """bf16 has a step of 4 in a thousand there: a noise level rounded to it moves the output by
    nothing."""
    model = make_model(FLUX2, ARCH, dtype=torch.bfloat16)
    (item,) = items()

    def velocity(sigma: float) -> torch.Tensor:
        with torch.no_grad():
            return model(
                FLUX2.training.make_inputs(
                    [item["latents"].to(latents)], torch.tensor([sigma]), [item], 1.0
                )
            )[0]

    assert torch.equal(velocity(0.9), velocity(0.9))
    assert not torch.equal(velocity(0.9), velocity(0.9005))


def test_training_in_bf16_hands_over_noise_levels_in_fp32():
    seen = []

    def spied(*given):
        seen.append(FLUX2.training.make_inputs(*given).sigma)
        return FLUX2.training.make_inputs(*given)

    model = make_model(FLUX2, ARCH, dtype=torch.bfloat16)
    train_shortly(altered(FLUX2, make_inputs=spied), model, items(2), BlockEngine())
    assert {sigma.dtype for sigma in seen} == {torch.float32}
    drawn = torch.cat([sigma for sigma in seen if len(sigma) == 2])
    assert drawn.max() <= 1 and not torch.equal(drawn, drawn.bfloat16().float())


def test_a_model_is_conditioned_on_the_guidance_if_it_has_an_embedding_of_it():
    for told in (False, True):
        model = make_model(FLUX2, replace(ARCH, guidance=told))
        with torch.no_grad():
            one, four = (
                model(made(items(), torch.tensor([0.5]), guidance))[0] for guidance in (1.0, 4.0)
            )
        assert torch.equal(one, four) is not told
    assert made(items(2), torch.tensor([0.5, 0.6]), 3.5).guidance.tolist() == [3.5, 3.5]


def test_references_come_in_order_and_change_the_prediction():
    (item,) = items(references=2)
    inputs = made([item], torch.tensor([0.5]))
    assert [[tuple(reference.shape) for reference in each] for each in inputs.references] == [
        [(6, 1, 2, 2), (6, 1, 2, 3)]
    ]
    model = make_model(FLUX2, ARCH)
    swapped = item | {"reference.0": item["reference.1"], "reference.1": item["reference.0"]}
    with torch.no_grad():
        outputs = [
            model(made([given], torch.tensor([0.5])))[0] for given in (item, swapped, items()[0])
        ]
    assert all(output.shape == (6, 1, 2, 3) for output in outputs)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_text_and_references_move_to_the_device_of_the_latents():
    given = items(2, references=1)
    noised = [item["latents"].to("meta") for item in given]
    inputs = FLUX2.training.make_inputs(noised, torch.tensor([0.5, 0.6]), given, 1.0)
    moved = [*inputs.text, *(reference for each in inputs.references for reference in each)]
    assert {tensor.device.type for tensor in moved} == {"meta"} and len(moved) == 4


def test_tokens_are_text_rows_target_and_references():
    assert FLUX2.training.num_tokens(items()[0]) == 5 + 6
    assert (
        FLUX2.training.num_tokens(
            {name: tensor.to("meta") for name, tensor in items(references=2)[0].items()}
        )
        == 5 + 6 + 4 + 6
    )


def test_the_default_targets_are_every_linear_layer_of_the_blocks():
    model = make_model(FLUX2, ARCH)
    linears = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    ]
    sets = {
        name: set(target_modules(model, (name,), FLUX2.adapters.targets))
        for name in FLUX2.adapters.targets
    }
    assert set(target_modules(model, (), FLUX2.adapters.targets)) == sets["blocks"]
    assert (
        sets["blocks"] == {name for name in linears if "_blocks." in name}
        and len(sets["blocks"]) == 2 * 12 + 2 * 2
    )
    assert sets["attention"] == {name for name in sets["blocks"] if "_mlp." not in name}
    assert sets["modulation"] == {name for name in linears if name.endswith(".lin")} | {
        "head.adaLN_modulation.1"
    }


def test_what_is_computed_in_fp32_is_stored_in_it():
    model = make_model(FLUX2, replace(ARCH, guidance=True), dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert {dtypes[name] for name in dtypes.keys() - narrow} == {torch.float32}
    modules = {name.removesuffix(".weight") for name in narrow}
    assert modules == {
        "embed.img_in",
        "embed.txt_in",
        *target_modules(model, ("blocks",), FLUX2.adapters.targets),
    }


def test_the_shift_of_training_is_that_of_the_images_size():
    for side, mu in ((256, 0.5), (1024, 1.15)):  # the two ends of the authors' line
        assert FLUX2.training.shift(torch.empty(128, 1, side // 16, side // 16)) == pytest.approx(
            math.exp(mu)
        )


def test_samples_are_generated_as_the_authors_do():
    drawn = {name: FLUX2.auxiliary.sample_defaults(arch) for name, arch in PRESETS.items()}
    few = SampleDefaults(steps=4, guidance=1.0, guided_by="nothing")
    base = SampleDefaults(steps=50, guidance=4.0, guided_by="negative")
    assert drawn == {
        "dev": SampleDefaults(steps=50, guidance=4.0, guided_by="embedding"),
        "klein-4b": few,
        "klein-9b": few,
        "klein-base-4b": base,
        "klein-base-9b": base,
    }


def test_training_a_distilled_model_is_advised_against_and_its_base_named():
    assert 'model.preset = "klein-base-4b"' in FLUX2.training.advice(PRESETS["klein-4b"])
    assert 'model.preset = "klein-base-9b"' in FLUX2.training.advice(PRESETS["klein-9b"])
    assert "base" in FLUX2.training.advice(replace(ARCH, distilled=True))
    for name in ("dev", "klein-base-4b", "klein-base-9b"):
        assert FLUX2.training.advice(PRESETS[name]) == ""
    assert "\n" not in FLUX2.training.advice(PRESETS["klein-4b"])
