"""Small tensors, which the process group's own collectives move faster in bfloat16 than ours in FP8.

An FP8 sum is two collectives and three kernels where bfloat16 needs one collective, some 0.2 ms more on a GPU, so below
some size it loses. Between four H200s, over NCCL and NVLink, that is at 58 MiB of bfloat16, by interpolation
(`benchmarks/results/comm.jsonl`); where bytes take longer it is less. A group's default is 16 MiB if its ranks are on
one host and found that they cannot use our kernel over NVLink, and 0 on several hosts, on CPUs and where "collective"
was asked for. Over NVLink all goes in FP8: there the kernel is ahead at every size, though in eager mode a call takes
the host longer. What is FP8 already goes as it is.

Sums are then the process group's: in bfloat16 and in its order, the same bits on all ranks; a NaN or infinity stays in
its element, and float32 loses its lower bits.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.formats import BLOCK
from fp8stack.kernels.reference.wire import Layout
from fp8stack.tensor import BlockScaledTensor

from .checks import group_of
from .nvlink import is_without_link
from .statistics import Sent
from .transport import Transport

CROSSOVER = 2**24  # bytes of bfloat16
_CROSSOVERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def set_crossover(nbytes: int, group: Any = None) -> None:
    """Choose from what size on the collectives of a group send FP8; all of its ranks must choose alike.

    Args:
        nbytes: tensors of fewer, counted in bfloat16, are summed or gathered in bfloat16; 0: none are. By default 16
            MiB between GPUs of one host without NVLink, else 0. Of no effect over NVLink, on FP8 tensors, on sums with
            error feedback, and on `broadcast`, `DataParallel` and groups with a hierarchy.
        group: a process group; by default torch's own.

    Raises:
        ConfigError: if `nbytes` is negative.
    """
    if nbytes < 0:
        raise ConfigError(f"a crossover is a number of bytes, 0 or more; got {nbytes}.")
    group = group_of(group)
    if group is not None:
        _CROSSOVERS[group] = nbytes


def crossover_of(group: Any) -> int:
    """Return the bytes of bfloat16 below which a group sends bfloat16."""
    default = CROSSOVER if is_without_link(group) else 0
    return _CROSSOVERS.get(group, default)


def is_small(x: Tensor, way: Transport) -> bool:
    """Is the whole that `x` is to ranks below the crossover of their group?"""
    return 2 * x.numel() < crossover_of(way.group) and not isinstance(x, BlockScaledTensor)


def reduce_all(output: Tensor, input: Tensor, way: Transport, divisor: int) -> Sent:
    """All-reduce in bfloat16."""
    whole = _as_bf16(output)
    if whole.data_ptr() != input.data_ptr():
        whole.copy_(input)
    way.all_reduce(whole)
    _finish(whole, output, divisor)
    sent = 2 * (way.world - 1) * whole.nbytes // way.world
    return Sent(sent, -(-output.numel() // BLOCK), lambda: _told_by(output))


def reduce_scatter(output: Tensor, input: Tensor, way: Transport, divisor: int) -> Sent:
    """Reduce-scatter in bfloat16."""
    mine = _as_bf16(output)
    way.reduce_scatter(mine, input.bfloat16())
    _finish(mine, output, divisor)
    blocks = -(-output.numel() // BLOCK)
    return Sent((way.world - 1) * mine.nbytes, blocks, lambda: _told_by(output))


def gather(output: Tensor, input: Tensor, way: Transport) -> Sent:
    """All-gather in bfloat16."""
    whole = _as_bf16(output)
    way.all_gather(whole, input.bfloat16())
    _finish(whole, output, 1)
    blocks = Layout(way.world, input.numel(), way.world).blocks
    return Sent((way.world - 1) * 2 * input.numel(), blocks, lambda: _told_by(output))


def _as_bf16(output: Tensor) -> Tensor:
    """Return bfloat16 memory of the shape of `output`, which it is itself if it can be."""
    own = output.dtype is torch.bfloat16
    return output if own else torch.empty_like(output, dtype=torch.bfloat16)


def _finish(result: Tensor, output: Tensor, divisor: int) -> None:
    if divisor != 1:
        result = result.float().div_(divisor)  # a float16 may not hold the sum
    if result is not output:
        output.copy_(result)


def _told_by(output: Tensor) -> Tensor:
    """Return what is NaN for each block that is not finite."""
    flat = output.view(-1).float()
    flat = torch.nn.functional.pad(flat - flat, (0, -flat.numel() % BLOCK))
    return flat.view(-1, BLOCK).sum(1)
