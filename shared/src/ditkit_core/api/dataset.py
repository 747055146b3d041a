"""A folder of media and captions as a family reads it."""

import re
from collections.abc import Sequence
from dataclasses import replace

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, Sample, scan
from ditkit_core.errors import UserError, argument
from ditkit_core.models.conditions import Column
from ditkit_core.models.spec import DataSpec

_SIDES = re.compile(
    r"\b(?:left|right)(?:ward|wards|most|hand|handed|-hand|-handed|-facing)?\b|\b(?:counter|anti)?-?clockwise\b"
    r"|\b(?:links|rechts|linke[nrs]?|rechte[nrs]?|gauche|droite|izquierd[ao]|derech[ao])\b|[左右]",
    re.IGNORECASE,
)
"""Words for sides in languages that captions are written in. `right` as in "right now" is one of
them: it takes a person to tell."""


def check_flip(samples: Sequence[Sample], columns: Sequence[Column]) -> None:
    """Refuse to mirror a dataset whose captions or conditions (the model's `columns`) say left or
    right."""
    for column in columns:
        named = next((sample for sample in samples if column.name in sample.controls), None)
        if named is not None and column.kind in ("text", "table"):
            raise UserError(
                f"data.flip cannot mirror {column.name} of {named.id} (a {column.kind}) with its "
                f"clip; set data.flip = false"
            )
    sided = [
        (sample.id, match[0])
        for sample in samples
        for match in map(_SIDES.search, sample.captions)
        if match is not None
    ]
    if sided:
        id, word = sided[0]
        others = f" ({len(sided) - 1} more do)" if len(sided) > 1 else ""
        raise UserError(
            f"data.flip would train the other side than the caption of {id} says: "
            f"{word!r}{others}; reword it, or set data.flip = false"
        )


def completed(config: DataConfig, data: DataSpec) -> DataConfig:
    """The section with the model's own size where it sets none.

    Raises:
        UserError: If it sets another frame rate than the only one that the model knows.
    """
    if data.fps_is_fixed and config.fps not in (0, data.fps):
        raise UserError(
            f"{argument('data.fps')} = {config.fps:g}: this model counts time at {data.fps:g} "
            f"frames per second, and at no other rate; leave it "
            "out, clips of any rate are resampled"
        )
    frames, height, width = data.size
    # The longest frame bucket is the length of the data, for plans and for generated samples.
    own_frames = max(config.frame_buckets, default=config.frames) or frames
    # resolved here, where it is known who asked for the number of frames
    if config.short_clips == "auto":
        has_lengths = bool(config.frames or config.frame_buckets)
        config = replace(config, short_clips="error" if has_lengths else "shorten")
    # Likewise the largest resolution is the size.
    side = max(config.resolutions, default=0)
    height, width = config.height or side or height, config.width or side or width
    return replace(config, frames=own_frames, height=height, width=width)


def read_dataset(
    config: DataConfig, data: DataSpec, columns: Sequence[Column], *, key: str = "data.folder"
) -> Dataset:
    """The samples of a completed section; prints nothing. `key` is what messages call the
    folder."""
    dataset = scan(config, data, columns, key=key)
    if config.flip:
        check_flip(dataset.samples, columns)
    return dataset
