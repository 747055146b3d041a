"""Resolving one configuration from several layers: defaults, the demo, a stored run, a run file,
flags; later layers win."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ditkit_core.config.cli_args import WHERE
from ditkit_core.config.nearest import path_remedy
from ditkit_core.config.schema import config_fields, config_sections, section_fields
from ditkit_core.config.toml import read_config_file
from ditkit_core.errors import UserError

Tree = TypeVar("Tree")


class Layer(NamedTuple):
    """The values from one place."""

    where: str
    """The place, for messages: `in run.toml`."""
    values: Mapping[str, Any]
    """Checked values by dotted key."""


def resolve(
    tree: type[Tree],
    *,
    demo: Path | None = None,
    stored: Path | None = None,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    name: str = "run",
) -> Tree:
    """Resolve a configuration.

    Args:
        tree: The configuration's dataclass; its `run.folder` is the folder of the run.
        demo: The demo's run file; `{run}` in its strings stands for the resolved `run.folder`.
        stored: Folder of a run to continue: its stored configuration is read, and `run.folder` is
            this folder.
        flags: Checked values from the command line.
        name: Names the run's folder in `runs/` if neither a layer nor the run file's name does.
    """
    # So that the runs of two run files never share a folder; a stored run has its own.
    layers = [Layer("by default", {"run.folder": f"runs/{name if file is None else file.stem}"})]
    if stored is not None:
        layers.append(_stored_layer(tree, stored))
    if file is not None:
        layers.append(Layer(f"in {file}", read_config_file(tree, file)))
    layers.append(Layer(WHERE, flags or {}))
    if stored is not None:
        other = layers[-1].values.get("run.folder")
        if other is not None and Path(other) != stored:
            raise UserError(
                f"--run {stored} and --run.folder {other} name two folders; leave one of them out"
            )
        layers.append(Layer("by --run", {"run.folder": str(stored)}))
    if demo is not None:
        values = read_config_file(tree, demo)
        # The demo writes its inputs into the run's folder, and a later layer may set another
        # folder.
        folder = _merged([layers[0], Layer("", values), *layers[1:]])["run.folder"]
        placed = {key: _placed(value, folder) for key, value in values.items()}
        layers.insert(1, Layer("in the demo's run file", placed))
    return build_config(tree, layers)


def build_config(tree: type[Tree], layers: list[Layer]) -> Tree:
    """Build the configuration from layers; later layers win."""
    values, sections = _merged(layers), {}
    origins = {key: layer.where for layer in layers for key in layer.values}
    for section, section_type in config_sections(tree).items():
        names = [field.name for field in section_fields(section_type)]
        section_values = {
            name: values[f"{section}.{name}"] for name in names if f"{section}.{name}" in values
        }
        try:
            sections[section] = section_type(**section_values)
        except UserError as error:
            message = str(error) if f"{section}." in str(error) else f"{section}: {error}"
            blamed = [
                f"{section}.{name}" for name in section_values if f"{section}.{name}" in message
            ]
            wheres = dict.fromkeys(origins[key] for key in blamed)
            raise UserError(
                f"{message} (set {' and '.join(wheres)})" if wheres else message
            ) from error
    return tree(**sections)


def _merged(layers: list[Layer]) -> dict[str, Any]:
    return {key: value for layer in layers for key, value in layer.values.items()}


def _stored_layer(tree: type, folder: Path) -> Layer:
    """A run's stored configuration, without unknown keys, which another version wrote, and without
    what is asked again on each machine."""
    file = folder / "config.toml"
    if not file.is_file():
        raise UserError(f"{folder} is not the folder of a run: {_no_run(folder)}")
    values, fields_by_key = read_config_file(tree, file, stored=True), config_fields(tree)
    return Layer(
        f"in {file}",
        {
            key: value
            for key, value in values.items()
            if value not in fields_by_key[key].asked_again
        },
    )


def _no_run(folder: Path) -> str:
    """Why a folder is not a run's, and which one may be meant."""
    if not folder.exists():
        return f"it does not exist; {path_remedy(folder)}"
    runs = (
        sorted(file.parent for file in folder.glob("*/config.toml"))[:5] if folder.is_dir() else []
    )
    if (folder.parent / "config.toml").is_file():
        runs = [folder.parent]
    remedy = (
        f"name {' or '.join(map(str, runs))}"
        if runs
        else "give the folder that was set as run.folder"
    )
    return f"it has no config.toml; {remedy}"


def _placed(value: Any, folder: str) -> Any:
    """A value of the demo, with `{run}` replaced by the run's folder."""
    if isinstance(value, str):
        return value.replace("{run}", folder)
    return tuple(_placed(item, folder) for item in value) if isinstance(value, tuple) else value
