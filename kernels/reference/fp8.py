"""Casts between float32 and the one-byte formats: round to nearest, ties to even.

The rounding is done on the grid of the target in float32, without a hardware cast. With e = the exponent of x, or
that of the smallest normal number if x is below it, the grid around x has step 2^(e - M) for M mantissa bits. Adding
magic = 2^(e + 23 - M) pushes everything finer than that step out of a float32's 24 bits, so the addition itself
rounds to nearest even, and the integer difference bits(x + magic) - bits(magic) counts the steps:

    code = bits(x + magic) - bits(magic) + (e - min_exponent) * 2^M

Normal numbers, subnormals and the carry into the next exponent are all the same line, and no subnormal float32 is ever
produced. Overflow saturates at the largest finite value (`count_saturated` counts it beforehand). NaN is kept where
the format has one (E4M3, E5M2: always code 0x7F), as is infinity in E5M2; infinity becomes NaN in E4M3. The two
optimizer formats have neither: their blocks carry a NaN scale instead (`quantize.py`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from fp8stack.formats import Float8

_EXPONENT = 0x7F800000


def encode(
    x: Tensor,  # float32, any shape
    fmt: Float8,
) -> Tensor:  # uint8, the same shape
    """Return the codes of `x` in `fmt`. For `ue3m5`, `x` must not be negative; the square root is the caller's."""
    x = x.float()
    magnitude = x.abs().clamp(max=fmt.max)
    exponent = magnitude.clamp(min=fmt.min_normal).view(torch.int32) & _EXPONENT
    magic = exponent + ((23 - fmt.mantissa_bits) << 23)
    steps = (magnitude + magic.view(torch.float32)).view(torch.int32) - magic
    lowest = (fmt.min_exponent + 127) << 23
    codes = steps + ((exponent - lowest) >> (23 - fmt.mantissa_bits))
    if fmt.signed:
        codes = codes | ((x.view(torch.int32) >> 24) & 0x80)
    if fmt.name == "e4m3":
        codes = torch.where(x.isfinite(), codes, 0x7F)
    elif fmt.name == "e5m2":
        infinity = 0x7C | (codes & 0x80)
        codes = torch.where(x.isnan(), 0x7F, torch.where(x.isinf(), infinity, codes))
    return codes.to(torch.uint8)


def cast(
    x: Tensor,  # float32, bfloat16 or float16, any shape
    fmt: Float8,  # e4m3 or e5m2
) -> Tensor:  # fmt.dtype, the same shape
    """Return `x` as an FP8 tensor; the same codes as `encode`, through torch's own cast, which is faster on a CPU.

    torch rounds correctly but has overflowed to NaN or to the maximum depending on its version, so x is clamped first.
    """
    x = x.float()
    special = torch.where(x.isinf(), x if fmt.name == "e5m2" else torch.nan, torch.nan)
    return torch.where(x.isfinite(), x.clamp(-fmt.max, fmt.max), special).to(fmt.dtype)


def cast_finite(
    x: Tensor,  # float32, finite, any shape
    fmt: Float8,  # e4m3 or e5m2
) -> Tensor:  # fmt.dtype, the same shape
    """Return `cast(x, fmt)` for an `x` that is known to be finite, in two passes over memory instead of six."""
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def decode(
    codes: Tensor,  # uint8 (or fmt.dtype), any shape
    fmt: Float8,
) -> Tensor:  # float32, the same shape
    """Return the values of `codes`. Exact: every code of every format is a float32."""
    if fmt.dtype is not torch.uint8:
        return codes.view(fmt.dtype).float()
    values: Tensor = _table(fmt, codes.device)[codes.int()]
    return values


def sqrt_rn(x: Tensor) -> Tensor:
    """Return the correctly rounded float32 square root of `x` (float32).

    torch's vectorized CPU square root is off by one bit for one float32 in six (seen in torch 2.13); from double it is
    exact, since no root of a float32 lies within a double's error of a rounding boundary.
    """
    return x.double().sqrt().float()


def count_saturated(x: Tensor, fmt: Float8) -> Tensor:
    """Return how many finite elements of `x` lie above the largest value of `fmt` by half a step or more (int64, 0-d).

    They are the ones that `encode` clips: up to half a step above the maximum, rounding down to it is correct.
    """
    top = 2.0 ** math.floor(math.log2(fmt.max))
    half_step = top * 2.0 ** (-fmt.mantissa_bits - 1)
    magnitude = x.float().abs()
    clipped: Tensor = magnitude.isfinite() & (magnitude >= fmt.max + half_step)
    return clipped.sum()


@lru_cache(maxsize=32)
def _table(fmt: Float8, device: torch.device) -> Tensor:
    """Return the float32 values of the 256 codes, computed from the definition of the format."""
    codes = torch.arange(256)
    body = codes & 0x7F if fmt.signed else codes
    exponent, mantissa = body >> fmt.mantissa_bits, body & ((1 << fmt.mantissa_bits) - 1)
    steps = torch.where(exponent > 0, mantissa + (1 << fmt.mantissa_bits), mantissa).double()
    value = (
        steps * 2.0 ** (exponent.clamp(min=1) - 1 + fmt.min_exponent - fmt.mantissa_bits).double()
    )
    if fmt.signed:
        value = torch.where(codes >= 128, -value, value)
    table: Tensor = value.float().to(device)
    return table
