"""Reads frozen modules one after the other, for encoders that do not fit into memory at once."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn

from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import Streaming
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.weights.load import ParameterReader, file_position

MARGIN_BYTES = 2 * 2**30
"""Bytes that weights must leave free to be loaded at once: for activations, and for other
programs."""

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h

Module = TypeVar("Module", bound=nn.Module)


class LayerStreamer:
    """Loads modules into the same memory one after the other, each for as long as it is used.

    The memory is allocated once, so nothing depends on how well the allocator reuses freed blocks.
    """

    def __init__(
        self,
        source: SafetensorsSource,
        *,
        device: torch.device,
        dtype: torch.dtype | Callable[[str], torch.dtype],
    ):
        """Prepare without reading or allocating. `dtype` is of all parameters on the device, or
        from a parameter's name in its module."""
        self._reader, self._device, self._dtype = ParameterReader(source), device, dtype
        self._buffers: dict[tuple[str, torch.Size], Tensor] = {}

    @contextmanager
    def holding(
        self, module: Module, mapping: Mapping[str, tuple[TensorSlice, ...]]
    ) -> Iterator[Module]:
        """Give a module on `meta` its weights inside the `with` block: read now, overwritten by the
        next module's.

        `mapping` has the parts of the file's tensors, by the module's own names.
        """
        state = module.state_dict()
        for name in sorted(
            mapping, key=lambda name: file_position(self._reader.source, mapping[name][0])
        ):
            owner, _, leaf = name.rpartition(".")
            weight = self._read(name, state[name].shape, mapping[name])
            module.get_submodule(owner).register_parameter(
                leaf, nn.Parameter(weight, requires_grad=False)
            )
        try:
            yield module.eval()
        finally:
            # Back to `meta`, so that nobody can use weights that the next module overwrites.
            module.to("meta")

    def _read(self, name: str, shape: torch.Size, parts: tuple[TensorSlice, ...]) -> Tensor:
        # Layers of one kind have equal names and shapes, so each of their weights reuses one
        # allocation.
        if (name, shape) not in self._buffers:
            dtype = self._dtype if isinstance(self._dtype, torch.dtype) else self._dtype(name)
            self._buffers[name, shape] = torch.empty(shape, device=self._device, dtype=dtype)
        self._reader.fill(self._buffers[name, shape], parts)
        return self._buffers[name, shape]


def give_back_large_blocks() -> None:
    """Have glibc return freed blocks of 128 KiB or more to the system at once, from here on. Other
    C libraries are left alone.

    That is glibc's default at the start. But it adapts to what is freed and soon keeps blocks of up
    to 32 MiB for later. Before version 2.38 it does not find them again for aligned requests, which
    torch makes: a process grew by an activation for each layer and caption (measured). The price is
    that the system clears the pages of every large activation, which costs little next to the
    matmul that fills them.
    """
    import ctypes

    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 2**17)
    except (OSError, AttributeError):  # another C library
        return


def below(
    prefix: str, mapping: Mapping[str, tuple[TensorSlice, ...]]
) -> dict[str, tuple[TensorSlice, ...]]:
    """The part of a mapping for a submodule, by the submodule's own names."""
    return {
        name.removeprefix(f"{prefix}."): parts
        for name, parts in mapping.items()
        if name.startswith(f"{prefix}.")
    }


def decide(streaming: Streaming, needed_bytes: int, device: torch.device) -> tuple[bool, str]:
    """Decide whether weights of so many bytes are streamed layer by layer, and say why in a few
    words.

    `auto` streams weights that would leave less than `MARGIN_BYTES` free.
    """
    if streaming != "auto":
        return streaming == "always", f"encode.streaming = {streaming}"
    free = free_memory_bytes(device)
    figures = f"{needed_bytes / 2**30:.1f} GiB of weights, {free / 2**30:.1f} GiB free on {device}"
    return too_large(needed_bytes, free), figures


def too_large(needed_bytes: int, free_bytes: int) -> bool:
    """Whether weights of this size leave too little free memory, so that `auto` streams them."""
    return needed_bytes + MARGIN_BYTES > free_bytes


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # In a container psutil tells the machine's memory, not the container's limit.
    return min(psutil.virtual_memory().available, _left_in_group(Path("/sys/fs/cgroup")))


def _left_in_group(group: Path) -> int:
    """Bytes that the process's control group still allows. Containers are limited by control
    groups."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    reclaimable = 0
    with suppress(OSError):  # pages of files, which the system frees first
        pages = re.search(
            r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE
        )
        reclaimable = int(pages[1]) if pages else 0
    return max(0, int(limit) - used + reclaimable) if limit.isdecimal() else sys.maxsize
