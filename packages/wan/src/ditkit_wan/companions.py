"""What runs beside the transformer, for a plan: the text encoder and the VAE on `meta`, as large as the files that are here, or as published."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ditkit_core.components import Components
from ditkit_core.model import Companion
from ditkit_wan import text, vae
from ditkit_wan.presets import WanArch


def companions(arch: WanArch, components: Components) -> Sequence[Companion]:
    """The VAE and the text encoder, as the encoders and the sampler use them.

    Raises:
        UserError: If files that are here are damaged, or of another model.
    """
    vae_config = vae.PUBLISHED
    if components.here("vae"):
        vae_config = vae.VaeEncoder(components, torch.device("cpu")).config
    text_config = text.config_of(components)[1] if components.here("text_encoder") else text.PUBLISHED

    def build_vae(text_dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return vae.build(vae_config).requires_grad_(False).eval()

    def build_text(text_dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            model = text.build(text_config)
        text.tie(model)
        return model.to(text_dtype).requires_grad_(False).eval()

    def encode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        return vae.encode_clip(module, torch.empty(3, *size), device)

    def decode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        frames, height, width = size
        latents = torch.empty(arch.in_channels, 1 + (frames - 1) // 4, height // 8, width // 8, device=device)
        return vae.decode_clip(module, latents, device)

    def read(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        ids = torch.zeros(1, text.TEXT_TOKENS, dtype=torch.long).to(device)
        return text.read(module, ids, torch.ones_like(ids))

    return (
        Companion(name="VAE encoder", stage="encode", build=build_vae, run=encode, tiles=vae.TILES),
        Companion(name="text encoder", stage="encode", build=build_text, run=read),
        Companion(name="VAE decoder", stage="sample", build=build_vae, run=decode, tiles=vae.TILES),
    )
