"""What configurations of folders in diffusers' layout say of the preset; test_conformance.py counts
all of them."""

import dataclasses

import pytest
import torch

from ditkit_flux2.presets import PRESETS, arch_from_config


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


def test_distilled_presets_differ_from_their_base_in_that_alone():
    for size in ("9b", "4b"):
        assert PRESETS[f"klein-{size}"] == dataclasses.replace(
            PRESETS[f"klein-base-{size}"], distilled=True
        )
    assert not PRESETS["dev"].distilled and PRESETS["dev"].guidance


def test_a_configuration_without_word_of_guidance_is_dev():
    config = dict(theirs_on_meta("dev").config)
    del config["guidance_embeds"]
    assert arch_from_config(config, {}) == PRESETS["dev"]


def test_a_configuration_that_contradicts_itself_is_refused():
    config = dict(theirs_on_meta("klein-4b").config) | {"axes_dims_rope": [32, 32]}
    with pytest.raises(ValueError, match="do not add up to a head of 128 features"):
        arch_from_config(config, {})


def test_another_models_configuration_is_refused():
    with pytest.raises(KeyError):
        arch_from_config(
            {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30}, {}
        )
