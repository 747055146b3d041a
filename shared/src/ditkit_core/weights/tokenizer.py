"""Checks that a tokenizer's folder is complete, before anything is loaded."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ditkit_core.errors import UserError, argument
from ditkit_core.io.files import read_json_object, readable
from ditkit_core.models.paths import ModelPaths

_REMEDY = "fetch it again, or set model.tokenizer"


def find_tokenizer(
    components: ModelPaths, *, or_vocabulary: str = "", also: tuple[str, ...] = ()
) -> Path:
    """Find the tokenizer's folder, which must be complete.

    It has `tokenizer.json`, or a file of sentencepiece with the vocabulary (`or_vocabulary`), and
    the JSON files `also`.
    """
    # `locate` would ask for model.base, which a run with separate files does not have.
    if not components.tokenizer and not components.base:
        raise UserError(
            f"the text encoder has no tokenizer; set {argument('model.tokenizer')} to the "
            f"tokenizer's folder"
        )
    path = components.locate("tokenizer")
    either = f"tokenizer.json or {or_vocabulary}" if or_vocabulary else "tokenizer.json"
    with readable(path):
        if not path.is_dir():
            raise UserError(
                f"{argument('model.tokenizer')} = {path} is a file; name the folder with {either}"
            )
        inside = {file.name for file in path.iterdir()}
    if not inside & {"tokenizer.json", or_vocabulary}:
        raise UserError(
            f"{path} has no tokenizer: {either} is missing; set {argument('model.tokenizer')}"
        )
    if missing := [name for name in also if name not in inside]:
        raise UserError(
            f"{path} has no tokenizer: {missing[0]} is missing; fetch it, or set "
            f"{argument('model.tokenizer')}"
        )
    if "tokenizer.json" not in inside and find_spec("sentencepiece") is None:
        raise UserError(
            f"{path} has {or_vocabulary} and no tokenizer.json, and {or_vocabulary} is read with "
            f"the package sentencepiece: uv pip install sentencepiece protobuf; or set "
            f"{argument('model.tokenizer')} to a folder with tokenizer.json"
        )
    # Read once for its errors alone: the library would fail later, in the middle of encoding, and
    # not in one line.
    if "tokenizer.json" in inside:
        _vocabulary(path / "tokenizer.json")
    for name in also:
        read_json_object(path / name, _REMEDY)
    return path


def added_tokens(folder: Path) -> dict[str, int]:
    """The tokens that a `tokenizer.json` never splits, with their ids by text."""
    path = folder / "tokenizer.json"
    listed = _vocabulary(path).get("added_tokens", [])
    try:
        return {str(token["content"]): int(token["id"]) for token in listed}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} has an invalid list of added tokens; {_REMEDY}") from error


def _vocabulary(path: Path) -> dict[str, Any]:
    tokenizer = read_json_object(path, _REMEDY)
    if not isinstance(tokenizer.get("model"), dict) or not isinstance(
        tokenizer["model"].get("vocab"), (dict, list)
    ):
        raise UserError(f"{path} has no vocabulary; {_REMEDY}")
    return tokenizer
