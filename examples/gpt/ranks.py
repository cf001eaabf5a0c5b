"""What the ranks of a run tell each other; without torchrun there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fp8stack.errors import CheckpointError

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T) -> list[T]:
    """Return every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def least(number: int) -> int:
    """Return the smallest of a number on all ranks."""
    return min(gather(number))


def on_first_rank(action: Callable[[], T]) -> T:
    """Do something on the first rank; return its result, or raise its error, on all."""
    result: Any = None
    if rank_and_world()[0] == 0:
        try:
            result = action()
        except CheckpointError as error:
            result = error
    result = gather(result)[0]
    if isinstance(result, CheckpointError):
        raise result
    return result
