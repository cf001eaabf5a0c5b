"""How bytes get from rank to rank: torch.distributed's own collectives, what is said when one fails, and statistics.

Every byte that does not go over NVLink by our own kernel (`nvlink.py`) goes through the caller's process group, by the
methods of `Transport`. An error that torch raises in one of them becomes a `CommError` that names the collective and
its ranks. Which rank died or stayed away is for torch, NCCL and the other ranks' logs to say.

`FP8STACK_DEBUG=1` (read at every call) makes each collective first compare its name, size, dtype and operation over all
ranks, at the cost of one more exchange. Ranks that call different collectives are then told so, instead of hanging or
adding up values that do not belong together.

Nothing is counted unless a `Statistics` is open, and counting never waits for the device: its events take the time,
which `collect` reads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import CommError, first_line
from fp8stack.tensor_kinds import inner_tensors

# Since torch 2.13 it has this name, and the old one warns.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_TRUE = ("1", "y", "yes", "t", "true")  # as torch reads its variables


def described(name: str, x: Tensor) -> str:
    """Return what errors call the collective `name` of a tensor."""
    return f"{name} of {x.numel()} {str(x.dtype).removeprefix('torch.')} elements"


class Transport:
    """Moves the bytes of one collective between the ranks of a process group.

    Args:
        group: the process group.
        what: what errors call the collective.
        background: whether other kernels run at the same time; the kernel over NVLink then leaves room for them.
    """

    def __init__(self, group: Any, what: str, background: bool = False) -> None:
        self.group, self.what, self.background = group, what, background
        self.world: int = group.size()

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send the i-th of equal parts to rank i, and receive one from it."""
        self._run(dist.all_to_all_single, received, sent)

    def all_gather(self, whole: Tensor, mine: Tensor) -> None:
        """Join the parts of all ranks; `mine` may be this rank's part of `whole`."""
        if not whole.is_cuda:  # NCCL promises that both may share memory, gloo does not
            mine = mine.clone()
        self._run(all_gather, whole.view(-1), mine.view(-1))

    def _run(self, collective: Callable[..., Any], *tensors: Tensor) -> None:
        # If the host is to wait for NCCL: since torch 2.8 only handles of asynchronous calls do that.
        blocks = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in _TRUE
        with failures_named(self.what, self.group):
            work = collective(*tensors, group=self.group, async_op=blocks and tensors[0].is_cuda)
            if work is not None:
                work.wait()


@contextlib.contextmanager
def failures_named(what: Any, group: Any) -> Iterator[None]:
    """Turn an error of torch.distributed into a CommError that names the collective and its ranks."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's DistError is one
        ranks = dist.get_process_group_ranks(group)
        over = f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"{len(ranks)} ranks"
        raise CommError(
            f"{what} over {over} failed on rank {dist.get_rank()}: {first_line(error)}. The tensors that it was to "
            "change are undefined. If a rank died or stayed away, its own log says why; start all ranks again."
        ) from error


def verify(what: Callable[[], str], group: Any) -> None:
    """Under FP8STACK_DEBUG=1, compare what the ranks of `group` say they are about to do.

    Raises:
        CommError: on every rank, if they do different things.
    """
    if os.environ.get("FP8STACK_DEBUG", "0") != "1":
        return
    said = gather_objects("comparison of calls", what(), group)
    if len(set(said)) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    lines = "".join(f"\n  rank {rank}: {each}" for rank, each in zip(ranks, said, strict=True))
    raise CommError(
        f"ranks call different collectives; all must make the same calls in the same order.{lines}"
    )


def gather_objects(what: str, mine: Any, group: Any) -> list[Any]:
    """Return what each rank of `group` gives, in order; `what` names that in errors."""
    said: list[Any] = [None] * dist.get_world_size(group)
    with failures_named(what, group):
        dist.all_gather_object(said, mine, group)
    return said


def broadcast(tensors: Iterable[Tensor], group: Any, source: int = 0) -> None:
    """Give all ranks of `group` parameters or buffers of one, whose number in the group is `source`."""
    # .data, so that a buffer that autograd saved counts as unchanged; its value rarely changes here
    data = [part for tensor in tensors for part in inner_tensors(tensor.data)]
    if data and group.size() > 1:
        with failures_named(f"broadcast of {len(data)} parameters or buffers", group):
            dist._broadcast_coalesced(group, data, 2**28, source)  # type: ignore[attr-defined]


def group_of(given: Any) -> Any:
    """Return the process group that an argument means, by default torch's own; None if this rank is not in it."""
    group = dist.group.WORLD if given is None else given
    if isinstance(group, dist.ProcessGroup):
        return group
    dist.get_rank(group)  # raises torch's own error if there is no process group at all
    return None


# --- statistics


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
