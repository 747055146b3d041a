"""The flags of a command, read from argv."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from ditkit_core.config.help import SHORT
from ditkit_core.config.schema import config_fields, renamed_keys
from ditkit_core.config.validation import unknown_key, value_from_text
from ditkit_core.errors import UserError

WHERE = "on the command line"


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every command; they are handled before a stage starts."""

    config: str = ""
    """The run file; the same as the first argument."""
    run: tuple[str, ...] = ()
    """Run folder to continue: its stored configuration is read, and other settings take precedence
    over it."""
    print_config: bool = False
    """Print the resolved configuration as TOML and stop."""
    changed: bool = False
    """Print only what differs from the defaults; for --print-config, which it implies."""
    print_schema: bool = False
    """Print the JSON Schema of run files, by which editors complete and check them, and stop."""
    version: bool = False
    """Print versions and stop."""
    help: str = ""
    """Print this help and stop; `--help all`, `--help data` (a section) and `--help data.fps` (a
    key) explain more."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A parsed and checked command line."""

    values: Mapping[str, Any]
    """Configuration values by dotted key."""
    common: CommonOptions
    options: Any
    """The command's own options."""


def read_flags(argv: Sequence[str], tree: type, options_type: type, *, section: str = "") -> Flags:
    """Read a command line.

    Args:
        argv: Arguments after the program's name: `[run.toml] [--section.key value ...] [--option
            [value] ...]`.
        options_type: Dataclass of the command's own options.
        section: The section that the command is about: an unknown flag without a section is first
            looked for there.

    Returns:
        The values and options that were given.
    """
    keys = config_fields(tree)
    hints = {key: field.type for key, field in keys.items()}
    hints |= _option_hints(CommonOptions) | _option_hints(options_type)
    values = {}
    for name, texts in _split(argv, hints, renamed_keys(tree), section).items():
        is_path = name in keys and keys[name].is_path
        shown = name if name in keys else f"--{name}"
        values[name] = value_from_text(shown, hints[name], texts, WHERE, is_path=is_path)

    def gather(kind: type) -> Any:
        return kind(
            **{
                field.name: values[_flag(field.name)]
                for field in fields(kind)
                if _flag(field.name) in values
            }
        )

    return Flags(
        values={key: value for key, value in values.items() if key in keys},
        common=gather(CommonOptions),
        options=gather(options_type),
    )


def _split(
    argv: Sequence[str], hints: Mapping[str, Any], renamed: Mapping[str, str], section: str
) -> dict[str, list[str]]:
    """The texts that each flag was given, in order; the argument without a flag is the run file."""
    texts: dict[str, list[str]] = {}
    rest = deque(argv)
    while rest:
        argument = rest.popleft()
        name, equals, text = argument.removeprefix("--").partition("=")
        if argument == "-h":
            name = "help"
        elif not argument.startswith("--"):
            name, equals, text = "config", "=", argument
            if argument.startswith("-"):
                raise UserError(f"unknown flag {argument} {WHERE}; flags start with --")
        if name not in hints:
            raise unknown_key(name, hints, WHERE, renamed=renamed, dashes="--", section=section)
        # an option is a switch; a configuration key takes true or false
        if hints[name] is bool and "." not in name:
            text = text if equals else "true"
        elif name == "help" and not equals:
            follows = rest[0] if rest else "-"
            text = SHORT if follows.startswith("-") or follows.endswith(".toml") else rest.popleft()
        elif not equals:
            text = rest.popleft() if rest else "--"
            if text.startswith("--"):
                raise UserError(
                    f"--{name} {WHERE} lacks its value; write --{name}=VALUE if the value starts "
                    f"with --"
                )
        texts.setdefault(name, []).append(text)
    if len(texts.get("config", [])) > 1:
        raise UserError(
            f"two run files {WHERE}: {', '.join(texts['config'])}; give one, and flags for what "
            f"differs"
        )
    return texts


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _option_hints(options_type: type) -> dict[str, Any]:
    return {_flag(name): hint for name, hint in get_type_hints(options_type).items()}
