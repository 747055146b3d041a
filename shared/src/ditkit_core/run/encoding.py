"""Everything that a run needs encoded, through its encoders into its cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ditkit_core.data.dataset import NothingToTrain, Sample
from ditkit_core.encoding.encode import SampleEncoders, encode, encode_references
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import files_of, split_held_out
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, warn
from ditkit_core.run.context import RunContext
from ditkit_core.sampling.prompts import SamplePrompt


class Encoded(NamedTuple):
    """What a run trains on, in the cache."""

    samples: list[EncodedSample]
    prior: list[EncodedSample]
    """The class pictures of prior preservation."""


def encode_all(run: RunContext, class_prompt: str = "") -> Encoded:
    """Every sample, and the texts and references of the samples to be drawn, through the encoders into the cache.

    Args:
        run: The run.
        class_prompt: The prompt of class images that are still to be generated, if any are.
    """
    data = run.data.dataset
    # says now if nothing would be left to train on
    split_held_out([sample.id for sample in data.samples], run.config.held_out.clips, files_of(data.samples))
    scenes = sample_prompts(run, data.samples, warn=warn)
    texts = [*_texts(run, scenes), *filter(None, [class_prompt])]
    failed: list[tuple[str, str]] = []
    encoded = encode_samples(run, [*data.samples, *run.data.prior_samples()], data.fps, texts, failed)
    own = {sample.id for sample in data.samples}
    if not any(sample.id in own for sample in encoded):
        raise NothingToTrain.after([each for each in failed if each[0] in own])
    _encode_controls(run, scenes)
    return Encoded(
        [sample for sample in encoded if sample.id in own], [sample for sample in encoded if sample.id not in own]
    )


def encode_prior(run: RunContext) -> list[EncodedSample]:
    """The class pictures of prior preservation alone."""
    return encode_samples(run, run.data.prior_samples(), run.data.dataset.fps, [])


def encode_samples(
    run: RunContext,
    samples: Sequence[Sample],
    fps: float,
    texts: Sequence[str] = (),
    failed: list[tuple[str, str]] | None = None,
) -> list[EncodedSample]:
    """Some samples and texts through the encoders into the cache; `failed` takes which were left out, and why."""
    media, text = run.auxiliary.encoders

    def left_out(sample: Sample, error: UserError) -> None:
        warn(f"left out: {sample.id}: {error}")
        if failed is not None:
            failed.append((sample.id, str(error)))

    encoders = SampleEncoders(
        media=media,
        text=text,
        fps=fps,
        reference_size=run.spec.data.reference_size,
        conditioning=run.auxiliary.conditioning,
        assemble=run.spec.training.assemble,
    )
    on_bad = left_out if run.config.data.on_bad == "skip" else None
    return encode(samples, encoders, run.data.cache, extra_captions=texts, progress=_encode_progress, on_bad=on_bad)


def sample_prompts(
    run: RunContext, samples: Sequence[Sample], warn: Callable[[str], None] | None = None
) -> list[SamplePrompt]:
    """What is to be drawn: the prompts, or the first of the samples' captions, no longer than what they are drawn from.

    Where samples may be bad, no caption is drawn whose clip has no condition that can be read: encoding leaves it out.
    """
    data, config = run.config.data, run.config.sample
    readers = run.auxiliary.readers if data.on_bad == "skip" and not config.prompts else None
    if readers is not None:
        config = replace(config, captions=len(samples) if config.captions else 0)
    found = config.scenes(
        samples,
        size=(data.frames, data.height, data.width),
        size_step=run.spec.data.size_step,
        columns=run.auxiliary.columns,
    )
    fitted = (scene.fitted(run.auxiliary.columns, run.data.fps, warn) for scene in found)
    if readers is None:
        return list(fitted)
    usable = (scene for scene in fitted if readers.reads(scene.controls(run.data.fps)))
    return list(islice(usable, run.config.sample.captions))


def encode_prompts(run: RunContext, scenes: Sequence[SamplePrompt]) -> None:
    """The texts and references of the samples to be drawn into the cache."""
    encode_samples(run, [], run.spec.data.fps, _texts(run, scenes))
    _encode_controls(run, scenes)


def _encode_controls(run: RunContext, scenes: Sequence[SamplePrompt]) -> None:
    for scene in scenes:
        reference_latents(run, scene.references)
        conditions_of(run, scene)


def conditions_of(run: RunContext, scene: SamplePrompt) -> Mapping[str, Tensor]:
    """What the model is told of a scene beside its text, encoded if the cache lacks it."""
    if run.auxiliary.conditioning is None:
        return {}
    return run.auxiliary.conditioning.tensors(scene.controls(run.data.fps), run.data.cache, _encode_progress)


def _texts(run: RunContext, scenes: Sequence[SamplePrompt]) -> list[str]:
    return [*(scene.prompt for scene in scenes), run.config.sample.negative]


def reference_latents(run: RunContext, pictures: Sequence[Path]) -> list[Tensor]:
    """The latents of the pictures that a sample is drawn from, encoded if the cache lacks them."""
    if not pictures:
        return []
    assert run.spec.data.reference_size is not None, "checked"
    return encode_references(
        pictures,
        cache=run.data.cache,
        media_encoder=run.auxiliary.encoders[0],
        reference_size=run.spec.data.reference_size,
        progress=_encode_progress,
    )


@contextmanager
def _encode_progress(stage: str, total: int) -> Iterator[Any]:
    with progress(f"encode {stage}", total) as bar:
        yield bar.advance
