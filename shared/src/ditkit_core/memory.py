"""How much memory a run has needed at most."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch


def peak_memory_bytes(devices: Iterable[torch.device]) -> int:
    """Highest memory use so far: the largest over the accelerators among `devices`, else of this process.

    On accelerators these are the bytes in tensors, not what the allocator reserves; for the process it is the peak
    resident set.
    """
    accelerators = [device for device in devices if device.type == "cuda"]
    if accelerators:
        return max(torch.cuda.max_memory_allocated(device) for device in accelerators)
    return process_peak_bytes()


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
