"""How much memory some work needs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from torch.autograd.profiler import profile

_LIBC = ctypes.CDLL(None)
_MMAP_THRESHOLD = -3  # mallopt's name for it


def return_what_is_freed() -> None:
    """From now on freed tensors go back to the system at once, so that what stays alive shows in the resident bytes."""
    _LIBC.mallopt(_MMAP_THRESHOLD, 1 << 16)


def resident_bytes() -> int:
    """What this process holds of the machine's memory, without what its allocator keeps for later."""
    _LIBC.malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(work: Callable[[], object], mapped: set[int]) -> int:
    """The most memory that torch had allocated on the CPU at once, files of these sizes that are mapped left out."""
    with profile(profile_memory=True) as watched:
        work()
    events = [event for event in watched.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if abs(event.nbytes()) not in mapped:
            now += event.nbytes()
            peak = max(peak, now)
    return peak
