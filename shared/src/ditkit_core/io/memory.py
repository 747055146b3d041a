"""Measuring peak memory, releasing memory, and recognising out-of-memory errors."""

import gc
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch


def peak_memory_bytes(devices: Iterable[torch.device]) -> int:
    """Peak memory: the largest among the accelerators in `devices` since `restart_peak`; without
    accelerators the peak of this process.

    On accelerators this counts the bytes in tensors, not those that the allocator reserves. For the
    process it is the peak resident set since its start.
    """
    accelerators = [device for device in devices if device.type == "cuda"]
    if accelerators:
        return max(torch.cuda.max_memory_allocated(device) for device in accelerators)
    return process_peak_bytes()


def peak_reserved_bytes(devices: Iterable[torch.device]) -> int | None:
    """Peak of what torch's allocator had taken from the fullest accelerator, gaps between tensors
    included; None without accelerators."""
    return max(
        (torch.cuda.max_memory_reserved(device) for device in devices if device.type == "cuda"),
        default=None,
    )


def restart_peak(devices: Iterable[torch.device]) -> None:
    """Restart the peak of the accelerators; the peak of a process cannot be restarted."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def release_memory() -> None:
    """Return the memory of freed tensors: torch keeps it for tensors of the same sizes, and the
    next stage needs other sizes."""
    gc.collect()  # models of other libraries contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_host_allocation(text: str) -> bool:
    """Whether an error's text is torch's when the host is out of memory; on Windows the wording
    differs."""
    return "can't allocate memory" in text or "DefaultCPUAllocator: not enough memory" in text


_OF_LIBRARIES = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "'out of memory'",  # NCCL puts CUDA's words in quotes
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "err 2 != CUDA_SUCCESS",  # cuDNN's words, where it compiles an attention kernel for a new shape
)
"""What torch says where memory ran out that its allocator does not get at once: a library's
workspace, a kernel's code, a buffer of NCCL, or a page of an expandable segment."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on an accelerator or the host."""
    text = str(error)
    # Where NVML does not answer, as on a part of a GPU (MIG), torch 2.11 fails to say who has the
    # memory, and raises only this.
    unsaid = "NVML_SUCCESS == " in text and "CUDACachingAllocator.cpp" in text
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError)
        and (unsaid or is_host_allocation(text) or any(words in text for words in _OF_LIBRARIES))
    )


def release_frames(error: BaseException) -> set[str]:
    """Clear the frames that an exception keeps alive, and so free the tensors in their local
    variables.

    Args:
        error: The exception; its causes and contexts are cleared as well.

    Returns:
        Names of the modules whose functions were in the traceback.
    """
    modules: set[str] = set()
    exceptions: list[BaseException | None] = [error]
    while exceptions:
        exception = exceptions.pop()
        if exception is None:
            continue
        modules |= {
            str(frame.f_globals.get("__name__"))
            for frame, _ in traceback.walk_tb(exception.__traceback__)
        }
        traceback.clear_frames(exception.__traceback__)
        exceptions += [exception.__cause__, exception.__context__]
        exception.__traceback__ = exception.__cause__ = exception.__context__ = None
    return modules


def process_peak_bytes() -> int:
    """Peak resident set of this process, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of a child starts at its parent's peak, VmHWM at its own
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
