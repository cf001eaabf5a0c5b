"""Statistics: how many bytes collectives send, how long they take, and how many of their results are not finite.

Nothing is counted unless a `Statistics` is open, and counting never waits for the device. Blocks that are not finite
(their scale is NaN) are added up on the device, and its events take the time; `collect` reads both. Saturation is not
counted because there is none: the scale of a block is made from its own largest magnitude.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sent(NamedTuple):
    """What one collective did."""

    nbytes: int  # sent by this rank
    scales: Callable[
        [], Tensor
    ]  # an element for each block of the result, NaN where the block is not finite


class Statistics:
    """Counts the collectives of fp8stack in its context, by name.

        with fp8stack.comm.Statistics() as statistics:
            for batch in data:
                train(batch)
                print(statistics.collect())  # of this step: {"all_reduce": {"calls": 12, "bytes": ...}, ...}

    `DataParallel`'s buckets are called "bucket". The keys are `calls`; `bytes` that this rank sent; `seconds` that its
    device took, waiting for other ranks included; `blocks` of 128 in the results; and `non_finite`, how many of those
    blocks are not finite.
    """

    def __init__(self) -> None:
        # name, bytes, blocks, how many are not finite, and when it began and ended
        self._calls: list[tuple[str, int, int, Tensor, Any, Any]] = []

    def __enter__(self) -> Statistics:
        _OPEN.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _OPEN.remove(self)

    def collect(self) -> dict[str, dict[str, float]]:
        """Return what was counted since the last call; waits for the device."""
        calls, self._calls = self._calls, []
        result: dict[str, dict[str, float]] = {}
        for name, nbytes, blocks, bad, start, end in calls:
            row = result.setdefault(name, dict.fromkeys(_KEYS, 0))
            row["calls"] += 1
            row["bytes"] += nbytes
            row["seconds"] += _seconds_between(start, end)
            row["blocks"] += blocks
            row["non_finite"] += int(bad)
        return result


_KEYS = ("calls", "bytes", "seconds", "blocks", "non_finite")
_OPEN: list[Statistics] = []


def observe(name: str, device: torch.device, body: Callable[[], Sent]) -> None:
    """Run a collective, and count it if a Statistics is open."""
    if not _OPEN:
        body()
        return
    start = _now(device)
    sent = body()
    end = _now(device)
    scales = sent.scales()
    bad = scales.isnan().sum()  # a count is kept until `collect`, not the scales
    for statistics in list(_OPEN):
        statistics._calls.append((name, sent.nbytes, scales.numel(), bad, start, end))


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
