"""A distilled model's file that is trained as another one is said by its name."""

import pytest

from ditkit_core.loading.architecture import distilled_by_name
from ditkit_core.models.spec import ModelSpec
from ditkit_flux2.spec import FLUX2
from ditkit_ltx.spec import LTX
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE


@pytest.mark.parametrize(
    ("spec", "preset", "named", "distilled"),
    [
        (ZIMAGE, "base", "files/z_image_turbo_bf16.safetensors", "turbo"),
        (ZIMAGE, "base", "Tongyi-MAI/Z-Image-Turbo", "turbo"),
        (ZIMAGE, "turbo", "Tongyi-MAI/Z-Image-Turbo", ""),
        (ZIMAGE, "base", "Tongyi-MAI/Z-Image", ""),
        (ZIMAGE, "base", "files/turbocharged.safetensors", ""),
        (FLUX2, "klein-base-4b", "flux-2-klein-4b.safetensors", "klein-4b"),
        (FLUX2, "klein-base-4b", "flux-2-klein-base-4b.safetensors", ""),
        (FLUX2, "klein-4b", "flux-2-klein-4b.safetensors", ""),
        (LTX, "13b", "files/LTX-Video-0.9.7-distilled", "13b_distilled"),
        (LTX, "13b", "files/ltxv-13b-0.9.8-distilled.safetensors", "13b_distilled"),
        (LTX, "13b_i2v", "files/LTX-Video-0.9.7-distilled", "13b_distilled_i2v"),
        (LTX, "13b", "files/LTX-Video-0.9.7-dev", ""),
        (LTX, "13b_distilled", "files/LTX-Video-0.9.7-distilled", ""),
        (WAN, "t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", ""),
    ],
)
def test_the_name_of_a_distilled_file_is_noticed(
    spec: ModelSpec, preset: str, named: str, distilled: str
):
    arch = spec.architecture.presets[preset]
    assert distilled_by_name(spec, arch, named) == distilled
