"""The two VAEs of Wan: configurations for files without one. Their names are in the core's
families/causal_vae.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from ditkit_core.families.causal_vae import causal_vae_name

WAN_2_1: Mapping[str, Any] = {"base_dim": 96, "z_dim": 16}
"""The VAE of all models except TI2V-5B; other fields are diffusers' defaults."""

# Statistics of the 2.2 VAE's latents over its training data, by channel; the statistics of 2.1 are
# diffusers' defaults.
_MEAN_2_2 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813,
    0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158,
    0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117,
    0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681,
    -0.0667,
)  # fmt: skip
_STD_2_2 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip
WAN_2_2: Mapping[str, Any] = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "in_channels": 12, "out_channels": 12,
    "is_residual": True,
    "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": list(_MEAN_2_2),
    "latents_std": list(_STD_2_2),
}  # fmt: skip
"""The VAE of TI2V-5B: pixels are folded 2 × 2 into channels before its first layer."""

_WIDEST = 4
"""The last factor of `dim_mult` in both: the decoder's first layer is this many times its base
width."""


def config_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """diffusers' configuration of a single file: its widths are read from the shapes, other fields
    are as published.

    Args:
        shapes: Shapes of the file's tensors, by name in either form.

    Returns:
        The configuration; None if the file is neither VAE.
    """
    renamed = {causal_vae_name(name): shape for name, shape in shapes.items()}
    first, code, decoder = (
        renamed.get(f"{layer}.weight", ())
        for layer in ("encoder.conv_in", "post_quant_conv", "decoder.conv_in")
    )
    match len(first) == len(code) == len(decoder) == 5 and (first[1], code[0]):
        case (3, 16):
            return {**WAN_2_1, "base_dim": first[0]}
        case (12, 48):
            return {**WAN_2_2, "base_dim": first[0], "decoder_base_dim": decoder[0] // _WIDEST}
    return None
