"""Collectives with torch.distributed's names and arguments that send E4M3 blocks (`kernels/reference/wire.py`).

| | bytes that a rank sends, per element | times a value is quantized |
|---|---|---|
| `all_reduce` | 2 (N - 1) / N × 1.03 | 2 |
| `reduce_scatter_tensor` | (N - 1) / N × 1.03 | 1 |
| `all_gather_into_tensor` | (N - 1) / N × 1.03 | 1 |

Sums are float32, in the order of ranks. They get scales of their own, so nothing saturates. A NaN or infinity makes its
block of 128 NaN on every rank. Every rank ends with the same bits. `exchange.py` does the work. With one rank nothing
is quantized.

They take SUM and AVG of float32, bfloat16 and float16 tensors, and of `BlockScaledTensor`s, whose codes are sent as
they are. A non-contiguous tensor costs a copy.

With `async_op=True` on a GPU, a collective runs on a stream of its own, which the caller's thread fills in the order of
calls; waiting for its handle makes the caller's stream wait, not the host. On a CPU it runs at once, and its handle is
done when the call returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.formats import FLOATS
from fp8stack.tensor import BlockScaledTensor

from . import exchange
from .nvlink import choice_of
from .transport import Transport, described, group_of, observe, verify


def all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> dist.Work | None:
    """Add up, or average, a tensor over all ranks, in place.

    Args:
        tensor: of the same shape and dtype on every rank.
        op: `ReduceOp.SUM` or `ReduceOp.AVG`.
        group: the process group; by default all ranks.
        async_op: return a handle; leave the tensor alone until its `wait()`. The same on all ranks.

    Returns:
        A handle if `async_op`, else None. A rank that is not in the group also gets None.

    Raises:
        ConfigError: for another operation, dtype or kind of tensor.
        CommError: if ranks fail or stay away.
    """
    return _run("all_reduce", tensor, tensor, op, group, async_op, exchange.all_reduce)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    background: bool = False,
) -> dist.Work | None:
    """Add up, or average, a tensor over all ranks and give each rank its part: the `rank`-th of equal parts, in order.

    Arguments, results and errors are those of `all_reduce`; `input` has as many elements as the outputs of all ranks.
    The sum is rounded to the dtype of `output` and not quantized again. `background` leaves room for kernels of other
    streams, as `async_op` does; give it if the caller's stream runs beside others.
    """
    name, body = "reduce_scatter_tensor", exchange.reduce_scatter
    return _run(name, output, input, op, group, async_op, body, background=background)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> dist.Work | None:
    """Join the tensors of all ranks, in order; arguments, results and errors are those of `all_reduce`."""
    name, op, body = "all_gather_into_tensor", dist.ReduceOp.SUM, exchange.gather
    return _run(name, output_tensor, input_tensor, op, group, async_op, body)


# --- what all collectives do


def _run(
    name: str,
    output: Tensor,
    input: Tensor,
    op: Any,
    group: Any,
    async_op: bool,
    body: Callable[..., int],  # of output, input, divisor and transport; returns the bytes sent
    background: bool = False,  # which `async_op` implies
) -> dist.Work | None:
    """Check the arguments and run a collective, now or in the background."""
    group = group_of(group)
    if group is None:
        warnings.warn(
            f"Running {name} on global rank {dist.get_rank()} which does not belong to the given group.",
            stacklevel=3,
        )
        return None
    world = group.size()
    try:
        _check(name, output, input, op, world)
    except (ConfigError, TypeError) as error:
        refusal = f"{name}, refused: {error}"
        verify(lambda: refusal, group)  # the other ranks may call what they wait in
        raise
    what = described(name, input)
    verify(
        lambda: (
            f"{what} {[*input.shape]} into {output.numel()}, {op}, {type(input).__name__}, async_op={async_op}, "
            f"transport {choice_of(group).transport}"
        ),
        group,
    )
    if world == 1 or not input.numel():
        if output is not input:
            output.detach().copy_(input.detach().reshape(output.shape))
        return Handle([output]) if async_op else None
    way = Transport(group, what, background or async_op)
    divisor = world if op == dist.ReduceOp.AVG else 1

    def run() -> None:
        # detached: as in torch.distributed, autograd does not see what happens
        given, taken = input.detach().contiguous(), output.detach()
        dense = isinstance(taken, BlockScaledTensor) or taken.is_contiguous()
        place = taken if dense else torch.empty_like(taken, memory_format=torch.contiguous_format)
        observe(name, place.device, lambda: body(place, given, divisor, way))
        if not dense:
            taken.copy_(place)

    if not async_op:
        run()
        return None
    return _run_beside(run, [output, input])


def _check(name: str, output: Tensor, input: Tensor, op: Any, world: int) -> None:
    for tensor in (output,) if output is input else (output, input):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} takes tensors, got {type(tensor).__name__}.")
        if isinstance(tensor, BlockScaledTensor) and output is not input:
            raise ConfigError(
                f"{name} takes ordinary tensors; it would cut blocks of a BlockScaledTensor. Use its dequantize()."
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
        raise ConfigError(f"{name} got output on {output.device} and input on {input.device}.")
    of_output, of_input = (world, 1) if name.startswith("reduce") else (1, world)
    if output.numel() * of_output != input.numel() * of_input:
        raise ConfigError(
            f"{name} over {world} ranks got an output of {output.numel()} elements and an input of {input.numel()}; "
            f"the larger must have {world} times the elements of the smaller."
        )


# --- handles


class Handle(dist.Work):
    """What `async_op=True` returns.

    Args:
        tensors: that the collective reads and writes, the result first.
        stream: of the GPU that the collective runs on; None if it is done.
    """

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None = None) -> None:
        super().__init__()
        self._tensors, self._stream = list(tensors), stream
        self._event = None if stream is None else stream.record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the process group's own timeout is in force, not `timeout`."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        """Wait, as NCCL's handles do; torch's own method of that name would return at once."""
        self.wait()

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        devices = {t.device for t in self._tensors if t.is_cuda}
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[*devices])
        # A future of a GPU's tensors remembers the work that is then on the current stream.
        with torch.cuda.stream(self._stream):  # None changes nothing
            future.set_result(self._tensors)
        return future


def _run_beside(run: Callable[[], None], tensors: Sequence[Tensor]) -> Handle:
    """Run a collective on the GPU's stream for that, or at once on a CPU; return its handle."""
    device = tensors[0].device
    if device.type != "cuda":
        run()
        return Handle(tensors)
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    for tensor in tensors:
        for part in tensor.parts() if isinstance(tensor, BlockScaledTensor) else (tensor,):
            part.record_stream(stream)
    return Handle(tensors, stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
