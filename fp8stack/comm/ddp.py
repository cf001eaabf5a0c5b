"""FP8 on the wire of torch's own DistributedDataParallel: a communication hook.

Each bucket of gradients is averaged by `all_reduce` and handed back in its own dtype, so nothing else changes: buckets,
`no_sync`, unused parameters and static graphs are DDP's. What DDP holds is not smaller either; gradients that live in
FP8 need a reducer of their own.

On a GPU all of a bucket is enqueued on one stream by the thread that DDP calls the hook in, so the order of collectives
is the order of buckets on every rank; nothing is started from a callback of a future.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the classes themselves.

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8stack.errors import ConfigError

from .checks import feeds_back
from .collectives import all_reduce, error_like


@dataclass
class Fp8CommState:
    """What the hook needs to know.

    Attributes:
        process_group: the group of the model's replicas; None: all ranks.
        min_bytes: buckets of fewer bytes are averaged as they are, in their own dtype.
        error_feedback: "shard" adds to each mean what quantizing the last one cut off, see `DataParallel`.
    """

    process_group: Any = None
    min_bytes: int = 0
    error_feedback: str = "none"

    def __post_init__(self) -> None:
        self._feeds_back = feeds_back(self.error_feedback)
        self._errors: dict[tuple[int, int], torch.Tensor] = {}

    def error_of(self, index: int, gradients: torch.Tensor) -> torch.Tensor | None:
        """Return the error of a bucket, which begins anew where the bucket is of another size than it was."""
        if not self._feeds_back:
            return None
        key = index, gradients.numel()
        if key not in self._errors:
            self._errors = {k: error for k, error in self._errors.items() if k[0] != index}
            self._errors[key] = error_like(gradients, self.process_group)
        return self._errors[key]


def fp8_compress_hook(
    state: Fp8CommState | dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients with E4M3 blocks on the wire: `ddp.register_comm_hook(state, fp8_compress_hook)`.

    Args:
        state: an `Fp8CommState`, the process group itself as torch's hooks take it, or None for all ranks.
        bucket: DDP's.
    """
    if not isinstance(state, Fp8CommState):
        state = Fp8CommState(state)
    gradients = bucket.buffer()
    if gradients.nbytes >= state.min_bytes:
        error = state.error_of(bucket.index(), gradients)
        average, group = dist.ReduceOp.AVG, state.process_group
        work = all_reduce(gradients, average, group, async_op=True, error=error)
        assert work is not None  # DDP's ranks are members
        future = work.get_future()
    else:
        gradients.div_(dist.get_world_size(state.process_group))
        group = dist.group.WORLD if state.process_group is None else state.process_group
        future = dist.all_reduce(gradients, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def register_fp8_hook(
    model: nn.parallel.DistributedDataParallel, min_bytes: int = 0, error_feedback: str = "none"
) -> None:
    """Make a DistributedDataParallel model average its gradients with E4M3 blocks on the wire.

    Args:
        model: the wrapped model, before its first backward.
        min_bytes, error_feedback: see `Fp8CommState`.

    Raises:
        ConfigError: if `model` is something else.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"register_fp8_hook takes a model wrapped in DistributedDataParallel, got {type(model).__name__}."
        )
    state = Fp8CommState(model.process_group, min_bytes, error_feedback)
    model.register_comm_hook(state, fp8_compress_hook)
