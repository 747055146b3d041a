"""A VAE of diffusers by the name of its class: from a diffusers folder or a single file to
normalised latents and back.

Latents are the posterior's mode in fp32. A latent that is sampled from the posterior would add the
encoder's noise to the training data.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.rng import generator
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import WHOLE, AuxiliaryModel, VaeMode
from ditkit_core.models.meta import on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.models.tiling import Tiles
from ditkit_core.weights.frozen import FrozenVae, find_weights
from ditkit_core.weights.load import fits_shapes

_STAGES = 4
_NORM_GROUPS = 32
"""Values that the shapes in a single file do not give."""

# Names of the latent diffusion code to diffusers', applied in order; diffusers' own names pass
# unchanged. Source: `AutoEncoder` in black-forest-labs/flux and flux2, autoencoder.py. The two
# differ in where quant_conv is.
_RENAMES = (
    (r"^(model\.)?(vae|first_stage_model)\.", ""),
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


def diffusers_name(name: str) -> str:
    """The diffusers name of a parameter of a KL autoencoder, given in that form or as the latent
    diffusion code names it."""

    def stage_name(match: re.Match[str]) -> str:
        # The latent diffusion code counts the decoder's stages from the pixels, diffusers from the
        # latents.
        inside = "resnets." if match[2] == "block." else "upsamplers.0."
        return f"decoder.up_blocks.{_STAGES - 1 - int(match[1])}.{inside}"

    name = _UP.sub(stage_name, name)
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


KL_NAMES = StateDictNames.renaming(to_native=diffusers_name)
DIFFUSERS_NAMES = StateDictNames.renaming(to_native=lambda name: name)
KL_TILES = Tiles(side=512, overlap=128)
"""diffusers' tiles are as large as the most common training image and would save no memory
there."""


@dataclass(frozen=True, kw_only=True)
class VaeFamily:
    """The VAE of a model family: diffusers' class, and how its latents become the transformer's."""

    published: Mapping[str, Any]
    """Configuration of the published VAE: for plans, and for a single file, whose shapes replace
    its widths. Empty fields are the class's."""

    kind: str = "AutoencoderKL"
    """The class in diffusers. For a class of videos, see `is_video`."""

    label: str = "the VAE of this model"
    """Its name in messages."""

    remedy: str = "set model.vae to a diffusers vae folder"
    """Where to get it, for messages."""

    patch: int = 1
    """Side of the square of the VAE's latent pixels that is one pixel of the transformer's latents:
    its pixels become channels, in the order channel, row, column."""

    statistics: Callable[[Any], tuple[Tensor, Tensor]] | None = None
    """From the VAE to mean and standard deviation of its latents by channel (after patches), in
    fp32. None takes `shift_factor` and `scaling_factor` of its configuration, as of the VAEs of
    Stable Diffusion, FLUX.1 and Z-Image."""

    recipe: str = ""
    """How latents are made, for the identity of caches; `{}` stands for the dtype. Empty: made of
    the fields above."""

    is_video: bool = False
    """Whether the class takes [batch, channels, frames, height, width]; others take images, and a
    clip is one."""

    has_opacity: bool = False
    """Whether the class has a fourth channel of pixels, their opacity: images are encoded as opaque
    and decoded ones are laid over white."""

    channels: Callable[[Mapping[str, Any]], int] = lambda config: config["latent_channels"]
    """From the configuration to the VAE's latent channels, before patches."""

    strides: Callable[[Mapping[str, Any]], tuple[int, int]] = lambda config: (
        1,
        2 ** (len(config["block_out_channels"]) - 1),
    )
    """From the configuration to pixel frames per latent frame after the first, and pixels per
    latent pixel, before patches."""

    names: StateDictNames | None = None
    """From names in files to diffusers'. None: the names of the latent diffusion code are known for
    images, and diffusers' alone for videos."""

    config_of_file: Callable[[SafetensorsSource], dict[str, Any]] | None = None
    """Reads the configuration off the shapes of a single file; None: `config_of_kl_file`, and for
    videos `config_of_published_file`. Raises UserError for another VAE's file."""

    tiles: Tiles = KL_TILES
    """For modes that work tile by tile."""

    ignore: frozenset[str] = frozenset()
    """Names in files that may be left over."""

    in_fp32: frozenset[str] = frozenset()
    """Names of values that are fp32 in any dtype."""

    decode_timestep: float | None = None
    """Noise level in [0, 1] that a VAE with `timestep_conditioning` in its configuration decodes
    at; other VAEs do without. None refuses one with it."""

    decode_noise_scale: float | None = None
    """Share of noise in the latents that such a VAE decodes. None: as `decode_timestep`. Source of
    both: `LTXPipeline.__call__` in diffusers."""

    prepare: Callable[[Any], object] = lambda vae: None
    """Called with a new VAE on `meta`: removes what files do not have."""

    finish: Callable[[Any], object] = lambda vae: None
    """Called with the loaded VAE: tries values of the configuration that the library only reads in
    use; raises for damaged ones."""

    safe_names: Mapping[str, str] = field(default_factory=dict)
    """Files that are pickles, and the files with the same weights as safetensors; see
    `ModelPaths.locate`."""

    def build(self, config: Mapping[str, Any]) -> Any:
        """The VAE of a configuration, on the default device."""
        vae = resolve_name(f"diffusers:{self.kind}").from_config(dict(config))
        if is_conditioned(vae.config) and self.decode_timestep is None:
            raise UserError(
                f"{self.label} decodes with a noise level and noise (timestep_conditioning in its "
                f"config.json), which its family does not name: take a VAE without, or give its "
                f"VaeFamily decode_timestep and decode_noise_scale (docs/adding_a_model.md, "
                f"4. Encoders)"
            )
        self.prepare(vae)
        return vae

    @cached_property
    def published_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the published VAE, by diffusers' names: each file of a folder is compared
        with them."""
        with on_meta():
            state = self.build(self.published).state_dict()
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    def normalise(
        self, vae: Any, latents: Float[Tensor, "channels f h w"]
    ) -> Float[Tensor, "channels f h w"]:
        """Latents of about unit variance, in fp32, of the VAE's own, after patches."""
        if self.statistics is None:
            return (latents - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
        mean, deviation = self._statistics(vae, latents.device)
        return (latents - mean) / deviation

    def denormalise(
        self, vae: Any, latents: Float[Tensor, "channels f h w"]
    ) -> Float[Tensor, "channels f h w"]:
        """The inverse of `normalise`."""
        if self.statistics is None:
            return latents / vae.config.scaling_factor + (vae.config.shift_factor or 0)
        mean, deviation = self._statistics(vae, latents.device)
        return latents * deviation + mean

    def _statistics(self, vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.statistics is not None
        mean, deviation = (value.to(device) for value in self.statistics(vae))
        return mean.view(-1, 1, 1, 1), deviation.view(-1, 1, 1, 1)

    def encode_clip(
        self, vae: Any, pixels: Float[Tensor, "3 frames height width"], device: torch.device
    ) -> Float[Tensor, "channels f h w"]:
        """Normalised latents of one clip, in fp32, on the device of the VAE's weights and computed
        in their dtype."""
        batch = pixels[None] if self.is_video else pixels.transpose(0, 1)
        if self.has_opacity:
            batch = torch.cat([batch, torch.ones_like(batch[:, :1])], 1)
        mode = vae.encode(batch.to(device, vae.dtype)).latent_dist.mode()[0].float()
        return self.normalise(vae, patchify(mode if self.is_video else mode[:, None], self.patch))

    def decode_clip(
        self, vae: Any, latents: Float[Tensor, "channels f h w"], device: torch.device
    ) -> Float[Tensor, "3 frames height width"]:
        """Pixels in [0, 1] of normalised latents, in fp32, on the device of the VAE's weights and
        computed in their dtype. A VAE that `is_conditioned` has noise of equally many channels
        behind the latents."""
        conditioned = is_conditioned(vae.config)
        latents, *noise = latents.to(device, torch.float32).chunk(2 if conditioned else 1)
        latents = self.denormalise(vae, latents)
        timestep, scale = self.decode_timestep or 0.0, self.decode_noise_scale
        if conditioned:
            # rounded to fp32 before the difference, as diffusers does
            share = torch.tensor(timestep if scale is None else scale, device=device)
            latents = (1 - share) * latents + share * noise[0]
        batch = unpatchify(latents.to(vae.dtype), self.patch)
        batch = batch[None] if self.is_video else batch.transpose(0, 1)
        temb = {"temb": batch.new_full(batch.shape[:1], timestep)} if conditioned else {}
        pixels = vae.decode(batch, **temb).sample.float()
        pixels = ((pixels + 1) / 2).clamp(0, 1)
        if self.has_opacity:
            colours, opacity = pixels.split(3, 1)
            pixels = 1 - opacity * (1 - colours)
        return pixels[0] if self.is_video else pixels.transpose(0, 1)

    def latent_size(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """Channels of the transformer's latents, pixel frames per latent frame after the first, and
        pixels on a side of a latent pixel."""
        config = {**self.published, **config}
        frames, pixels = self.strides(config)
        return self.channels(config) * self.patch**2, frames, self.patch * pixels


class DiffusersVae(FrozenVae):
    """Pixels to normalised latents and back; an `Encoder` and a `Decoder` of the core."""

    def __init__(
        self,
        family: VaeFamily,
        components: ModelPaths,
        device: torch.device,
        mode: VaeMode = WHOLE,
        *,
        channels: int | None = None,
        decodings: Sequence[VaeMode] = (),
    ):
        """Find the weights and read their headers; nothing is loaded.

        Args:
            family: The family's VAE.
            components: Where the model's files are.
            device: Device of the VAE.
            mode: How it encodes. bf16 and tiles take less memory and give other results.
            channels: Latent channels that the transformer was trained on; None takes any number.
            decodings: The ways to decode; the first that memory has room for is taken. Empty: as it
                encodes.

        Raises:
            UserError: If there are none, a file is damaged, or they belong to another VAE.
        """
        of_file = config_of_published_file if family.is_video else config_of_kl_file
        read = family.config_of_file or partial(of_file, family)
        remedy, safe_names = family.remedy, family.safe_names
        source, config = find_weights(
            components, "vae", read, kind=family.kind, remedy=remedy, safe_names=safe_names
        )
        super().__init__(
            family.build,
            config,
            source,
            family.names or (DIFFUSERS_NAMES if family.is_video else KL_NAMES),
            device,
            mode.dtype,
            key="model.vae",
            ignore=family.ignore,
            in_fp32=family.in_fp32,
            finish=self._finish,
            mode=mode,
            decodings=decodings,
            tiles=family.tiles,
            encode_clip=family.encode_clip,
            decode_clip=family.decode_clip,
        )
        self.family = family
        if channels is None:
            return
        failure = f"{source.path}: no model can be built from its configuration"
        with given_to_library(failure, "fetch its config.json again"):
            latent_channels = self.channels
        if channels != latent_channels:
            raise UserError(
                f"{source.path} makes {latent_channels} latent channels and the model takes "
                f"{channels}; set model.vae to the model's own: {remedy}"
            )

    @property
    def recipe(self) -> str:  # type: ignore[override]  # a constant of other classes
        """How latents are made, for the identity of caches."""
        family, config = self.family, {**self.family.published, **self.config}
        shift, scale = config.get("shift_factor"), config.get("scaling_factor")
        patches = (
            f", {family.patch}x{family.patch} patches as channel, row, column"
            if family.patch > 1
            else ""
        )
        scaled = (
            f"minus {shift}, times {scale}"
            if family.statistics is None
            else "normalised by channel"
        )
        return family.recipe or f"posterior mode, {scaled}{patches}, {{}}"

    @property
    def channels(self) -> int:
        """Channels of a latent pixel."""
        return self.family.latent_size(self.config)[0]

    @property
    def strides(self) -> tuple[int, int]:
        """Pixel frames per latent frame after the first, and pixels on a side of the square that
        becomes one latent pixel."""
        return self.family.latent_size(self.config)[1:]

    def decode(self, latents: Tensor, seed: int = 0) -> Float[Tensor, "3 frames height width"]:
        """As `FrozenVae.decode`; a VAE that `is_conditioned` decodes with noise of the seed."""
        if is_conditioned(self.config):
            # For the whole sample, as channels of it, so that tiles take their parts of it.
            noise = torch.randn(latents.shape, generator=generator(seed, "decode"))
            latents = torch.cat([latents, noise.to(latents)])
        return super().decode(latents, seed)

    def _finish(self, vae: Any) -> None:
        """Try what is read only in use, so that a damaged value is found when the VAE is loaded."""
        channels, *strides = self.family.latent_size(self.config)
        self.family.normalise(vae, torch.zeros(channels, 1, 1, 1, device=self.device))
        for size in strides:
            Fraction(1, size)
        for norm in vae.modules():
            if isinstance(norm, nn.GroupNorm) and type(norm.num_groups) is not int:
                raise ValueError(f"norm_num_groups is {norm.num_groups}")
        self.family.finish(vae)


def is_conditioned(config: Mapping[str, Any]) -> bool:
    """Whether a VAE of this configuration decodes with a noise level and noise."""
    return bool(config.get("timestep_conditioning"))


def config_of_kl_file(family: VaeFamily, source: SafetensorsSource) -> dict[str, Any]:
    """The configuration of a KL autoencoder in a single file: as published, with the widths that
    the shapes have."""
    shapes = {diffusers_name(name): stored.shape for name, stored in source.tensors.items()}
    try:
        latent_channels = shapes["decoder.conv_in.weight"][1]
        down, up = (
            [shapes[f"{blocks}.{stage}.resnets.0.conv1.weight"][0] for stage in range(_STAGES)]
            for blocks in ("encoder.down_blocks", "decoder.up_blocks")
        )
    except (KeyError, IndexError) as error:
        raise UserError(f"{source.path} is not {family.label}; {family.remedy}") from error
    if odd := [width for width in (*down, *up) if width % _NORM_GROUPS]:
        raise UserError(
            f"{source.path} is not {family.label}: {odd[0]} channels are not {_NORM_GROUPS} equal "
            f"groups; {family.remedy}"
        )
    config = {**family.published, "latent_channels": latent_channels, "block_out_channels": down}
    return config if up == down[::-1] else config | {"decoder_block_out_channels": up[::-1]}


def config_of_published_file(family: VaeFamily, source: SafetensorsSource) -> dict[str, Any]:
    """The published configuration, of a single file that has its names and shapes."""
    if not fits_shapes(source, family.names or DIFFUSERS_NAMES, family.published_shapes):
        raise UserError(f"{source.path} is not {family.label}; {family.remedy}")
    return dict(family.published)


def vae_models(
    family: VaeFamily, components: ModelPaths, *, channels: int
) -> tuple[AuxiliaryModel, AuxiliaryModel]:
    """The VAE as plans count it while encoding and while sampling, in the sizes of the local files
    or the published ones.

    `channels` is the number in the transformer's latents.

    Raises:
        UserError: If the local files are damaged, or of another VAE.
    """
    config = family.published
    if components.here("vae"):
        config = DiffusersVae(family, components, torch.device("cpu"), channels=channels).config
    _, frames_per_latent, stride = family.latent_size(config)

    def build(dtype: torch.dtype) -> nn.Module:
        with on_meta():
            # Not diffusers' own `to`, which warns of a change of dtype.
            return nn.Module.to(family.build(config), dtype).requires_grad_(False).eval()

    def encode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        return family.encode_clip(module, torch.empty(3, *size), device)

    def decode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        frames, height, width = size
        with_noise = 2 * channels if is_conditioned(config) else channels
        length = 1 + (frames - 1) // frames_per_latent
        shape = (with_noise, length, height // stride, width // stride)
        return family.decode_clip(module, torch.empty(shape, device=device), device)

    return (
        AuxiliaryModel(
            name="VAE encoder", stage="encode", build=build, run=encode, tiles=family.tiles
        ),
        AuxiliaryModel(
            name="VAE decoder", stage="sample", build=build, run=decode, tiles=family.tiles
        ),
    )


def patchify(
    latents: Float[Tensor, "c f height width"], side: int
) -> Float[Tensor, "patch_channels f h w"]:
    """Squares of pixels to channels: with a side of 2, channel c, row i and column j of a square
    become channel 4c + 2i + j."""
    return rearrange(latents, "c f (h i) (w j) -> (c i j) f h w", i=side, j=side)


def unpatchify(
    patches: Float[Tensor, "patch_channels f h w"], side: int
) -> Float[Tensor, "c f height width"]:
    """The inverse of `patchify`."""
    return rearrange(patches, "(c i j) f h w -> c f (h i) (w j)", i=side, j=side)
