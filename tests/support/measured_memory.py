"""Measures the memory of a computation: the peak of the CPU's allocator."""

import warnings
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measured_peak(compute: Callable[[], Any]) -> int:
    """Return the peak of allocated bytes while ``compute`` ran, without the bytes that were allocated before."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Warning: Profiler clears events", category=UserWarning
        )  # torch 2.11 always warns
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            compute()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    out = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        out += event.nbytes()
        most = max(most, out)
    return most
