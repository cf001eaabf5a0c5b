"""Collectives with torch.distributed's names and arguments, whose bytes are E4M3 blocks (`kernels/reference/wire.py`).

| | sent by a rank, of an element | quantized |
|---|---|---|
| `all_reduce` | 2 (N - 1) / N × 1.03 bytes: all-to-all of stripes, all-gather of their sums | twice |
| `reduce_scatter_tensor` | (N - 1) / N × 1.03: all-to-all | once |
| `all_gather_into_tensor` | (N - 1) / N × 1.03 | once |
| `broadcast` | 1.03 | once |

Sums are float32 and have the order of ranks; nothing saturates, since sums get scales of their own. A NaN or infinity
makes its block of 128 NaN on every rank. Every rank ends with the same bits. The bytes are moved by torch.distributed's
collectives of uint8, so any backend that has them does (NCCL, gloo); sums over the GPUs of one host are one kernel of
ours (`nvlink.py`), with the same bits.

Between GPUs of one host that cannot use NVLink, small tensors go in bfloat16, with the backend's own sums
(`crossover.py`).

With one rank nothing is quantized. SUM and AVG of float32, bfloat16 and float16 tensors, and of `BlockScaledTensor`s,
whose codes then are neither decoded nor rounded before they are sent; a non-contiguous tensor costs a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.formats import BLOCK, FLOATS
from fp8stack.kernels.reference.wire import scales_of
from fp8stack.tensor import BlockScaledTensor

from . import exchange
from .checks import Call, group_of, verify
from .crossover import crossover_of
from .hosts import hierarchy_of
from .nvlink import transport_of
from .statistics import Sent, observe
from .transport import Transport
from .work import Done, start


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    error: Tensor | None = None,
) -> dist.Work | None:
    """Add up, or average, a tensor over all ranks, in place.

    Args:
        tensor: of the same shape and dtype on every rank.
        op: `ReduceOp.SUM` or `ReduceOp.AVG`.
        group: the process group; by default all ranks.
        async_op: return a handle; the tensor is to be left alone until its `wait()`. The same on all ranks.
        error: of `error_like(tensor)`; what quantizing this rank's part of the sum cut off the last time. It is added
            to the sum, and replaced ("error feedback" of the second quantization alone).

    Returns:
        A handle if `async_op`, else None; None too on a rank that is not in the group.

    Raises:
        ConfigError: for another operation, dtype or kind of tensor.
        CommError: if ranks fail or stay away.
    """
    hosts, detail = hierarchy_of(group), ""
    if error is not None and dist.get_world_size(group) > 0:  # else this rank is not in the group
        _check_error(error, tensor, group)
        detail = "with error feedback"
    body = partial(exchange.reduce_hosts if hosts else exchange.reduce_all, error=error)
    return _run("all_reduce", tensor, tensor, op, group, async_op, body, hosts, detail, error=error)


def error_like(tensor: Tensor, group: Any = None) -> Tensor:
    """Return zeros for the `error` of an all_reduce of `tensor`: float32, an element for each of this rank's part."""
    return torch.zeros(_part_of(tensor, group), dtype=torch.float32, device=tensor.device)


def _part_of(tensor: Tensor, group: Any) -> int:
    """Return the elements of a rank's part, filled up to whole blocks."""
    world = dist.get_world_size(group)
    return exchange.flat(tensor, world).per * BLOCK if world > 0 else 0


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Add up, or average, a tensor over all ranks and give each rank its part: the `rank`-th of equal parts, in order.

    Arguments, results and errors are those of `all_reduce`; `input` has as many elements as the outputs of all ranks.
    The sum is rounded to the dtype of `output` and not quantized again.
    """
    return reduce_scatter_beside(output, input, op, group, async_op, background=async_op)


def reduce_scatter_beside(
    output: Tensor, input: Tensor, op: Any, group: Any, async_op: bool, background: bool = True
) -> dist.Work | None:
    """As `reduce_scatter_tensor`, on a stream beside whose kernels others are to run."""
    _refuse_blocks("reduce_scatter_tensor", output, input)
    body = exchange.reduce_scatter
    return _run(
        "reduce_scatter_tensor", output, input, op, group, async_op, body, background=background
    )


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> dist.Work | None:
    """Join the tensors of all ranks, in order; arguments, results and errors are those of `all_reduce`."""
    _refuse_blocks("all_gather_into_tensor", output_tensor, input_tensor)
    sum_ = dist.ReduceOp.SUM
    return _run(
        "all_gather_into_tensor",
        output_tensor,
        input_tensor,
        sum_,
        group,
        async_op,
        exchange.gather,
    )


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """Copy a rank's tensor to all, rounded to E4M3 blocks on that rank too.

    `src` is its number among all ranks, `group_src` in the group; one of them is given.

    Arguments, results and errors are those of `all_reduce`.
    """
    source = _source_of(src, group_src, group)

    def body(output: Tensor, input: Tensor, average: bool, way: Transport) -> Sent:
        layout, sends = exchange.flat(input, 1), way.rank == source
        if sends:
            chunk = exchange.pack(input, layout)
        else:
            chunk = torch.empty((1, layout.pitch), dtype=torch.uint8, device=input.device)
        way.broadcast(chunk, source)
        exchange.unpack(chunk, output, layout)
        return Sent(sends * chunk.nbytes, layout.blocks, lambda: scales_of(chunk, layout.per))

    told = f"from rank {src}" if group_src is None else f"from group rank {group_src}"
    sum_ = dist.ReduceOp.SUM
    return _run("broadcast", tensor, tensor, sum_, group, async_op, body, detail=told)


def _source_of(src: int | None, group_src: int | None, group: Any) -> int:
    """Return the number of a source in the group; 0 on a rank that is not in it."""
    if (src is None) == (group_src is None):
        raise ConfigError(
            f"broadcast needs one of src and group_src; got src={src} and group_src={group_src}."
        )
    if dist.get_world_size(group) < 1:
        return 0
    ranks = dist.get_process_group_ranks(group)
    if src in ranks:
        return ranks.index(src)
    if group_src is None or not 0 <= group_src < len(ranks):
        given = f"src={src}" if group_src is None else f"group_src={group_src}"
        raise ValueError(f"broadcast got {given}, which is no rank of the group {ranks}.")
    return group_src


reduce_scatter_single = reduce_scatter_tensor
all_gather_single = all_gather_into_tensor


# --- around every collective

Body = Callable[..., Sent]  # of output, input, average, transports


def _run(
    name: str,
    output: Tensor,
    input: Tensor,
    op: Any,
    group: Any,
    async_op: bool,
    body: Body,
    more: tuple[Any, ...] = (),  # groups
    detail: str = "",  # that ranks have to agree on
    background: bool = False,  # which `async_op` implies
    error: Tensor | None = None,  # that `body` uses
) -> dist.Work | None:
    """Check the arguments and run a collective."""
    group = group_of(group)
    if group is None:
        warnings.warn(
            f"Running {name} on global rank {dist.get_rank()} which does not belong to the given group.",
            stacklevel=3,
        )
        return None
    world = group.size()
    _check(name, output, input, op, world)
    what = Call(f"{name} {detail}" if detail else name, input.numel(), input.dtype)
    average = op == dist.ReduceOp.AVG

    def tell() -> str:
        how = "in the background" if async_op else "waiting"
        how += f", by way of hosts of {more[0].size()}" if more else ""
        way = f"transport {transport_of(group)}, crossover {crossover_of(group)}"
        return f"{what} into {output.numel()}, {op}, {type(input).__name__}, {how}, {way}"

    verify(tell, group)
    if world == 1 or not input.numel():
        if output is not input:
            output.detach().copy_(input.detach().reshape(output.shape))
        return Done([output]) if async_op else None
    groups = (group, *more)

    def run(*over: Any) -> None:
        # autograd has nothing to do with it, as in torch.distributed
        given, taken = input.detach().contiguous(), output.detach()
        dense = isinstance(taken, BlockScaledTensor) or taken.is_contiguous()
        place = taken if dense else torch.empty_like(taken, memory_format=torch.contiguous_format)
        beside = background or async_op
        ways = [Transport(g, what, o, beside) for g, o in zip(groups, over, strict=True)]
        observe(name, place.device, lambda: body(place, given, average, *ways))
        if not dense:
            taken.copy_(place)

    tensors = [output, input] if error is None else [output, input, error]
    return start(run, groups, tensors, async_op)


def _refuse_blocks(name: str, *tensors: Tensor) -> None:
    if any(isinstance(tensor, BlockScaledTensor) for tensor in tensors):
        raise ConfigError(
            f"{name} takes ordinary tensors; blocks of a BlockScaledTensor would be cut. Use its dequantize()."
        )


def _check_error(error: Tensor, tensor: Tensor, group: Any) -> None:
    size = _part_of(tensor, group)
    fits = error.dtype is torch.float32 and error.is_contiguous() and error.numel() == size
    if not fits or error.device != tensor.device:
        raise ConfigError(
            f"error must be {size} contiguous float32 elements on {tensor.device}, as error_like makes it; got "
            f"{error.numel()} of {error.dtype} on {error.device}."
        )


def _lies_dense(tensor: BlockScaledTensor) -> bool:
    return tensor.codes.is_contiguous() and tensor.scale.is_contiguous()


def _check(name: str, output: Tensor, input: Tensor, op: Any, world: int) -> None:
    for tensor in (output,) if output is input else (output, input):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} takes tensors, got {type(tensor).__name__}.")
        if isinstance(tensor, BlockScaledTensor) and not _lies_dense(tensor):
            raise ConfigError(
                f"{name} got a BlockScaledTensor whose codes or scales are not contiguous; quantize it anew."
            )
        if tensor.dtype not in FLOATS or tensor.layout is not torch.strided:
            kind = "sparse" if tensor.layout is not torch.strided else tensor.dtype
            raise ConfigError(
                f"fp8stack.comm.{name} takes dense float32, bfloat16 and float16 tensors, got {kind}. "
                f"Use torch.distributed.{name}."
            )
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ConfigError(
            f"fp8stack.comm.{name} has ReduceOp.SUM and ReduceOp.AVG, got {op}. Use torch.distributed.{name}."
        )
    if output is input:
        return
    if output.device != input.device:
        raise ConfigError(
            f"{name} got an output on {output.device} and an input on {input.device}."
        )
    of_output, of_input = (world, 1) if name.startswith("reduce") else (1, world)
    if output.numel() * of_output != input.numel() * of_input:
        raise ConfigError(
            f"{name} over {world} ranks got an output of {output.numel()} elements and an input of {input.numel()}; "
            f"the larger must have {world} times the elements of the smaller."
        )
