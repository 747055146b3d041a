"""The presets are the published models, counted on `meta`."""

import dataclasses

import pytest
import torch

from ditkit_core.models.precision import Precision
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import PRESETS, arch_from_config

COUNTS = {
    "dev": 32_223_281_152,
    "klein-9b": 9_078_581_248,
    "klein-base-9b": 9_078_581_248,
    "klein-4b": 3_875_544_576,
    "klein-base-4b": 3_875_544_576,
}


def theirs_on_meta(preset: str) -> torch.nn.Module:
    from diffusers import Flux2Transformer2DModel

    arch = PRESETS[preset]
    with torch.device("meta"):
        return Flux2Transformer2DModel(
            num_layers=arch.double_layers,
            num_single_layers=arch.single_layers,
            num_attention_heads=arch.heads,
            joint_attention_dim=arch.text_dim,
            guidance_embeds=arch.guidance,
        )


def formula(preset: str) -> int:
    """From the shapes: 26 D² a double block, 13 D² a single block, norms of 128 per q and k."""
    arch = PRESETS[preset]
    d = arch.dim
    double, single = 26 * d * d + 4 * 128, 13 * d * d + 2 * 128
    embedders = (2 if arch.guidance else 1) * (256 * d + d * d)
    outside = (128 + arch.text_dim) * d + embedders + (6 + 6 + 3 + 2) * d * d + d * 128
    return arch.double_layers * double + arch.single_layers * single + outside


@pytest.mark.parametrize("preset", COUNTS)
def test_parameter_counts_are_those_of_the_shapes_and_of_diffusers(preset):
    with torch.device("meta"):
        model = Flux2Transformer(PRESETS[preset], Precision())
    theirs = theirs_on_meta(preset)
    assert (
        COUNTS[preset]
        == sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in theirs.parameters())
    )
    assert formula(preset) == COUNTS[preset]
    assert len(model.state_dict()) == len(theirs.state_dict())


def test_the_presets_are_all_counted_and_distilled_ones_differ_from_their_base_in_that_alone():
    assert PRESETS.keys() == COUNTS.keys()
    for size in ("9b", "4b"):
        assert PRESETS[f"klein-{size}"] == dataclasses.replace(
            PRESETS[f"klein-base-{size}"], distilled=True
        )
    assert not PRESETS["dev"].distilled and PRESETS["dev"].guidance


@pytest.mark.parametrize("preset", PRESETS)
def test_a_diffusers_folder_says_which_preset_it_is(preset):
    config, distilled = dict(theirs_on_meta(preset).config), PRESETS[preset].distilled
    assert arch_from_config(config, {"is_distilled": True} if distilled else {}) == PRESETS[preset]


def test_a_configuration_without_word_of_guidance_is_dev():
    config = dict(theirs_on_meta("dev").config)
    del config["guidance_embeds"]
    assert arch_from_config(config, {}) == PRESETS["dev"]


def test_a_configuration_that_contradicts_itself_is_refused():
    config = dict(theirs_on_meta("klein-4b").config) | {"axes_dims_rope": [32, 32]}
    with pytest.raises(ValueError, match="do not add up to attention_head_dim 128"):
        arch_from_config(config, {})


def test_another_models_configuration_is_refused():
    with pytest.raises(KeyError):
        arch_from_config(
            {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30}, {}
        )
