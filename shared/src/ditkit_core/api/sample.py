"""Generates images and clips with a loaded model for any Python program: `sample`."""

from collections.abc import Sequence
from dataclasses import fields
from logging import getLogger
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.api.prompts import PromptEncoder
from ditkit_core.config.nearest import check_arguments
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.config import EncodeConfig
from ditkit_core.encoding.encode import PromptFiles
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.sampling.denoise import generate, single_stage
from ditkit_core.sampling.prompts import choose_prompts

_LOGGER = getLogger(__name__)


def sample(
    model: Model, prompts: str | Sequence[str], **settings: Any
) -> list[Float[Tensor, "3 frames height width"]]:
    """Generate a sample of each prompt with a model, its adapter, and the encoders and the
    scheduler next to its transformer.

        (image,) = sample(model, "a red circle", frames=1, height=512, width=512, steps=30, seed=1)

    Args:
        model: The model; it is in eval mode meanwhile.
        prompts: One prompt, or several.
        settings: Fields of `SampleConfig`: frames, height, width, steps, guidance, negative, seed,
            images, references, controls and more. What is left out is as the model's authors set
            it.

    Returns:
        Pixels in [0, 1] on the CPU; with several `images`, all of the first prompt come first.

    Raises:
        UserError: If the model cannot sample with these settings, or a component cannot be used.
    """
    check_arguments(
        "sample",
        settings,
        (field.name for field in fields(SampleConfig) if field.name != "prompts"),
    )
    spec, origin = model.spec, model.origin
    if spec.architecture.experts(origin.arch):
        raise UserError(
            f"{spec.name} {origin.preset} samples with two transformers; use the sample command"
        )
    texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    config = SampleConfig(prompts=texts, **settings)
    data, defaults = spec.data, spec.auxiliary.sample_defaults(origin.arch)
    config.check(data)
    config = config.resolved(defaults, _LOGGER.warning)
    device = model.device
    auxiliary = Auxiliary(
        spec=spec,
        arch=origin.arch,
        paths=origin.paths,
        encode=EncodeConfig(device=str(device)),
        sample=config,
        dtype=model.matmul_dtype,
        device_of_sampler=lambda: device,
    )
    chosen = choose_prompts(
        config,
        (),
        size=data.size,
        size_step=data.size_step,
        columns=auxiliary.columns,
        shape_reference=data.shape_reference,
    )
    with TemporaryDirectory(prefix="ditkit") as folder:
        encoder = PromptEncoder(auxiliary, Cache(Path(folder)), data.fps)
        negative = config.negative if config.uses_negative(defaults) else None
        encoder.encode_texts(
            [
                PromptFiles(text, prompt.references)
                for prompt in chosen
                for text in (prompt.prompt, negative)
                if text is not None
            ]
        )
        jobs = [job for prompt in chosen for job in encoder.requests(prompt, config, negative)]
        return list(generate(auxiliary.sampler, jobs, single_stage(model.module, model.engine)))
