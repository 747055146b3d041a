"""Drawing the class pictures of prior preservation with the model as it is before training."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from ditkit_core.data.discovery import lists_of
from ditkit_core.data.media.clip import write_image
from ditkit_core.encoding.prior_preservation import count_media
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, say, warn
from ditkit_core.io.files import write_text
from ditkit_core.models.conditions import ClipInputs
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.previews.generate import text_conditions
from ditkit_core.run.context import RunContext
from ditkit_core.sampling.denoise import DenoiserStage, generate


def num_missing_class_images(run: RunContext, *, started: bool) -> int:
    """How many class pictures are missing, which can only be drawn while the model is still the base.

    Args:
        run: The run.
        started: Whether anything was trained yet: then there is what there is.

    Raises:
        UserError: If some are missing and cannot be drawn.
    """
    config, prior, folder = run.config, run.config.prior, run.data.prior_folder
    missing = prior.images - count_media(folder) if prior.prompt and not started else 0
    if missing <= 0:
        return 0
    if config.adapter.method != "lora" or config.adapter.init:
        what = f"adapter.method = {config.adapter.method}" if config.adapter.method != "lora" else "adapter.init"
        raise UserError(
            f"prior.prompt: {missing} class pictures are missing in {folder}, and with {what} none are drawn; put them there, "
            "each with a caption in a .txt file"
        )
    listed = lists_of(folder, image_folders=config.data.image_folders)
    if listed:
        raise UserError(
            f"prior.prompt: {folder} has {listed[0]}, which drawn pictures would not be in; set prior.images = "
            f"{prior.images - missing} or leave prior.prompt empty"
        )
    return missing


def check_class_prompt(run: RunContext) -> None:
    """Refuse class pictures of a model that draws nothing from text alone, while nothing is loaded.

    Raises:
        UserError: Naming what else it is told.
    """
    needed = [f"has no {column.name}" for column in run.auxiliary.columns if column.required]
    try:
        for conditioner in run.auxiliary.conditioning.conditioners if run.auxiliary.conditioning else ():
            conditioner.uses(_class_picture(run))
    except UserError as error:
        needed.append(str(error))
    if needed:
        raise UserError(
            f"prior.prompt: class pictures are drawn from text alone, which this model cannot do ({needed[0]}); put pictures of the class into "
            "prior.folder, with a metadata.jsonl that names what goes with them if anything must, and leave prior.prompt empty"
        )


def class_conditions(run: RunContext) -> Mapping[str, Tensor]:
    """What the model is told of a class picture beside its text, encoded if the cache lacks it."""
    return (
        {}
        if run.auxiliary.conditioning is None
        else run.auxiliary.conditioning.tensors(_class_picture(run), run.data.cache)
    )


def _class_picture(run: RunContext) -> ClipInputs:
    return ClipInputs(clip=None, frames=1, height=run.config.data.height, width=run.config.data.width, fps=0.0)


def generate_class_images(
    run: RunContext, turns: Sequence[DenoiserStage], count: int, told: Mapping[str, Tensor] = MappingProxyType({})
) -> list[Path]:
    """Draw class pictures of the prompt, each with its caption beside it, the seeds being 0, 1, …; those there are kept.

    Args:
        run: The run; the prompt and the negative one are in its cache.
        turns: The transformers that take the steps, whose adapters are at zero.
        count: How many more.
        told: As `class_conditions` has it.

    Raises:
        UserError: If one cannot be written, or is not finite.
    """
    config, folder = run.config, run.data.prior_folder
    defaults = run.spec.auxiliary.sample_defaults(run.arch)
    drawing = config.sample.resolved(defaults, warn)
    wanted = {**text_conditions(run, config.prior.prompt), **told}
    guided = replace(drawing, guidance=max(turn.guidance or drawing.guidance for turn in turns))
    negative = {**text_conditions(run, drawing.negative), **told} if guided.uses_negative(defaults) else None
    seeds = [seed for seed in range(config.prior.images) if not _picture(folder, seed).exists()][:count]
    say(f"drawing {len(seeds)} pictures of {config.prior.prompt!r} into {folder}")
    jobs = (
        GenerationRequest(
            conditions=wanted, negative=negative, frames=1, height=config.data.height, width=config.data.width,
            steps=drawing.steps, guidance=drawing.guidance, shift=drawing.shift, seed=seed,
        )
        for seed in seeds
    )  # fmt: skip
    try:
        with (
            progress("class pictures", len(seeds)) as bar,
            closing(generate(run.auxiliary.sampler, jobs, turns)) as results,
        ):
            for seed, pixels in zip(seeds, results, strict=True):
                if not pixels.isfinite().all():
                    raise UserError(
                        f"a picture of {config.prior.prompt!r} is not finite: the base's weights are broken"
                    )
                path = _picture(folder, seed)
                write_text(path.with_suffix(".txt"), config.prior.prompt + "\n")  # first: a picture needs its caption
                write_image(path, pixels[:, 0])
                bar.advance()
    finally:
        run.auxiliary.sampler.release()
    return [_picture(folder, seed) for seed in seeds]


def _picture(folder: Path, seed: int) -> Path:
    return folder / f"class-{seed:05d}.png"
