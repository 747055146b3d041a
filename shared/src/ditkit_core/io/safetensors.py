"""Reading and writing safetensors files one tensor at a time.

The bytes of a tensor are read directly into the memory that it stays in. Files are not
memory-mapped: mapped pages count as memory of the process as long as any tensor of the file exists,
so the host's peak would be twice the model. On Windows a mapped file cannot be replaced.
"""

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.config.foreign_files import HEAD_BYTES, is_other_weights, is_safetensors, mark_of
from ditkit_core.config.nearest import path_remedy
from ditkit_core.errors import UserError
from ditkit_core.io.files import (
    atomic_write,
    head_of,
    parse_json_object,
    read_json_object,
    readable,
    refuse_pickles,
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NOT_READ = ("U16", "U32", "U64", "C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""The format's other dtypes. A file that has them is complete."""
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 64  # torch's own limit
_MOST_TENSORS = 100_000
_SCALED_AT_ONCE, _UNPACKED_AT_ONCE = 2**20, 2**22


class Packing(NamedTuple):
    """How a tensor's values are computed from others of its file."""

    parts: tuple["StoredTensor", ...]
    unpack: Callable[[range], Tensor]
    """From some of the tensor's rows to their values in its dtype."""
    kind: str = ""
    """Format in which a layer can hold it as it is stored; empty if none can."""
    codes: Callable[[range], Mapping[str, Tensor]] | None = None
    """From some of its rows to the codes and scales of that layer, by the names of its
    parameters."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file."""

    file: Path
    offset: int
    """First byte, counted from the start of the file."""
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: "StoredTensor | None" = None
    """Scale of an 8-bit tensor: the weight is its codes times one number, or one number per row.
    None if the tensor is the weight itself."""
    packing: Packing | None = None
    """For a tensor that is not stored as its values: `shape`, `dtype` and `num_bytes` are the
    values'. None if it is."""

    @property
    def packed_kind(self) -> str:
        """Format in which a layer can hold it as it is stored; empty if there is none."""
        return "" if self.packing is None else self.packing.kind


@dataclass(frozen=True)
class SafetensorsSource:
    """The tensors of a safetensors file or of a folder of such files, from their headers."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    """Metadata in the header; for a folder, in the header of its first file."""

    @classmethod
    def open(cls, path: Path) -> "SafetensorsSource":
        """Read the headers of a file, of a sharded index's files, or of all .safetensors files of a
        folder.

        Raises:
            UserError: If the path does not exist, a file is truncated or not a safetensors file, an
                index names a file that is missing or outside its folder, or two files contain the
                same name.
        """
        path = Path(path)
        with readable(path):
            if not path.exists():
                raise UserError(f"there is no {path}; {path_remedy(path)}")
            refuse_pickles(path)
            files = _files_of(path)
        tensors: dict[str, StoredTensor] = {}
        metadata: list[dict[str, str]] = []
        for file in files:
            stored, about = _read_header(file)
            if both := sorted(tensors.keys() & stored.keys()):
                raise UserError(
                    f"{both[0]!r} is in {tensors[both[0]].file.name} and in {file.name} of {path}; "
                    "name one file, or remove the other copy"
                )
            tensors.update(stored)
            metadata.append(about)
        return cls(path, tensors, metadata[0])

    def fingerprint(self) -> str:
        """Digest of names, shapes, dtypes and both ends of every tensor; it takes seconds for any
        size, and differs for other weights."""
        digest = hashlib.blake2b(digest_size=16)
        for name, stored in sorted(self.tensors.items()):
            digest.update(f"{name} {stored.shape} {stored.dtype}".encode())
            for part in (stored, stored.scale) if stored.packing is None else stored.packing.parts:
                if part is None:
                    continue
                with readable(part.file), open(part.file, "rb") as file:
                    for offset in (0, max(0, part.num_bytes - 1024)):
                        file.seek(part.offset + offset)
                        digest.update(file.read(min(1024, part.num_bytes)))
        return digest.hexdigest()

    def read(
        self,
        name: str,
        buffer: Tensor | None = None,
        *,
        index: int = 0,
        of: int = 1,
        rows: range | None = None,
    ) -> Tensor:
        """Read a tensor, or some of its rows, onto the CPU in the file's dtype; of a scaled tensor,
        the codes, of a packed one, the values.

        Args:
            name: Name in the file.
            buffer: uint8 memory of exactly the right size for the result; None allocates it.
            index: Index of the part to read.
            of: Number of equal parts that the rows are split into.
            rows: Consecutive rows of the part; None for all.

        Raises:
            UserError: If the file ends inside the tensor.
        """
        stored = self.tensors[name]
        num_bytes = stored.num_bytes // of
        shape = stored.shape if of == 1 else (stored.shape[0] // of, *stored.shape[1:])
        offset = index * num_bytes
        if rows is not None:
            of_row = num_bytes // shape[0]
            num_bytes = len(rows) * of_row
            shape = (len(rows), *shape[1:])
            offset = offset + rows.start * of_row
        buffer = torch.empty(num_bytes, dtype=torch.uint8) if buffer is None else buffer
        assert buffer.numel() == num_bytes, name
        if stored.packing is not None:
            values = buffer.view(stored.dtype).view(shape)
            first = index * (stored.shape[0] // of) + (rows.start if rows else 0)
            at_once = max(1, _UNPACKED_AT_ONCE // max(1, values[:1].numel()))
            for start in range(0, len(values), at_once):
                some = values[start : start + at_once]
                some.copy_(stored.packing.unpack(range(first + start, first + start + len(some))))
            return values
        # Read and not mapped: mapped pages would count as memory of this process in addition to the
        # tensor.
        with readable(stored.file), open(stored.file, "rb") as file:
            file.seek(stored.offset + offset)
            if file.readinto(buffer.numpy().data) != num_bytes:
                raise UserError(
                    f"{stored.file} ends inside {name!r}: it changed while it was read; fetch it "
                    f"again"
                )
        return buffer.view(stored.dtype).reshape(shape)

    def scale_of(self, name: str, *, index: int = 0, of: int = 1) -> Tensor | None:
        """The scale of a tensor's codes, fp32 [1] or [rows] on the CPU; None if the tensor is the
        weight itself.

        Args:
            name: The tensor's name in the file.
            index: Index of the part of its rows.
            of: Number of equal parts that the rows are split into.

        Raises:
            UserError: If the file ends inside the scale.
        """
        scale = self.tensors[name].scale
        if scale is None:
            return None
        read = SafetensorsSource(self.path, {name: scale}, {}).read(name).reshape(-1).float()
        return read if len(read) == 1 else read.view(of, -1)[index]

    def apply_scale(
        self, values: Tensor, name: str, *, index: int = 0, of: int = 1, rows: range | None = None
    ) -> None:
        """Multiply codes (converted to a floating dtype, on any device) with their scale, in place,
        which gives the weight.

        Args:
            values: Codes of a part of the tensor, in any shape; unchanged if the tensor has no
                scale.
            name: The tensor's name in the file.
            index: Index of the part of its rows.
            of: Number of equal parts that the rows are split into.
            rows: Consecutive rows of the part that `values` are; None for all.
        """
        scale = self.scale_of(name, index=index, of=of)
        if scale is None:
            return
        num_rows = self.tensors[name].shape[0] // of
        rows = range(num_rows) if rows is None else rows
        scale = scale.expand(num_rows)[rows.start : rows.stop, None].to(values.device)
        matrix = values.view(len(rows), -1)
        # some rows at a time: the CPU makes an fp32 copy of them
        at_once = max(1, _SCALED_AT_ONCE // max(1, matrix.shape[1]))
        for start in range(0, len(rows), at_once):
            matrix[start : start + at_once].mul_(scale[start : start + at_once])


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        # and not `glob`, which finds nothing in a folder that may not be read
        inside = sorted(path.iterdir())
        indices = [file for file in inside if file.name.endswith(".safetensors.index.json")]
        if len(indices) > 1:
            raise UserError(
                f"{path} has {len(indices)} indices "
                f"({', '.join(index.name for index in indices)}); name one of them"
            )
        files = (
            _files_of(indices[0])
            if indices
            else [file for file in inside if file.suffix == ".safetensors"]
        )
        if not files and (other := next(filter(is_other_weights, inside), None)) is not None:
            mark = (
                mark_of(head_of(other), other.name)
                or "is not read; get the same weights as .safetensors"
            )
            raise UserError(f"{path} contains no .safetensors file; {other.name} {mark}")
        if not files:
            below = [
                folder for folder in inside if folder.is_dir() and any(folder.glob("*.safetensors"))
            ]
            remedy = (
                f"name {' or '.join(map(str, below[:3]))}"
                if below
                else "name the folder or file with the weights"
            )
            raise UserError(f"{path} contains no .safetensors file; {remedy}")
        return files
    if not path.name.endswith(".index.json"):
        return [path]
    problem = "is not an index of safetensors files"
    weight_map = read_json_object(path, problem=f"{problem}: it").get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise UserError(f"{path} {problem}; fetch it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        # Links are not resolved, because in the hub's cache every file is a link to another folder.
        # Only the name is checked.
        if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
            raise UserError(
                f"{path} names {name!r}, which is not a .safetensors file of its own folder; fetch "
                f"it again"
            )
        if not (path.parent / name).is_file():
            raise UserError(f"{path} names {name}, which is missing; fetch it again")
    return [path.parent / name for name in names]


def _read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Names, places and metadata in a file's header, checked against the file's size."""
    with readable(path):
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise UserError(
                f"{path} is not a regular file; name a .safetensors file or a folder of them"
            )
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
            header_bytes = int.from_bytes(head[:8], "little")
            if about.st_size < 8 or not 2 <= header_bytes <= min(
                _MAX_HEADER_BYTES, about.st_size - 8
            ):
                mark = "" if is_safetensors(head) else mark_of(head, path.name, size=about.st_size)
                raise UserError(
                    f"{path} {mark or 'is not a safetensors file, or is truncated in its header; fetch it again'}"
                )
            file.seek(8)
            raw = file.read(header_bytes)
    # Before the header is parsed, which takes seconds and gigabytes for a million of them. The
    # largest models have some thousands.
    if (count := raw.count(b'"data_offsets"')) > _MOST_TENSORS:
        raise UserError(
            f"{path} has {count} tensors in its header, and files of models have at most "
            f"{_MOST_TENSORS}; fetch it again"
        )
    header = parse_json_object(raw, f"{path}: the header")
    metadata = header.pop("__metadata__", None) or {}
    if any(mark in raw for mark in (b"_orig_mod", b"_wrapped_module", b'"module.')):
        header = _without_wrappers(path, header)
    try:
        # Half of a character, as JSON can escape it, cannot be written to any file.
        "".join((*header, *metadata, *metadata.values())).encode()
        stored = {name: _stored(path, 8 + header_bytes, about) for name, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a safetensors file that can be read ({error!r} in its header); fetch "
            f"it again"
        ) from error
    # As the format demands it: tensors follow each other from the first byte of data to the last of
    # the file.
    end = 8 + header_bytes
    for tensor in sorted(stored.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            raise UserError(
                f"{path} has a header that contradicts itself: tensors overlap or leave gaps; "
                f"fetch it again"
            )
        end += tensor.num_bytes
    if end != about.st_size:
        raise UserError(
            f"{path} is truncated or damaged: it has {about.st_size} bytes, but its header "
            f"describes {end}; fetch it again"
        )
    return stored, metadata


_WRAPPERS = re.compile(
    r"^module\.|(?:^|(?<=[._]))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[._]"
)
"""Parts of names that torch's wrappers add: DataParallel in front; compiled, sharded and
checkpointed modules anywhere. kohya's form has underscores."""


def _without_wrappers(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """A header with the names that its tensors have without torch's wrappers."""
    plain: dict[str, Any] = {}
    for name, about in header.items():
        short = _WRAPPERS.sub("", name)
        if short in plain:
            raise UserError(
                f"{path} has {short!r} twice, with and without the marks of a wrapper; remove one "
                f"of them"
            )
        plain[short] = about
    return plain


def _stored(path: Path, start: int, about: Mapping[str, Any]) -> StoredTensor:
    """The place of a tensor, from its entry in the header; ValueError, KeyError or TypeError if
    that is damaged, UserError if it is not read."""
    shape, (first, end) = tuple(about["shape"]), about["data_offsets"]
    # Python's integers and not torch's, whose product of 2**40 and 2**40 is 0. True is no number
    # here, and 1.0 no place.
    if not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, first, end)):
        raise ValueError(f"{shape} at {first} to {end}")
    if about["dtype"] in _NOT_READ:
        raise UserError(
            f"{path} has tensors of dtype {about['dtype']}, which ditkit does not read; get the "
            f"weights in bf16 or fp8"
        )
    dtype, count = _DTYPES[about["dtype"]], math.prod(shape)
    if (
        len(shape) > _MAX_DIMS
        or math.prod(filter(None, shape)) >= 2**63
        or count * dtype.itemsize != end - first
    ):
        raise ValueError(f"{shape} in {end - first} bytes")
    return StoredTensor(path, start + first, end - first, shape, dtype)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensor_of: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    *,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a safetensors file tensor by tensor, atomically, and read it back before it gets its
    name.

    Args:
        shapes: Shape and dtype by name, in the order of writing.
        tensor_of: From a name to its tensor; called once for each name, so that only one tensor is
            in memory at a time.
        check: Called with the written file before it gets its name; it may raise.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # aligns the data to eight bytes, as the format asks
    digests: dict[str, bytes] = {}
    with atomic_write(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for name, (shape, dtype) in shapes.items():
                tensor = tensor_of(name).detach().to("cpu").contiguous()
                assert tensor.shape == shape and tensor.dtype == dtype, (
                    f"{name}: {tensor.shape} {tensor.dtype}"
                )
                data = _bytes_of(tensor)
                digests[name] = hashlib.blake2b(data).digest()
                file.write(data)
        written = SafetensorsSource.open(temporary)
        same = list(written.tensors) == list(shapes) and all(
            hashlib.blake2b(_bytes_of(written.read(name))).digest() == digest
            for name, digest in digests.items()
        )
        if not same:
            raise UserError(f"{path} could not be read back as it was written; check the disk")
        if check is not None:
            check(temporary)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
