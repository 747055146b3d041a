"""The pictures that an editing instruction starts from: which files they are, and what each is encoded at."""

import re
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ditkit_core.data.config import DataConfig
from ditkit_core.data.discovery import media_files
from ditkit_core.data.media.clip import available, media_kind, status
from ditkit_core.errors import UserError
from ditkit_core.io.files import inside

ReferenceSize = Callable[[int, int, int], tuple[int, int]]
"""As `ModelSpec.reference_size`."""


def references_by_name(
    config: DataConfig, ids: Collection[str]
) -> tuple[Mapping[str, tuple[str, ...] | UserError], list[str]]:
    """The files of `data.references` that belong to samples: of the sample's name, or of its name with `_0`, `_1`, … in order.

    A sample in a subfolder of the dataset has them in the same subfolder there.

    Args:
        config: The `[data]` section, of one folder.
        ids: Samples; one whose own name ends with a number takes precedence.

    Returns:
        By sample that has any, paths relative to the folder or why they cannot be used, and the files of no sample.

    Raises:
        UserError: If the folder cannot be read, or nothing in it has the name of a sample.
    """
    if not config.references:
        return {}, []
    folder = Path(config.references)
    at_folder = status(folder)
    if at_folder is None or not stat.S_ISDIR(at_folder.st_mode):
        raise UserError(f"data.references {folder} does not exist or is no folder; correct the path")
    places: dict[str, dict[int | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    left_over = []
    for file in media_files(folder):
        stem = Path(file).with_suffix("").as_posix()
        numbered = re.fullmatch(r"(.+)_(\d{1,9})", stem, re.ASCII)
        # A sample that is itself called cat_0 has its own reference, which is none of the sample cat.
        if stem in ids:
            places[stem][None].append(file)
        elif numbered and numbered[1] in ids:
            places[numbered[1]][int(numbered[2])].append(file)
        else:
            left_over.append(file)
    if not places:
        there = f"none of its {len(left_over)} pictures, first {left_over[0]}," if left_over else "no picture in it"
        raise UserError(
            f"data.references {folder}: {there} has the name of a sample; name them like the pictures of {config.folder}"
        )
    named = {id: _in_order(folder, id, files) for id, files in places.items()}
    return named, [str(folder / file) for file in left_over]


def _in_order(folder: Path, id: str, files: dict[int | None, list[str]]) -> tuple[str, ...] | UserError:
    several = next((names for names in files.values() if len(names) > 1), None)
    if several or (None in files and len(files) > 1):
        names = sorted(several or [name for group in files.values() for name in group])
        return UserError(
            f"{' and '.join(names)} in data.references {folder} are both the reference of {id!r}; number them "
            f"{Path(id).name}_0, {Path(id).name}_1 or remove all but one"
        )
    numbers = sorted(number for number in files if number is not None)
    if numbers != list(range(len(numbers))):
        return UserError(
            f"references of {id!r} in {folder} are numbered {', '.join(map(str, numbers))}; rename them to 0, 1, … in order"
        )
    return tuple(name for number in sorted(files, key=lambda n: n or 0) for name in files[number])


def checked_references(
    folder: Path, names: Sequence[str], reference_size: ReferenceSize, *, allow_outside: bool
) -> tuple[Path, ...]:
    """The references of one sample as paths, each known to be a picture that the model takes.

    Raises:
        UserError: If one leaves the folder, cannot be read, or is of no size that can be used.
    """
    for name in names:
        inside(folder, name, allow_outside=allow_outside)
    paths = tuple(folder / name for name in names)
    encoded_sizes(paths, reference_size)
    return paths


def encoded_sizes(paths: Sequence[Path], reference_size: ReferenceSize) -> list[tuple[int, int]]:
    """Height and width that each picture of one sample is encoded at.

    Raises:
        UserError: If a file is no picture, cannot be read, or is of no size that can be used.
    """
    sizes = []
    for path in paths:
        if media_kind(path) == "video":
            raise UserError(f"reference {path} is a video; convert it to a still image")
        _, height, width = available(path, 1.0)
        try:
            sizes.append(reference_size(height, width, len(paths)))
        except UserError as error:
            raise UserError(f"reference {path}: {error}") from error
    return sizes
