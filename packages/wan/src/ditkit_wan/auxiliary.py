"""The models next to the transformer, for the planner: text encoder, VAE, CLIP and wav2vec2 on
`meta`, in the sizes of the local files or the published ones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ditkit_core.families.vae import vae_models
from ditkit_core.models.encoders import AuxiliaryModel, LayerContext
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
    if components.here("vae"):
        vae.VaeEncoder(
            components, torch.device("cpu"), channels=channels
        )  # refuses another model's
    encoder, decoder = vae_models(vae.vae_family(channels), components, channels=channels)
    image_encoders = [_clip(components)] if arch.image_dim else []
    speech_encoders = [_speech(components)] if arch.speech else []
    return [encoder, _text(components), *image_encoders, *speech_encoders, decoder]


def _text(components: ModelPaths) -> AuxiliaryModel:
    config = text.config_of(components)[1] if components.here("text_encoder") else text.PUBLISHED

    def build(dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            model = text.build(config)
        text.tie(model)
        del model.shared  # the encoder has it too, and a state dict would count it twice
        return model.to(dtype).requires_grad_(False).eval()

    def read(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        ids = torch.zeros(1, text.TEXT_TOKENS, dtype=torch.long).to(device)
        return text.read(module, ids, torch.ones_like(ids))

    def read_streamed(
        module: nn.Module, device: torch.device, passing: Callable[[], LayerContext]
    ) -> list[Tensor]:
        # One block is enough: all have the same size, and a caption keeps only its hidden state.
        del module.get_submodule("encoder.block")[1:]  # type: ignore[operator]
        ids = torch.zeros(1, text.TEXT_TOKENS, dtype=torch.long).to(device)
        return text.read_layers(
            module, [(ids, torch.ones_like(ids))] * text.CAPTIONS_STREAMED, passing
        )

    return AuxiliaryModel(
        name="text encoder", stage="encode", build=build, run=read, run_streamed=read_streamed
    )


def _clip(components: ModelPaths) -> AuxiliaryModel:
    config = (
        image_encoder.config_of(components)[1]
        if components.here("image_encoder")
        else image_encoder.PUBLISHED
    )

    def build(dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
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
        with torch.device("meta"):
            return speech.build(config).requires_grad_(False).eval()

    def encode(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        frames, _, _ = size
        return speech.read(module, torch.empty(max(frames - 1, 1) * speech.RATE // 16), device)

    return AuxiliaryModel(name="speech encoder", stage="encode", build=build, run=encode)
