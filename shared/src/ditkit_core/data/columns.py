"""Which columns of metadata name the clip, its captions and the pictures that an instruction starts from, under the names in use."""

import difflib
import re
from collections.abc import Iterable, Sequence

from ditkit_core.errors import UserError

_ELSEWHERE = ("video_path", "image_path")
MEDIA_COLUMNS = ("file_name", "video", "image", "file_path", "path", *_ELSEWHERE)
"""The last two are the clip where none of the others is there, and otherwise nothing: they may say where it was taken from."""
CAPTION_COLUMNS = ("text", "prompt", "caption")
REFERENCE_COLUMNS = ("references", "reference", "control", "edit_image")
NUMBERED_REFERENCES = "control_path"
"""Or `control_path_0`, `control_path_1`, …: where a model edits pictures, one of them in each column."""

OF_THE_MODEL = (NUMBERED_REFERENCES, "control_file_path", "object_file_path")
"""Names that other trainers fill with whatever the model needs: they mean something only where a column of the model has them."""

_NO_REFERENCES = ("end_image",)
"""Nearly spelt like a column of references, and in the metadata of image-to-video models."""

_NO_MORE_REFERENCES = re.compile(
    rf"edited_image|preferences?|({'|'.join((*REFERENCE_COLUMNS, NUMBERED_REFERENCES))})_[a-z][a-z0-9]+"
)
"""Names, in lower case, that are words of their own where the references have a column already: `reference_id`, `edit_image_path`, …"""

_OF_FOLDERS = "control_directory"
"""musubi-tuner's setting for a folder of references."""

_NEARLY = {**dict.fromkeys(REFERENCE_COLUMNS, 0.8), NUMBERED_REFERENCES: 0.85, _OF_FOLDERS: 0.9}
"""How alike a name and a column of references are (as `difflib` has it) from where on it is that, misspelt."""

_NUMBERED = re.compile(rf"{NUMBERED_REFERENCES}(?:_(\d{{1,9}}))?", re.ASCII)


def number_of(name: str) -> int | None:
    """The number i of `control_path_i`, 0 of `control_path`; None of any other column."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1] or 0) if match else None


def media_columns(found: Iterable[str]) -> tuple[str, ...]:
    """The names that may be the clip's among columns."""
    first = tuple(name for name in MEDIA_COLUMNS if name not in _ELSEWHERE)
    return first if any(name in first for name in found) else MEDIA_COLUMNS


def only_column(where: str, found: Iterable[str], accepted: tuple[str, ...], what: str) -> str:
    """The accepted column that is there, which must be the only one.

    Args:
        where: For messages.
        found: The columns that there are.
        accepted: What it may be called.
        what: It is for.

    Raises:
        UserError: If there is none, or several.
    """
    names = list(found)
    there = [name for name in names if name in accepted]
    if len(there) > 1:
        raise UserError(f"{where} has {len(there)} {what} columns, {', '.join(there)}; remove or rename all but one")
    if there:
        return there[0]
    remedy = f"accepted: {', '.join(accepted)}"
    if len(names) == 1 and (apart := next((each for each in (";", "\t", "|") if each in names[0]), "")):
        remedy = f"fields are separated by commas and not by {apart!r}: save it again with commas"
    elif near := next((name for name in names if name.strip().lower() in accepted), ""):
        remedy = f"write {near!r} as {near.strip().lower()!r}"
    raise UserError(f"{where} has no {what} column: found {', '.join(names) or 'none'}; {remedy}")


def reference_columns(
    where: str, found: Iterable[str], *, edits: bool, model_columns: Sequence[str] = ()
) -> tuple[str, ...]:
    """The columns that name references, in the order of the pictures; none if there are none.

    A misspelt one is refused, because without it nothing would be edited, or with less; so is one of `OF_THE_MODEL` that may mean several things to
    a model which is told something beside text.

    Args:
        where: For messages.
        found: The columns that there are, without those of the model.
        edits: Whether the model takes references.
        model_columns: Names of the model's own columns.

    Raises:
        UserError: If a column is none of these but nearly, or if the same is there twice.
    """
    found = list(found)
    numbered = {name: number for name in found if (number := number_of(name)) is not None}
    there = [name for name in found if name in REFERENCE_COLUMNS]
    if edits:
        _refuse_misspelt(where, found, beside=[*there, *numbered])
    if numbered and edits:
        if there:
            both = f"{there[0]}, {next(iter(numbered))}"
            raise UserError(f"{where} has several reference columns, {both}; remove or rename all of one kind")
        if len(set(numbered.values())) < len(numbered):
            raise UserError(f"{where} has a number of {', '.join(numbered)} twice; remove or rename one")
        return tuple(sorted(numbered, key=numbered.__getitem__))
    own = [*model_columns, *(["references"] if edits else [])]
    if own and (vague := next((name for name in found if name in numbered or name in OF_THE_MODEL), "")):
        raise UserError(
            f"{where} has a column {vague!r}, which does not say what it is to this model; call it {_either(own)}, or remove it"
        )
    if there:
        return (only_column(where, there, REFERENCE_COLUMNS, "reference"),)
    for name in () if edits else found:  # of a model that edits they were looked through above
        if name in _NO_REFERENCES or name in OF_THE_MODEL or name in numbered:
            continue
        if close := difflib.get_close_matches(name.lower(), REFERENCE_COLUMNS, n=1, cutoff=0.8):
            raise UserError(_rename(where, name, close[0]))
    return ()


def _refuse_misspelt(where: str, found: Sequence[str], *, beside: Sequence[str]) -> None:
    """Refuse what is nearly a column of references of a model that edits; `beside` are those of the columns that are one."""
    for name in found:
        if name in beside or name in _NO_REFERENCES or name in OF_THE_MODEL:
            continue
        lowered = name.lower()
        plain = re.sub(r"_[0-9]+$", "", lowered)
        number = lowered[len(plain) :]
        scores = [(difflib.SequenceMatcher(None, known, plain).ratio(), known) for known in _NEARLY]
        close = max((each for each in scores if each[0] >= _NEARLY[each[1]]), default=(0.0, ""))[1]
        if not close or (beside and _NO_MORE_REFERENCES.fullmatch(plain)):
            continue
        if beside:
            raise UserError(
                f"{where} has a column {name!r} beside {beside[0]!r}; put its references there, in order, or else rename it"
            )
        if number:
            close = NUMBERED_REFERENCES + number
        raise UserError(_rename(where, name, "references" if close == _OF_FOLDERS else close))


def _rename(where: str, name: str, right: str) -> str:
    return f"{where} has a column {name!r}; call it {right!r} if it names references, or else rename it"


def _either(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
