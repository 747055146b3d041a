"""Checking values from files and flags against the configuration's keys and types, with one-line
messages.

Not by jsonargparse or pydantic, which were both used or tried: every message has to be replaced,
because theirs span lines and name Python types, and every strict check of a TOML value has to be
added. `_converted` is shorter than that, and imports nothing.
"""

import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ditkit_core.config.foreign_words import FOREIGN_VALUES, FOREIGN_WORDS
from ditkit_core.config.nearest import nearest_key, nearest_word
from ditkit_core.config.removed import REMOVED
from ditkit_core.config.schema import ConfigField
from ditkit_core.errors import UserError

_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""Longest file name and longest path in bytes that systems accept; the path leaves room for the
names of files below it."""


BACKSLASH_REMEDY = "in double quotes a backslash begins an escape; write the path in single quotes, or with forward slashes"

_LARGEST_INTEGER = 2**63 - 1
"""Largest whole number that torch and files can store."""
_SHOWN = 120
"""Largest number of characters of a refused value that a message quotes."""


def value_from_file(field: ConfigField, raw: Any, where: str) -> Any:
    """Check a value from TOML, which already has a type: a quoted number is not a number. A list of
    one may be written as its item.

    Args:
        where: The place, for messages: `in run.toml`.

    Returns:
        The value in the type of the key.
    """
    wrapped = [raw] if Ellipsis in get_args(field.type) and not isinstance(raw, list) else raw
    try:
        value = _converted(field.type, wrapped)
    except ValueError as error:
        raise _wrong_value(field.key, field.type, raw, where) from error
    _check_texts(field.key, value, where, is_path=field.is_path)
    for text in value if isinstance(value, tuple) else (value,):
        # A path of Windows with one backslash before n or t is valid TOML, and says something else.
        if field.is_path and isinstance(text, str) and re.search(r"[\b\t\n\f\r]", text):
            raise UserError(f"{field.key} {where} has a tab or a line break: {BACKSLASH_REMEDY}")
    return value


def value_from_text(
    key: str, hint: Any, texts: list[str], where: str, *, is_path: bool = False
) -> Any:
    """Check the text of a flag, which was given once or (for lists) several times.

    A list is a TOML array, or the flag is repeated for each item. Commas do not separate items,
    because captions and paths contain commas. If a flag that is not a list is repeated, the last
    text counts.
    """
    try:
        raw: Any = texts[-1]
        if is_list(hint) and len(texts) == 1 and raw.lstrip().startswith("["):
            raw = tomllib.loads(f"list = {raw}")["list"]
        elif is_list(hint):
            item = get_args(hint)[0]
            raw = [_converted(item, text, is_text=True) for text in texts]
        value = _converted(hint, raw, is_text=isinstance(raw, str))
    except (ValueError, RecursionError) as error:  # of TOML too: long numbers, lists nested deeply
        raise _wrong_value(key, hint, texts[-1] if len(texts) == 1 else texts, where) from error
    _check_texts(key, value, where, is_path=is_path)
    return value


def _wrong_value(key: str, hint: Any, raw: Any, where: str) -> UserError:
    """The error for a value that the type does not accept; it says what a value of another trainer
    is here."""
    remark = FOREIGN_VALUES.get(key, {}).get(str(raw).lower().replace("-", "_"), "")
    if re.fullmatch(rf"-?\d{{{len(str(_LARGEST_INTEGER))},}}", str(raw)):
        remark = "that number is too large"
    # Closer than keys: fp16 is no mistyped bf16.
    elif not remark and (near := nearest_word(str(raw), _choices(hint), at_least=0.8)):
        remark = f"did you mean {near}?"
    return UserError(
        f"{key} {where} must be {expected(hint)}, not {_shown(raw)}{remark and '; '}{remark}"
    )


def _check_texts(key: str, value: Any, where: str, *, is_path: bool) -> None:
    """Check that a run file can contain the characters of a value, and that a path is valid.

    Checked here once, because sections look up paths in many places, and each would need a message
    of its own.
    """
    for text in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(text, str):
            continue
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(
                f"{key} {where} contains a lone surrogate (half of a character); correct it"
            )
        if not is_path:
            continue
        if "\0" in text:
            raise UserError(f"{key} {where} has a null byte, which no path can contain; correct it")
        if (
            max(len(part.encode()) for part in text.split("/")) > _LONGEST_NAME
            or len(text.encode()) > _LONGEST_PATH
        ):
            raise UserError(
                f"{key} {where} is too long for a path ({len(text)} characters); correct it"
            )
        if text.startswith("~") and os.path.expanduser(text).startswith("~"):
            raise UserError(
                f"{key} {where} = {text!r} begins with the home folder of an unknown user; write "
                f"the full path"
            )


def is_list(hint: Any) -> bool:
    """Whether values of this type are written as arrays."""
    return get_origin(hint) in (tuple, list)


def _choices(hint: Any) -> list[str]:
    """The words among which a type chooses; none for other types."""
    if get_origin(hint) in (Union, UnionType):
        return [word for argument in get_args(hint) for word in _choices(argument)]
    return list(map(str, get_args(hint))) if get_origin(hint) is Literal else []


def expected(hint: Any) -> str:
    """The name of a type for messages: `a whole number`."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(map(str, arguments))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(expected(argument) for argument in arguments if argument is not NoneType)
    if is_list(hint):
        count = 2 if Ellipsis in arguments else len(arguments)
        return f"a list such as {json.dumps((['a', 'b', 'c'] if arguments[0] is str else [1, 2, 3])[:count])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(
        hint, str(hint)
    )


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _converted(hint: Any, raw: Any, *, is_text: bool = False) -> Any:
    """A value in a type of the configuration.

    Args:
        raw: From TOML, where a quoted number is no number; or the text of a flag (`is_text`).

    Raises:
        ValueError: If the type does not accept it.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        for argument in arguments:
            with suppress(ValueError):
                return _converted(argument, raw, is_text=is_text)
    elif kind in (tuple, list) and isinstance(raw, list):
        items = arguments[:1] * len(raw) if kind is list or Ellipsis in arguments else arguments
        return kind(_converted(item, value) for item, value in zip(items, raw, strict=True))
    elif hint is NoneType and is_text and raw == "null":
        return None
    elif hint is bool and (isinstance(raw, bool) or is_text and raw.lower() in _WORDS):
        return _WORDS[raw.lower()] if is_text else raw
    elif hint is str and isinstance(raw, str) or kind is Literal and raw in arguments:
        return raw
    elif hint in (int, float) and (is_text or type(raw) in (int, hint)):
        number = int(raw) if hint is int or isinstance(raw, int) else float(raw)
        # NaN would pass checks such as `if value < 0`.
        if abs(number) <= _LARGEST_INTEGER if isinstance(number, int) else math.isfinite(number):
            return hint(number)
    raise ValueError(f"not of type {hint}")


def _shown(raw: Any) -> str:
    text = json.dumps(raw, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def unknown_key(
    key: str,
    keys: Iterable[str],
    where: str,
    *,
    renamed: Mapping[str, str] = MappingProxyType({}),
    dashes: str = "",
    section: str = "",
) -> UserError:
    """The error for an unknown key: the present name of a renamed key, what replaces a removed one,
    or else the nearest key.

    Args:
        keys: The known ones.
        where: The place, for the message.
        renamed: Present names by former ones.
        dashes: `--` for a flag.
        section: Where a key without a section is first looked for.
    """
    if key in renamed:
        return UserError(f"{dashes}{key} {where} is now named {dashes}{renamed[key]}; rename it")
    if key in REMOVED:
        return UserError(f"{dashes}{key} {where} was removed: {REMOVED[key].instead}; leave it out")
    names = list(keys)
    prefix, _, name = key.rpartition(".")
    ours = FOREIGN_WORDS.get(name.replace("-", "_"), "")
    # In a section with a key of this name, that is meant: `sample.num_frames` is `sample.frames`,
    # and not `data.frames`.
    own_key = f"{prefix or section}.{ours.rpartition('.')[2] or name}"
    meant = next(
        (candidate for candidate in (own_key, ours) if candidate in names), ""
    ) or nearest_key(key, names)
    if " " in ours:
        hint = ours
    else:
        hint = f"did you mean {dashes}{meant}?" if meant else "--help all explains every key"
    return UserError(f"unknown key {dashes}{key} {where}; {hint}")
