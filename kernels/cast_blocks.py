"""Matrices in FP8 with block scales, and their products; the twin of `reference/cast_blocks.py`, casts bit for bit.

Why: block scales follow outliers that one scale for a matrix would make everything else pay for.

How: a program reads one 128×128 tile once and writes it in the layouts that are asked for: 2 bytes to read and 1 + 1 to
write for an element in bfloat16. No search for a largest magnitude comes first, since a block's is inside the tile.
Products are cuBLAS's.

Limits: sizes are padded to multiples of 128; products need sm_90 and torch's scaled_mm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK, MiniFloat

from . import transpose_tiles
from .cast import encode_rows
from .fp8 import casts_in_hardware, encode_blocks, scale_and_inverse
from .launch import UNFUSED, launched
from .reference import cast_blocks as reference
from .reference.cast import aligned
from .reference.cast_blocks import Codes


@triton.jit
def _cast_row(x, scale_ptr, r, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Return codes of some rows of a tile, a scale each, and store the scales."""
    code, scale = encode_blocks(x, MANTISSA, HARDWARE)
    tl.store(scale_ptr + r, scale)
    return code


@triton.jit
def _cast_square(x0, x1, x2, x3, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the scale of a tile, and its codes."""
    bits = tl.max(tl.max(transpose_tiles.magnitude(x0, x1, x2, x3), axis=1), axis=0)
    scale, inverse = scale_and_inverse(bits, MANTISSA)
    c0, c1, c2, c3 = encode_rows(x0, x1, x2, x3, inverse, MANTISSA, HARDWARE)
    return scale, c0, c1, c2, c3


@launched(num_warps=4, **UNFUSED)
def _cast_blocks_kernel(
    x_ptr, codes_ptr, scale_ptr, codes_t_ptr, scale_t_ptr, rows, cols, rows_padded, cols_padded,
    MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr,
    SQUARES: tl.constexpr, SQUARES_T: tl.constexpr,
):  # fmt: skip
    across, down = cols_padded // 128, rows_padded // 128
    block_r, block_c = tl.program_id(0) // across, tl.program_id(0) % across
    q, c = transpose_tiles.place_tile(tl.program_id(0), across, 128, 128)
    x0, x1, x2, x3 = transpose_tiles.load_float(x_ptr, q, c, rows, cols, EVEN)
    if SQUARES:
        scale, c0, c1, c2, c3 = _cast_square(x0, x1, x2, x3, MANTISSA, HARDWARE)
    if CODES:
        if SQUARES:
            tl.store(scale_ptr + block_r * ((across + 3) // 4 * 4) + block_c, scale)
        else:
            own, r = scale_ptr + block_c.to(tl.int64) * rows_padded, 4 * q
            c0 = _cast_row(x0, own, r, MANTISSA, HARDWARE)
            c1 = _cast_row(x1, own, r + 1, MANTISSA, HARDWARE)
            c2 = _cast_row(x2, own, r + 2, MANTISSA, HARDWARE)
            c3 = _cast_row(x3, own, r + 3, MANTISSA, HARDWARE)
        transpose_tiles.store_rows(c0, c1, c2, c3, codes_ptr, q, c, rows_padded, cols_padded, True)
    if TRANSPOSED:
        if SQUARES_T:
            if not SQUARES:
                scale, c0, c1, c2, c3 = _cast_square(x0, x1, x2, x3, MANTISSA, HARDWARE)
            tl.store(scale_t_ptr + block_c * ((down + 3) // 4 * 4) + block_r, scale)
        else:
            bits = tl.max(transpose_tiles.magnitude(x0, x1, x2, x3), axis=0)
            scale, inverse = scale_and_inverse(bits, MANTISSA)
            c0, c1, c2, c3 = encode_rows(x0, x1, x2, x3, inverse[None, :], MANTISSA, HARDWARE)
            tl.store(scale_t_ptr + block_r.to(tl.int64) * cols_padded + c, scale)
        transpose_tiles.store_columns(
            c0, c1, c2, c3, codes_t_ptr, q, c, rows_padded, cols_padded, HARDWARE, True
        )


def cast_1x128(
    x: Tensor, fmt: MiniFloat, codes: bool = True, transposed: bool = True, squares_t: bool = False
) -> Codes:
    """Quantize with a scale for each 128 elements of a row, and again for 128 of a column or, `squares_t`, a square."""
    return _cast(x, fmt, codes, transposed, False, squares_t)


def cast_128x128(x: Tensor, fmt: MiniFloat, codes: bool = True, transposed: bool = True) -> Codes:
    """Quantize with a scale for each square of 128."""
    return _cast(x, fmt, codes, transposed, True, True)


def _cast(x: Tensor, fmt: MiniFloat, codes: bool, transposed: bool, *squares: bool) -> Codes:
    x = x if x.is_contiguous() else x.detach().contiguous()
    results = reference.results(x, fmt, squares, codes, transposed)
    if x.numel():
        rows, cols = x.numel() // x.shape[-1], x.shape[-1]
        down, across = aligned(rows, BLOCK), aligned(cols, BLOCK)
        _cast_blocks_kernel(
            (down // BLOCK * (across // BLOCK), 1, 1),
            x, *results, rows, cols, down, across, fmt.mantissa_bits, casts_in_hardware(x.device),
            codes, transposed, rows == down and cols == across, *squares,
        )  # fmt: skip
    return results


def matmul_blocks(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (a × a_scale) @ (b × b_scale).T."""
    if not a.numel() or not b.numel():
        return reference.matmul_blocks(a, a_scale, b, b_scale, dtype)
    scaling, in_squares = torch.nn.functional.ScalingType, reference.in_squares
    kinds = scaling.BlockWise1x128, scaling.BlockWise128x128
    result: Tensor = torch.nn.functional.scaled_mm(
        a, b.t(), a_scale, kinds[in_squares(a, a_scale)], b_scale, kinds[in_squares(b, b_scale)],
        output_dtype=dtype if dtype is torch.bfloat16 else torch.float32,  # all that there is
    )  # fmt: skip
    return result.to(dtype)
