"""Reference images of editing instructions: finding the files of each sample, and the size that
each is encoded at."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ditkit_core.config.nearest import path_remedy
from ditkit_core.data.config import DataConfig
from ditkit_core.data.discovery import media_files
from ditkit_core.data.media.clip import available, media_kind
from ditkit_core.data.media.files import is_folder
from ditkit_core.data.side_names import Names
from ditkit_core.errors import UserError
from ditkit_core.io.files import inside

ReferenceSize = Callable[[int, int, int], tuple[int, int]]
"""From height, width and number of references to the encoded height and width; see
`DataSpec.reference_size`."""


def references_by_name(
    config: DataConfig, ids: Collection[str]
) -> tuple[Mapping[str, tuple[str, ...] | UserError], list[str]]:
    """The references of each sample that has some, as paths in `data.references`, or why they
    cannot be used; and the files of no sample.

    A file has the sample's name, or its name with `_0`, `_1`, … in order; a sample whose own name
    ends with a number takes precedence. A sample in a subfolder of the dataset has its references
    in the same subfolder there.
    """
    if not config.references:
        return {}, []
    folder = Path(config.references)
    if not is_folder(folder):
        raise UserError(
            f"data.references {folder} does not exist or is not a folder; {path_remedy(folder)}"
        )
    files_by_id: dict[str, dict[int | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    samples = Names(ids)
    left_over = []
    for file in media_files(folder):
        stem = Path(file).with_suffix("").as_posix()
        numbered = re.fullmatch(r"(.+)_(\d{1,9})", stem, re.ASCII)
        # A sample that is itself named cat_0 owns cat_0.png; the file is then no reference of the
        # sample cat.
        if (id := samples.find(stem)) is not None:
            files_by_id[id][None].append(file)
        elif numbered and (id := samples.find(numbered[1])) is not None:
            files_by_id[id][int(numbered[2])].append(file)
        else:
            left_over.append(file)
    if not files_by_id:
        images = (
            f"none of its {len(left_over)} images (first: {left_over[0]})"
            if left_over
            else "no image in it"
        )
        raise UserError(
            f"data.references {folder}: {images} has the name of a sample; name them like the "
            f"images in {config.folder}"
        )
    named = {id: _in_order(folder, id, files) for id, files in files_by_id.items()}
    return named, [str(folder / file) for file in left_over]


def _in_order(
    folder: Path, id: str, files: dict[int | None, list[str]]
) -> tuple[str, ...] | UserError:
    several = next((names for names in files.values() if len(names) > 1), None)
    if several or (None in files and len(files) > 1):
        names = sorted(several or [name for group in files.values() for name in group])
        return UserError(
            f"{' and '.join(names)} in data.references {folder} both match {id!r} as its "
            f"reference; number them {Path(id).name}_0, {Path(id).name}_1 or remove all but one"
        )
    numbers = sorted(number for number in files if number is not None)
    if numbers != list(range(len(numbers))):
        return UserError(
            f"references of {id!r} in {folder} are numbered {', '.join(map(str, numbers))}; "
            f"renumber them 0, 1, … in order"
        )
    return tuple(name for number in sorted(files, key=lambda n: n or 0) for name in files[number])


def checked_references(
    folder: Path, names: Sequence[str], reference_size: ReferenceSize, *, allow_outside: bool
) -> tuple[Path, ...]:
    """Check the references of one sample, and return their paths."""
    for name in names:
        inside(folder, name, allow_outside=allow_outside)
    paths = tuple(folder / name for name in names)
    encoded_sizes(paths, reference_size)
    return paths


def encoded_sizes(paths: Sequence[Path], reference_size: ReferenceSize) -> list[tuple[int, int]]:
    """Height and width in pixels that each reference of one sample is encoded at."""
    sizes = []
    for path in paths:
        if media_kind(path) == "video":
            raise UserError(f"reference {path} is a video; convert it to a still image")
        _, height, width = available(path, 1.0)
        try:
            sizes.append(reference_size(height, width, len(paths)))
        except UserError as error:
            raise error.at(f"reference {path}") from error
    return sizes
