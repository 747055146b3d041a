"""The presets are the published models, counted on `meta`."""

import pytest
import torch

from ditkit_core.precision import Precision
from ditkit_wan.model import WanTransformer
from ditkit_wan.presets import PRESETS


@pytest.mark.parametrize(
    ("preset", "num_parameters", "num_names"),
    [("t2v-1.3b", 1_418_996_800, 825), ("t2v-14b", 14_288_491_584, 1095)],
)
def test_parameter_counts_are_those_of_the_official_code(preset, num_parameters, num_names):
    with torch.device("meta"):
        model = WanTransformer(PRESETS[preset], Precision())
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert len(model.state_dict()) == num_names
