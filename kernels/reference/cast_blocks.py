"""A matrix in FP8 with a scale for each 1×128 or 128×128 block, for the block-scaled GEMMs of Hopper.

DeepSeek-V3's recipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3): activations and gradients have a
scale for each 128 elements along the inner dimension of the product, weights one for each square of 128. In the
product that gives a weight's gradient the activation has squares here, so that each product has one operand in squares:
cuBLAS takes a third longer where neither is. Sizes are padded to multiples of 128. Scale and rounding are
`quantize.py`'s.

    cast_1x128      codes    [rows, cols]   scale    [rows, cols / 128]     along the columns
                    codes_t  [cols, rows]   scale_t  [cols, rows / 128]     along the rows, rounded on its own,
                                                     or with `squares_t` that of cast_128x128, and its codes_t
    cast_128x128    codes    [rows, cols]   scale    [L4(cols / 128), rows / 128]
                    codes_t  [cols, rows]   scale_t  [L4(rows / 128), cols / 128]

L4 rounds up to a multiple of 4. All scales lie in memory with the first dimension innermost, as cuBLAS reads them.
Codes and scales of a layout that was not asked for are empty. What a scale is of, its shape tells (`in_squares`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8stack.formats import BLOCK, MiniFloat

from .cast import aligned, as_matrix, transpose
from .quantize import encode_scaled, quantize_blocks, scale_and_inverse

Codes = tuple[Tensor, Tensor, Tensor, Tensor]  # codes, scale, codes_t, scale_t


def results(
    x: Tensor, fmt: MiniFloat, squares: Sequence[bool], codes: bool = True, transposed: bool = True
) -> Codes:
    """Return memory for a cast; `squares` says which layouts have a scale for each. Their padding is zeros."""
    rows, cols = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    rows, cols = aligned(rows, BLOCK), aligned(cols, BLOCK)
    found: list[Tensor] = []
    layouts = (codes, rows, cols), (transposed, cols, rows)
    for square, (wanted, outer, inner) in zip(squares, layouts, strict=True):
        down, across = outer // BLOCK, inner // BLOCK
        shape = (down, aligned(across, 4)) if square else (across, outer)
        new = x.new_zeros if square and across % 4 else x.new_empty
        scale = new(shape if wanted else (0, 0), dtype=torch.float32).t()
        found += x.new_empty((outer, inner) if wanted else (0, 0), dtype=fmt.dtype), scale
    return found[0], found[1], found[2], found[3]


def cast_1x128(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    fmt: MiniFloat,
    codes: bool = True,
    transposed: bool = True,
    squares_t: bool = False,
) -> Codes:
    """Quantize with a scale for each 128 elements of a row, and again for 128 of a column or, `squares_t`, a square."""
    x = as_matrix(x, BLOCK, BLOCK)
    plain, scale = quantize_blocks(x if codes else x[:0, :0], fmt)
    scale = scale.t().contiguous().t()
    if transposed and squares_t:
        return plain, scale, *cast_128x128(x, fmt, codes=False)[2:]
    plain_t, scale_t = quantize_blocks(x.t() if transposed else x[:0, :0], fmt)
    return plain, scale, plain_t, scale_t.t().contiguous().t()


def cast_128x128(
    x: Tensor,  # float32, bfloat16 or float16 [rows, cols]
    fmt: MiniFloat,
    codes: bool = True,
    transposed: bool = True,
) -> Codes:
    """Quantize with a scale for each square of 128."""
    x = as_matrix(x, BLOCK, BLOCK)
    rows, cols = (size // BLOCK for size in x.shape)
    squares = x.reshape(rows, BLOCK, cols, BLOCK)
    scale, inverse = scale_and_inverse(squares.abs().amax((1, 3)), fmt)
    plain = encode_scaled(squares, inverse[:, None, :, None], fmt).reshape(x.shape)
    found = results(x, fmt, (True, True), codes, transposed)
    none = x.new_empty((0, 0), dtype=fmt.dtype)
    found[1][:cols], found[3][:rows] = (scale.t() if codes else 0.0), (scale if transposed else 0.0)
    return plain if codes else none, found[1], transpose(plain) if transposed else none, found[3]


def matmul_blocks(
    a: Tensor,  # codes [m, k]
    a_scale: Tensor,  # as one of the casts returns it; squares in one operand at most
    b: Tensor,  # codes [n, k]
    b_scale: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # [m, n]
    """Return (a × a_scale) @ (b × b_scale).T, multiplied in float32."""
    return (_values(a, a_scale) @ _values(b, b_scale).t()).to(dtype)


def in_squares(codes: Tensor, scale: Tensor) -> bool:
    """Return whether `codes` have a scale for each square."""
    return scale.shape != (codes.shape[0], codes.shape[1] // BLOCK)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    if in_squares(codes, scale):
        scale = scale[: codes.shape[1] // BLOCK].t().repeat_interleave(BLOCK, 0)
    return codes.float() * scale.repeat_interleave(BLOCK, 1)
