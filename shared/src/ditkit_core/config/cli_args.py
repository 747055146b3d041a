"""The flags of a command: reading them from argv, and the help text."""

from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from ditkit_core.config.schema import config_fields, config_sections, field_docs, renamed_keys
from ditkit_core.config.validation import unknown_key, value_from_text
from ditkit_core.errors import UserError

WHERE = "on the command line"


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every command; they are handled before a stage starts."""

    config: str = ""
    """The run file; the same as the first argument."""
    run: str = ""
    """Run folder to continue: its stored configuration is read, and other settings take precedence over it."""
    print_config: bool = False
    """Print the resolved configuration as TOML and stop."""
    version: bool = False
    """Print versions and stop."""
    help: bool = False
    """Print this help and stop."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A parsed and checked command line."""

    values: Mapping[str, Any]
    """Configuration values by dotted key."""
    common: CommonOptions
    options: Any
    """The command's own options."""


def read_flags(argv: Sequence[str], tree: type, options_type: type) -> Flags:
    """Read a command line.

    Args:
        argv: Arguments after the program's name: `[run.toml] [--section.key value ...] [--option [value] ...]`.
        tree: The configuration's dataclass.
        options_type: Dataclass of the command's own options.

    Returns:
        The values and options that were given.

    Raises:
        UserError: If a flag is unknown, lacks its value, or has a value of the wrong type.
    """
    keys = config_fields(tree)
    hints = {key: field.type for key, field in keys.items()}
    hints |= _option_hints(CommonOptions) | _option_hints(options_type)
    values = {}
    for name, given in _split(argv, hints, renamed_keys(tree)).items():
        is_path = name in keys and keys[name].holds != "value"
        shown = name if name in keys else f"--{name}"
        values[name] = value_from_text(shown, hints[name], given, WHERE, is_path=is_path)

    def gather(kind: type) -> Any:
        return kind(**{field.name: values[_flag(field.name)] for field in fields(kind) if _flag(field.name) in values})

    return Flags(
        values={key: value for key, value in values.items() if key in keys},
        common=gather(CommonOptions),
        options=gather(options_type),
    )


def _split(argv: Sequence[str], hints: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, list[str]]:
    """The texts that each flag was given, in order; the argument without a flag is the run file."""
    texts: dict[str, list[str]] = {}
    rest = iter(argv)
    for argument in rest:
        name, equals, text = argument.removeprefix("--").partition("=")
        if argument == "-h":
            name = "help"
        elif not argument.startswith("--"):
            name, equals, text = "config", "=", argument
            if argument.startswith("-"):
                raise UserError(f"unknown flag {argument} {WHERE}; flags start with --")
        if name not in hints:
            raise unknown_key(name, hints, WHERE, renamed=renamed, flag=True)
        if hints[name] is bool and "." not in name:  # an option is a switch; a configuration key takes true or false
            text = text if equals else "true"
        elif not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise UserError(f"--{name} {WHERE} lacks its value; write --{name}=VALUE if the value starts with --")
        texts.setdefault(name, []).append(text)
    if len(texts.get("config", [])) > 1:
        raise UserError(f"two run files {WHERE}: {', '.join(texts['config'])}; give one, and flags for what differs")
    return texts


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _option_hints(options_type: type) -> dict[str, Any]:
    return {_flag(name): hint for name, hint in get_type_hints(options_type).items()}


def format_help(prog: str, about: str, tree: type, options_type: type) -> str:
    """The help text: options, then every key of the configuration with its meaning, type and default."""
    parser = ArgumentParser(
        prog=prog,
        description=about,
        add_help=False,
        usage="%(prog)s [run.toml] [--section.key value ...]",
        epilog="""A list is written as in TOML, --sample.prompts '["a cat", "a dog"]', or the flag is repeated.""",
    )
    parser.add_argument("file", metavar="run.toml", nargs="?", default=SUPPRESS, help="the run file; flags win over it")
    for kind in (options_type, CommonOptions):
        for name, hint in _option_hints(kind).items():
            form: dict[str, Any] = {"action": "store_true"} if hint is bool else {"metavar": name.upper()}
            # A prefix keeps option names apart from section names: jsonargparse would read --adapter as the whole section [adapter].
            form |= {"dest": f"option_{name}", "help": field_docs(kind).get(name.replace("-", "_"), "")}
            parser.add_argument(f"--{name}", default=SUPPRESS, **form)
    groups = {
        section: parser.add_argument_group(f"[{section}]", (cls.__doc__ or "").strip().split("\n\n")[0])
        for section, cls in config_sections(tree).items()
    }
    for key, field in config_fields(tree).items():
        group = groups[key.split(".")[0]]
        group.add_argument(f"--{key}", type=field.type, default=field.default, help=field.doc)
    return parser.format_help()
