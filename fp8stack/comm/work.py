"""Handles of collectives: what `async_op=True` returns.

On a GPU an asynchronous collective runs on a stream of its own, enqueued in the order of calls by the caller's thread;
waiting makes the caller's stream wait, not the host. On a CPU it runs in one thread a process, in the order of calls,
over a private group of the same ranks: collectives that the caller starts meanwhile cannot get between its parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Result
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Body = Callable[[Any], None]  # runs a collective over a group


class Done(dist.Work):
    """The handle of what needed no communication."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return _settled(self._tensors)


class StreamWork(Done):
    """A collective that a stream of the GPU runs."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        super().__init__(tensors)
        self._event = stream.record_event()
        with torch.cuda.stream(stream):  # a future of a GPU remembers what its stream has yet to do
            self._future = _settled(self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the process group's own timeout is in force, not `timeout`."""
        torch.cuda.current_stream(self._tensors[0].device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class ThreadWork(Done):
    """A collective that a thread of the host runs."""

    def __init__(self, tensors: Sequence[Tensor], result: Result[None]) -> None:
        super().__init__(tensors)
        self._result = result
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        result.add_done_callback(self._settle)

    def _settle(self, result: Result[None]) -> None:
        error = result.exception()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raise what it raised, TimeoutError after `timeout`."""
        self._result.result(timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        return self._result.done()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


def start(body: Body, group: Any, tensors: Sequence[Tensor], async_op: bool) -> Done | None:
    """Run a collective over `group`: now, or in the background, returning its handle."""
    device = tensors[0].device
    if not async_op:
        body(group)
        return None
    if device.type != "cuda":
        return ThreadWork(tensors, _thread().submit(body, _private(group)))
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        body(group)
    for tensor in tensors:
        tensor.record_stream(stream)
    return StreamWork(tensors, stream)


def _settled(tensors: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
    devices = {t.device for t in tensors if t.is_cuda}
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list(devices))
    future.set_result(tensors)
    return future


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "fp8stack.comm")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


_PRIVATE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By group: another one of the same ranks, for the thread. All ranks make it at their first asynchronous call."""


def _private(group: Any) -> Any:
    if group not in _PRIVATE:
        _PRIVATE[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            group._get_backend(torch.device("cpu")).options._timeout,
            "gloo",
            use_local_synchronization=True,
        )
    return _PRIVATE[group]
