"""Quantization with a scale per block of 128, or per tensor: value = code × scale.

Per block (or tensor), with `max` the format's largest value, all in float32:

    amax  = max |x|                       NaN and infinity count, they are never dropped
    scale = amax / max                    if amax is finite and the quotient at least 2^-127
          = 2^-127                        if it is smaller, so that 1 / scale is finite; 0 if amax is 0
          = NaN                           if amax is not finite: the block decodes to NaN, its codes mean nothing
    code  = round(x × (1 / scale))        as `fp8.py` rounds

(The optimizer's own formats compute scale = amax × (1 / max), one multiplication, and code = round(x × (NUDGE /
scale)). A scale below 2^-126 is 0 there, and so is the block.) A `squared` format stores square roots: sqrt(x) is
encoded, and decoding squares it. There a positive element never gets code 0, as a second moment of zero makes Adam
divide by epsilon: it gets at least code 1 (for ue3m5, 1/4032 of the largest). An element that is exactly zero keeps
code 0.

Codes of 4 bits lie two in a byte, [rows, ceil(cols / 2)], the even column in the lower half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8stack.formats import BLOCK, LEAST_SCALE, NUDGE, TINY, MiniFloat, rows_cols, scale_shape

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


def scale_and_inverse(amax: Tensor, fmt: MiniFloat) -> tuple[Tensor, Tensor]:
    """Return (scale, 1 / scale) for magnitudes `amax` (float32); the inverse is 0 where the scale is 0 or NaN."""
    if fmt.dtype is torch.uint8:
        scale = amax * (1 / fmt.max)
        scale = torch.where(scale >= TINY, scale, 0.0)
    else:  # by a tensor: on CUDA, torch multiplies by the reciprocal of a Python number, which rounds differently
        scale = (amax / torch.full_like(amax, fmt.max)).clamp(min=LEAST_SCALE)
        scale = torch.where(amax > 0, scale, 0.0)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    return scale, torch.where(scale > 0, 1.0 / scale, 0.0)


def encode_scaled(x: Tensor, inverse: Tensor, fmt: MiniFloat) -> Tensor:
    """Return the codes of x × inverse in an OCP format; zeros where the inverse is 0: infinity × 0 is NaN."""
    return cast_finite(torch.where(inverse > 0, x * inverse, 0.0), fmt)


def quantize_blocks(
    x: Tensor,  # float32, bfloat16 or float16, any shape
    fmt: MiniFloat,
    random: Tensor | None = None,  # int64 like x, the words of `noise`: dithered
) -> tuple[Tensor, Tensor]:
    """Quantize `x` with one scale for each block of 128 elements of a row.

    Codes are of fmt.dtype and fmt.codes_shape(x.shape), scales float32 [rows, ceil(cols / 128)].
    """
    blocks = as_blocks(x.float())
    if fmt.squared:
        blocks = sqrt_rn(blocks)
    scale, inverse = scale_and_inverse(blocks.abs().amax(-1), fmt)
    if fmt.dtype is torch.uint8 or random is not None:
        # Kernels multiply once, by a factor that includes `encode`'s unit; for blocks above 2^114 it is subnormal.
        unit = 2.0 ** -(fmt.min_exponent + 14)
        factor = inverse * (unit if random is not None else NUDGE * unit)
        words = None if random is None else as_blocks(random)
        codes = encode(blocks * factor.unsqueeze(-1) / unit, fmt, words)
    else:
        codes = encode_scaled(blocks, inverse.unsqueeze(-1), fmt).view(torch.uint8)
    if fmt.squared:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    codes = from_blocks(codes, x.shape).contiguous()
    return (pack(codes) if fmt.bits == 4 else codes.view(fmt.dtype)), scale


def quantize_blocks_into(x: Tensor, fmt: MiniFloat, codes: Tensor, scale: Tensor) -> None:
    """Write the results of `quantize_blocks` into existing memory."""
    new_codes, new_scale = quantize_blocks(x, fmt)
    codes.view(torch.uint8).copy_(new_codes.view(torch.uint8))
    scale.copy_(new_scale)


@lru_cache(256)
def places_in_list(
    shapes: tuple[torch.Size, ...],
) -> tuple[tuple[tuple[int, int], ...], tuple[int, int]]:
    """Return where codes of 8 bits and scales of tensors begin that lie end to end, and the sizes of both.

    Codes begin at multiples of 16, scales have no gaps.
    """
    places, codes, scales = [], 0, 0
    for shape in shapes:
        places.append((codes, scales))
        codes += -(-shape.numel() // 16) * 16
        scales += math.prod(scale_shape(shape))
    return tuple(places), (codes, scales)


def part_of(memory: Tensor, place: int, shape: Sequence[int]) -> Tensor:
    """Return the tensor of `shape` that begins at an element of 1-d memory."""
    return memory.narrow(0, place, math.prod(shape)).view(shape)


def dequantize_blocks(
    codes: Tensor,  # fmt.dtype, fmt.codes_shape(shape)
    scale: Tensor,  # float32 [rows, ceil(cols / 128)]
    fmt: MiniFloat,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,  # of the values; 4-bit codes do not tell it
) -> Tensor:  # dtype, `shape` or that of codes
    """Return code × scale (squared for a squared format), rounded to `dtype`."""
    if fmt.bits == 4:
        codes = unpack(codes, torch.Size(fmt.values_shape(codes.shape) if shape is None else shape))
    values = as_blocks(decode(codes, fmt)) * scale.unsqueeze(-1)
    if fmt.squared:
        values = values * values
    return from_blocks(values, codes.shape).contiguous().to(dtype)


def pack(
    codes: Tensor,  # uint8 in [0, 15], any shape
) -> Tensor:  # uint8 [rows, ceil(cols / 2)]
    """Put two 4-bit codes in each byte, the even column in the lower half."""
    rows, cols = rows_cols(codes.shape)
    codes = pad(codes.reshape(rows, cols), (0, cols % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(
    packed: Tensor,  # uint8 [rows, ceil(cols / 2)]
    shape: torch.Size,
) -> Tensor:  # uint8 of `shape`
    """Undo `pack`."""
    _, cols = rows_cols(shape)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)[:, :cols].reshape(shape)
