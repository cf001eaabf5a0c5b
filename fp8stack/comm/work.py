"""Handles of collectives: what `async_op=True` returns.

On a GPU an asynchronous collective runs on a stream of its own, enqueued in the order of calls by the caller's thread;
waiting makes the caller's stream wait, not the host. On a CPU it runs in a thread of the group's (`transport.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future as Result
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.tensor import BlockScaledTensor

from .transport import worker_of

Body = Callable[..., None]  # runs a collective over groups, or what stands for them


class Done(dist.Work):
    """The handle of what needed no communication."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait, as NCCL's handles do."""
        self.wait()

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

    def is_success(self) -> bool:
        return self._result.done() and self._result.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the collective raised, if it is done."""
        return self._result.exception() if self._result.done() else None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


def start(
    body: Body, groups: Sequence[Any], tensors: Sequence[Tensor], async_op: bool
) -> Done | None:
    """Run a collective over `groups`, of whose first it is: now, or in the background, returning its handle."""
    device = tensors[0].device
    if not async_op:
        body(*groups)
        return None
    if device.type != "cuda":
        return ThreadWork(tensors, worker_of(groups[0]).submit(body, groups))
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        body(*groups)
    for tensor in tensors:
        for part in tensor.parts() if isinstance(tensor, BlockScaledTensor) else (tensor,):
            part.record_stream(stream)
    return StreamWork(tensors, stream)


def _settled(tensors: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
    devices = {t.device for t in tensors if t.is_cuda}
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list(devices))
    future.set_result(tensors)
    return future


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
