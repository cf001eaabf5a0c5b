"""What went wrong in a collective, and whose fault it is.

A collective that fails, because a rank died or stays away until the group's timeout, raises an error on every other
rank. Each of those signs in at the store through which the group found together; who has not signed after two seconds
is named. `FP8STACK_DEBUG=1` (read at every call) makes each collective compare name, size, dtype and operation over all
ranks first, at the cost of one more exchange, so that ranks that call different collectives are told so and do not hang
or add up what does not belong together.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import CommError, ConfigError, did_you_mean

PATIENCE = 2.0  # seconds that ranks may take to sign in after a failure

_FAILED: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def feeds_back(error_feedback: str) -> bool:
    """Return whether a choice of error feedback is to feed anything back, or raise ConfigError."""
    if error_feedback not in ("none", "shard"):
        raise ConfigError(
            f'error_feedback must be "none" or "shard", got "{error_feedback}".'
            f"{did_you_mean(error_feedback, ('none', 'shard'))}"
        )
    return error_feedback == "shard"


def describe(name: str, tensor: Tensor) -> str:
    """Return a collective in words."""
    return f"{name} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} elements"


def verify(name: str, output: Tensor, input: Tensor, op: Any, group: Any) -> None:
    """Under FP8STACK_DEBUG=1, compare what the ranks of `group` are about to do.

    Raises:
        CommError: on every rank, if they do different things.
    """
    if os.environ.get("FP8STACK_DEBUG", "0") != "1":
        return
    mine = f"{describe(name, input)} into {output.numel()}, {op}, {type(input).__name__}"
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group)
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


def explain(name: str, tensor: Tensor, group: Any, reason: str) -> str:
    """Return the message of a collective that failed, with the ranks that are missing."""
    ranks = dist.get_process_group_ranks(group)
    missing = _find_missing(group, ranks)
    who = (
        f"rank {missing[0]} did" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} did"
    )  # fmt: skip
    told = f"{who} not take part in it" if missing else "all ranks are alive"
    return (
        f"{describe(name, tensor)} over ranks {', '.join(map(str, ranks))} failed on rank {dist.get_rank()}: "
        f"{told} ({reason}). The tensor's contents are undefined; see the logs of the ranks named."
    )


def _find_missing(group: Any, ranks: list[int]) -> list[int]:
    """Sign in as a rank whose collective failed, and return those who do not."""
    count = _FAILED[group] = _FAILED.get(group, 0) + 1
    try:
        store = dist.distributed_c10d._get_default_store()
        place = f"fp8stack/failed/{group.group_name}/{count}"
        store.set(f"{place}/{dist.get_rank()}", "1")
        deadline = time.monotonic() + PATIENCE
        missing = list(ranks)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
            time.sleep(0.05)
        return missing
    except RuntimeError:  # the store was with the rank that died
        return []
