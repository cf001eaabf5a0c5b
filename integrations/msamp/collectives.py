"""MS-AMP's data parallelism over `fp8stack.comm`: FP8 on the wire, sums in float32, no fork of NCCL.

MS-AMP let NCCL add FP8 codes, rounding and saturating at every hop, so that the mean of gradients that are alike came
out too small. Here sums are float32 and get scales of their own: nothing saturates.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8stack import comm
from fp8stack.comm.transport import broadcast
from fp8stack.tensor import BlockScaledTensor
from fp8stack.tensor_kinds import is_sharded

GROUPS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The process groups that models were given to `LinearReplacer.replace` with."""


def is_alone(group: Any = None) -> bool:
    """Return whether there is no other rank to exchange anything with."""
    return not dist.is_initialized() or dist.get_world_size(group) < 2


def share_weights(model: nn.Module, src_rank: int = 0, group: Any = None) -> None:
    """Give every rank of `group` the parameters of global rank `src_rank`."""
    if not is_alone(group):
        group = dist.group.WORLD if group is None else group
        broadcast(model.parameters(), group, dist.get_group_rank(group, src_rank))


@torch.no_grad()
def all_reduce_grads(model: nn.Module) -> None:
    """Average the gradients of `model` over ranks: FP8 ones with FP8 on the wire, others as they are.

    All ranks need gradients of the same parameters. A model wrapped in DistributedDataParallel or
    `fp8stack.comm.DataParallel` has averaged them already.
    """
    group = GROUPS.get(model)
    if is_alone(group) or isinstance(model, (DistributedDataParallel, comm.DataParallel)):
        return
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None or is_sharded(gradient):
            continue
        if isinstance(gradient, BlockScaledTensor):
            comm.all_reduce(gradient, dist.ReduceOp.AVG, group)
        else:
            dist.all_reduce(gradient, group=group)
            gradient.div_(dist.get_world_size(group))
