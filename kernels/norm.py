"""Norm and largest magnitude of many gradients of any format, each in one launch; the twin of `reference/norm.py`.

Why: a launch for each gradient would take longer than the work.

How: gradients stand in a pointer table, and each program reads a span of one of them. An FP8 gradient is read once, one
byte an element, for its norm; its scales alone, a thirty-second of that, for its largest magnitude and for being
multiplied. Sums are float64, a partial sum for each program, added in a fixed order: the norm has the same bits every
time.

Limits: contiguous gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import bits_of_magnitude
from .launch import UNFUSED, launched
from .pointer_table import COLUMN, WIDTH, programs_of, upload_columns
from .state_codecs import E4M3_MAX, values_of
from .step import TYPES, groups_of
from .tile_io import places, pointer

SPAN = 1024  # blocks of 128 that a program reads
TILE = 16
_SPAN, _WIDTH = tl.constexpr(SPAN), tl.constexpr(WIDTH)
_GRAD, _GRAD_BLOCK_SCALE, _BLOCKS, _PER_ROW, _COLS, _FIRST = (
    tl.constexpr(COLUMN[n])
    for n in ("grad", "grad_block_scale", "blocks", "blocks_per_row", "cols", "first_span")
)


@triton.jit
def span_of(table_ptr, owner_ptr):
    """Return the row of this program, the first block of its span, how many it has, and the number of elements."""
    program = tl.program_id(0)
    row = table_ptr + tl.load(owner_ptr + program).to(tl.int64) * _WIDTH
    first = (program - tl.load(row + _FIRST).to(tl.int32)) * _SPAN
    blocks = tl.load(row + _BLOCKS)
    numel = blocks // tl.load(row + _PER_ROW) * tl.load(row + _COLS)
    return row, first, tl.minimum(blocks.to(tl.int32) - first, _SPAN), numel


@launched(num_warps=4, **UNFUSED)
def _largest_kernel(table_ptr, owner_ptr, out_ptr, TYPE: tl.constexpr, TILE: tl.constexpr):
    row, first, span, numel = span_of(table_ptr, owner_ptr)
    if TYPE == tl.uint8:
        scale = pointer(row, _GRAD_BLOCK_SCALE, tl.float32, "any")
        block = first + tl.arange(0, _SPAN)
        exists = block < tl.load(row + _BLOCKS).to(tl.int32)
        x = tl.load(scale + block, mask=exists, other=0.0) * E4M3_MAX
        bits = tl.max(bits_of_magnitude(x), 0)
    else:
        grad = pointer(row, _GRAD, TYPE, "any")
        bits = tl.zeros([TILE * 128], tl.int32)
        for i in range(0, span, TILE):
            at = (first + i).to(tl.int64) * 128 + tl.arange(0, TILE * 128)
            x = tl.load(grad + at, mask=at < numel, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, bits_of_magnitude(x))
        bits = tl.max(bits, 0)
    tl.atomic_max(out_ptr, bits)


@launched(num_warps=4, **UNFUSED)
def _squares_kernel(
    table_ptr, owner_ptr, partial_ptr, TYPE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row, first, span, _numel = span_of(table_ptr, owner_ptr)
    grad = pointer(row, _GRAD, TYPE, ROWS)
    scale_ptr = pointer(row, _GRAD_BLOCK_SCALE, tl.float32, "any")
    total = tl.zeros([TILE], tl.float64)
    for i in range(0, span, TILE):
        block, inside, offset, mask, _bytes, _byte_mask = places(row, first + i, ROWS, TILE)
        x = tl.load(grad + offset, mask=mask, other=0)
        if TYPE == tl.uint8:
            x = values_of(x, 7, 0x3F803F80) * 256.0
            scale = tl.load(scale_ptr + block, mask=inside, other=0.0)
        else:
            x = x.to(tl.float32)
            bits = tl.max(bits_of_magnitude(x), 1)
            scale = bits.to(tl.float32, bitcast=True)
            x = tl.where(scale[:, None] > 0, tl.div_rn(x, scale[:, None]), x)
        scale = scale.to(tl.float64)
        total += tl.sum(x * x, 1).to(tl.float64) * (scale * scale)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _root_of_sum(partial_ptr, count, SIZE: tl.constexpr):
    total = tl.zeros([SIZE], tl.float64)
    for i in range(0, count, SIZE):
        at = i + tl.arange(0, SIZE)
        total += tl.load(partial_ptr + at, mask=at < count, other=0.0)
    return tl.sqrt(tl.sum(total, 0)).to(tl.float32)


@launched(num_warps=4, **UNFUSED)
def _root_kernel(partial_ptr, out_ptr, count, SIZE: tl.constexpr):
    tl.store(out_ptr, _root_of_sum(partial_ptr, count, SIZE))


@launched(num_warps=4, **UNFUSED)
def _roots_kernel(table_ptr, partial_ptr, out_ptr, SIZE: tl.constexpr):
    """The norm of one gradient: a program for each row of the table adds the partial sums of that row."""
    row = table_ptr + tl.program_id(0).to(tl.int64) * _WIDTH
    count = tl.cdiv(tl.load(row + _BLOCKS), _SPAN).to(tl.int32)
    norm = _root_of_sum(partial_ptr + tl.load(row + _FIRST), count, SIZE)
    tl.store(out_ptr + tl.program_id(0), norm)


def largest(
    rows: Tensor,  # int64 [tensors, 16], see pointer_table.py
    owner: Tensor,  # int32 [programs], see `pointer_table.deal`
    dtype: torch.dtype,  # of the gradients; float8_e4m3fn: blocks
    out: Tensor,  # float32, 0-d, 0 or more: raised to the largest magnitude, NaN if there is one
) -> None:
    if len(owner):
        grid = (len(owner), 1, 1)
        _largest_kernel(grid, rows, owner, out.view(torch.int32), TYPES[dtype], TILE)


def total(
    launches: Sequence[tuple[torch.dtype, str, Tensor, Tensor]],  # dtype, layout, table, owners
    partial: Tensor,  # float64 [programs of all launches]; overwritten with each program's sum of squares
    out: Tensor,  # float32, 0-d
) -> None:
    """Write the norm of all gradients of several launches."""
    _squares(launches, partial)
    _root_kernel((1, 1, 1), partial, out, len(partial), 1024)


def _squares(launches: Sequence[tuple[torch.dtype, str, Tensor, Tensor]], partial: Tensor) -> None:
    at = 0
    for dtype, layout, rows, owner in launches:
        if len(owner):
            grid, part = (len(owner), 1, 1), partial[at : at + len(owner)]
            _squares_kernel(grid, rows, owner, part, TYPES[dtype], layout, TILE)
            at += len(owner)


def norms(
    gradients: Sequence[tuple[torch.Size, tuple[int, int]]],  # shapes; addresses of codes, scales
    device: torch.device,
) -> list[Tensor]:  # float32, 0-d
    """Return the norm of each FP8 gradient; all are on `device`, codes and scales contiguous."""
    launches, order = [], []
    codes = [(torch.float8_e4m3fn, shape, address) for shape, (address, _) in gradients]
    for dtype, layout, of, columns in groups_of(codes):
        columns["first_span"], owner = programs_of(columns["blocks"], SPAN, device)
        columns["grad_block_scale"] = [gradients[i][1][1] for i in of]
        launches.append((dtype, layout, upload_columns(columns, device), owner))
        order += of
    programs = sum(len(owner) for *_, owner in launches)
    partial = torch.empty(programs, dtype=torch.float64, device=device)
    _squares(launches, partial)
    out = partial.new_empty(len(gradients), dtype=torch.float32)
    at = row = 0
    for _, _, rows, owner in launches:
        _roots_kernel((len(rows), 1, 1), rows, partial[at:], out[row:], 64)
        at, row = at + len(owner), row + len(rows)
    norm_of = dict(zip(order, out.unbind(), strict=True))
    return [norm_of[i] for i in range(len(gradients))]
