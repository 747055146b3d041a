"""Moves a model's weights from its GPUs to the host while another model needs their memory, and
back bitwise."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ditkit_core.io.memory import release_memory


@contextmanager
def parked(weights: Iterable[Tensor]) -> Iterator[None]:
    """Keep a model's weights on the host as long as the context is open; the model cannot run
    meanwhile.

    What is on the host already stays there: all of a model on a CPU, and the copies of streamed
    blocks. Tensors keep their identity, because only their memory goes away: optimizer and engine
    need not know.
    """
    with parked_tensors([tensor for tensor in weights if tensor.device.type != "cpu"]):
        yield


@contextmanager
def parked_tensors(tensors: list[Tensor]) -> Iterator[None]:
    """As `parked`, for tensors on any device. Those that share memory share it afterwards, too."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    _wait_for(tensors)  # copies of streamed blocks may still be under way
    # A streamed block that is not on its device has no memory there.
    host_copies = [
        (storage, _bytes_of(storage).to("cpu", copy=True))
        for storage in storages.values()
        if storage.nbytes()
    ]
    for storage, _ in host_copies:
        storage.resize_(0)
    release_memory()
    try:
        yield
    finally:
        release_memory()  # what took the place has been let go by now
        for storage, values in host_copies:
            storage.resize_(values.numel())
            _bytes_of(storage).copy_(values)
        _wait_for(tensors)


def parked_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes that `parked` needs on the host."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in weights
        if tensor.device.type != "cpu"
    }
    return sum(storage.nbytes() for storage in storages.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait_for(tensors: list[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
