"""How much memory some work needs."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.profiler import profile


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
