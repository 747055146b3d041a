"""The models next to the transformer, for the planner: text encoder, VAE, CLIP and wav2vec2 on
`meta`, in the sizes of the local files or the published ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ditkit_core.families.t5 import t5_model
from ditkit_core.families.vae import vae_models
from ditkit_core.models.encoders import AuxiliaryModel
from ditkit_core.models.meta import on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.encoders import clip as image_encoder
from ditkit_wan.encoders import speech, text, vae
from ditkit_wan.presets import WanArch


def auxiliary_models(arch: WanArch, components: ModelPaths) -> Sequence[AuxiliaryModel]:
    """The VAE, the text encoder and, for models that take images or speech, CLIP and wav2vec2, as
    the encoders and the sampler use them.

    Raises:
        UserError: If local files are damaged, or belong to another model.
    """
    channels = arch.out_channels
    encoder, decoder = vae_models(vae.vae_family(channels), components, channels=channels)
    image_encoders = [_clip(components)] if arch.image_dim else []
    speech_encoders = [_speech(components)] if arch.speech else []
    return [encoder, t5_model(text.TEXT, components), *image_encoders, *speech_encoders, decoder]


def _clip(components: ModelPaths) -> AuxiliaryModel:
    config = (
        image_encoder.config_of(components)[1]
        if components.here("image_encoder")
        else image_encoder.PUBLISHED
    )

    def build(dtype: torch.dtype) -> nn.Module:
        with on_meta():
            return image_encoder.build(config).requires_grad_(False).eval()

    def encode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        _, height, width = size
        return image_encoder.read(module, torch.empty(3, 1, height, width), device, torch.float32)

    return AuxiliaryModel(name="image encoder", stage="encode", build=build, run=encode)


def _speech(components: ModelPaths) -> AuxiliaryModel:
    config = (
        speech.config_of(components)[1] if components.here("audio_encoder") else speech.PUBLISHED
    )

    def build(dtype: torch.dtype) -> nn.Module:
        with on_meta():
            return speech.build(config).requires_grad_(False).eval()

    def encode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        frames, _, _ = size
        return speech.read(module, torch.empty(max(frames - 1, 1) * speech.RATE // 16), device)

    return AuxiliaryModel(name="speech encoder", stage="encode", build=build, run=encode)
