"""FP8 on the wire of torch's own DistributedDataParallel: a communication hook.

`all_reduce` averages each bucket of gradients, which then goes back to DDP in its own dtype. Nothing else changes:
buckets, `no_sync`, unused parameters and static graphs are DDP's, and so is the memory that it takes. For gradients
that live in FP8 there is `DataParallel`.

On a GPU, the thread in which DDP calls the hook enqueues all of a bucket on one stream. So collectives have the order
of buckets, which is the same on every rank; no collective is launched from a callback of a future.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the classes themselves.

import torch
import torch.distributed as dist
from torch import nn

from fp8stack.errors import ConfigError

from .collectives import all_reduce


def fp8_compress_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients with E4M3 blocks on the wire: `ddp.register_comm_hook(group, fp8_compress_hook)`.

    Args:
        group: the group of the model's replicas, as torch's hooks take it; None: all ranks.
        bucket: DDP's.
    """
    work = all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group, async_op=True)
    assert work is not None  # DDP's ranks are members
    return work.get_future().then(lambda done: done.value()[0])


def register_fp8_hook(model: nn.parallel.DistributedDataParallel) -> None:
    """Make a DistributedDataParallel model, before its first backward, average gradients with E4M3 blocks on the wire.

    Raises:
        ConfigError: if `model` is something else.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"register_fp8_hook takes a model wrapped in DistributedDataParallel, got {type(model).__name__}."
        )
    model.register_comm_hook(model.process_group, fp8_compress_hook)
