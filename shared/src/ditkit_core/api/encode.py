"""Encodes a folder of media and captions for any Python program: `encode`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.api.dataset import completed, read_dataset
from ditkit_core.api.load import ModelSource, paths_of
from ditkit_core.config.nearest import check_arguments
from ditkit_core.data.config import DataConfig
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.config import EncodeConfig
from ditkit_core.encoding.encode import encode as encode_samples
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.engine.devices import make_current
from ditkit_core.io.files import local_path
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.spec import ModelSpec
from ditkit_core.sampling.config import SampleConfig


def encode(
    spec: ModelSpec,
    path: ModelSource,
    folder: str | Path,
    cache: str | Path,
    *,
    encoding: EncodeConfig | None = None,
    empty_captions: bool = False,
    slider: tuple[str, str] | None = None,
    **data: Any,
) -> list[EncodedSample]:
    """Encode the videos, images and captions of a folder with a model's VAE and text encoder, which
    need not be in memory with its transformer.

        base = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        samples = encode(WAN, base, "clips", "cache", frames=33, height=480, width=832)
        item = samples[0].load()  # latents, text and more

    Args:
        spec: The family.
        path: As for `load`.
        folder: Media with captions next to them, or with metadata.
        cache: Folder of encoded samples, which is made where it is missing. What it has is not
            encoded again, and encoders are loaded only for what it lacks.
        encoding: Device and dtypes of the encoders.
        empty_captions: Whether items have the empty caption too, for `FlowConfig.target_guidance`.
        slider: The two prompts of a slider, which items have too: `FlowConfig.slider_positive` and
            `slider_negative`.
        data: Fields of `DataConfig`: frames, height, width, fps, metadata and more.

    Returns:
        The samples, sorted by name. Their tensors are read when they are used.

    Raises:
        UserError: If the folder, a file in it or a component of the model cannot be used.
    """
    check_arguments(
        "encode", data, (field.name for field in fields(DataConfig) if field.name != "folder")
    )
    paths, encoding = paths_of(path), encoding or EncodeConfig()
    arch = arch_here(spec, paths, fetch=True)[1]
    spec = spec.for_arch(arch)
    auxiliary = Auxiliary(
        spec=spec,
        arch=arch,
        paths=paths,
        encode=encoding,
        sample=SampleConfig(),
        dtype=torch.bfloat16,
        device_of_sampler=lambda: auxiliary.device,
    )
    config = completed(DataConfig(folder=str(folder), **data), spec.data)
    dataset = read_dataset(config, spec.data, auxiliary.columns)
    make_current([auxiliary.device])
    encoders = auxiliary.sample_encoders(
        dataset.fps, flips=config.flip, empty_captions=empty_captions, slider=slider
    )
    return encode_samples(dataset.samples, encoders, Cache(local_path(str(cache))))
