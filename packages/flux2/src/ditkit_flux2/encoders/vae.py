"""The FLUX.2 VAE: diffusers' `AutoencoderKLFlux2` from a diffusers folder or from the official single file.

Latents are the posterior's mode in 2x2 patches, normalised with the statistics of a batch norm that is never run, as the official
code trains and samples. The statistics are fp32 in any mode.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import WHOLE, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.models.tiling import Tiles
from ditkit_core.weights.frozen import find_weights
from ditkit_core.weights.frozen_vae import FrozenVae

_STAGES = 4
_PATCH = 2
_NORM_GROUPS = 32
"""Values that the shapes in a single file do not give."""
TILES = Tiles(side=512, overlap=128)
"""diffusers' tiles are as large as the most common training image and would save no memory there."""
PUBLISHED = {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512]}
"""Configuration of the VAE of all FLUX.2 models."""
_GET = "get ae.safetensors of black-forest-labs/FLUX.2-dev, or name a diffusers vae folder"

# Official names to diffusers', applied in order; diffusers' own names pass unchanged. Source: `AutoEncoder` in
# black-forest-labs/flux2, src/flux2/autoencoder.py.
_RENAMES = (
    (r"^encoder\.quant_conv\.", "quant_conv."),
    (r"^decoder\.post_quant_conv\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"^encoder\.down\.(\d)\.block\.", r"encoder.down_blocks.\1.resnets."),
    (r"^encoder\.down\.(\d)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
)
_UP = re.compile(r"^decoder\.up\.(\d)\.(block\.|upsample\.)")


def to_diffusers(name: str) -> str:
    """The diffusers name of a parameter of the FLUX.2 VAE, given in either form."""

    def stage_name(match: re.Match[str]) -> str:
        # The official code counts the decoder's stages from the pixels, diffusers from the latents.
        inside = "resnets." if match[2] == "block." else "upsamplers.0."
        return f"decoder.up_blocks.{_STAGES - 1 - int(match[1])}.{inside}"

    name = _UP.sub(stage_name, name)
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


VAE_NAMES = StateDictNames.renaming(to_native=to_diffusers)


class VaeEncoder(FrozenVae):
    """Pixels to normalised latents and back; an `Encoder` of the core. A clip is one image."""

    recipe = "posterior mode, 2x2 patches as channel, row, column, batch-norm statistics, {}"

    def __init__(
        self,
        components: ModelPaths,
        device: torch.device,
        mode: VaeMode = WHOLE,
        *,
        decodings: Sequence[VaeMode] = (),
    ):
        """Find the weights and read their headers; nothing is loaded.

        Args:
            components: Where the model's files are.
            device: Device of the VAE.
            mode: How it encodes. bf16 and tiles take less memory and give other results.
            decodings: The ways to decode; the first that memory has room for is taken. Empty: as it encodes.

        Raises:
            UserError: If there are none, a file is damaged, or they belong to another VAE.
        """
        source, config = find_weights(components, "vae", _config_of_file, kind="AutoencoderKLFlux2", remedy=_GET)
        super().__init__(
            build,
            config,
            source,
            VAE_NAMES,
            device,
            mode.dtype,
            key="model.vae",
            ignore=frozenset({"bn.num_batches_tracked"}),
            in_fp32=frozenset({"bn.running_mean", "bn.running_var"}),
            finish=_finish,
            mode=mode,
            decodings=decodings,
            tiles=TILES,
            encode_clip=encode_image,
            decode_clip=decode_image,
        )

    @property
    def channels(self) -> int:
        """Channels of a latent pixel, which is a patch of 2 x 2 of the VAE's latent pixels."""
        return self.config.get("latent_channels", 32) * _PATCH**2

    @property
    def strides(self) -> tuple[int, int]:
        """1, and pixels on a side of the square that becomes one latent pixel."""
        return 1, _PATCH * 2 ** (len(self.config.get("block_out_channels", range(_STAGES))) - 1)


def build(config: Mapping[str, Any]) -> Any:
    """The VAE of a configuration, on the default device."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2.from_config(dict(config))
    vae.bn.register_buffer("num_batches_tracked", None)  # used in training alone, and not in every file
    return vae


def _finish(vae: Any) -> None:
    _statistics(vae)
    for norm in vae.modules():
        if isinstance(norm, nn.GroupNorm) and type(norm.num_groups) is not int:
            raise ValueError(f"norm_num_groups is {norm.num_groups}")


def encode_image(
    vae: Any, pixels: Float[Tensor, "3 1 height width"], device: torch.device
) -> Float[Tensor, "channels 1 h w"]:
    """Normalised latents of one image, in fp32, on the device of the VAE's weights and computed in their dtype."""
    mean, deviation = _statistics(vae)
    mode = vae.encode(pixels.transpose(0, 1).to(device, vae.dtype)).latent_dist.mode()
    return ((patchify(mode[0].float()) - mean) / deviation)[:, None]


def decode_image(
    vae: Any, latents: Float[Tensor, "channels 1 h w"], device: torch.device
) -> Float[Tensor, "3 1 height width"]:
    """Pixels in [0, 1] of normalised latents, in fp32, on the device of the VAE's weights and computed in their dtype."""
    mean, deviation = _statistics(vae)
    patches = (latents[:, 0].to(device, torch.float32) * deviation + mean).to(vae.dtype)
    pixels = vae.decode(unpatchify(patches)[None]).sample.float()
    return ((pixels + 1) / 2).clamp(0, 1).transpose(0, 1)


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of the patches over the VAE's own training data."""
    norm = vae.bn
    deviation = torch.sqrt(norm.running_var + norm.eps)
    return norm.running_mean.view(-1, 1, 1), deviation.view(-1, 1, 1)


def _config_of_file(source: SafetensorsSource) -> dict[str, Any]:
    """diffusers' configuration of a single file; the small decoder differs from the usual one in widths alone."""
    shapes = {to_diffusers(name): stored.shape for name, stored in source.tensors.items()}
    try:
        latent_channels = shapes["post_quant_conv.weight"][0]
        down, up = (
            [shapes[f"{blocks}.{stage}.resnets.0.conv1.weight"][0] for stage in range(_STAGES)]
            for blocks in ("encoder.down_blocks", "decoder.up_blocks")
        )
        patch_channels = shapes["bn.running_mean"][0]
    except (KeyError, IndexError) as error:
        raise UserError(f"{source.path} is not the FLUX.2 VAE (FLUX.1's file has the same name); {_GET}") from error
    if odd := [width for width in (*down, *up) if width % _NORM_GROUPS]:
        raise UserError(
            f"{source.path} is not the FLUX.2 VAE: {odd[0]} channels are not {_NORM_GROUPS} equal groups; {_GET}"
        )
    if patch_channels != latent_channels * _PATCH**2:
        raise UserError(f"{source.path} contradicts itself: {latent_channels} and {patch_channels} channels; {_GET}")
    config = {"latent_channels": latent_channels, "block_out_channels": down}
    return config if up == down[::-1] else config | {"decoder_block_out_channels": up[::-1]}


def patchify(latents: Float[Tensor, "c height width"]) -> Float[Tensor, "patch_channels h w"]:
    """Squares of two by two pixels to channels: channel c, row i and column j of a square become channel 4c + 2i + j."""
    channels, height, width = latents.shape
    squares = latents.reshape(channels, height // _PATCH, _PATCH, width // _PATCH, _PATCH)
    return squares.permute(0, 2, 4, 1, 3).flatten(0, 2)


def unpatchify(patches: Float[Tensor, "patch_channels h w"]) -> Float[Tensor, "c height width"]:
    """The inverse of `patchify`."""
    squares = patches.unflatten(0, (-1, _PATCH, _PATCH))
    return squares.permute(0, 3, 1, 4, 2).flatten(3, 4).flatten(1, 2)
