"""MS-AMP's data parallelism over `fp8stack.comm`: FP8 on the wire, sums in float32, no fork of NCCL.

MS-AMP let NCCL add FP8 codes, rounding and saturating at every hop, so that the mean of gradients that are alike came
out too small. Here sums are float32 and get scales of their own: nothing saturates. Only `DistOp`, which is given codes
without their scale, has to put a sum into the range of its codes; it warns where that clips.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp8stack import comm
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.kernels.reference import fp8
from fp8stack.tensor import BlockScaledTensor, is_sharded

from .tensors import FP8_FORMATS, Dtypes, QType, ScalingMeta, ScalingTensor

GROUPS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The process groups that models were given to `LinearReplacer.replace` with."""


def is_alone(group: Any = None) -> bool:
    """Return whether there is no other rank to exchange anything with."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2


def share_weights(model: nn.Module, src_rank: int = 0, group: Any = None) -> None:
    """Give every rank of `group` the parameters of global rank `src_rank`."""
    if not is_alone(group):
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src_rank, group)


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


class FP8DistributedDataParallel(DistributedDataParallel):
    """torch's DistributedDataParallel, its arguments included, with FP8 on the wire."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        comm.register_fp8_hook(self)


class TensorDist:
    """Collectives of lists of ScalingTensors and ordinary tensors, in place; `bucket_size` has no effect."""

    @staticmethod
    def broadcast(
        tensors: Sequence[ScalingTensor | Tensor],
        src: int = 0,
        group: Any = None,
        bucket_size: int = 0,
    ) -> None:
        """Copy the tensors of global rank `src` to all ranks."""
        if is_alone(group):
            return
        for tensor in tensors:
            if isinstance(tensor, ScalingTensor):
                meta = tensor.meta.to(tensor.device)
                parts = torch.cat([meta.scale.view(1), meta.scale_inv.view(1), meta.amax])
                dist.broadcast(tensor.value, src, group)
                dist.broadcast(parts, src, group)
                tensor.meta = ScalingMeta(tensor.qtype, parts[0], parts[1], parts[2:], group=group)
            else:
                dist.broadcast(tensor, src, group)

    @staticmethod
    @torch.no_grad()
    def all_reduce(
        tensors: Sequence[ScalingTensor | Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        bucket_size: int = 0,
    ) -> None:
        """Add up, or average (ReduceOp.AVG), with FP8 on the wire; a sum gets a scale of its own."""
        for tensor in tensors if not is_alone(group) else ():
            if isinstance(tensor, ScalingTensor):
                total = tensor.float()
                comm.all_reduce(total, op, group)
                tensor.assign_(total)
            else:
                comm.all_reduce(tensor, op, group)

    all_reduce_sum = all_reduce

    @classmethod
    def all_reduce_avg(
        cls, tensors: Sequence[ScalingTensor | Tensor], group: Any = None, bucket_size: int = 0
    ) -> None:
        """Average over ranks."""
        cls.all_reduce(tensors, dist.ReduceOp.AVG, group)


class DistOp:
    """Sums of bare FP8 codes, which share one scale that is not told."""

    @staticmethod
    @torch.no_grad()
    def all_reduce(tensor: Any, qtype: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        """Add up, or average (ReduceOp.AVG), uint8 codes of `qtype` over ranks, in place.

        MS-AMP had both orders of the first two arguments, and so has this. Sums beyond the largest code are clipped to
        it, with a warning. Other formats are torch's all_reduce.
        """
        if isinstance(tensor, QType):
            tensor, qtype = qtype, tensor
        if not Dtypes.is_fp8_qtype(qtype):
            dist.all_reduce(tensor, op, group)
            return
        tensor.copy_(_sum_of_codes(tensor, qtype, op, group))

    @staticmethod
    @torch.no_grad()
    def reduce(
        tensor: Tensor, dst: int, qtype: QType, op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> None:
        """As `all_reduce`, into the tensor of global rank `dst` alone."""
        if not Dtypes.is_fp8_qtype(qtype):
            dist.reduce(tensor, dst, op, group)
            return
        total = _sum_of_codes(tensor, qtype, op, group)
        if dist.get_rank() == dst:
            tensor.copy_(total)


def _sum_of_codes(codes: Tensor, qtype: QType, op: Any, group: Any) -> Tensor:
    if codes.dtype is not torch.uint8:
        raise ConfigError(
            f"codes of {qtype.name} are uint8, got {codes.dtype}. cast(x, qtype).value is them."
        )
    fmt = FP8_FORMATS[qtype]
    total = fp8.decode(codes, fmt)
    comm.all_reduce(total, op, group)
    clipped = int(fp8.count_saturated(total, fmt))
    if clipped:
        warnings.warn(
            f"msamp: {clipped} of {total.numel()} sums of {qtype.name} codes are beyond {fmt.max:g} and are clipped to "
            "it. TensorDist.all_reduce_avg of ScalingTensors gives sums a scale of their own.",
            Fp8StackWarning,
            stacklevel=3,
        )
    return fp8.cast(total, fmt).view(torch.uint8)
