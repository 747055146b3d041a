"""A folder read as a dataset."""

from pathlib import Path
from typing import Any

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.models.conditions import Column


def look(
    folder: Path, *, columns: tuple[Column, ...] = (), edits: bool = False, **settings: Any
) -> Dataset:
    config = DataConfig(
        **{"folder": str(folder), "frames": 5, "height": 32, "width": 32, **settings}
    )
    return scan(
        config, frame_step=4, size_step=16, fps=24.0, columns=columns,
        reference_size=(lambda height, width, count: (16, 16)) if edits else None,
    )  # fmt: skip
