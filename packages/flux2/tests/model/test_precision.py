"""Which dtypes the parts of FLUX.2 have; its presets are held against recordings and diffusers in
test_against_official.py and test_conformance.py."""

import pytest
import torch
from tiny_flux2 import ARCHS

from ditkit_core.models.precision import Precision
from ditkit_core.nn.rope import timestep_features
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.spec import FLUX2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_timestep_is_rounded_before_it_is_scaled_and_its_sinusoid_is_fp32_or_wider(dtype):
    sigma = torch.tensor([0.9937])
    features = timestep_features(1000 * sigma.to(dtype), 8, dtype)
    assert features.dtype == torch.promote_types(dtype, torch.float32)
    scaled = 1000 * sigma.to(dtype)
    assert float(scaled) == (992.0 if dtype == torch.bfloat16 else pytest.approx(993.7, abs=1e-3))
    assert torch.equal(features[0, 0], scaled[0].to(features.dtype).cos())


def test_parameters_compute_where_their_names_say():
    model = Flux2Transformer(ARCHS["dev"], Precision())
    places = {name: FLUX2.precision.op_group_of(name) for name, _ in model.named_parameters()}
    assert (
        places["embed.time_in.in_layer.weight"]
        == places["embed.guidance_in.out_layer.weight"]
        == "time_mlp"
    )
    assert places["embed.double_stream_modulation_txt.lin.weight"] == "modulation"
    assert places["head.adaLN_modulation.1.weight"] == places["head.linear.weight"] == "head"
    assert places["single_blocks.0.norm.key_norm.weight"] == "qk_norms"
    assert places["embed.img_in.weight"] == places["double_blocks.0.img_attn.q.weight"] == "matmul"
