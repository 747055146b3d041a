"""Samples of a run's [sample] section, with the transformers that are handed in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ditkit_core.encoding.encode import text_key
from ditkit_core.io.console import progress, warn
from ditkit_core.run.context import RunContext
from ditkit_core.run.encoding import conditions_of, encode_prompts, reference_latents
from ditkit_core.sampling.denoise import DenoiserStage
from ditkit_core.sampling.prompts import SamplePrompt, requests_of
from ditkit_core.sampling.render import PromptRequest, SampleFiles, render_samples


def generate_samples(
    run: RunContext, turns: Sequence[DenoiserStage], scenes: Sequence[SamplePrompt], folder: Path, stem: str
) -> list[Path]:
    """Generate what the section asks for, with the transformers that take the steps in turn."""
    if not scenes:
        return []
    defaults = run.spec.auxiliary.sample_defaults(run.arch)
    config = run.config.sample.resolved(defaults, warn)
    guided = replace(config, guidance=max(turn.guidance or config.guidance for turn in turns))
    encode_prompts(run, scenes)
    negative = text_conditions(run, config.negative) if guided.uses_negative(defaults) else None
    requests = []
    for number, scene in enumerate(scenes):
        told = conditions_of(run, scene)
        jobs = requests_of(
            scene,
            config,
            conditions={**text_conditions(run, scene.prompt), **told},
            negative=negative and {**negative, **told},
            references=reference_latents(run, scene.references),
        )
        requests += [PromptRequest(number=number, prompt=scene.prompt, job=job) for job in jobs]
    to = SampleFiles(folder=folder, stem=stem, fps=run.data.fps, images=config.images)
    with progress("sample", len(requests) * config.steps) as bar:
        return render_samples(turns, run.auxiliary.sampler, requests, to, bar.advance)


def text_conditions(run: RunContext, text: str) -> Mapping[str, Tensor]:
    """A text's encoded tensors, which are in the cache."""
    tensors = run.data.cache.get("text", text_key(text, run.auxiliary.encoders[1]))
    assert tensors is not None, text
    return tensors
