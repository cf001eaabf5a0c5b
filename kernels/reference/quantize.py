"""Quantization with a scale per block of 128, or per tensor: value = code × scale.

Per block (or tensor), with `max` the format's largest value, all in float32:

    amax  = max |x|                       NaN and infinity count, they are never dropped
    scale = amax / max                    if amax is finite and the quotient is a normal float32
          = 0                             if it is smaller: the block is zero
          = NaN                           if amax is not finite: the whole block decodes to NaN, its codes are 0
    code  = round(x × (1 / scale))        to the nearest code, ties to even

`ue3m5` stores square roots: x is replaced by sqrt(x) first and squared after decoding. A positive element never gets
code 0 there (it is lifted to code 1, 1/4032 of the block's largest), since a second moment that flushes to zero makes
Adam divide by epsilon; an element that is exactly zero keeps code 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8stack.formats import BLOCK, TINY, Float8, rows_cols, scale_shape

from .fp8 import cast_finite, decode, encode, sqrt_rn


def as_blocks(x: Tensor) -> Tensor:
    """Return `x` as [rows, blocks, 128], its rows padded with zeros to a multiple of 128 elements."""
    rows, cols = rows_cols(x.shape)
    x = x.reshape(rows, cols)
    if cols % BLOCK:
        x = pad(x, (0, -cols % BLOCK))
    return x.reshape(*scale_shape(x.shape), BLOCK)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo `as_blocks`."""
    _, cols = rows_cols(shape)
    return blocks.flatten(1)[:, :cols].reshape(shape)


def scale_and_inverse(amax: Tensor, fmt: Float8) -> tuple[Tensor, Tensor]:
    """Return (scale, 1 / scale) for magnitudes `amax` (float32); the inverse is 0 where the scale is 0 or NaN."""
    # Divided by a tensor: on CUDA, torch multiplies by the reciprocal of a Python number, which rounds differently.
    scale = amax / torch.full_like(amax, fmt.max)
    scale = torch.where(scale >= TINY, scale, 0.0)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    return scale, torch.where(scale > 0, 1.0 / scale, 0.0)


def quantize_blocks(
    x: Tensor,  # float32, bfloat16 or float16, any shape
    fmt: Float8,
) -> tuple[Tensor, Tensor]:  # codes: fmt.dtype, x's shape; scale: float32 [rows, ceil(cols / 128)]
    """Quantize `x` with one scale for each block of 128 elements of a row."""
    blocks = as_blocks(x.float())
    if fmt.squared:
        blocks = sqrt_rn(blocks)
    scale, inverse = scale_and_inverse(blocks.abs().amax(-1), fmt)
    scaled = blocks * inverse.unsqueeze(-1)
    scaled = torch.where(inverse.unsqueeze(-1) > 0, scaled, 0.0)  # infinity × 0 is NaN
    if fmt.dtype is torch.uint8:
        codes = encode(scaled, fmt)
        if fmt.squared:
            codes = torch.where(
                (blocks > 0) & (inverse.unsqueeze(-1) > 0), codes.clamp(min=1), codes
            )
    else:
        codes = cast_finite(scaled, fmt)
    return from_blocks(codes, x.shape).contiguous(), scale


def dequantize_blocks(
    codes: Tensor,  # fmt.dtype, any shape
    scale: Tensor,  # float32 [rows, ceil(cols / 128)]
    fmt: Float8,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # dtype, the shape of codes
    """Return code × scale (squared for `ue3m5`), rounded to `dtype`."""
    values = as_blocks(decode(codes, fmt)) * scale.unsqueeze(-1)
    if fmt.squared:
        values = values * values
    return from_blocks(values, codes.shape).contiguous().to(dtype)


def quantize_tensor(
    x: Tensor,  # float32, bfloat16 or float16, any shape
    fmt: Float8,  # e4m3 or e5m2
) -> tuple[Tensor, Tensor]:  # codes: fmt.dtype, x's shape; scale: float32, 0-d
    """Quantize `x` with one scale for the whole tensor ("current scaling": amax of this very tensor)."""
    x = x.float()
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    scale, inverse = scale_and_inverse(amax, fmt)
    return cast_finite(torch.where(inverse > 0, x * inverse, 0.0), fmt), scale
