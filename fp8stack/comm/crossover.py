"""Small tensors, which the process group's own collectives move faster in bfloat16 than ours in FP8.

An FP8 sum is two collectives and three kernels where bfloat16 needs one collective, so below some size it loses. On
four H200s over NCCL that is between 16 MiB of bfloat16 (where FP8 takes 2.6 times as long) and 64 MiB (where it is 1.08
times faster; `benchmarks/results/comm.jsonl`). Over NVLink our kernel is ahead at every size and all goes in FP8; so do
blocks that are FP8 already, and everything on CPUs. `set_crossover` decides otherwise.

Sums are then the process group's: in bfloat16, the same bits on all ranks, and an infinity stays one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.formats import BLOCK
from fp8stack.kernels.reference.wire import Layout
from fp8stack.tensor import BlockScaledTensor

from .statistics import Sent
from .transport import Transport

CROSSOVER = 2**25  # bytes of bfloat16
_CROSSOVERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def set_crossover(nbytes: int, group: Any = None) -> None:
    """Choose from what size on the collectives of a group send FP8; all of its ranks must choose alike.

    Args:
        nbytes: tensors of fewer, counted in bfloat16, are summed or gathered in bfloat16; 0: none are. By default 32
            MiB on GPUs, 0 on CPUs. Of no effect over NVLink, on FP8 tensors, on sums with error feedback, and on
            `broadcast`, `DataParallel` and groups with a hierarchy.
        group: a process group; by default torch's own.

    Raises:
        ConfigError: if `nbytes` is negative.
    """
    if nbytes < 0:
        raise ConfigError(f"a crossover is a number of bytes, 0 or more; got {nbytes}.")
    group = dist.group.WORLD if group is None else group
    if isinstance(group, dist.ProcessGroup):
        _CROSSOVERS[group] = nbytes
    else:
        dist.get_rank(
            group
        )  # raises torch's error where there are no groups; else this rank is not in it


def is_small(x: Tensor, way: Transport) -> bool:
    """Is the whole that `x` is to ranks below the crossover of their group?"""
    least = _CROSSOVERS.get(way.group, CROSSOVER if x.is_cuda else 0)
    return 2 * x.numel() < least and not isinstance(x, BlockScaledTensor)


def reduce_all(output: Tensor, input: Tensor, way: Transport, divisor: int) -> Sent:
    """All-reduce in bfloat16."""
    whole = (
        output if output.dtype is torch.bfloat16 else torch.empty_like(output, dtype=torch.bfloat16)
    )
    if whole is not input:
        whole.copy_(input)
    way.all_reduce(whole)
    _finish(whole, output, divisor)
    sent = 2 * (way.world - 1) * whole.nbytes // way.world
    return Sent(sent, -(-output.numel() // BLOCK), lambda: _told_by(output))


def reduce_scatter(output: Tensor, input: Tensor, way: Transport, divisor: int) -> Sent:
    """Reduce-scatter in bfloat16."""
    mine = (
        output if output.dtype is torch.bfloat16 else torch.empty_like(output, dtype=torch.bfloat16)
    )
    way.reduce_scatter(mine, input.bfloat16())
    _finish(mine, output, divisor)
    return Sent((way.world - 1) * mine.nbytes, 0, None)


def gather(output: Tensor, input: Tensor, way: Transport) -> Sent:
    """All-gather in bfloat16."""
    whole = (
        output if output.dtype is torch.bfloat16 else torch.empty_like(output, dtype=torch.bfloat16)
    )
    way.all_gather(whole, input.bfloat16())
    _finish(whole, output, 1)
    blocks = Layout(way.world, input.numel(), way.world).blocks
    return Sent((way.world - 1) * 2 * input.numel(), blocks, lambda: _told_by(output))


def _finish(result: Tensor, output: Tensor, divisor: int) -> None:
    if result is not output:
        output.copy_(result)
    if divisor != 1:
        output.div_(divisor)


def _told_by(output: Tensor) -> Tensor:
    """Return what is NaN for each block that is not finite."""
    flat = output.view(-1).float()
    flat = torch.nn.functional.pad(flat - flat, (0, -flat.numel() % BLOCK))
    return flat.view(-1, BLOCK).sum(1)
