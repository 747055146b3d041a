"""A quantized base stored on disk, so that it is converted once: `base.quantized_cache`.

A file contains every loaded tensor of a model under our names, codes and scales included, and their digests at the end. Its name is a
digest of everything that it was made from, so that a stale file is never used: other weights, other merges or another model have another name.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.adapters.inject import canonical_name, is_adapter_name
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.encoding.claims import alone_with
from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path, remove_unfinished
from ditkit_core.io.safetensors import SafetensorsSource, write_safetensors
from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.quantized_linear import QuantizedLinear, final_dtype
from ditkit_core.weights.load import Scratch
from ditkit_core.weights.rows import unsharded

if TYPE_CHECKING:
    from ditkit_core.distributed.division import Division

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
        model: nn.Module | StagedModel,
        convert: Callable[[], None],
        *,
        device_of: Callable[[str], torch.device],
        dtype_of: Callable[[str], torch.dtype],
        division: "Division | None" = None,
        say: Callable[[str], None],
    ) -> None:
        """Load a model's base from the file if it exists and is intact, or convert it and write the file.

        Of several processes that find no file, one converts; the others wait and read what it has written.

        Args:
            model: The model, built on `meta`, with or without adapters.
            convert: Loads the same tensors from the files of the base (`load_into`).
            device_of: Device of a parameter, by our name.
            dtype_of: Its dtype there, if it is not quantized.
            division: Of the rows over ranks. They read the tensors in turn and send them to each other, so that each can be verified as a whole.
            say: Called with one line: the file that was read or written, or what is wrong with it.
        """
        read = partial(self._read, model, device_of=device_of, dtype_of=dtype_of, division=division, say=say)
        state = self._written()
        if read():
            return
        with alone_with(self.file) if division is None else nullcontext():  # ranks that divide it convert together
            # Of these ranks one could see the file of another run a moment before the others, and wait for them to read it.
            if division is None and self._written() != state and read():
                return
            convert()
            self._write(_entries(model, dtype_of), division, say)

    def _written(self) -> int:
        """When the file was written; 0 if it is missing."""
        return self.file.stat().st_mtime_ns if self.file.exists() else 0

    def _read(
        self,
        model: nn.Module | StagedModel,
        *,
        device_of: Callable[[str], torch.device],
        dtype_of: Callable[[str], torch.dtype],
        division: "Division | None",
        say: Callable[[str], None],
    ) -> bool:
        """Whether the base could be read. If not, some parameters may be set already, and have to be loaded again."""
        ranks, entries = Ranks() if division is None else division.ranks, _entries(model, dtype_of)
        if not all(ranks.all_gather_object(self.file.exists())):
            return False
        opened, problem = None, ""
        try:
            opened = self._opened(entries)
        except UserError as error:
            problem = str(error)
        if not (problem := _of_any(ranks, problem)) and opened is not None:
            read = _read_whole if division is None else partial(_read_rows, division=division)
            problem = _of_any(ranks, read(*opened, entries, device_of))
        if problem:
            say(f"base.quantized_cache: {self.file} is damaged or foreign ({problem}); the base is quantized again")
            return False
        say(f"base.quantized_cache: the quantized base is read from {self.file}")
        return True

    def _opened(self, entries: Mapping[str, _Entry]) -> tuple[SafetensorsSource, Tensor]:
        """The file, with the digests of its tensors in their order."""
        source = SafetensorsSource.open(self.file)
        expected = {name: (entry.shape, entry.dtype) for name, entry in entries.items()} | _digests_about(len(entries))
        shapes = {name: (stored.shape, stored.dtype) for name, stored in source.tensors.items()}
        if source.metadata.get(_KEY) != self.key or shapes != expected:
            raise UserError("it was not made for this base")
        return source, source.read(_DIGESTS)

    def _write(self, entries: dict[str, _Entry], division: "Division | None", say: Callable[[str], None]) -> None:
        """Write the base that was just loaded. If the disk is full, no file is left behind and the run goes on.

        With a `division` the first rank writes, and the others send it their rows.
        """
        if division is None:
            self._write_file(entries, lambda name: entries[name].tensor.detach(), say)
            return
        ranks = division.ranks

        def gathered(name: str) -> Tensor:
            ranks.ask(name)
            return unsharded(entries[name].tensor, division)

        def send(name: str) -> None:
            unsharded(entries[name].tensor, division)

        ranks.on_first(lambda: self._write_file(entries, gathered, say), send)

    def _write_file(
        self, entries: dict[str, _Entry], value_of: Callable[[str], Tensor], say: Callable[[str], None]
    ) -> None:
        digests: list[bytes] = []

        def tensor_of(name: str) -> Tensor:
            # Called in the order of `about`, so all digests are known when this last entry is written.
            if name == _DIGESTS:
                return torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)
            tensor = value_of(name).to("cpu").contiguous()
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


def _of_any(ranks: Ranks, problem: str) -> str:
    """The first problem that a rank has; empty if none has one."""
    return next(filter(None, ranks.all_gather_object(problem)), "")


def _read_whole(
    source: SafetensorsSource,
    digests: Tensor,
    entries: Mapping[str, _Entry],
    device_of: Callable[[str], torch.device],
) -> str:
    """Give a model its tensors until one is damaged; returns what is wrong with that."""
    scratch = Scratch(torch.uint8)
    for (name, entry), digest in zip(entries.items(), digests, strict=True):
        stored, device = source.tensors[name], device_of(entry.ours)
        # A tensor that goes to a GPU is read into a reused buffer; one that stays on the host needs memory of its own.
        buffer = None if device.type == "cpu" else scratch.of(stored.num_bytes)
        try:
            tensor = _verified(source, name, digest, buffer)
        except UserError as error:
            return str(error)
        _put(entry, tensor if tensor.device == device else tensor.to(device, copy=True))
    return ""


def _read_rows(
    source: SafetensorsSource,
    digests: Tensor,
    entries: Mapping[str, _Entry],
    device_of: Callable[[str], torch.device],
    *,
    division: "Division",
) -> str:
    """The same for this rank's rows. Ranks read the tensors in turn and send them to the others, so that each is verified as a whole."""
    passing, problem = Scratch(torch.uint8), ""
    for index, ((name, entry), digest) in enumerate(zip(entries.items(), digests, strict=True)):
        stored, device = source.tensors[name], device_of(entry.ours)
        host = passing.of(stored.num_bytes)
        if division.reads(index) and not problem:
            try:
                _verified(source, name, digest, host)
            except UserError as error:
                problem = str(error)  # and go on: the others wait for the next tensors
        shared = division.share(host.to(device), index)
        tensor = shared.view(stored.dtype).view(stored.shape)
        if (rows := division.rows(entry.tensor)) is None:
            _put(entry, tensor.clone())
        else:
            division.put(entry.owner, entry.leaf, tensor[rows.start : rows.stop].clone())
    return problem


def _verified(source: SafetensorsSource, name: str, digest: Tensor, buffer: Tensor | None) -> Tensor:
    """A tensor of the file. Every one is verified: a damaged file would otherwise train on wrong weights without any error."""
    tensor = source.read(name, buffer)
    if _digest(tensor) != bytes(digest.tolist()):
        raise UserError(f"{name!r} is not what was written")
    return tensor


def find_cache(
    folder: str,
    kind: str,
    model: nn.Module | StagedModel,
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
        if strength and (file.modules or file.differences)
    ]
    layers = [
        (name, entry.shape, str(entry.dtype), getattr(entry.owner, "kind", ""))
        for name, entry in _entries(model, dtype_of).items()
    ]
    made_of = json.dumps([_VERSION, kind, source.fingerprint(), merges, layers])
    return QuantizedCache(local_path(folder), hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest())


def _entries(model: nn.Module | StagedModel, dtype_of: Callable[[str], torch.dtype]) -> dict[str, _Entry]:
    """The parameters and buffers of a model's base, scales included, by canonical name.

    The order is part of the key of a file: in another one, the files that users have would not be found.
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
