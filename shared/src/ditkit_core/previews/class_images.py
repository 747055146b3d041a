"""Generates the class images of prior preservation with the base model, before training."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from ditkit_core.data.discovery import lists_of
from ditkit_core.data.media.clip import write_image
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.prior_preservation import count_media
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, say
from ditkit_core.io.files import json_hash, write_text
from ditkit_core.previews.generate import guided_by, with_adapters
from ditkit_core.run.context import RunContext
from ditkit_core.run.data import RunData
from ditkit_core.run.data_record import keys_of
from ditkit_core.run.encoding import encode_prior, prompt_encoder
from ditkit_core.sampling.denoise import DenoiserStage, generate
from ditkit_core.sampling.prompts import SamplePrompt, requests_of
from ditkit_core.sampling.shares import ALONE, SampleShares


def num_missing_class_images(data: RunData, *, started: bool) -> int:
    """Number of class images that are still to be generated.

    Args:
        started: Whether training has begun. Then the answer is 0: only the base model can generate
            class images.
    """
    config, prior, folder = data.config, data.config.prior, data.prior_folder
    # Any media counts, not only generated files: people put images of their own into the folder.
    missing = prior.images - count_media(folder) if prior.class_prompt and not started else 0
    if missing <= 0:
        return 0
    if config.adapter.method == "full" or config.adapter.init:
        setting = (
            f"adapter.method = {config.adapter.method}"
            if config.adapter.method == "full"
            else "adapter.init"
        )
        raise UserError(
            f"prior.prompt: {missing} class images are missing in {folder}, and with {setting} "
            "they are not generated; put them there, each with a caption in a .txt file"
        )
    # A metadata file decides what is in a dataset, so that generated images next to it would be
    # ignored.
    listed = lists_of(folder, image_folders=config.data.image_folders)
    if listed:
        raise UserError(
            f"prior.prompt: {folder} has {listed[0]}, which does not list generated images; set "
            f"prior.images = {prior.images - missing} or leave prior.prompt empty"
        )
    return missing


def class_conditions(data: RunData) -> Mapping[str, Tensor]:
    """The conditions of a class image besides its text; encoded if the cache does not have them."""
    conditioning = data.auxiliary.conditioning
    return {} if conditioning is None else conditioning.tensors(data.class_inputs, data.cache)


def generate_class_images(
    run: RunContext,
    stages: Sequence[DenoiserStage],
    count: int,
    extra_conditions: Mapping[str, Tensor] = MappingProxyType({}),
    shares: SampleShares = ALONE,
) -> list[Path]:
    """Generate class images of the prompt with the seeds 0, 1, …, each with its caption next to it;
    existing files are kept.

    Ranks divide them as samples, and each writes its own.

    Args:
        run: The run; the prompt and the negative one are in its cache.
        stages: The transformers that take the steps, whose adapters are at zero.
        extra_conditions: The result of `class_conditions`.
        shares: Which ranks generate which of them, called on all of them.

    Returns:
        The new files, of all ranks.
    """
    config, folder, bare = run.config, run.data.prior_folder, run.for_class_images
    sampling, negative = guided_by(bare.data, stages)
    texts = prompt_encoder(run.data)
    (job,) = requests_of(
        SamplePrompt(
            prompt=config.prior.prompt,
            references=(),
            frames=1,
            height=config.data.height,
            width=config.data.width,
        ),
        replace(sampling, images=1),
        conditions={**texts.text(config.prior.prompt), **extra_conditions},
        negative=None if negative is None else {**texts.text(negative), **extra_conditions},
        references=(),
    )
    missing = [
        seed for seed in range(config.prior.images) if not _image_path(folder, seed).exists()
    ][:count]
    # as the first rank sees them: others already write
    seeds = shares.ranks.broadcast_object(missing)
    local_seeds = [(seeds[index], counts) for index, counts in shares.local_indices(len(seeds))]
    say(f"generating {len(seeds)} images of {config.prior.prompt!r} into {folder}")
    jobs = (replace(job, seed=seed) for seed, _ in local_seeds)
    with (
        progress("class images", len(local_seeds)) as bar,
        closing(generate(run.auxiliary.sampler, jobs, with_adapters(bare, stages))) as results,
    ):
        for (seed, counts), pixels in zip(local_seeds, results, strict=True):
            if counts:
                _write(_image_path(folder, seed), pixels, config.prior.prompt)
            bar.advance()
    shares.ranks.barrier()  # all of them are there, before anybody looks at the folder
    return [_image_path(folder, seed) for seed in seeds]


def _write(path: Path, pixels: Tensor, prompt: str) -> None:
    if not pixels.isfinite().all():
        raise UserError(f"an image of {prompt!r} is not finite: the base's weights are broken")
    # The caption first: after a crash between the two, an image without one would stop the next
    # start.
    write_text(path.with_suffix(".txt"), prompt + "\n")
    write_image(path, pixels[:, 0])


def encoded_class_images(
    run: RunContext, stages: Sequence[DenoiserStage], count: int
) -> list[EncodedSample]:
    """Generate class images and encode them; all ranks call it, and each does its share of both."""
    ranks = current_ranks()
    generate_class_images(run, stages, count, class_conditions(run.data), SampleShares.of(ranks))
    encoded = encode_prior(run.data)
    # The file system of another machine may list the folder as it was before.
    ranks.check_same({"set of class images": json_hash(keys_of(encoded))})
    return encoded


def _image_path(folder: Path, seed: int) -> Path:
    return folder / f"class-{seed:05d}.png"
