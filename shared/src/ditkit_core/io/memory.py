"""How much memory a run has needed at most, and giving back what it no longer needs."""

import gc
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch


def peak_memory_bytes(devices: Iterable[torch.device]) -> int:
    """Highest memory use: the largest over the accelerators among `devices` since `restart_peak`, else of this process.

    On accelerators these are the bytes in tensors, not what the allocator reserves; for the process it is the peak
    resident set since its start.
    """
    accelerators = [device for device in devices if device.type == "cuda"]
    if accelerators:
        return max(torch.cuda.max_memory_allocated(device) for device in accelerators)
    return process_peak_bytes()


def restart_peak(devices: Iterable[torch.device]) -> None:
    """Measure the accelerators' peak from here; a process has one peak, which nothing restarts."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def release_memory() -> None:
    """Give back what freed tensors occupied: torch keeps it for tensors alike, and the next stage's are others."""
    gc.collect()  # models of other libraries hold themselves in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_host_allocation(text: str) -> bool:
    """Whether an error's text is that of torch when the host has no memory: in the system's words, on Windows in its own."""
    return "can't allocate memory" in text or "DefaultCPUAllocator: not enough memory" in text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out, on an accelerator or the host."""
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and (is_host_allocation(text) or "CUDA error: out of memory" in text)
    )


def let_go(error: BaseException) -> set[str]:
    """Clear the frames that an exception keeps alive, and with them the tensors in their variables.

    Returns:
        Names of the modules that were at work in them.
    """
    modules: set[str] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None:
            continue
        modules |= {str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(each.__traceback__)}
        traceback.clear_frames(each.__traceback__)
        left += [each.__cause__, each.__context__]
        each.__traceback__ = each.__cause__ = each.__context__ = None
    return modules


def process_peak_bytes() -> int:
    """Peak resident set of this process, in bytes."""
    if sys.platform == "win32":
        return _windows_peak_bytes()
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of a child starts at its parent's peak, VmHWM at its own
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def _windows_peak_bytes() -> int:
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS of psapi.h."""

        _fields_ = [
            ("size", wintypes.DWORD),
            ("page_faults", wintypes.DWORD),
            ("peak_working_set", ctypes.c_size_t),
            ("rest", ctypes.c_size_t * 7),
        ]

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    query = kernel.K32GetProcessMemoryInfo
    query.argtypes = [wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD]
    counters = Counters(size=ctypes.sizeof(Counters))
    if not query(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.size):
        raise ctypes.WinError(ctypes.get_last_error())  # type: ignore[attr-defined]
    return int(counters.peak_working_set)
