"""Encodes everything that a run needs into its cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from ditkit_core.api.prompts import PromptEncoder
from ditkit_core.data.dataset import NothingToTrain, Sample
from ditkit_core.encoding.encode import encode
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import files_of, split_held_out
from ditkit_core.engine.devices import make_current
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, warn
from ditkit_core.run.context import RunContext
from ditkit_core.sampling.config import AUTHORS_NEGATIVE
from ditkit_core.sampling.prompts import SamplePrompt, choose_prompts


class Encoded(NamedTuple):
    """The encoded samples that a run trains on."""

    samples: list[EncodedSample]
    prior: list[EncodedSample]
    """The class images of prior preservation."""


def encode_all(run: RunContext, class_prompt: str = "") -> Encoded:
    """Encode every sample, and the texts and references of the samples to generate, into the cache.

    Args:
        class_prompt: The prompt of class images that are still to be generated, if any are.
    """
    data = run.data.dataset
    # Called for its check alone: fails now, not after hours of encoding, if nothing would be left to train on.
    split_held_out([sample.id for sample in data.samples], run.config.held_out.clips, files_of(data.samples))
    prompts = sample_prompts(run, data.samples, warn=warn)
    matched = run.config.prior.prompt if run.config.prior.match_base else ""
    texts = [*_texts(run, prompts), *filter(None, [class_prompt, matched])]
    failed: list[tuple[str, str]] = []
    encoded = encode_samples(run, [*data.samples, *run.data.prior_samples()], data.fps, texts, failed)
    # Class images alone are nothing to train on, so the check below counts the dataset's own samples.
    dataset_ids = {sample.id for sample in data.samples}
    if not any(sample.id in dataset_ids for sample in encoded):
        raise NothingToTrain.after([failure for failure in failed if failure[0] in dataset_ids])
    _encode_controls(run, prompts)
    return Encoded(
        [sample for sample in encoded if sample.id in dataset_ids],
        [sample for sample in encoded if sample.id not in dataset_ids],
    )


def encode_prior(run: RunContext) -> list[EncodedSample]:
    """Encode the class images of prior preservation alone."""
    return encode_samples(run, run.data.prior_samples(), run.data.dataset.fps, [])


def encode_samples(
    run: RunContext,
    samples: Sequence[Sample],
    fps: float,
    texts: Sequence[str] = (),
    failed: list[tuple[str, str]] | None = None,
) -> list[EncodedSample]:
    """Encode some samples and texts into the cache; `failed` receives the ids of samples that were left out, and why."""
    make_current([run.auxiliary.device])

    def left_out(sample: Sample, error: UserError) -> None:
        warn(f"left out: {sample.id}: {error}")
        if failed is not None:
            failed.append((sample.id, str(error)))

    config = run.config
    encoders = run.auxiliary.sample_encoders(
        fps,
        mask_weight=config.train.mask_weight,
        flips=config.data.flip,
        empty_captions=config.flow.target_guidance != 1,
    )
    on_bad = left_out if config.data.on_bad == "skip" else None
    return encode(samples, encoders, run.data.cache, extra_captions=texts, progress=_encode_progress, on_bad=on_bad)


def sample_prompts(
    run: RunContext, samples: Sequence[Sample], warn: Callable[[str], None] | None = None
) -> list[SamplePrompt]:
    """The prompts of the samples to generate: the ones in [sample], or the first captions of the dataset, no longer than their clips.

    With data.on_bad = skip, captions whose conditions cannot be read are skipped, because encoding leaves those samples out.
    """
    data, config = run.config.data, run.config.sample
    readers = run.auxiliary.readers if data.on_bad == "skip" and not config.prompts else None
    if readers is not None:
        # All captions are candidates here: how many of the first are unusable is only known once they are read.
        config = replace(config, captions=len(samples) if config.captions else 0)
    prompts = choose_prompts(
        config,
        samples,
        size=(data.frames, data.height, data.width),
        size_step=run.spec.data.size_step,
        columns=run.auxiliary.columns,
    )
    fitted = (prompt.fitted(run.auxiliary.columns, run.data.fps, warn) for prompt in prompts)
    if readers is None:
        return list(fitted)
    usable = (prompt for prompt in fitted if readers.reads(prompt.controls(run.data.fps)))
    return list(islice(usable, run.config.sample.captions))


def encode_prompts(run: RunContext, prompts: Sequence[SamplePrompt]) -> None:
    """Encode the texts and references of the samples to generate into the cache."""
    encode_samples(run, [], run.spec.data.fps, _texts(run, prompts))
    _encode_controls(run, prompts)


def prompt_encoder(run: RunContext) -> PromptEncoder:
    """What encodes the texts and conditions of the run's samples, into its cache."""
    return PromptEncoder(run.auxiliary, run.data.cache, run.data.fps, _encode_progress)


def _encode_controls(run: RunContext, prompts: Sequence[SamplePrompt]) -> None:
    encoder = prompt_encoder(run)
    for prompt in prompts:
        encoder.references(prompt.references)
        encoder.conditions(prompt)


def _texts(run: RunContext, prompts: Sequence[SamplePrompt]) -> list[str]:
    sample = run.config.sample
    # Without a transformer's files nothing says whose negative prompt it would be; what samples needs them, and encodes it then.
    if run.arch is not None:
        sample = sample.resolved(run.spec.auxiliary.sample_defaults(run.arch), lambda unused: None)
    negative = "" if sample.negative == AUTHORS_NEGATIVE else sample.negative
    return [*(prompt.prompt for prompt in prompts), negative]


@contextmanager
def _encode_progress(stage: str, total: int) -> Iterator[Any]:
    with progress(f"encode {stage}", total) as bar:
        yield bar.advance
