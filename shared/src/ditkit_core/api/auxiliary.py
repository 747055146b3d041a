"""The models next to a transformer: VAE, text encoder, conditioners, sampler. Each loads its
weights when it is first used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ditkit_core.encoding.config import EncodeConfig
from ditkit_core.encoding.encode import Conditioning, SampleEncoders
from ditkit_core.encoding.encoded_sample import EMPTY_CAPTION_PREFIX, SLIDER_PREFIXES
from ditkit_core.engine.devices import choose_device
from ditkit_core.models.conditions import Column
from ditkit_core.models.encoders import Encoder, Sampler, VaeMode, decodings_of
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import parse_dtype
from ditkit_core.models.spec import ModelSpec
from ditkit_core.sampling.config import SampleConfig


@dataclass(frozen=True)
class Auxiliary:
    """The auxiliary models of a transformer. Each is made once, and loads its weights when it is
    first used."""

    spec: ModelSpec
    arch: Any
    """None if the architecture is not known; its model is then conditioned on text alone."""
    paths: ModelPaths
    encode: EncodeConfig
    sample: SampleConfig
    dtype: torch.dtype
    """Dtype of the transformer's matmuls."""
    device_of_sampler: Callable[[], torch.device]
    """Returns the device that samples are denoised and decoded on: the transformer's first."""

    @property
    def columns(self) -> Sequence[Column]:
        """Columns of a dataset that the model is conditioned on besides text."""
        return () if self.arch is None else self.spec.data.columns(self.arch)

    @cached_property
    def conditioning(self) -> Conditioning | None:
        """Encodes these columns; None if there are none."""
        return self._conditioning(self.paths)

    @cached_property
    def readers(self) -> Conditioning | None:
        """Checks whether these columns are readable. It needs none of the model's files, and
        encodes nothing."""
        return self._conditioning(None)

    @property
    def optional_conditions(self) -> list[str]:
        """Kinds of conditions that only some samples may have."""
        return (
            [conditioner.kind for conditioner in self.readers.conditioners if conditioner.optional]
            if self.readers
            else []
        )

    def _conditioning(self, components: ModelPaths | None) -> Conditioning | None:
        if self.arch is None:
            return None
        device = self.device
        conditioners = self.spec.auxiliary.conditioners(
            self.arch, components, device, self.encoding
        )
        texts = [column.name for column in self.columns if column.kind == "text"]
        sounds = [column.name for column in self.columns if column.kind == "audio"]
        # speech is the clip's own if no file is given
        sounds += [""] * any(column.in_step for column in self.columns)
        return (
            Conditioning(conditioners=conditioners, texts=texts, sounds=sounds)
            if conditioners
            else None
        )

    @cached_property
    def encoders(self) -> tuple[Encoder, Encoder]:
        """Media and text encoder."""
        device, dtype = self.device, parse_dtype(self.encode.text_dtype)
        media = self.spec.auxiliary.media_encoder(self.paths, device, self.encoding)
        return media, self.spec.auxiliary.text_encoder(
            self.paths, device, dtype, self.encode.streaming
        )

    @property
    def device(self) -> torch.device:
        """The device of the encoders."""
        return choose_device(self.encode.device, "encode.device")

    @property
    def encoding(self) -> VaeMode:
        """How the VAE encodes, as configured."""
        return VaeMode(parse_dtype(self.encode.vae_dtype), self.encode.vae_tiling)

    @property
    def decodings(self) -> tuple[VaeMode, ...]:
        """The ways to decode samples that are configured, the most exact first."""
        return decodings_of(self.sample.vae_dtype, tiled=self.sample.vae_tiling)

    @cached_property
    def sampler(self) -> Sampler:
        """The family's sampler, on the transformer's first device."""
        return self.sampler_with(self.decodings)

    def sampler_with(self, decodings: Sequence[VaeMode]) -> Sampler:
        """The sampler with some of the ways to decode."""
        return self.spec.auxiliary.sampler(
            self.paths, self.device_of_sampler(), self.dtype, decodings
        )

    def sample_encoders(
        self,
        fps: float,
        *,
        mask_weight: float = 0.0,
        flips: bool = False,
        empty_captions: bool = False,
        slider: tuple[str, str] | None = None,
    ) -> SampleEncoders:
        """What encodes samples, whose items also have the empty caption or a slider's two prompts;
        the other arguments are fields of `SampleEncoders`."""
        media, text = self.encoders
        return SampleEncoders(
            media=media,
            text=text,
            fps=fps,
            reference_size=self.spec.data.reference_size,
            picture_size=self.spec.data.picture_size,
            conditioning=self.conditioning,
            assemble=self.spec.training.assemble,
            mask_weight=mask_weight,
            flips=flips,
            more_captions={EMPTY_CAPTION_PREFIX: ""}
            if empty_captions
            else dict(zip(SLIDER_PREFIXES, slider or ())),
        )
