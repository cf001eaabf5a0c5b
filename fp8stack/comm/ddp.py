"""FP8 on the wire of torch's own DistributedDataParallel: a communication hook.

`all_reduce` averages each bucket of gradients, which then goes back to DDP in its own dtype. Nothing else changes:
buckets, `no_sync`, unused parameters and static graphs are DDP's, and so is the memory that it takes. For gradients
that live in FP8 there is `DataParallel`.

On a GPU, the thread in which DDP calls the hook enqueues all of a bucket on one stream. So collectives have the order
of buckets, which is the same on every rank; no collective is launched from a callback of a future.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the classes themselves.

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8stack.errors import ConfigError
from fp8stack.levels import check_number

from .collectives import all_reduce


@dataclass
class Fp8CommState:
    """The options of the hook.

    Attributes:
        process_group: the group of the model's replicas; None: all ranks.
        min_bytes: buckets of fewer bytes are averaged by torch, in their own dtype.
    """

    process_group: Any = None
    min_bytes: int = 0


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
        work = all_reduce(gradients, dist.ReduceOp.AVG, state.process_group, async_op=True)
        assert work is not None  # DDP's ranks are members
        future = work.get_future()
    else:
        gradients.div_(dist.get_world_size(state.process_group))
        group = dist.group.WORLD if state.process_group is None else state.process_group
        future = dist.all_reduce(gradients, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def register_fp8_hook(model: nn.parallel.DistributedDataParallel, min_bytes: int = 0) -> None:
    """Make a DistributedDataParallel model average its gradients with E4M3 blocks on the wire.

    Args:
        model: the wrapped model, before its first backward.
        min_bytes: buckets of fewer bytes are averaged by torch, in their own dtype.

    Raises:
        ConfigError: if `model` is something else.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"register_fp8_hook takes a model wrapped in DistributedDataParallel, got {type(model).__name__}."
        )
    min_bytes = check_number("min_bytes", min_bytes, whole=True)
    model.register_comm_hook(Fp8CommState(model.process_group, min_bytes), fp8_compress_hook)
