"""Tiles of a matrix, read four rows at a time, whose codes of one byte are written as they lie and transposed.

Why: FP8 products want both layouts of an operand. Transposing byte by byte, threads would exchange four times as many
words.

How: a thread holds the same columns of four rows. It turns the four codes of a column into one word; threads exchange
words, through `tl.trans`, and write four codes at a time.

Limits: the number of rows that is stored is a multiple of 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import BYTES, INTS, bits_of_magnitude


@triton.jit
def place_tile(tile, across, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return a tile's groups of four rows [ROWS / 4] and its columns [COLS]."""
    q = (tile // across) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    return q, (tile % across) * COLS + tl.arange(0, COLS)


@triton.jit
def _load(at, r, c, rows, cols, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0)


@triton.jit
def load_rows(x_ptr, q, c, rows, cols, EVEN: tl.constexpr):
    """Return the first to fourth rows of a tile's groups [ROWS / 4, COLS], zeros beyond the matrix."""
    r = 4 * q
    at = x_ptr + r[:, None].to(tl.int64) * cols + c[None, :]
    x0 = _load(at, r, c, rows, cols, EVEN)
    at += cols  # not a multiple of it, which may be more than an int32 holds
    x1 = _load(at, r + 1, c, rows, cols, EVEN)
    at += cols
    x2 = _load(at, r + 2, c, rows, cols, EVEN)
    at += cols
    x3 = _load(at, r + 3, c, rows, cols, EVEN)
    return x0, x1, x2, x3


@triton.jit
def load_float(x_ptr, q, c, rows, cols, EVEN: tl.constexpr):
    """Return what `load_rows` does in float32."""
    x0, x1, x2, x3 = load_rows(x_ptr, q, c, rows, cols, EVEN)
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def magnitude(x0, x1, x2, x3):
    """Return the bits of the largest magnitude of four float32, NaN being the largest."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    a = tl.maximum(tl.abs(x0), tl.abs(x1), propagate_nan=nan)  # max.NaN takes |x| for free
    b = tl.maximum(tl.abs(x2), tl.abs(x3), propagate_nan=nan)
    return bits_of_magnitude(tl.maximum(a, b, propagate_nan=nan))


# A 4 × 4 transpose of bytes: $4 to $7 are four rows of four codes, $0 to $3 their columns. A digit of prmt's selector
# names a byte of the first operand (0 to 3) or of the second (4 to 7), from the lowest byte of the result on. The first
# four interleave rows 0 and 1, and rows 2 and 3; the others join halves of those.
_TURN = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $4, $5, 0x7362;
prmt.b32 c, $6, $7, 0x5140;
prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, c, 0x5410;
prmt.b32 $1, a, c, 0x7632;
prmt.b32 $2, b, d, 0x5410;
prmt.b32 $3, b, d, 0x7632;
}""")


@triton.jit
def _turn(c0, c1, c2, c3, HARDWARE: tl.constexpr):
    """Return the codes of four rows, a column of them in an int32."""
    if HARDWARE:
        word = tl.inline_asm_elementwise(
            _TURN, "=r,=r,=r,=r,r,r,r,r", [c0, c1, c2, c3], tl.int32, True, 4
        )
    else:
        word = c0.to(tl.int32) | (c1.to(tl.int32) << 8)
        word |= (c2.to(tl.int32) << 16) | (c3.to(tl.int32) << 24)
    return word


@triton.jit
def _store(at, code, inside, EVEN: tl.constexpr):
    tl.store(at, code, mask=None if EVEN else inside)


@triton.jit
def store_rows(c0, c1, c2, c3, codes_ptr, q, c, rows, cols, EVEN: tl.constexpr):
    """Store uint8 codes of a tile as they lie; the matrix has `rows`, a multiple of 4."""
    at = codes_ptr.to(BYTES, bitcast=True) + (4 * q)[:, None].to(tl.int64) * cols + c[None, :]
    inside = (q < rows // 4)[:, None] & (c < cols)[None, :]
    _store(at, c0, inside, EVEN)
    at += cols
    _store(at, c1, inside, EVEN)
    at += cols
    _store(at, c2, inside, EVEN)
    at += cols
    _store(at, c3, inside, EVEN)


@triton.jit
def store_columns(
    c0, c1, c2, c3, codes_t_ptr, q, c, rows, cols, HARDWARE: tl.constexpr, EVEN: tl.constexpr
):
    """Store uint8 codes of a tile transposed."""
    word = tl.trans(_turn(c0, c1, c2, c3, HARDWARE))
    at = codes_t_ptr.to(INTS, bitcast=True) + c[:, None].to(tl.int64) * (rows // 4) + q[None, :]
    _store(at, word, (c < cols)[:, None] & (q < rows // 4)[None, :], EVEN)


@triton.jit
def store_both(
    c0, c1, c2, c3, codes_ptr, codes_t_ptr, q, c, rows, cols,
    CODES: tl.constexpr, TRANSPOSED: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store uint8 codes of a tile in the layouts that are asked for."""
    if CODES:
        store_rows(c0, c1, c2, c3, codes_ptr, q, c, rows, cols, EVEN)
    if TRANSPOSED:
        store_columns(c0, c1, c2, c3, codes_t_ptr, q, c, rows, cols, HARDWARE, EVEN)
