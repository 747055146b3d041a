"""Recognising metadata columns: which header names the clip, its captions and its reference images,
under the names in common use."""

import difflib
import re
from collections.abc import Iterable, Sequence

from ditkit_core.errors import UserError

_FALLBACK = ("video_path", "image_path")
MEDIA_COLUMNS = ("file_name", "video", "image", "file_path", "path", *_FALLBACK)
"""The last two name the clip only if none of the others is present: next to another one they often
record where the clip came from."""
CAPTION_COLUMNS = ("text", "prompt", "caption")
REFERENCE_COLUMNS = ("references", "reference", "control", "edit_image")
NUMBERED_REFERENCES = "control_path"
"""Or `control_path_0`, `control_path_1`, …: for a model that edits images, each column names one
reference."""

OF_THE_MODEL = (NUMBERED_REFERENCES, "control_file_path", "object_file_path")
"""Names that other trainers use for any condition of a model; they have a meaning only if the model
declares a column of that name."""

_NO_REFERENCES = ("end_image",)
"""Spelt almost like a reference column, but common in the metadata of image-to-video models."""

_NO_MORE_REFERENCES = re.compile(
    rf"edited_image|preferences?|({'|'.join((*REFERENCE_COLUMNS, NUMBERED_REFERENCES))})_[a-z][a-z0-9]+"
)
"""Lower-case names that are accepted as other columns if there is a reference column already:
`reference_id`, `edit_image_path`, …"""

_FOLDER_SETTING = "control_directory"
"""musubi-tuner's setting for a folder of references."""

_MISSPELT_FROM = {
    **dict.fromkeys(REFERENCE_COLUMNS, 0.8),
    NUMBERED_REFERENCES: 0.85,
    _FOLDER_SETTING: 0.9,
}
"""Similarity (`difflib` ratio) from which on a header counts as a misspelt reference column, for
each column."""

_NUMBERED = re.compile(rf"{NUMBERED_REFERENCES}(?:_(\d{{1,9}}))?", re.ASCII)


def number_of(name: str) -> int | None:
    """The number i of `control_path_i`, 0 for `control_path`; None for any other column."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1] or 0) if match else None


def media_columns(headers: Iterable[str]) -> tuple[str, ...]:
    """The accepted names of the clip's column, given the headers that are present."""
    first = tuple(name for name in MEDIA_COLUMNS if name not in _FALLBACK)
    return first if any(name in first for name in headers) else MEDIA_COLUMNS


def only_column(where: str, headers: Iterable[str], accepted: tuple[str, ...], kind: str) -> str:
    """The one accepted column among the headers."""
    names = list(headers)
    matches = [name for name in names if name in accepted]
    if len(matches) > 1:
        raise UserError(
            f"{where} has {len(matches)} {kind} columns, {', '.join(matches)}; remove or rename "
            f"all but one"
        )
    if matches:
        return matches[0]
    remedy = f"accepted: {', '.join(accepted)}"
    if len(names) == 1 and (
        apart := next((separator for separator in (";", "\t", "|") if separator in names[0]), "")
    ):
        remedy = f"fields must be separated by commas, not by {apart!r}: save the file with commas"
    elif near := next((name for name in names if name.strip().lower() in accepted), ""):
        remedy = f"write {near!r} as {near.strip().lower()!r}"
    raise UserError(f"{where} has no {kind} column: found {', '.join(names) or 'none'}; {remedy}")


def reference_columns(
    where: str, headers: Iterable[str], *, edits: bool, model_columns: Sequence[str] = ()
) -> tuple[str, ...]:
    """The columns that name references, in their order, among headers that are not the model's own
    columns; empty if there are none.

    A misspelt name is refused: ignoring it would train on fewer references, without a word. A name
    of `OF_THE_MODEL` is refused as well if the model has columns of its own, because it may mean
    any of them.
    """
    headers = list(headers)
    numbered = {name: number for name in headers if (number := number_of(name)) is not None}
    reference_names = [name for name in headers if name in REFERENCE_COLUMNS]
    if edits:
        _refuse_misspelt(where, headers, valid_headers=[*reference_names, *numbered])
    if numbered and edits:
        if reference_names:
            both = f"{reference_names[0]}, {next(iter(numbered))}"
            raise UserError(
                f"{where} has several reference columns, {both}; remove or rename all of one kind"
            )
        if len(set(numbered.values())) < len(numbered):
            raise UserError(
                f"{where} has a number of {', '.join(numbered)} twice; remove or rename one"
            )
        return tuple(sorted(numbered, key=numbered.__getitem__))
    accepted = [*model_columns, *(["references"] if edits else [])]
    if accepted and (
        ambiguous_name := next(
            (name for name in headers if name in numbered or name in OF_THE_MODEL), ""
        )
    ):
        either = " or ".join(filter(None, [", ".join(accepted[:-1]), accepted[-1]]))
        raise UserError(
            f"{where} has a column {ambiguous_name!r}, which is ambiguous for this model; rename "
            f"it to {either}, or remove it"
        )
    if reference_names:
        return (only_column(where, reference_names, REFERENCE_COLUMNS, "reference"),)
    # for a model that edits, _refuse_misspelt has checked them above
    for name in () if edits else headers:
        if name in _NO_REFERENCES or name in OF_THE_MODEL or name in numbered:
            continue
        if suggestions := difflib.get_close_matches(
            name.lower(), REFERENCE_COLUMNS, n=1, cutoff=0.8
        ):
            raise UserError(_rename(where, name, suggestions[0]))
    return ()


def _refuse_misspelt(where: str, headers: Sequence[str], *, valid_headers: Sequence[str]) -> None:
    """Refuse headers that look like misspelt reference columns; `valid_headers` are spelt
    correctly."""
    for name in headers:
        if name in valid_headers or name in _NO_REFERENCES or name in OF_THE_MODEL:
            continue
        lowered = name.lower()
        plain = re.sub(r"_[0-9]+$", "", lowered)
        number = lowered[len(plain) :]
        scores = [
            (difflib.SequenceMatcher(None, spelling, plain).ratio(), spelling)
            for spelling in _MISSPELT_FROM
        ]
        best_match = max(
            (score for score in scores if score[0] >= _MISSPELT_FROM[score[1]]), default=(0.0, "")
        )[1]
        if not best_match or (valid_headers and _NO_MORE_REFERENCES.fullmatch(plain)):
            continue
        if valid_headers:
            raise UserError(
                f"{where} has a column {name!r} besides {valid_headers[0]!r}; move its references "
                f"there, in order, or rename it"
            )
        if number:
            best_match = NUMBERED_REFERENCES + number
        raise UserError(
            _rename(where, name, "references" if best_match == _FOLDER_SETTING else best_match)
        )


def _rename(where: str, name: str, correct_name: str) -> str:
    return f"{where} has a column {name!r}; rename it to {correct_name!r} if it names references, otherwise to something else"
