"""Samples of a run's [sample] section, with the transformers that are handed in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ditkit_core.encoding.encode import text_key
from ditkit_core.io.console import progress, warn
from ditkit_core.run.encoding import conditions_of, encode_scenes, reference_latents
from ditkit_core.run.run import Run
from ditkit_core.sampling.denoise import Turn
from ditkit_core.sampling.prompts import Scene, jobs_of
from ditkit_core.sampling.render import SampleFiles, SampleRequest, draw_samples


def draw(run: Run, turns: Sequence[Turn], scenes: Sequence[Scene], folder: Path, stem: str) -> list[Path]:
    """Generate what the section asks for, with the transformers that take the steps in turn."""
    if not scenes:
        return []
    defaults = run.spec.auxiliary.sample_defaults(run.arch)
    config = run.config.sample.resolved(defaults, warn)
    guided = replace(config, guidance=max(turn.guidance or config.guidance for turn in turns))
    encode_scenes(run, scenes)
    negative = text_conditions(run, config.negative) if guided.uses_negative(defaults) else None
    requests = []
    for number, scene in enumerate(scenes):
        told = conditions_of(run, scene)
        jobs = jobs_of(
            scene,
            config,
            conditions={**text_conditions(run, scene.prompt), **told},
            negative=negative and {**negative, **told},
            references=reference_latents(run, scene.references),
        )
        requests += [SampleRequest(number=number, prompt=scene.prompt, job=job) for job in jobs]
    to = SampleFiles(folder=folder, stem=stem, fps=run.data.fps, images=config.images)
    with progress("sample", len(requests) * config.steps) as bar:
        return draw_samples(turns, run.auxiliary.sampler, requests, to, bar.advance)


def text_conditions(run: Run, text: str) -> Mapping[str, Tensor]:
    """A text's encoded tensors, which are in the cache."""
    tensors = run.data.cache.get("text", text_key(text, run.auxiliary.encoders[1]))
    assert tensors is not None, text
    return tensors
