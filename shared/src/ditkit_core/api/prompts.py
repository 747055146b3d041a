"""Encodes the prompts of samples: texts, reference images and other conditions, each found in a
cache where it was encoded before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import PromptFiles, encode, encode_references
from ditkit_core.encoding.missing import Progress
from ditkit_core.engine.devices import make_current
from ditkit_core.io.console import NullProgress
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.sampling.prompts import SamplePrompt, requests_of


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts with a family's encoders, which are loaded only for what the cache lacks."""

    auxiliary: Auxiliary
    cache: Cache
    fps: float
    """Frames per second of generated clips."""
    progress: Progress = NullProgress

    def encode_texts(self, prompts: Sequence[PromptFiles]) -> None:
        """Encode all texts that the cache lacks, with one start of the text encoder."""
        make_current([self.auxiliary.device])
        encode(
            [],
            self.auxiliary.sample_encoders(self.fps),
            self.cache,
            extra_prompts=prompts,
            progress=self.progress,
        )

    def text(self, text: str, references: tuple[Path, ...] = ()) -> Mapping[str, Tensor]:
        """The tensors of a text, and of the references that its encoder sees; encoded again if
        their entry is damaged."""
        prompt = PromptFiles(text, references)
        encoders = self.auxiliary.sample_encoders(self.fps)
        return self.cache.read_encoded(
            self.cache.get,
            "text",
            encoders.text_keys([prompt], self.cache)[prompt],
            repr(text),
            lambda: self.encode_texts([prompt]),
        )

    def conditions(self, prompt: SamplePrompt) -> Mapping[str, Tensor]:
        """The conditions of a sample besides its text."""
        if self.auxiliary.conditioning is None:
            return {}
        return self.auxiliary.conditioning.tensors(
            prompt.controls(self.fps), self.cache, self.progress
        )

    def references(self, images: Sequence[Path]) -> list[Tensor]:
        """The latents of the images that a sample is conditioned on."""
        if not images:
            return []
        reference_size = self.auxiliary.spec.data.reference_size
        assert reference_size is not None, "checked"
        return encode_references(
            images,
            cache=self.cache,
            media_encoder=self.auxiliary.encoders[0],
            reference_size=reference_size,
            progress=self.progress,
        )

    def requests(
        self, prompt: SamplePrompt, config: SampleConfig, negative: str | None
    ) -> list[GenerationRequest]:
        """The requests for one prompt, of a resolved section; `negative` is the negative prompt,
        None if guidance does not use it."""
        conditions = self.conditions(prompt)

        def conditions_with(text: str) -> Mapping[str, Tensor]:
            return {**self.text(text, prompt.references), **conditions}

        return requests_of(
            prompt,
            config,
            conditions=conditions_with(prompt.prompt),
            # Guidance is about the text alone: both texts are with the same references.
            negative=None if negative is None else conditions_with(negative),
            references=self.references(prompt.references),
        )
