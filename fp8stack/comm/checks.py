"""What went wrong in a collective, and whose fault it is.

A collective that fails, because a rank died or stays away until the group's timeout, raises an error on every other
rank. Each of those signs in at the store through which the group found together; who has not signed after two seconds
is named. `FP8STACK_DEBUG=1` (read at every call) makes each collective compare name, size, dtype and operation over all
ranks first, at the cost of one more exchange, so that ranks that call different collectives are told so and do not hang
or add up what does not belong together.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.errors import CommError, ConfigError, did_you_mean
from fp8stack.formats import FLOATS
from fp8stack.tensor import is_sharded

PATIENCE = 2.0  # seconds that ranks may take to sign in after a failure


def feeds_back(error_feedback: str) -> bool:
    """Return whether a choice of error feedback is to feed anything back, or raise ConfigError."""
    if error_feedback not in ("none", "shard"):
        raise ConfigError(
            f'error_feedback must be "none" or "shard", got "{error_feedback}".'
            f"{did_you_mean(error_feedback, ('none', 'shard'))}"
        )
    return error_feedback == "shard"


class Call(NamedTuple):
    """A collective, which is put into words when something is wrong."""

    name: str
    numel: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} of {self.numel} {str(self.dtype).removeprefix('torch.')} elements"


def verify(what: Callable[[], str], group: Any) -> None:
    """Under FP8STACK_DEBUG=1, compare what the ranks of `group` say they are about to do.

    Raises:
        CommError: on every rank, if they do different things.
    """
    if os.environ.get("FP8STACK_DEBUG", "0") != "1":
        return
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, what(), group)
    if len(set(said)) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    lines = "".join(f"\n  rank {rank}: {each}" for rank, each in zip(ranks, said, strict=True))
    raise CommError(
        f"ranks call different collectives; all must make the same calls in the same order.{lines}"
    )


def verify_models(parameters: Sequence[tuple[str, Tensor]], group: Any) -> None:
    """Compare names, shapes and dtypes of parameters over the ranks of `group`.

    Raises:
        CommError: on every rank, if they differ.
    """
    mine = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group)
    for rank, theirs in zip(dist.get_process_group_ranks(group), said, strict=True):
        if theirs == said[0]:
            continue
        pairs = zip(theirs, said[0], strict=False)
        one, other = next((a, b) for a, b in [*pairs, ("fewer or more", "others")] if a != b)
        raise CommError(
            f"rank {rank} trains {len(theirs)} parameters, the first rank {len(said[0])}; they differ at: {one} "
            f"instead of {other}. All ranks must build the same model."
        )


def group_of(given: Any) -> Any:
    """Return the process group that an argument means, by default torch's own; None if this rank is not in it."""
    group = dist.group.WORLD if given is None else given
    if isinstance(group, dist.ProcessGroup):
        return group
    dist.get_rank(group)  # raises torch's error where there are no groups
    return None


def member_group(given: Any) -> Any:
    """Return the process group that an argument means, or raise ConfigError if this rank is not in it."""
    group = group_of(given)
    if group is None:
        raise ConfigError(f"rank {dist.get_rank()} does not belong to the given process group.")
    return group


def check_model(
    module: nn.Module, trained: list[tuple[str, nn.Parameter]], bucket_cap_mb: float
) -> torch.device:
    """Return the device of the model, or raise ConfigError."""
    if not trained:
        raise ConfigError(
            f"DataParallel got {type(module).__name__}, no parameter of which is trained."
        )
    if bucket_cap_mb <= 0:
        raise ConfigError(f"bucket_cap_mb must be above 0, got {bucket_cap_mb}.")
    devices = {str(p.device) for p in module.parameters()}
    if len(devices) > 1:
        raise ConfigError(
            f"DataParallel takes a model on one device; this one is on {', '.join(sorted(devices))}."
        )
    for name, p in trained:
        if p.dtype not in FLOATS:
            raise ConfigError(
                f"{name} is {p.dtype}; FP8 gradients are of float32, bfloat16 and float16 parameters."
            )
        if is_sharded(p):
            raise ConfigError(f"{name} is sharded already; DataParallel is for whole replicas.")
    return trained[0][1].device


def explain(what: Any, group: Any, reason: str) -> str:
    """Return the message of a collective that failed, with the ranks that are missing."""
    ranks = dist.get_process_group_ranks(group)
    missing = _find_missing(group, ranks)
    if missing is None:
        told = "which ranks are missing is not known, as the store is gone too"
    elif missing:
        one = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {_listed(missing)}"
        told = f"{one} did not take part in it"
    else:
        told = "all ranks are alive"
    return (
        f"{what} over ranks {_listed(ranks)} failed on rank {dist.get_rank()}: {told} ({reason}). "
        "What it was to change is undefined; see the logs of the ranks named."
    )


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown


def _find_missing(group: Any, ranks: list[int]) -> list[int] | None:
    """Sign in as a rank whose collective failed, and return those who do not; None if the store does not answer.

    Ranks sign out later, or the next failure would find them alive.
    """
    answer: list[list[int]] = []
    answered = threading.Event()

    def ask() -> None:
        store = dist.distributed_c10d._get_default_store()
        place = f"fp8stack/failed/{group.group_name}"
        with contextlib.suppress(RuntimeError):  # the store was with the rank that died
            store.set(f"{place}/{dist.get_rank()}", "1")
            deadline, missing = time.monotonic() + PATIENCE, list(ranks)
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
                time.sleep(0.05)
            answer.append(missing)
            answered.set()
            time.sleep(4 * PATIENCE)
            store.delete_key(f"{place}/{dist.get_rank()}")

    # A store whose host is stopped answers neither yes nor no.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    answered.wait(2 * PATIENCE)
    return answer[0] if answer else None
