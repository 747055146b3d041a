"""Saves of weights that ranks divide: each rank writes its rows, in the safetensors form of
torch.distributed.checkpoint, without pickle.

The folder, its index and its life are as in `checkpoint.py`; only the files with tensors differ.
Any number of ranks reads them, and each only the rows that it needs. A rank copies its part of the
state to the host, and a thread writes the copy while training goes on. We write the files: torch's
writer makes one more copy of all tensors.
"""

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.io.files import file_hash
from ditkit_core.io.safetensors import write_safetensors

if TYPE_CHECKING:
    from ditkit_core.distributed.shards import Shards

Part = Mapping[str, tuple[Tensor, int]]
"""Of a state: tensors on the host by `group/key`, each with its first row in the whole tensor."""


def write_part(folder: Path, part: Part, ranks: Ranks) -> Mapping[str, Any]:
    """Write this rank's part of a save into a folder; all ranks call it.

    Returns:
        The entries of all ranks' files for the index of the save.
    """
    files: dict[str, Any] = {}
    failure, problem = "", f"rank {ranks.rank} cannot write its part of {folder.parent}"
    path = folder / f"shard-{ranks.rank + 1:05d}-model-00001-of-00001.safetensors"
    offsets = {
        name: {"saved_offsets": [first, *[0] * (tensor.ndim - 1)][: tensor.ndim]}
        for name, (tensor, first) in part.items()
    }
    try:
        if part:
            shapes = {
                name: (tuple(tensor.shape), tensor.dtype) for name, (tensor, _) in part.items()
            }
            # The words under which torch.distributed.checkpoint finds the place of rows in the
            # whole.
            write_safetensors(
                path, shapes, lambda name: part[name][0], {"DCP_SHARDING_INFO": json.dumps(offsets)}
            )
            files[path.name] = {"bytes": path.stat().st_size, "blake2b": file_hash(path)}
    except OSError as error:
        failure = f"{problem}: {error.strerror or error}; free some space or choose another folder"
    except UserError as error:
        failure = f"{problem}: {error}"
    by_rank: list[dict[str, Any]] = ranks.all_gather_object({"files": files, "failure": failure})
    for report in by_rank:
        if report["failure"]:
            raise UserError(report["failure"])
    return {name: entry for report in by_rank for name, entry in report["files"].items()}


class BackgroundWriter:
    """A thread that writes one save at a time."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._thread = ThreadPoolExecutor(1, "ditkit-save")
        self._writing: Future[object] | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Write while the caller goes on; `finish` was called since the last time."""
        assert self._writing is None
        self._writing = self._thread.submit(write)

    def finish(self) -> None:
        """Wait for the save that is being written, if any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def read_sharded(
    folder: Path, shards: "Shards | None", wanted: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of some groups of a save, by group and name: this rank's rows, or whole ones
    without `shards`."""
    reader = HuggingFaceStorageReader(str(folder))
    flat: dict[str, Tensor] = {}
    for path, about in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata), "safetensors files have tensors alone"
        if path.partition("/")[0] not in wanted:
            continue
        empty = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        flat[path] = (
            torch.empty_like(empty, device="cpu")
            if shards is None
            else shards.place_for(path.partition("/")[2], empty)
        )
    # of what is asked for here: ranks need not agree on what each of them reads
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(flat, storage_reader=reader, no_dist=True)
    groups: dict[str, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        group, _, key = path.partition("/")
        groups.setdefault(group, {})[key] = tensor if shards is None else shards.rows_in(tensor)
    return groups
