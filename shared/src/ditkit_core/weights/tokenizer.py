"""Whether a tokenizer's folder holds what reading it takes, checked before anything is loaded."""

from pathlib import Path
from typing import Any

from ditkit_core.errors import UserError
from ditkit_core.io.files import read_json_object
from ditkit_core.models.paths import ModelPaths

_REMEDY = "fetch it again, or set model.tokenizer"


def find_tokenizer(components: ModelPaths, *, or_vocabulary: str = "", also: tuple[str, ...] = ()) -> Path:
    """The folder of the tokenizer.

    Args:
        components: Where the parts of the model are.
        or_vocabulary: A file that holds the vocabulary where there is no `tokenizer.json`.
        also: JSON files that the folder must have besides.

    Raises:
        UserError: If there is no folder, or a file in it is missing, unreadable or not what its name says.
    """
    if not components.tokenizer and not components.base:
        raise UserError("the text encoder has no tokenizer; set model.tokenizer to the tokenizer's folder")
    path = components.locate("tokenizer")
    either = f"tokenizer.json or {or_vocabulary}" if or_vocabulary else "tokenizer.json"
    if not path.is_dir():
        raise UserError(f"model.tokenizer = {path} is a file; name the folder with {either}")
    vocabulary = path / "tokenizer.json"
    if not vocabulary.exists() and not (or_vocabulary and (path / or_vocabulary).exists()):
        raise UserError(f"{path} holds no tokenizer: {either} is missing; set model.tokenizer")
    for name in also:
        if not (path / name).exists():
            raise UserError(f"{path} holds no tokenizer: {name} is missing; fetch it, or set model.tokenizer")
    if vocabulary.exists():
        _vocabulary(vocabulary)
    for name in also:
        read_json_object(path / name, _REMEDY)
    return path


def added_tokens(folder: Path) -> dict[str, int]:
    """Id by text of the tokens that a `tokenizer.json` never cuts into pieces.

    Raises:
        UserError: If the file cannot be read, or lists something else.
    """
    path = folder / "tokenizer.json"
    listed = _vocabulary(path).get("added_tokens", [])
    try:
        return {str(token["content"]): int(token["id"]) for token in listed}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} lists added tokens that are none; {_REMEDY}") from error


def _vocabulary(path: Path) -> dict[str, Any]:
    found = read_json_object(path, _REMEDY)
    if not isinstance(found.get("model"), dict) or not isinstance(found["model"].get("vocab"), (dict, list)):
        raise UserError(f"{path} holds no vocabulary; {_REMEDY}")
    return found
