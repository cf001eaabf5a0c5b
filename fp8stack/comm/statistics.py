"""Statistics: how many bytes collectives send, and how long they take.

Nothing is counted unless a `Statistics` is open, and counting never waits for the device: its events take the time,
which `collect` reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Statistics:
    """Counts the collectives of fp8stack in its context, by name.

        with fp8stack.comm.Statistics() as statistics:
            for batch in data:
                train(batch)
                print(statistics.collect())  # of this step: {"all_reduce": {"calls": 12, "bytes": ...}, ...}

    `DataParallel`'s buckets are called "bucket". The keys are `calls`; `bytes` that this rank sent; and `seconds` that
    its device took, waiting for other ranks included.
    """

    def __init__(self) -> None:
        # name, bytes, and when it began and ended
        self._calls: list[tuple[str, int, Any, Any]] = []

    def __enter__(self) -> Statistics:
        _OPEN.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _OPEN.remove(self)

    def collect(self) -> dict[str, dict[str, float]]:
        """Return what was counted since the last call; waits for the device."""
        calls, self._calls = self._calls, []
        result: dict[str, dict[str, float]] = {}
        for name, nbytes, start, end in calls:
            row = result.setdefault(name, {"calls": 0, "bytes": 0, "seconds": 0.0})
            row["calls"] += 1
            row["bytes"] += nbytes
            row["seconds"] += _seconds_between(start, end)
        return result


_OPEN: list[Statistics] = []


def observe(name: str, device: torch.device, body: Callable[[], int]) -> None:
    """Run a collective, which returns the bytes that this rank sends, and count it if a Statistics is open."""
    if not _OPEN:
        body()
        return
    start = _now(device)
    nbytes = body()
    end = _now(device)
    for statistics in list(_OPEN):
        statistics._calls.append((name, nbytes, start, end))


def _now(device: torch.device) -> Any:
    """Return seconds, or an event of the GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
