"""Saves of weights that ranks divide: each rank writes its rows, by torch.distributed.checkpoint in its safetensors form, without pickle.

The folder, its index and its life are those of `checkpoint.py`; only the files with tensors differ. Any number of ranks reads them, and each
only the rows that it needs.
"""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ditkit_core.errors import UserError
from ditkit_core.io.files import file_hash, flush
from ditkit_core.io.ranks import Ranks

if TYPE_CHECKING:
    from ditkit_core.engine.shards import Shards


def write_sharded(
    folder: Path, groups: Mapping[str, Mapping[str, Tensor]], shards: "Shards", ranks: Ranks
) -> Mapping[str, Any]:
    """Write this rank's rows into a folder; all ranks call it.

    Returns:
        The entries of all ranks' files for the index of the save.

    Raises:
        UserError: On all ranks, if one of them cannot write.
    """
    flat = {
        f"{group}/{key}": shards.as_dtensor(key, tensor)
        for group, tensors in groups.items()
        for key, tensor in tensors.items()
    }
    try:
        save(
            flat,
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=shards.files_group,
        )
    except CheckpointException as error:
        rank, reason = min(error.failures.items())
        raise UserError(
            f"rank {rank} cannot write its part of {folder.parent}: {reason[0]}; free some space or choose another folder"
        ) from error
    own: dict[str, Any] = {}
    failure = ""
    try:
        for path in folder.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors"):
            flush(path)
            own[path.name] = {"bytes": path.stat().st_size, "blake2b": file_hash(path)}
    except OSError as error:
        failure = f"rank {ranks.rank} cannot write its part of {folder.parent}: {error.strerror or error}"
    found: list[dict[str, Any]] = ranks.all_gather_object({"files": own, "failure": failure})
    for each in found:
        if each["failure"]:
            raise UserError(f"{each['failure']}; free some space or choose another folder")
    return {name: entry for each in found for name, entry in each["files"].items()}


def read_sharded(folder: Path, shards: "Shards | None", wanted: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """The tensors of some groups of a save, by group and name: this rank's rows, or whole ones without `shards`."""
    reader = HuggingFaceStorageReader(str(folder))
    flat: dict[str, Tensor] = {}
    for path, about in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata), "safetensors files have tensors alone"
        if path.partition("/")[0] not in wanted:
            continue
        empty = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        flat[path] = (
            torch.empty_like(empty, device="cpu") if shards is None else shards.place_for(path.partition("/")[2], empty)
        )
    with warnings.catch_warnings():  # of what is asked for here: ranks need not agree on what each of them reads
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(flat, storage_reader=reader, no_dist=True)
    groups: dict[str, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        group, _, key = path.partition("/")
        groups.setdefault(group, {})[key] = tensor if shards is None else shards.rows_in(tensor)
    return groups
