"""Encodes everything that a run needs into its cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from ditkit_core.api.prompts import PromptEncoder
from ditkit_core.data.dataset import NothingToTrain, Sample
from ditkit_core.encoding.encode import PromptFiles, encode
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import files_of, split_held_out
from ditkit_core.engine.devices import make_current
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, warn
from ditkit_core.run.data import RunData
from ditkit_core.sampling.config import AUTHORS_NEGATIVE
from ditkit_core.sampling.prompts import SamplePrompt, choose_prompts


class Encoded(NamedTuple):
    """The encoded samples that a run trains on."""

    samples: list[EncodedSample]
    prior: list[EncodedSample]
    """The class images of prior preservation."""


def encode_all(data: RunData, *, with_class_prompt: bool = False) -> Encoded:
    """Encode every sample, and the texts and references of the samples to generate, into the cache;
    and the prompt of class images, if some are still to be generated."""
    dataset, config = data.dataset, data.config
    # Called for its check alone: fails now, not after hours of encoding, if nothing would be left
    # to train on.
    split_held_out(
        [sample.id for sample in dataset.samples], config.held_out.clips, files_of(dataset.samples)
    )
    prompts = sample_prompts(data, dataset.samples, warn=warn)
    is_used = with_class_prompt or bool(config.prior.match_base)
    texts = _texts(data, prompts)
    texts += map(PromptFiles, filter(None, [config.prior.prompt if is_used else ""]))
    texts += [PromptFiles(_negative(data))] * with_class_prompt
    failed: list[tuple[str, str]] = []
    encoded = encode_samples(
        data, [*dataset.samples, *data.prior_samples()], dataset.fps, texts, failed
    )
    # Class images alone are nothing to train on, so the check below counts the dataset's own
    # samples.
    dataset_ids = {sample.id for sample in dataset.samples}
    if not any(sample.id in dataset_ids for sample in encoded):
        raise NothingToTrain.after([failure for failure in failed if failure[0] in dataset_ids])
    _encode_controls(data, prompts)
    return Encoded(
        [sample for sample in encoded if sample.id in dataset_ids],
        [sample for sample in encoded if sample.id not in dataset_ids],
    )


def encode_prior(data: RunData) -> list[EncodedSample]:
    """Encode the class images of prior preservation alone."""
    return encode_samples(data, data.prior_samples(), data.dataset.fps, [])


def encode_samples(
    data: RunData,
    samples: Sequence[Sample],
    fps: float,
    texts: Sequence[PromptFiles] = (),
    failed: list[tuple[str, str]] | None = None,
) -> list[EncodedSample]:
    """Encode some samples and texts into the cache; `failed` receives the ids of samples that were
    left out, and why."""
    make_current([data.auxiliary.device])

    def left_out(sample: Sample, error: UserError) -> None:
        warn(f"left out: {sample.id}: {error}")
        if failed is not None:
            failed.append((sample.id, str(error)))

    config = data.config
    encoders = data.auxiliary.sample_encoders(
        fps,
        mask_weight=config.train.mask_weight,
        flips=config.data.flip,
        empty_captions=config.flow.target_guidance != 1,
        slider=(config.flow.slider_positive, config.flow.slider_negative)
        if config.flow.slider_positive
        else None,
    )
    on_bad = left_out if config.data.on_bad == "skip" else None
    return encode(
        samples,
        encoders,
        data.cache,
        extra_prompts=texts,
        progress=_encode_progress,
        on_bad=on_bad,
    )


def sample_prompts(
    data: RunData, samples: Sequence[Sample], warn: Callable[[str], None] | None = None
) -> list[SamplePrompt]:
    """The prompts of the samples to generate: the ones in [sample], or the first captions of the
    dataset, no longer than their clips.

    With data.on_bad = skip, captions whose conditions cannot be read are skipped, because encoding
    leaves those samples out.
    """
    section, config, auxiliary = data.config.data, data.config.sample, data.auxiliary
    readers = auxiliary.readers if section.on_bad == "skip" and not config.prompts else None
    if readers is not None:
        # All captions are candidates here: how many of the first are unusable is only known once
        # they are read.
        config = replace(config, captions=len(samples) if config.captions else 0)
    prompts = choose_prompts(
        config,
        samples,
        size=(section.frames, section.height, section.width),
        size_step=data.spec.data.size_step,
        columns=auxiliary.columns,
        shape_reference=data.spec.data.shape_reference,
    )
    fitted = (prompt.fitted(auxiliary.columns, data.fps, warn) for prompt in prompts)
    if readers is None:
        return list(fitted)
    usable = (prompt for prompt in fitted if readers.reads(prompt.controls(data.fps)))
    return list(islice(usable, data.config.sample.captions))


def encode_prompts(data: RunData, prompts: Sequence[SamplePrompt]) -> None:
    """Encode the texts and references of the samples to generate into the cache."""
    encode_samples(data, [], data.spec.data.fps, _texts(data, prompts))
    _encode_controls(data, prompts)


def prompt_encoder(data: RunData) -> PromptEncoder:
    """What encodes the texts and conditions of a run's samples, into its cache."""
    return PromptEncoder(data.auxiliary, data.cache, data.fps, _encode_progress)


def _encode_controls(data: RunData, prompts: Sequence[SamplePrompt]) -> None:
    encoder = prompt_encoder(data)
    for prompt in prompts:
        encoder.references(prompt.references)
        encoder.conditions(prompt)


def _texts(data: RunData, prompts: Sequence[SamplePrompt]) -> list[PromptFiles]:
    """The text and the negative prompt of each sample, with the references that their encoder may
    see."""
    negative = _negative(data)
    return [
        PromptFiles(text, prompt.references)
        for prompt in prompts
        for text in (prompt.prompt, negative)
    ]


def _negative(data: RunData) -> str:
    sample, arch = data.config.sample, data.auxiliary.arch
    # Without a transformer's files nothing says whose negative prompt it would be; what samples
    # needs them, and encodes it then.
    if arch is not None:
        sample = sample.resolved(data.spec.auxiliary.sample_defaults(arch), lambda unused: None)
    return "" if sample.negative == AUTHORS_NEGATIVE else sample.negative


@contextmanager
def _encode_progress(stage: str, total: int) -> Iterator[Any]:
    with progress(f"encode {stage}", total) as bar:
        yield bar.advance
