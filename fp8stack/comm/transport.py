"""How bytes get from rank to rank: torch.distributed's collectives, and who is to blame when one fails.

Sums over the GPUs of one host have a way of their own (`nvlink.py`). Everything else goes through the caller's process
group on a GPU, and for calls that wait. What runs in the background on a CPU needs another: the caller's later
collectives would get between the parts of ours. Each group therefore has a thread, and the thread its own connections
of the same ranks, made when it is first needed, in the thread: no call waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import CommError, first_line

from .checks import explain

# Their names since torch 2.13, where the old ones warn.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Transport:
    """Moves bytes between the ranks of a process group.

    Args:
        group: the process group.
        what: the collective, whose string stands in errors.
        over: connections of the same ranks to use in its place.
        background: whether other kernels are to run at the same time.
    """

    def __init__(self, group: Any, what: Any, over: Any = None, background: bool = False) -> None:
        self.group, self.what = group, what
        self._over = group if over is None else over
        self.background = background
        self.world, self.rank = group.size(), group.rank()

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Exchange the i-th of equal parts with rank i."""
        self._run(dist.all_to_all_single, received, sent)

    def all_gather(self, whole: Tensor, mine: Tensor) -> None:
        """Join the parts of all ranks; `mine` may be this rank's part of `whole`."""
        if not whole.is_cuda:  # only NCCL promises that they may share memory
            mine = mine.clone()
        self._run(all_gather, whole.view(-1), mine.view(-1))

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up in the tensor's own dtype."""
        self._run(dist.all_reduce, tensor)

    def reduce_scatter(self, mine: Tensor, whole: Tensor) -> None:
        """Add up this rank's part in the tensors' own dtype."""
        self._run(_reduce_scatter, mine.view(-1), whole.view(-1))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy from a rank of the group, by its number in it."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        with blamed(self.what, self.group):
            self._over.broadcast([tensor], options).wait()

    def _run(self, collective: Callable[..., Any], *tensors: Tensor) -> None:
        with blamed(self.what, self.group):
            work = collective(*tensors, group=self._over, async_op=tensors[0].is_cuda and _blocks())
            if work is not None:
                work.wait()


def _blocks() -> bool:
    """Is the host to wait for NCCL? Only handles do, and since torch 2.8 calls that are not asynchronous have none."""
    return os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in ("1", "y", "yes", "t", "true")


@contextlib.contextmanager
def blamed(what: Any, group: Any) -> Iterator[None]:
    """Say of an error of torch.distributed which ranks are missing."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        # What torch logs of an error asks for the group's name, and a group that torch does not know has none.
        cause = error if isinstance(error, RuntimeError) else error.__context__
        if not isinstance(cause, RuntimeError):
            raise
        raise CommError(explain(what, group, first_line(cause))) from cause


class Worker:
    """A thread that runs the collectives of one group, in the order of calls, over connections of its own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # Not a pool, whose threads Python waits for at exit: an unfinished collective would keep it.
        calls = (self._calls,)
        self._thread = threading.Thread(target=_serve, args=calls, daemon=True, name=__name__)
        self._thread.start()

    def __del__(self) -> None:
        self._calls.put(None)

    def close(self) -> None:
        """End the thread, if it is idle, and the connections: gloo's must not be left to the end of the process."""
        self._calls.put(None)
        self._thread.join(1.0)
        self._over.clear()

    def submit(self, call: Callable[..., None], groups: Sequence[Any]) -> Future[None]:
        """Run `call` with what stands for each of `groups`; the first is the one this worker is of."""
        result: Future[None] = Future()
        inference = torch.is_inference_mode_enabled()
        over, name = self._over, groups[0].group_name

        def run() -> None:
            with torch.inference_mode(inference):
                for each in groups:
                    if each not in over:
                        over[each] = _connect(each, name)
                call(*(over[each] for each in groups))

        self._calls.put((run, result))
        return result


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while (job := calls.get()) is not None:
        run, result = job
        try:
            run()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)
        del job, run, result


def _connect(group: Any, name: str) -> Any:
    """Return gloo connections of the ranks of `group`, for the worker of the group of that name."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    store = dist.distributed_c10d._get_default_store()
    # While one of a store waits, it keeps other threads from the store. torch 2.6 and some stores cannot copy it.
    with contextlib.suppress(AttributeError, RuntimeError):
        store = store.clone()  # type: ignore[attr-defined]
    place = f"fp8stack/{name}/{group.group_name}"
    # The same store may see another group of this name.
    place = f"{place}/{store.add(f'{place}/{dist.get_rank()}', 1)}"
    store = dist.PrefixStore(place, store)  # type: ignore[attr-defined]
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    backend = dist.ProcessGroupGloo(store, rank, world, timeout=timeout)
    over = dist.ProcessGroup(store, rank, world)
    over._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return over


_WORKERS: weakref.WeakKeyDictionary[Any, Worker] = weakref.WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    for worker in list(_WORKERS.values()):
        worker.close()
    _WORKERS.clear()


def worker_of(group: Any) -> Worker:
    """Return the worker of a group."""
    if group not in _WORKERS:
        _WORKERS[group] = Worker()
    return _WORKERS[group]
