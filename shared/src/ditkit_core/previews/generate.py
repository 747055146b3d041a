"""Generates the samples of a run's [sample] section with given transformers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.adapters.added_adapter import AddedAdapter, adapters_added
from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.io.console import progress, warn
from ditkit_core.loading.on_meta import loaded_dtype
from ditkit_core.models.encoders import DecodedBy, Sampler
from ditkit_core.models.protocol import Engine
from ditkit_core.previews.decoding import FittingDecoder
from ditkit_core.run.context import RunContext
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import encode_prompts, prompt_encoder
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.sampling.denoise import DenoiserStage
from ditkit_core.sampling.prompts import SamplePrompt
from ditkit_core.sampling.render import PromptRequest, SampleFiles, render_samples
from ditkit_core.sampling.shares import ALONE, SampleShares


def generate_samples(
    run: RunContext,
    stages: Sequence[DenoiserStage],
    prompts: Sequence[SamplePrompt],
    folder: Path,
    stem: str,
    shares: SampleShares = ALONE,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[Path]:
    """Generate the samples of some prompts as the section says.

    Args:
        stages: The transformers that take the denoising steps, the one of the highest noise levels
            first, without `sample.adapter`.
        prompts: What to sample; may be empty.
        stem: First part of the file names.
        shares: Which ranks generate which samples, called on all of them.
        is_stopping: Asked after each denoising step whether to end there.

    Returns:
        The files, as `render_samples` returns them.
    """
    if not prompts:
        return []
    encode_prompts(run.data, prompts)
    config, requests = requests_for(run.data, stages, prompts)
    to = SampleFiles(folder=folder, stem=stem, fps=run.data.fps, images=config.images)
    sampler = fitting_sampler(run.auxiliary, prompts)
    with progress("denoise", len(shares.local_indices(len(requests))) * config.steps) as bar:

        def on_step() -> bool:
            bar.advance()
            return shares.ends(is_stopping())

        return render_samples(with_adapters(run, stages), sampler, requests, to, on_step, shares)


def requests_for(
    data: RunData, stages: Sequence[DenoiserStage], prompts: Sequence[SamplePrompt]
) -> tuple[SampleConfig, list[PromptRequest]]:
    """The section with the model's own values where it sets none, and what it asks for: a request
    for each seed of each prompt."""
    config, negative = guided_by(data, stages)
    requests, encoder = list[PromptRequest](), prompt_encoder(data)
    for number, prompt in enumerate(prompts):
        jobs = encoder.requests(prompt, config, negative)
        requests += [PromptRequest(number=number, prompt=prompt.prompt, job=job) for job in jobs]
    return config, requests


def fitting_sampler(auxiliary: Auxiliary, prompts: Sequence[SamplePrompt]) -> Sampler:
    """The family's sampler, which decodes samples of these prompts in the first way that the GPU
    has room for."""
    sizes = [(prompt.frames, prompt.height, prompt.width) for prompt in prompts]
    return DecodedBy(auxiliary.sampler.denoise, FittingDecoder(auxiliary, sizes))


def with_adapters(run: RunContext, stages: Sequence[DenoiserStage]) -> list[DenoiserStage]:
    """The stages with the adapters that are for samples alone, and without `base.assistant`, which
    is for training alone."""
    dtype_of = loaded_dtype(run.spec, run.precision)
    return [
        _with(stage, adapters, dtype_of) if adapters else stage
        for stage, adapters in zip(stages, run.sample_adapters.opened(), strict=True)
    ]


def _with(
    stage: DenoiserStage, adapters: Sequence[AddedAdapter], dtype_of: Callable[[str], torch.dtype]
) -> DenoiserStage:
    @contextmanager
    def opened() -> Iterator[tuple[Any, Engine]]:
        with stage.opened() as opened:
            with adapters_added(opened[0], adapters, dtype_of):
                yield opened
            # before the stage closes: another transformer may come back into this memory
            del opened

    return replace(stage, opened=opened)


def guided_by(data: RunData, stages: Sequence[DenoiserStage]) -> tuple[SampleConfig, str | None]:
    """The section with the model's own values where it sets none, and the negative prompt if a
    stage is guided by it."""
    defaults = data.spec.auxiliary.sample_defaults(data.auxiliary.arch)
    config = data.config.sample.resolved(defaults, warn)
    # A stage may have its own guidance.
    guided = replace(config, guidance=max(stage.guidance or config.guidance for stage in stages))
    return config, config.negative if guided.uses_negative(defaults) else None
