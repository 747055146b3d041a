"""Drawing what a run's [sample] section asks for, with the transformers that are handed in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ditkit_core.encoding.encode import text_key
from ditkit_core.io.console import progress, warn
from ditkit_core.run.run import Run
from ditkit_core.sampling.denoise import Turn
from ditkit_core.sampling.prompts import Scene, draw_samples


def draw(run: Run, turns: Sequence[Turn], scenes: Sequence[Scene], folder: Path, stem: str) -> list[Path]:
    """Draw what the section asks for, with the transformers that take the steps in turn."""
    if not scenes:
        return []
    defaults = run.spec.auxiliary.sample_defaults(run.arch)
    config = run.config.sample.resolved(defaults, warn)
    guided = replace(config, guidance=max(turn.guidance or config.guidance for turn in turns))
    run.encode_scenes(scenes)
    text_encoder = run.encoders[1]

    def conditions(text: str) -> Mapping[str, Tensor]:
        tensors = run.cache.get("text", text_key(text, text_encoder))
        assert tensors is not None, text
        return tensors

    with progress("sample", len(scenes) * config.images * config.steps) as bar:
        return draw_samples(
            turns,
            run.sampler,
            scenes,
            config,
            conditions=conditions,
            references=run.reference_latents,
            controls=run.conditions_of,
            negative=conditions(config.negative) if guided.uses_negative(defaults) else None,
            fps=run.fps,
            folder=folder,
            stem=stem,
            on_step=bar.advance,
        )
