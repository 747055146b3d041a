"""A folder read as a dataset."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from data_specs import CLIPS

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.models.conditions import Column


def look(
    folder: Path, *, columns: tuple[Column, ...] = (), edits: bool = False, **settings: Any
) -> Dataset:
    config = DataConfig(
        **{"folder": str(folder), "frames": 5, "height": 32, "width": 32, **settings}
    )
    size = (lambda height, width, count: (16, 16)) if edits else None
    return scan(config, replace(CLIPS, fps=24.0, reference_size=size), columns)
