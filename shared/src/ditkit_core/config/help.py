"""The help texts of a command: the keys that matter by default, a section or one key or everything
on request."""

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from ditkit_core.config.nearest import nearest_key
from ditkit_core.config.schema import ConfigField, config_fields, config_sections, field_docs, plain
from ditkit_core.config.validation import expected
from ditkit_core.errors import UserError

SHORT, ALL = "short", "all"
_LEFT, _WIDEST = 27, 120
"""Columns of the flags, and of a line."""

Row = tuple[str, str]
"""A flag with its value, and what it does."""


def format_help(
    prog: str,
    about: str,
    tree: type,
    options: Sequence[type],
    *,
    topic: str = SHORT,
    keys: Mapping[str, Sequence[str]],
) -> str:
    """The help text.

    Args:
        options: Dataclasses of the command's options.
        topic: What is asked for: `all`, a section, a key, or `short` for the options and the keys
            that matter.
        keys: The keys that matter, by title.
    """
    fields_by_key, sections = config_fields(tree), config_sections(tree)
    if topic in fields_by_key:
        return _rows([_row(fields_by_key[topic])])
    if topic in sections:
        return _section(tree, topic)
    rows_of_options = _rows(_options(options, complete=topic == ALL))
    parts = [_opening(prog, about), f"Options:\n{rows_of_options}"]
    if topic == ALL:
        return "\n\n".join([*parts, *(_section(tree, section) for section in sections)])
    if topic != SHORT:
        near = nearest_key(topic, [*fields_by_key, *sections])
        remedy = (
            f"did you mean {near}?"
            if near
            else f"name a key, {ALL}, or a section: {', '.join(sections)}"
        )
        raise UserError(f"--help {topic}: there is no such topic; {remedy}")
    for title, named in keys.items():
        rows = _rows(_short(fields_by_key[key]) for key in named)
        parts.append(f"{title}:\n{rows}")
    more = f"{prog} --help {ALL} explains every key, --help SECTION those of a section: {', '.join(sections)}."
    parts.append("\n".join(textwrap.wrap(more, _width())))
    return "\n\n".join(parts)


def _section(tree: type, section: str) -> str:
    doc = config_sections(tree)[section].__doc__ or ""
    first_paragraph, *_ = doc.split("\n\n")
    title = " ".join(first_paragraph.split())
    rows = [
        _row(field) for key, field in config_fields(tree).items() if key.startswith(f"{section}.")
    ]
    return "\n".join([*textwrap.wrap(title, _width()), _rows(rows)])


def _opening(prog: str, about: str) -> str:
    return (
        f"usage: {prog} [run.toml] [--section.key VALUE ...] [--option ...]\n\n{about}\n"
        """A list is written as in TOML, --sample.prompts '["a cat", "a dog"]', or the flag is repeated."""
    )


def _options(kinds: Sequence[type], *, complete: bool) -> Iterable[Row]:
    for kind in kinds:
        hints, docs = get_type_hints(kind), field_docs(kind)
        for field in fields(kind):
            flag = f"--{field.name.replace('_', '-')}"
            doc = docs.get(field.name, "")
            value = "" if hints[field.name] is bool else " VALUE"
            yield flag + value, doc if complete else _sentence(doc)


def _row(field: ConfigField) -> Row:
    suffix = "" if field.default is None else f"; default {_shown(field.default)}"
    return f"--{field.key}", f"{field.doc} ({expected(field.type)}{suffix})"


def _short(field: ConfigField) -> Row:
    suffix = f" [{_shown(field.default)}]" if field.default else ""
    return f"--{field.key}", _sentence(field.doc) + suffix


def _shown(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def _sentence(doc: str) -> str:
    """The first sentence, which is enough to choose by."""
    return re.split(r"(?<=[.;:])\s(?![^()]*\))", doc, maxsplit=1)[0].rstrip(".;:") + "."


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)


def _rows(rows: Iterable[Row]) -> str:
    lines = []
    for left, text in rows:
        wrapped = textwrap.wrap(text, max(40, _width() - _LEFT - 3)) or [""]
        head = f"  {left:<{_LEFT}} "
        if len(left) > _LEFT:
            lines.append(f"  {left}")
            head = " " * (_LEFT + 3)
        lines += [(head + wrapped[0]).rstrip(), *(" " * (_LEFT + 3) + line for line in wrapped[1:])]
    return "\n".join(lines)
