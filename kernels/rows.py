"""Rows of tokens on their way to experts and back; the twin of `reference/rows.py`.

Why: torch has no kernel that takes rows and transposes them. It adds rows up by an atomic addition each, or writes them
in the order of the tokens first.

How: `take_rows` is `transpose_tiles.py` with the rows of a tile read from where the index says. A program of `sum_rows`
adds up a part of a token's rows, in the order that they are given in.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .fp8 import casts_in_hardware
from .launch import Launcher
from .transpose_tiles import BYTES, place_tile, store_both

ROWS, COLS, WIDTH = 64, 64, 1024


@triton.jit
def _take(codes_ptr, index_ptr, r, c, rows, cols):
    row = tl.load(index_ptr + r, mask=r < rows, other=-1)
    at = codes_ptr.to(BYTES, bitcast=True) + row[:, None].to(tl.int64) * cols + c[None, :]
    return tl.load(at, mask=(row >= 0)[:, None] & (c < cols)[None, :], other=0)


@triton.jit
def _take_rows_kernel(
    codes_ptr, index_ptr, plain_ptr, turned_ptr, rows, cols,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    q, c = place_tile(tl.program_id(0), tl.cdiv(cols, COLS), ROWS, COLS)
    c0 = _take(codes_ptr, index_ptr, 4 * q, c, rows, cols)
    c1 = _take(codes_ptr, index_ptr, 4 * q + 1, c, rows, cols)
    c2 = _take(codes_ptr, index_ptr, 4 * q + 2, c, rows, cols)
    c3 = _take(codes_ptr, index_ptr, 4 * q + 3, c, rows, cols)
    store_both(
        c0, c1, c2, c3, plain_ptr, turned_ptr, q, c, rows, cols, PLAIN, TURNED, HARDWARE, False
    )  # fmt: skip


@triton.jit
def _row(x_ptr, place_ptr, c, cols):
    """Return a part of the row whose place is given in float32; zeros if it is -1."""
    place = tl.load(place_ptr)
    inside = (c < cols) & (place + 0 * c >= 0)  # not a scalar, for Triton's interpreter
    return tl.load(x_ptr + place.to(tl.int64) * cols + c, mask=inside, other=0).to(tl.float32)


@triton.jit
def _sum_rows_kernel(
    x_ptr, places_ptr, total_ptr, cols, across, COUNT: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0) // across
    c = (tl.program_id(0) % across) * WIDTH + tl.arange(0, WIDTH)
    total = _row(x_ptr, places_ptr + token * COUNT, c, cols)
    for i in tl.static_range(1, COUNT):
        total += _row(x_ptr, places_ptr + token * COUNT + i, c, cols)
    tl.store(total_ptr + token.to(tl.int64) * cols + c, total, mask=c < cols)


_launch_take = Launcher(_take_rows_kernel, num_warps=4)
_launch_sum = Launcher(_sum_rows_kernel, num_warps=4)


def take_rows(
    codes: Tensor,  # one byte an element, [rows, cols], cols a multiple of 16
    index: Tensor,  # int32 [n], n a multiple of 16; -1 names no row
    plain: bool = True,
    transposed: bool = True,
) -> tuple[Tensor, Tensor]:  # codes [n, cols] and [cols, n]; empty if not asked for
    """Return the rows of `codes` that `index` names."""
    rows, cols = len(index), codes.shape[1]
    taken = codes.new_empty((rows, cols) if plain else (0, 0))
    turned = codes.new_empty((cols, rows) if transposed else (0, 0))
    if rows and cols:
        _launch_take(
            (-(-rows // ROWS) * -(-cols // COLS), 1, 1),
            codes, index, taken if plain else turned, turned if transposed else taken, rows, cols,
            plain, transposed, casts_in_hardware(codes.device), ROWS, COLS,
        )  # fmt: skip
    return taken, turned


def sum_rows(
    x: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    places: Tensor,  # int32 [tokens, count] in rows; -1 stands for a row of zeros
) -> Tensor:  # [tokens, cols] in the dtype of x
    """Return for each token the sum of its rows, added in float32 one after the other."""
    (tokens, count), cols = places.shape, x.shape[1]
    total = x.new_empty((tokens, cols))
    across = -(-cols // WIDTH)
    if total.numel():
        _launch_sum(
            (tokens * across, 1, 1), x.contiguous(), places.contiguous(), total, cols, across, count, WIDTH
        )  # fmt: skip
    return total
