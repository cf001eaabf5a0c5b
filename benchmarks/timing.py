"""How benchmarks measure: the time of steps, what copies reach, and what is noted where a configuration fails."""

from __future__ import annotations

import contextlib
import gc
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8stack.errors import ConfigError

Step = Callable[[], Any]
Numbers = dict[str, Any]  # of one configuration; only a "note" where nothing could be measured
_stopped: list[int] = []


def time_steps(step: Step, count: int, cuda: bool) -> tuple[float, float, int]:
    """Return median ms of the device, steps queued without waiting, and of the host, the device idle before each.

    The third is the number of steps that each is of: `count`, or fewer (five at least) if they take over 15 s.
    """
    host, device = [], []
    while len(host) < count and (len(host) < 5 or sum(host) < 15_000):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - start))
    for _ in host if cuda else ():
        device.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        device[-1][0].record()
        step()
        device[-1][1].record()
    if cuda:
        torch.cuda.synchronize()
    on_device = [start.elapsed_time(end) for start, end in device] or host
    return statistics.median(on_device), statistics.median(host), len(host)


def measure_copy(device: str) -> float:
    """Return the TB/s, read plus written, of a copy within the device."""
    cuda = device == "cuda"
    source = torch.empty(2**31 if cuda else 2**24, dtype=torch.uint8, device=device).random_()
    target = source.clone()
    return 2 * source.nbytes / time_steps(lambda: target.copy_(source), 20, cuda)[0] / 1e9


def measure_bus() -> float:
    """Return the GB/s of copies from and to pinned host memory at the same time, both counted."""
    there, back = (torch.empty(2**29, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    one, two = there.cuda(), back.cuda()
    other = torch.cuda.Stream()

    def copy() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            back.copy_(two, non_blocking=True)
        one.copy_(there, non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)

    return 2 * there.nbytes / time_steps(copy, 10, True)[0] / 1e6


@contextlib.contextmanager
def stopping_in_order() -> Iterator[None]:
    """Let Ctrl-C, or a scheduler's SIGTERM, end the measuring but not the program: what is done is recorded."""

    def stop(number: int, _: Any) -> None:
        _stopped.append(number)
        raise KeyboardInterrupt

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        _stopped.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:100]


def attempt(work: Callable[[], Numbers]) -> Numbers:
    """Return what `work` returns, or a note on why it cannot be done; free all that it held."""
    if _stopped:
        return {"note": "not begun: the run was stopped"}
    try:
        return work()
    except KeyboardInterrupt:
        if not _stopped:
            raise
        return {"note": "the run was stopped"}
    except ModuleNotFoundError as error:
        return {"note": f"not installed ({error.name})"}
    except torch.cuda.OutOfMemoryError:
        return {"note": "skipped: does not fit into the free memory of the device"}
    except Exception as error:  # a peer may fail in any way; the others are still worth measuring
        kind = "not available" if isinstance(error, ConfigError) else type(error).__name__
        note, cause = f"{kind}: {first_line(error)}", error
        while cause.__cause__ and cause.__cause__ is not error:
            cause = cause.__cause__
        if cause is not error:
            note += f" ({type(cause).__name__}: {first_line(cause)})"
        return {"note": note}
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
