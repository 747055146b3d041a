"""The models next to a run's transformer: VAE, text encoder, conditioners, sampler. Each loads its weights when it is first used."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ditkit_core.encoding.encode import Conditioning
from ditkit_core.engine.devices import choose_device, choose_devices
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column
from ditkit_core.models.encoders import Encoder, Sampler, VaeMode, decodings_of
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import parse_dtype
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.training.config import TrainConfig


@dataclass(frozen=True)
class Auxiliary:
    """The auxiliary models of a run, as configured. Each is made once, and loads its weights when it is first used."""

    spec: ModelSpec
    config: RunConfig
    arch: Any
    """None if the architecture is not known; the run is then conditioned on text alone."""

    @property
    def columns(self) -> Sequence[Column]:
        """Columns of a dataset that the model is conditioned on besides text."""
        return () if self.arch is None else self.spec.data.columns(self.arch)

    @cached_property
    def conditioning(self) -> Conditioning | None:
        """Encodes these columns; None if there are none."""
        return self._conditioning(self.config.model)

    @cached_property
    def readers(self) -> Conditioning | None:
        """Checks whether these columns are readable. It needs none of the model's files, and encodes nothing."""
        return self._conditioning(None)

    @property
    def optional_conditions(self) -> list[str]:
        """Kinds of conditions that only some samples may have."""
        return [each.kind for each in self.readers.conditioners if each.optional] if self.readers else []

    def _conditioning(self, components: ModelPaths | None) -> Conditioning | None:
        if self.arch is None:
            return None
        device = choose_device(self.config.encode.device, "encode.device")
        conditioners = self.spec.auxiliary.conditioners(self.arch, components, device, self.encoding)
        texts = [column.name for column in self.columns if column.kind == "text"]
        return Conditioning(conditioners=conditioners, texts=texts) if conditioners else None

    @cached_property
    def encoders(self) -> tuple[Encoder, Encoder]:
        """Media and text encoder."""
        config, device = self.config.encode, choose_device(self.config.encode.device, "encode.device")
        media = self.spec.auxiliary.media_encoder(self.config.model, device, self.encoding)
        dtype = parse_dtype(config.text_dtype)
        return media, self.spec.auxiliary.text_encoder(self.config.model, device, dtype, config.streaming)

    @property
    def encoding(self) -> VaeMode:
        """How the VAE encodes, as configured."""
        config = self.config.encode
        return VaeMode(parse_dtype(config.vae_dtype), config.vae_tiling)

    @property
    def decodings(self) -> tuple[VaeMode, ...]:
        """The ways to decode samples that are configured, the most exact first."""
        return decodings_of(self.config.sample.vae_dtype, tiled=self.config.sample.vae_tiling)

    @cached_property
    def sampler(self) -> Sampler:
        """The family's sampler, on the transformer's first device."""
        return self.sampler_with(self.decodings)

    def sampler_with(self, decodings: Sequence[VaeMode]) -> Sampler:
        """The sampler with some of the ways to decode."""
        matmul = parse_dtype(self.config.model.dtype)
        return self.spec.auxiliary.sampler(self.config.model, training_devices(self.config.train)[0], matmul, decodings)


def device_names(config: TrainConfig) -> tuple[str, ...]:
    """The names in `train.devices`, or else the one in `train.device`.

    Raises:
        UserError: If both are set.
    """
    if not config.devices:
        return (config.device,)
    if config.device != "auto":
        raise UserError(f"train.device = {config.device!r} and train.devices are both set; leave one of them out")
    return config.devices


def training_devices(config: TrainConfig) -> tuple[torch.device, ...]:
    """The devices that `train.device` or `train.devices` names.

    Raises:
        UserError: If both are set, or a device is not in this machine.
    """
    names = device_names(config)
    return choose_devices(names) if config.devices else (choose_device(config.device, "train.device"),)
