"""What the collectives do: pack, move bytes, add up, unpack.

Over NVLink a sum is one kernel (`nvlink.py`). Else it is an all-to-all and an all-gather of uint8 with kernels before,
between and after them; or what bfloat16 takes, if the tensor is small (`crossover.py`). A large tensor on a GPU goes in
chunks, and the kernels of one run on a second stream while another is on the wire; chunks are large, since each costs
two more collectives. The bits of a sum in FP8 do not depend on any of that; which rank keeps which part of its error
does on chunks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fp8stack.formats import BLOCK, rows_cols
from fp8stack.kernels import ops
from fp8stack.kernels.reference.wire import Layout, scales_of
from fp8stack.tensor import BlockScaledTensor

from . import crossover
from .nvlink import link_of
from .statistics import Sent
from .transport import Transport

CHUNK = 2**27  # elements


def reduce_all(
    output: Tensor, input: Tensor, average: bool, way: Transport, *, error: Tensor | None
) -> Sent:
    """All-reduce."""
    layout, divisor = flat(input, way.world), way.world if average else 1
    if link := link_of(way.group, input.device):
        link.all_reduce(*parts(input), *parts(output), layout, way, divisor, error)
    elif error is None and crossover.is_small(input, way):
        return crossover.reduce_all(output, input, way, divisor)
    else:
        chunks = _cut(output, input, error, layout) if input.is_cuda else []
        if len(chunks) > 1:
            _reduce_in_chunks(chunks, way, divisor)
        else:
            _reduce_whole(output, input, error, layout, way, divisor)
    if isinstance(output, BlockScaledTensor):
        output.residual = None
    stripe = layout.per * (BLOCK + 4) if link else layout.pitch
    return Sent(2 * (way.world - 1) * stripe, layout.blocks, lambda: _scales_told_by(output))


def _reduce_whole(
    output: Tensor, input: Tensor, error: Tensor | None, layout: Layout, way: Transport, divisor: int
) -> None:  # fmt: skip
    sent = pack(input, layout)
    received = torch.empty_like(sent)
    way.all_to_all(received, sent)
    stripe = ops.wire_kernels(sent.is_cuda).reduce_pack(received, layout, divisor, error)
    way.all_gather(sent, stripe)
    unpack(sent, output, layout)


Chunk = tuple[Tensor, Tensor, Tensor | None]  # output, input, error


def _reduce_in_chunks(chunks: list[Chunk], way: Transport, divisor: int) -> None:
    """Reduce chunks, the kernels of each beside the collectives of the others."""
    device, world = chunks[0][0].device, way.world
    layouts = [flat(input, world) for _, input, _ in chunks]
    wire, casts = torch.cuda.current_stream(device), _casts(device)
    # All memory is this stream's, which waits for the other in the end: what is freed then is not in use.
    some = torch.empty(0, dtype=torch.uint8, device=device)
    sent = [some.new_empty((world, layout.pitch)) for layout in layouts]
    received = [torch.empty_like(chunk) for chunk in sent]
    stripes = [some.new_empty(layout.pitch) for layout in layouts]
    casts.wait_stream(wire)
    try:
        _pipeline(chunks, layouts, sent, received, stripes, way, divisor)
    finally:
        wire.wait_stream(casts)


def _pipeline(
    chunks: list[Chunk], layouts: list[Layout], sent: list[Tensor], received: list[Tensor], stripes: list[Tensor],
    way: Transport, divisor: int,
) -> None:  # fmt: skip
    """Queue kernels on one stream and collectives on the current one, a chunk ahead of each other."""
    device, kernels = sent[0].device, ops.wire_kernels(True)
    wire, casts = torch.cuda.current_stream(device), _casts(device)
    packed, reduced = [], []
    with torch.cuda.stream(casts):
        for (_, input, _), layout, out in zip(chunks, layouts, sent, strict=True):
            pack(input, layout, out)
            packed.append(casts.record_event())
    for i in range(len(chunks) + 1):
        if i < len(chunks):
            wire.wait_event(packed[i])
            way.all_to_all(received[i], sent[i])
            casts.wait_stream(wire)
            with torch.cuda.stream(casts):
                error = chunks[i][2]
                kernels.reduce_pack(received[i], layouts[i], divisor, error, stripes[i])
                reduced.append(casts.record_event())
        if i:
            wire.wait_event(reduced[i - 1])
            way.all_gather(sent[i - 1], stripes[i - 1])
            casts.wait_stream(wire)
            with torch.cuda.stream(casts):
                unpack(sent[i - 1], chunks[i - 1][0], layouts[i - 1])


def _cut(output: Tensor, input: Tensor, error: Tensor | None, layout: Layout) -> list[Chunk]:
    """Return chunks of a tensor whose blocks lie end to end, each of whole blocks for every rank; else none."""
    numel, unit = input.numel(), BLOCK * layout.world
    if layout.rows > 1 and layout.cols % BLOCK:
        return []
    size = -(-numel // max(numel // CHUNK, 1) // unit) * unit
    cuts = [(start, min(start + size, numel)) for start in range(0, numel, size)]
    return [
        (
            _slice(output, start, end),
            _slice(input, start, end),
            None if error is None else error[start // layout.world :][: size // layout.world],
        )
        for start, end in cuts
    ]


def _slice(x: Tensor, start: int, end: int) -> Tensor:
    if not isinstance(x, BlockScaledTensor):
        return x.view(-1)[start:end]
    scale = x.scale.view(1, -1)[:, start // BLOCK : -(-end // BLOCK)]
    return BlockScaledTensor(x.codes.view(-1)[start:end], scale, x.dtype)


@cache
def _casts(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _scales_told_by(output: Tensor) -> Tensor:
    """Return what is NaN for each block that is not finite: as a whole, so one element of each stands for it."""
    return output.scale if isinstance(output, BlockScaledTensor) else output.view(-1)[::BLOCK]


def reduce_hosts(
    output: Tensor,
    input: Tensor,
    average: bool,
    way: Transport,
    inside: Transport,
    across: Transport,
    *,
    error: Tensor | None,
) -> Sent:
    """All-reduce by way of hosts: add up within each, then across them, and gather the same way back.

    Chunk l × M + m of M hosts belongs to rank l of host m. Within a host, rank l adds up the chunks from l × M on;
    across hosts, it adds up its own of those. What it quantizes last, everybody decodes.
    """
    kernels, layout = ops.wire_kernels(input.is_cuda), flat(input, way.world)
    sent = pack(input, layout)
    received = torch.empty_like(sent)
    inside.all_to_all(received, sent)
    part = kernels.reduce_pack(received.view(inside.world, across.world, -1), layout)
    others = torch.empty_like(part)
    across.all_to_all(others, part)
    stripe = kernels.reduce_pack(others, layout, way.world if average else 1, error)
    across.all_gather(part, stripe)
    inside.all_gather(sent, part)
    unpack(sent, output, layout)
    chunks = 2 * (across.world - 1) + 2 * (inside.world - 1) * across.world
    return Sent(chunks * layout.pitch, layout.blocks, lambda: scales_of(sent, layout.per))


def reduce_scatter(output: Tensor, input: Tensor, average: bool, way: Transport) -> Sent:
    """Reduce-scatter: the sum is not quantized again."""
    layout = Layout(way.world, input.numel() // way.world, way.world)
    divisor = way.world if average else 1
    if link := link_of(way.group, input.device):
        link.reduce_scatter(input, output, layout, way, divisor)
        sent = (way.world - 1) * layout.per * (BLOCK + 4)
        return Sent(sent, layout.per, lambda: _scales_told_by(output))
    if crossover.is_small(input, way):
        return crossover.reduce_scatter(output, input, way, divisor)
    sent = pack(input, layout)
    received = torch.empty_like(sent)
    way.all_to_all(received, sent)
    ops.wire_kernels(sent.is_cuda).reduce_unpack(received, output, divisor)
    return Sent((way.world - 1) * layout.pitch, layout.per, lambda: _scales_told_by(output))


def gather(output: Tensor, input: Tensor, average: bool, way: Transport) -> Sent:
    """All-gather."""
    if crossover.is_small(output, way):
        return crossover.gather(output, input, way)
    chunk = pack(input, Layout(1, input.numel(), 1))
    chunks = chunk.new_empty((way.world, chunk.shape[1]))
    way.all_gather(chunks, chunk)
    layout = Layout(way.world, input.numel(), way.world)
    unpack(chunks, output, layout)
    return Sent(
        (way.world - 1) * layout.pitch, layout.blocks, lambda: scales_of(chunks, layout.per)
    )


def flat(x: Tensor, world: int) -> Layout:
    """Return the layout of a tensor in one row, or in the rows that its blocks have."""
    rows, cols = rows_cols(x.shape) if isinstance(x, BlockScaledTensor) else (1, x.numel())
    return Layout(rows, cols, world)


def pack(x: Tensor, layout: Layout, out: Tensor | None = None) -> Tensor:
    """Return the chunks of a tensor."""
    kernels = ops.wire_kernels(x.is_cuda)
    if isinstance(x, BlockScaledTensor):
        return kernels.pack_codes(x.codes.contiguous(), x.scale.contiguous(), layout, out)  # type: ignore[no-any-return]
    return kernels.pack(x, layout, out)  # type: ignore[no-any-return]


def parts(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return values, or codes and scales."""
    if isinstance(x, BlockScaledTensor):
        return x.codes.view(torch.uint8), x.scale
    return x, None


def unpack(chunks: Tensor, out: Tensor, layout: Layout) -> None:
    """Take a tensor out of chunks."""
    kernels = ops.wire_kernels(out.is_cuda)
    if isinstance(out, BlockScaledTensor):
        kernels.unpack_codes(chunks, out.codes, out.scale, layout)
        out.residual = None
    else:
        kernels.unpack(chunks, out, layout)
