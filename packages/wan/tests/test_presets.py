"""The presets are the published models, counted on `meta`, and what diffusers' configurations say
of them."""

import json
import math
from functools import cache
from typing import Any

import pytest
import torch

from ditkit_core.adapters.files.identify import Shapes, parameters_of
from ditkit_wan.presets import PRESETS, arch_from_config
from ditkit_wan.spec import WAN
from ditkit_wan.state_dict import to_diffusers, to_native, to_official

# Parameters and keys of the official code.
COUNTS = {
    "t2v-1.3b": (1_418_996_800, 825),
    "t2v-14b": (14_288_491_584, 1095),
    "i2v-14b-480p": (16_394_878_784, 1303),
    "i2v-14b-720p": (16_394_878_784, 1303),
    "flf2v-14b-720p": (16_395_536_704, 1304),
    "vace-1.3b": (2_153_972_032, 1264),
    "vace-14b": (17_337_592_896, 1331),
    "ti2v-5b": (4_999_787_712, 825),
    "t2v-a14b": (14_288_491_584, 1095),
    "i2v-a14b": (14_288_901_184, 1095),
}

SIZES_1_3B = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
}
SIZES_14B = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "ffn_dim": 13824,
    "num_layers": 40,
}
IMAGE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
VACE = {"vace_in_channels": 96, "in_channels": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "t2v-1.3b": SIZES_1_3B,
    "t2v-14b": SIZES_14B,
    "i2v-14b-480p": SIZES_14B | IMAGE,
    "i2v-14b-720p": SIZES_14B | IMAGE,
    "flf2v-14b-720p": SIZES_14B | IMAGE | {"pos_embed_seq_len": 514},
    "vace-1.3b": SIZES_1_3B | VACE | {"vace_layers": list(range(0, 30, 2))},
    "vace-14b": SIZES_14B | VACE | {"vace_layers": list(range(0, 40, 5))},
    "ti2v-5b": {
        "num_attention_heads": 24, "attention_head_dim": 128, "ffn_dim": 14336, "num_layers": 30,
        "in_channels": 48,
        "out_channels": 48,
    },
    "t2v-a14b": SIZES_14B,
    "i2v-a14b": SIZES_14B | {"in_channels": 36},
}  # fmt: skip
WAN_2_1 = {"boundary_ratio": None, "transformer_2": [None, None], "expand_timesteps": False}
TWO = ["diffusers", "WanTransformer3DModel"]
INDICES: dict[str, dict[str, Any]] = {
    "ti2v-5b": WAN_2_1 | {"expand_timesteps": True},
    "t2v-a14b": {"boundary_ratio": 0.875, "transformer_2": TWO, "expand_timesteps": False},
    "i2v-a14b": {"boundary_ratio": 0.9, "transformer_2": TWO, "expand_timesteps": False},
}


def ours(preset: str) -> Shapes:
    return parameters_of(WAN.architecture.build, PRESETS[preset])


def theirs(preset: str) -> Any:
    return theirs_of(json.dumps(CONFIGS[preset]))


@cache
def theirs_of(text: str) -> Any:
    """diffusers' transformer of a configuration, on `meta`; two presets may have one."""
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    config = json.loads(text)
    with torch.device("meta"):
        return (WanVACETransformer3DModel if "vace_layers" in config else WanTransformer3DModel)(
            **config
        )


@pytest.mark.parametrize(("preset", "counts"), COUNTS.items())
def test_parameter_counts_are_those_of_the_official_code(preset, counts):
    found = ours(preset)
    assert (sum(map(math.prod, found.values())), len(found)) == counts
    assert len({to_official(name) for name in found}) == counts[1]


def test_every_preset_that_diffusers_has_is_counted():
    assert COUNTS.keys() == CONFIGS.keys() <= PRESETS.keys()


@pytest.mark.parametrize("preset", CONFIGS)
def test_diffusers_has_the_same_parameters_of_the_same_shapes(preset):
    expected = {name: tuple(x.shape) for name, x in theirs(preset).state_dict().items()}
    found = ours(preset)
    assert {to_diffusers(name): shape for name, shape in found.items()} == expected
    assert {to_native(name): shape for name, shape in expected.items()} == found


@pytest.mark.parametrize("preset", CONFIGS)
def test_diffusers_own_configuration_is_the_preset(preset):
    config = dict(theirs(preset).config)
    assert arch_from_config(config, INDICES.get(preset, WAN_2_1)) == PRESETS[preset]


def test_without_the_pipelines_index_a_transformer_stands_alone():
    assert arch_from_config(dict(theirs("ti2v-5b").config), {}) == PRESETS["ti2v-5b"]
    assert arch_from_config(dict(theirs("t2v-a14b").config), {}) == PRESETS["t2v-14b"]


def test_a_boundary_without_a_second_transformer_is_a_converters_mistake():
    """diffusers' converter writes 0.9 into the index of a 2.1 image-to-video model."""
    index = {"boundary_ratio": 0.9, "transformer_2": [None, None]}
    assert arch_from_config(dict(theirs("i2v-14b-720p").config), index).boundary == 0


def test_a_configuration_of_another_model_raises_what_the_core_expects():
    with pytest.raises(KeyError):
        arch_from_config({"_class_name": "FluxTransformer2DModel", "in_channels": 64}, {})


def test_the_authors_own_config_leaves_the_choice_to_the_shapes():
    official = {
        "_class_name": "WanModel",
        "dim": 1536,
        "ffn_dim": 8960,
        "freq_dim": 256,
        "in_dim": 16,
        "model_type": "t2v",
    }
    assert (
        arch_from_config(
            official | {"num_heads": 12, "num_layers": 30, "out_dim": 16, "text_len": 512}, {}
        )
        is None
    )
