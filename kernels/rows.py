"""Rows of tokens on their way to experts and back; the twin of `reference/rows.py`.

Why: torch has no kernel that takes rows and transposes them. It adds rows up by an atomic addition each, or writes them
in the order of the tokens first.

How: two launches `route`, with a program an expert: each counts the pairs of its expert, then each goes through all
pairs again and numbers its own. `take_rows` is `transpose_tiles.py` with the rows of a tile read from where the index
says. A program of `sum_rows` adds up a part of a token's rows, in the order that they are given in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import BYTES, casts_in_hardware
from .launch import launched, next_power_of_2
from .reference.cast import ALIGNMENT
from .reference.rows import rows_needed
from .transpose_tiles import place_tile, store_both

ROWS, COLS, WIDTH, BLOCK = 64, 64, 1024, 2048


@launched(num_warps=8)
def _count_pairs_kernel(ids_ptr, counts_ptr, places_ptr, pairs, experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
        total += (own == expert).to(tl.int32)
        # one program marks the pairs that no expert here will; no scalar masks, for Triton's interpreter
        here = ((own < 0) | (own >= experts)) & (pair < pairs - expert * pairs)
        tl.store(places_ptr + pair, -1, mask=here)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@launched(num_warps=8)
def _route_kernel(
    ids_ptr, counts_ptr, ends_ptr, index_ptr, places_ptr, pairs, experts, rows,
    ALIGNMENT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + numbers, mask=numbers < experts, other=0)
    sizes = (counts + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    row = tl.sum(tl.where(numbers < expert, sizes, 0), axis=0)
    size = tl.sum(tl.where(numbers == expert, sizes, 0), axis=0)
    end = tl.where(expert == experts - 1, rows, row + size)
    tl.store(ends_ptr + expert, end)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert
        before = tl.cumsum(own.to(tl.int32), axis=0)
        place = row + before - 1
        tl.store(index_ptr + place, pair, mask=own)
        tl.store(places_ptr + pair, place, mask=own)
        row += tl.sum(own.to(tl.int32), axis=0)
    for start in range(row, end, BLOCK):
        padding = start + tl.arange(0, BLOCK)
        tl.store(index_ptr + padding, -1, mask=padding < end)


@triton.jit
def _take(codes_ptr, index_ptr, r, c, rows, cols, count):
    pair = tl.load(index_ptr + r, mask=r < rows, other=-1)
    row = tl.where(pair < 0, 0, pair // count)
    at = codes_ptr.to(BYTES, bitcast=True) + row[:, None].to(tl.int64) * cols + c[None, :]
    return tl.load(at, mask=(pair >= 0)[:, None] & (c < cols)[None, :], other=0)


@launched(num_warps=4)
def _take_rows_kernel(
    codes_ptr, index_ptr, plain_ptr, turned_ptr, rows, cols, count,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    q, c = place_tile(tl.program_id(0), tl.cdiv(cols, COLS), ROWS, COLS)
    c0 = _take(codes_ptr, index_ptr, 4 * q, c, rows, cols, count)
    c1 = _take(codes_ptr, index_ptr, 4 * q + 1, c, rows, cols, count)
    c2 = _take(codes_ptr, index_ptr, 4 * q + 2, c, rows, cols, count)
    c3 = _take(codes_ptr, index_ptr, 4 * q + 3, c, rows, cols, count)
    store_both(
        c0, c1, c2, c3, plain_ptr, turned_ptr, q, c, rows, cols, PLAIN, TURNED, HARDWARE, False
    )  # fmt: skip


@triton.jit
def _row(x_ptr, place_ptr, c, cols):
    """Return a part of the row whose place is given in float32; zeros if it is -1."""
    place = tl.load(place_ptr)
    inside = (c < cols) & (place + 0 * c >= 0)
    return tl.load(x_ptr + place.to(tl.int64) * cols + c, mask=inside, other=0).to(tl.float32)


@launched(num_warps=4)
def _sum_rows_kernel(
    x_ptr, places_ptr, total_ptr, cols, across, COUNT: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0) // across
    c = (tl.program_id(0) % across) * WIDTH + tl.arange(0, WIDTH)
    total = _row(x_ptr, places_ptr + token * COUNT, c, cols)
    for i in tl.static_range(1, COUNT):
        total += _row(x_ptr, places_ptr + token * COUNT + i, c, cols)
    tl.store(total_ptr + token.to(tl.int64) * cols + c, total, mask=c < cols)


def route(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give each pair of token and expert a row; see the reference, which has the same bits."""
    ids, pairs = top_k_index.contiguous(), top_k_index.numel()
    rows = rows_needed(pairs, experts)
    counts, ends, index = (ids.new_empty(n, dtype=torch.int32) for n in (experts, experts, rows))
    places = torch.empty_like(ids, dtype=torch.int32)
    _count_pairs_kernel((experts, 1, 1), ids, counts, places, pairs, experts, BLOCK)
    _route_kernel(
        (experts, 1, 1), ids, counts, ends, index, places, pairs, experts, rows, ALIGNMENT, next_power_of_2(experts),
        BLOCK,
    )  # fmt: skip
    return ends, index, places


def take_rows(
    codes: Tensor,  # one byte an element, [rows, cols], cols a multiple of 16
    index: Tensor,  # int32 [n], n a multiple of 16, in count × rows; -1 names no row
    count: int,  # that many numbers in a row name the same row
    plain: bool = True,
    transposed: bool = True,
) -> tuple[Tensor, Tensor]:  # codes [n, cols] and [cols, n]; empty if not asked for
    """Return the rows of `codes` that `index` names."""
    rows, cols = len(index), codes.shape[1]
    taken = codes.new_empty((rows, cols) if plain else (0, 0))
    turned = codes.new_empty((cols, rows) if transposed else (0, 0))
    if rows and cols:
        _take_rows_kernel(
            (-(-rows // ROWS) * -(-cols // COLS), 1, 1),
            codes, index, taken if plain else turned, turned if transposed else taken, rows, cols, count,
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
        _sum_rows_kernel(
            (tokens * across, 1, 1), x.contiguous(), places.contiguous(), total, cols, across, count, WIDTH
        )  # fmt: skip
    return total
