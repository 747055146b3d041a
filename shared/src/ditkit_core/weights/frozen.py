"""Frozen encoders from safetensors: a library's module built on `meta`, then filled by our own strict reader.

One path for folders and single files. The libraries' own loaders would only warn about a missing tensor, and go on with
random numbers in its place.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from ditkit_core.errors import UserError
from ditkit_core.io.files import read_json_object
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.load import Advice, load_into, match
from ditkit_core.weights.quantize import hold_as_stored

Module = TypeVar("Module", bound=nn.Module)

_COUNTED = (".safetensors", ".json", ".model", ".txt")
_WHOLE_BYTES = 2**28
_SAMPLED_BYTES = 2**20
_SAMPLES = 64


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`.

    Raises:
        UserError: If it is missing or no JSON object.
    """
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} has no config.json; name the part's folder, or a single .safetensors file")
    return read_json_object(path)


def find_weights(
    components: ModelPaths,
    part: str,
    config_of_file: Callable[[SafetensorsSource], dict[str, Any]],
    *,
    kind: str = "",
    remedy: str = "",
    safe_names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[SafetensorsSource, dict[str, Any]]:
    """Where a part's weights lie, their headers read, and its configuration; nothing is loaded.

    Args:
        components: Where the parts of the model are.
        part: As `ModelPaths.locate` takes it.
        config_of_file: What a single file's shapes say in place of a folder's `config.json`.
        kind: The library's class that the configuration has to be of, if it names one; empty for any.
        remedy: What to do about another.
        safe_names: As `ModelPaths.locate` takes them.

    Raises:
        UserError: If there are none, a file is damaged, or they are those of another model.
    """
    source = open_weights(components.locate(part, safe_names=safe_names))
    config = read_config(source.path) if source.path.is_dir() else config_of_file(source)
    if kind and (found := config.get("_class_name", kind)) != kind:
        raise UserError(f"{source.path} holds {found}, not {kind}; {remedy}")
    return source, config


def build_frozen(make: Callable[[Any], Module], config: Mapping[str, Any], source: SafetensorsSource) -> Module:
    """A library's module on `meta`, made from its configuration.

    Raises:
        UserError: If the configuration makes none.
    """
    try:
        with torch.device("meta"):
            return make(config)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{source.path}: its configuration makes no model ({reason}); fetch its config.json again"
        ) from error


def load_frozen(
    model: nn.Module,
    source: SafetensorsSource,
    names: StateDictNames,
    *,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
    key: str = "the part's path in [model]",
    tied: Mapping[str, str] | None = None,
    ignore: frozenset[str] = frozenset(),
) -> None:
    """Give every parameter of a module on `meta` its value, and freeze it; matrices that are 8-bit codes with a scale stay that.

    Args:
        model: The module; in eval mode afterwards.
        source: The file or folder.
        names: Names of the file against the module's.
        device: Where the weights go.
        dtype_of: The dtype of a parameter there.
        key: The setting that names the part, for messages.
        tied: Modules that share the weight of another, by name: not read, but set to the other.
        ignore: Names of the file that may be left over.

    Raises:
        UserError: If a tensor is missing, unexpected or mis-shaped, or the file is damaged.
    """
    tied = tied or {}
    skipped = {f"{name}.weight" for name in tied}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in skipped}
    remedy = f"set {key} to a whole folder or file of it"
    advice = Advice(
        described_by="the part's configuration", if_unknown=remedy, if_depth_differs=remedy, if_shapes_differ=remedy
    )
    mapping = match(source, names, wanted, ignore=lambda name: name in ignore | skipped, advice=advice)
    hold_as_stored(model, source, mapping)
    load_into(model, source, mapping, device_of=lambda name: device, dtype_of=dtype_of)
    for name, other in tied.items():
        model.get_submodule(name).weight = model.get_submodule(other).weight
    model.requires_grad_(False).eval()


@dataclass
class FrozenModule:
    """A library's module that is read from its files when it is needed, and freed afterwards."""

    make: Callable[[Mapping[str, Any]], nn.Module]
    """Builds the module from its configuration, on the default device."""
    config: Mapping[str, Any]
    source: SafetensorsSource
    """The file or folder of the weights."""
    names: StateDictNames
    """Names of the file against the module's."""
    device: torch.device
    dtype: torch.dtype
    """Of all weights on the device."""
    key: str
    """The setting that names the part, for messages."""
    ignore: frozenset[str] = frozenset()
    """Names of the file that may be left over."""
    module: Any = field(default=None, init=False)
    """None while it is not loaded; `Any`, because the library's class is known to the caller alone."""

    def load(self) -> None:
        """Read the weights onto the device, unless they are there.

        Raises:
            UserError: If the weights do not fit the configuration, or a file is damaged.
        """
        if self.module is not None:
            return
        module = build_frozen(self.make, self.config, self.source)
        load_frozen(
            module,
            self.source,
            self.names,
            device=self.device,
            dtype_of=lambda name: self.dtype,
            key=self.key,
            ignore=self.ignore,
        )
        # Set last: a module whose weights could not all be read never counts as loaded.
        self.module = module

    def unload(self) -> None:
        """Free the weights."""
        self.module = None


def fingerprint(path: Path, *settings: object) -> str:
    """Digest of a part's files and of the settings it is used with, without loading it.

    Of a large weight file only the size and 64 MiB spread over it, the header included, are read: two sets of weights
    differ nearly everywhere, and reading 11 GB at each start would take longer than all else with a complete cache.

    Args:
        path: File or folder; of a folder, the weights, configurations and tokenizer files in it.
        settings: What else changes the part's results.
    """
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    files = sorted(file for file in path.iterdir() if file.suffix in _COUNTED) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with open(file, "rb") as stream:
            if size <= _WHOLE_BYTES:
                digest.update(stream.read())
                continue
            for sample in range(_SAMPLES):
                stream.seek(sample * (size - _SAMPLED_BYTES) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()
