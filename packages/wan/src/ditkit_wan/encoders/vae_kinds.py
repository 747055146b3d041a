"""The two VAEs of Wan: their parameter names in official files and in diffusers, and configurations
for files without one.

Sources: `WanVAE_` in Wan-Video/Wan2.1, wan/modules/vae.py; `WanVAE_` and `Wan2_2_VAE` in
Wan-Video/Wan2.2, wan/modules/vae2_2.py.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ditkit_core.models.state_dict import StateDictNames

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

_IN_FOLDED_STAGE = re.compile(
    r"^(encoder\.down|decoder\.up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)$"
)
_IN_DECODER_STAGE = re.compile(r"^decoder\.upsamples\.(\d+)\.")
_RENAMES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"^(encoder|decoder)\.middle\.0\.", r"\1.mid_block.resnets.0."),
    (r"^(encoder|decoder)\.middle\.1\.", r"\1.mid_block.attentions.0."),
    (r"^(encoder|decoder)\.middle\.2\.", r"\1.mid_block.resnets.1."),
    (r"^encoder\.downsamples\.", "encoder.down_blocks."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
"""Official names to diffusers', applied in order."""


def to_diffusers(name: str) -> str:
    """The diffusers name of a parameter of either VAE, given in the official form or in diffusers'
    own."""

    def folded(
        match: re.Match[str],
    ) -> str:  # 2.2: a stage is residual blocks, then a change of resolution
        half, stage, index, rest = match.groups()
        resamples = rest.startswith(("resample.", "time_conv."))
        part = f"{half.partition('.')[2]}sampler" if resamples else f"resnets.{index}"
        return f"{half}_blocks.{stage}.{part}.{rest}"

    def decoding(
        match: re.Match[str],
    ) -> str:  # 2.1: three residual blocks and an upsampler in each stage
        stage, index = divmod(int(match[1]), 4)
        return f"decoder.up_blocks.{stage}.{'upsamplers.0' if index == 3 else f'resnets.{index}'}."

    name = _IN_DECODER_STAGE.sub(decoding, _IN_FOLDED_STAGE.sub(folded, name))
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


VAE_NAMES = StateDictNames.renaming(to_native=to_diffusers)


def config_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """diffusers' configuration of a single file: its widths are read from the shapes, other fields
    are as published.

    Args:
        shapes: Shapes of the file's tensors, by name in either form.

    Returns:
        The configuration; None if the file is neither VAE.
    """
    renamed = {to_diffusers(name): shape for name, shape in shapes.items()}
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
