"""A quantized base stored on disk, so that it is converted once: `base.quantized_cache`.

A file contains every loaded tensor of a model under our names, codes and scales included, and their digests at the end. Its name is a
digest of everything that it was made from, so that a stale file is never used: other weights, other merges or another model have another name.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.adapters.inject import canonical_name, is_adapter_name
from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path, remove_unfinished
from ditkit_core.io.safetensors import SafetensorsSource, write_safetensors
from ditkit_core.nn.quantized_linear import QuantizedLinear, final_dtype
from ditkit_core.weights.load import Scratch

_VERSION = 1  # of the layouts: raise it when the same weights are to be quantized to other codes or scales
_DIGESTS, _KEY, _DIGEST_BYTES = "digests", "ditkit.quantized_base", 16


@dataclass(frozen=True)
class _Entry:
    """A parameter or buffer of the base."""

    owner: nn.Module
    leaf: str
    ours: str
    """Our name of the parameter that it belongs to; for a scale, the name of the weight."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Its dtype after loading."""

    @property
    def tensor(self) -> Tensor:
        """The tensor in the model."""
        tensor: Tensor = self.owner.get_parameter(self.leaf) if self.is_parameter else self.owner.get_buffer(self.leaf)
        return tensor

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer."""
        return self.owner._parameters.get(self.leaf) is not None


@dataclass(frozen=True)
class QuantizedCache:
    """The file of one quantized base."""

    folder: Path
    key: str

    @property
    def file(self) -> Path:
        """Its path."""
        return self.folder / f"{self.key}.safetensors"

    def load(
        self,
        model: nn.Module,
        *,
        device_of: Callable[[str], torch.device],
        dtype_of: Callable[[str], torch.dtype],
        on_tensor: Callable[[str, nn.Module], None] | None = None,
        say: Callable[[str], None],
    ) -> bool:
        """Load a model's base from the file, if it exists and is intact: the same tensors as from `load_into`.

        Args:
            model: The model, built on `meta`, with or without adapters.
            device_of: Device of a parameter, by our name.
            dtype_of: Its dtype there, if it is not quantized.
            on_tensor: Called with our name and module of each parameter once it is loaded.
            say: Called with one line: the file that was read, or what is wrong with it.

        Returns:
            Whether it was loaded. If not, some parameters may be set already, and have to be loaded again.
        """
        if not self.file.exists():
            return False
        try:
            source = SafetensorsSource.open(self.file)
            entries = _entries(model, dtype_of)
            self._check(source, entries)
            digests, scratch = source.read(_DIGESTS), Scratch(torch.uint8)
            # Every tensor is verified: a damaged file would otherwise train on wrong weights without any error.
            for (name, entry), digest in zip(entries.items(), digests, strict=True):
                stored, device = source.tensors[name], device_of(entry.ours)
                # A tensor that goes to a GPU is read into a reused buffer; one that stays on the host needs memory of its own.
                buffer = None if device.type == "cpu" else scratch.of(stored.num_bytes)
                tensor = source.read(name, buffer)
                if _digest(tensor) != bytes(digest.tolist()):
                    raise UserError(f"{name!r} is not what was written")
                _put(entry, tensor if tensor.device == device else tensor.to(device, copy=True))
                if on_tensor is not None and entry.leaf == entry.ours.rpartition(".")[2]:
                    on_tensor(entry.ours, entry.owner)
        except UserError as error:
            say(f"base.quantized_cache: {self.file} is damaged or foreign ({error}); the base is quantized again")
            return False
        say(f"base.quantized_cache: the quantized base is read from {self.file}")
        return True

    def _check(self, source: SafetensorsSource, entries: dict[str, _Entry]) -> None:
        expected = {name: (entry.shape, entry.dtype) for name, entry in entries.items()} | _digests_about(len(entries))
        found = {name: (stored.shape, stored.dtype) for name, stored in source.tensors.items()}
        if source.metadata.get(_KEY) != self.key or found != expected:
            raise UserError("it was not made for this base")

    def write(self, model: nn.Module, *, dtype_of: Callable[[str], torch.dtype], say: Callable[[str], None]) -> None:
        """Write the base of a model that was just loaded. If the disk is full, no file is left behind and the run goes on."""
        entries = _entries(model, dtype_of)
        digests: list[bytes] = []

        def tensor_of(name: str) -> Tensor:
            # Called in the order of `about`, so all digests are known when this last entry is written.
            if name == _DIGESTS:
                return torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)
            tensor = entries[name].tensor.detach().to("cpu").contiguous()
            digests.append(_digest(tensor))
            return tensor

        about = {name: (entry.shape, entry.dtype) for name, entry in entries.items()} | _digests_about(len(entries))
        remove_unfinished(self.folder.glob(".*.tmp"))  # of a process that was killed here, many GiB each
        try:
            write_safetensors(self.file, about, tensor_of, {_KEY: self.key})
        except UserError as error:
            say(f"base.quantized_cache: the quantized base is not stored ({error})")
            return
        say(f"base.quantized_cache: the quantized base is written to {self.file}")


def find_cache(
    folder: str,
    kind: str,
    model: nn.Module,
    source: SafetensorsSource,
    merged: Sequence[tuple[AdapterFile, float]],
    *,
    dtype_of: Callable[[str], torch.dtype],
) -> QuantizedCache | None:
    """The file for a quantized base, whether it exists or not; None if none is configured.

    Args:
        folder: `base.quantized_cache`.
        kind: `base.quantize`.
        model: The model, on `meta`, its layers quantized already.
        source: The base's files.
        merged: Adapters that are merged into it, with their strengths.
        dtype_of: Dtype after loading of a parameter that is not quantized, by our name.
    """
    if not folder or kind == "none":
        return None
    merges = [
        (file.source.fingerprint(), strength, [(name, m.rank, m.scale, m.use_dora) for name, m in file.modules.items()])
        for file, strength in merged
    ]
    layers = [
        (name, entry.shape, str(entry.dtype), getattr(entry.owner, "kind", ""))
        for name, entry in _entries(model, dtype_of).items()
    ]
    made_of = json.dumps([_VERSION, kind, source.fingerprint(), merges, layers])
    return QuantizedCache(local_path(folder), hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest())


def _entries(model: nn.Module, dtype_of: Callable[[str], torch.dtype]) -> dict[str, _Entry]:
    """The parameters and buffers of a model's base, scales included, by canonical name.

    Scales come before weights, because `on_tensor` reports a weight as complete, which needs its scales.
    """
    entries: dict[str, _Entry] = {}
    for full, tensor in sorted(model.state_dict(keep_vars=True).items(), key=lambda item: item[0].endswith(".weight")):
        name = canonical_name(full)
        if is_adapter_name(name):
            continue
        owner_name, _, leaf = full.rpartition(".")
        owner = model.get_submodule(owner_name)
        is_part = isinstance(owner, QuantizedLinear) and leaf in owner.values()
        ours = f"{name.removesuffix(leaf)}weight" if is_part else name
        dtype = final_dtype(owner, leaf, dtype_of(name))
        entries[name] = _Entry(owner, leaf, ours, tuple(tensor.shape), dtype)
    return entries


def _put(entry: _Entry, tensor: Tensor) -> None:
    if entry.is_parameter:
        entry.owner._parameters[entry.leaf] = nn.Parameter(tensor, requires_grad=entry.tensor.requires_grad)
    else:
        entry.owner._buffers[entry.leaf] = tensor


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).numpy().data, digest_size=_DIGEST_BYTES).digest()


def _digests_about(num: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {_DIGESTS: ((num, _DIGEST_BYTES), torch.uint8)}
