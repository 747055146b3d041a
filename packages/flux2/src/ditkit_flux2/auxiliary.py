"""The models next to the transformer, for the planner: text encoder and VAE on `meta`, in the sizes of the local files or the published ones."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import AuxiliaryModel, LayerContext
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.encoders import text, text_model, vae
from ditkit_flux2.encoders.prompt import TEXT_TOKENS, TextFamily
from ditkit_flux2.presets import Flux2Arch


def auxiliary_models(arch: Flux2Arch, components: ModelPaths) -> Sequence[AuxiliaryModel]:
    """The VAE and the text encoder, as the encoders and the sampler use them.

    Raises:
        UserError: If local files are damaged or belong to another model. Building the text encoder raises it too, if no published
            encoder has the width that the model reads.
    """
    vae_config = vae.PUBLISHED
    if components.here("vae"):
        vae_config = vae.VaeEncoder(components, torch.device("cpu")).config
    described = None
    if components.here("text_encoder"):
        described = text_model.describe(SafetensorsSource.open(components.locate("text_encoder")))

    def text_encoder() -> tuple[TextFamily, dict[str, Any]]:
        # Looked up on demand: a model with an unknown text encoder can still plan its VAE.
        return described or text_model.published(arch.text_dim)

    def build_vae(dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            # Not diffusers' own `to`, which warns of a change of dtype.
            return nn.Module.to(vae.build(vae_config), dtype).requires_grad_(False).eval()

    def build_text(dtype: torch.dtype) -> nn.Module:
        return text_model.build_layers(*text_encoder()).to(dtype)

    def encode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        return vae.encode_image(module, torch.empty(3, *size), device)

    def decode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        _, height, width = size
        return vae.decode_image(
            module, torch.empty(arch.in_channels, 1, height // 16, width // 16, device=device), device
        )

    def read(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> list[Tensor]:
        family, _ = text_encoder()
        return _read(family, module, 1, device, lambda: lambda name: nullcontext(module.get_submodule(name)))

    def read_streamed(module: nn.Module, device: torch.device, passing: Callable[[], LayerContext]) -> list[Tensor]:
        family, config = text_encoder()
        hidden_size, dtype = config["hidden_size"], module.get_parameter("embed_tokens.weight").dtype
        count = text.captions_at_once(len(family.layers) * hidden_size, hidden_size, dtype)
        # One layer is enough: all layers have the same size, and a caption keeps only the hidden state of each.
        shallow = replace(family, layers=(1,))
        return _read(shallow, module, count, device, passing)

    return (
        AuxiliaryModel(name="VAE encoder", stage="encode", build=build_vae, run=encode, tiles=vae.TILES),
        AuxiliaryModel(name="text encoder", stage="encode", build=build_text, run=read, run_streamed=read_streamed),
        AuxiliaryModel(name="VAE decoder", stage="sample", build=build_vae, run=decode, tiles=vae.TILES),
    )


def _read(
    family: TextFamily, module: Any, count: int, device: torch.device, passing: Callable[[], LayerContext]
) -> list[Tensor]:
    """Run padded captions, each with a mask, through the layers."""
    ids = [torch.zeros(TEXT_TOKENS, dtype=torch.long).to(device) for _ in range(count)]
    shape = (1, 1, TEXT_TOKENS, TEXT_TOKENS)
    # Most captions are padded and have a mask, so the plan has one for each.
    masks = [torch.ones(shape, dtype=torch.bool).to(device) for _ in ids]
    return text.features(family, text_model.rotary_of(module, device), ids, masks, passing)
