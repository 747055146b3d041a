"""The run file that the page edits: its text is the truth, and the command's own reader checks
every change before it is saved."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_values, json_schema
from ditkit_core.errors import UserError
from ditkit_core.io.files import read_text, write_text
from ditkit_core.run.config import RunConfig
from ditkit_ui import texts


class RunFile:
    """A run file while it is edited.

    Attributes:
        path: The file.
        text: What the page shows; the file has it as soon as it is valid.
        config: The configuration of the last valid text.
    """

    def __init__(self, path: Path):
        self.path = path
        self._earlier: list[str] = []
        self.load()

    def load(self) -> None:
        """Read the file.

        Raises:
            UserError: If the command would not read it; the text is there to be corrected.
        """
        self.text = self._saved = read_text(self.path)
        self.config = checked(self.text, self.path)

    def edit(self, text: str) -> None:
        """Take a new text, and save it if the command would read it.

        Raises:
            UserError: The message of the command; or the file was changed meanwhile. The file then
                stays as it is.
        """
        self.text = text
        config = checked(text, self.path)
        if read_text(self.path) != self._saved:
            raise UserError(texts.CHANGED_ON_DISK.format(file=self.path))
        if text != self._saved:
            write_text(self.path, text)
            self._earlier.append(self._saved)
        self._saved, self.config = text, config

    def set(self, values: Mapping[str, Any]) -> None:
        """Change keys, by dotted name, in the text, whose comments and order stay; None removes
        one, which is then at its default. Errors are those of `edit`."""
        try:
            document = tomlkit.parse(self.text)
        except TOMLKitError:  # the command's message says more
            checked(self.text, self.path)
            raise
        for key, value in values.items():
            section, name = key.split(".")
            if value is not None:
                if section not in document:
                    document[section] = tomlkit.table()
                document[section][name] = value
            elif name in document.get(section, {}):
                del document[section][name]
        self.edit(tomlkit.dumps(document))

    def undo(self) -> bool:
        """Go back to the text before the last saved change; False if there is none."""
        if not self._earlier:
            return False
        text = self._earlier.pop()
        self.edit(text)
        self._earlier.pop()  # the undone change itself
        return True

    def values(self) -> dict[str, Any]:
        """The keys that the file itself sets, by dotted name."""
        tables = tomllib.loads(self._saved)
        return {
            f"{section}.{name}": value
            for section, table in tables.items()
            for name, value in table.items()
        }


def checked(text: str, path: Path) -> RunConfig:
    """The configuration of a text, as the command reads it out of a file.

    Args:
        path: The file that the text is for, which messages name.

    Raises:
        UserError: The message of the command.
    """
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name  # the same name: the run's folder has it by default
        copy.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            return resolve(RunConfig, file=copy)
        except UserError as error:
            raise UserError(str(error).replace(str(copy), path.name)) from error


def changed_values(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations: for each key both values."""
    old, new = config_values(before), config_values(after)
    return {key: (old[key], new[key]) for key in new if old[key] != new[key]}


def schema(presets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The JSON Schema of every key, by dotted name: its description, default and accepted
    values."""
    tree = json.loads(json_schema(RunConfig, "", {"model.preset": presets}))
    return {
        f"{section}.{name}": described
        for section, table in tree["properties"].items()
        for name, described in table["properties"].items()
    }


def value_of(text: str, accepted: Mapping[str, Any]) -> Any:
    """The value that a person typed into a field: a text as it is, and anything else as TOML has
    it. None where the field is empty."""
    if not text.strip():
        return None
    if accepted.get("type") == "string":
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # the command says what is wrong with it


def text_of(value: Any) -> str:
    """A value as a field shows it, so that `value_of` reads it back."""
    if value is None or isinstance(value, str):
        return value or ""
    return tomlkit.item(value).as_string()
