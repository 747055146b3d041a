"""A folder of media and captions as a family reads it."""

from collections.abc import Sequence
from dataclasses import replace

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.data.mirroring import check_flip
from ditkit_core.models.conditions import Column
from ditkit_core.models.spec import DataSpec


def completed(config: DataConfig, data: DataSpec) -> DataConfig:
    """The section with the model's own size where it sets none."""
    frames, height, width = data.size
    # The longest frame bucket is the length of the data, for plans and for generated samples.
    own_frames = max(config.frame_buckets, default=config.frames) or frames
    if config.short_clips == "auto":  # resolved here, where it is known who asked for the number of frames
        asked = bool(config.frames or config.frame_buckets)
        config = replace(config, short_clips="error" if asked else "shorten")
    # Likewise the largest resolution is the size.
    side = max(config.resolutions, default=0)
    height, width = config.height or side or height, config.width or side or width
    return replace(config, frames=own_frames, height=height, width=width)


def read_dataset(config: DataConfig, data: DataSpec, columns: Sequence[Column], *, key: str = "data.folder") -> Dataset:
    """The samples of a completed section; prints nothing. `key` is what messages call the folder."""
    dataset = scan(
        config,
        frame_step=data.frame_step,
        size_step=data.size_step,
        fps=data.fps,
        reference_size=data.reference_size,
        columns=columns,
        key=key,
    )
    if config.flip:
        check_flip(dataset.samples, columns)
    return dataset
