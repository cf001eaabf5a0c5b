"""Casts between float32 and the formats of one byte or less.

**E4M3 and E5M2: to nearest, ties to even.** torch's own cast, which rounds so on every device. `kernels/fp8.py`
says how kernels do it without that cast.

**Optimizer formats: to nearest, ties away from zero, or stochastically.** Scaled by 2^-(min_exponent + 14), the
format's exponents fall on float16's, subnormals included, so a code is the upper bits of a float16. The scaled value is
cut to float16 (not rounded: two roundings would move ties), and an integer addition rounds it:

    code = (float16_bits(x × 2^-(min_exponent + 14)) + 2^(9 - M)) >> (10 - M)

A dithered code adds noise (`noise`) instead of a half. That of a first moment, in a signed format, adds it to the
nearest float16. That of the root of a second moment adds it to all bits of the float32: one step moves it by less than
a float16 can tell.

Overflow saturates at the largest finite value, and so does infinity. NaN stays NaN in E4M3 and E5M2. The optimizer
formats have none: their blocks get a NaN scale instead (`quantize.py`), and NaN the largest code, or 0 where it is a
second moment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import MiniFloat, rows_cols

NEIGHBOUR = 0x7038001C  # 7/16 of the circle, in every field of a word of noise
HASH = 0x9E3779B1  # 2^32 / golden ratio, odd: neighbours in a tensor get seeds far from each other
_WORD = 0xFFFFFFFF


def encode(
    x: Tensor,  # float32, any shape
    fmt: MiniFloat,
    random: Tensor | None = None,  # int64 like x, the words of `noise`: dithered
) -> Tensor:  # uint8, the same shape; 4-bit codes unpacked
    """Return the codes of `x` in `fmt`. For a squared format, pass the square root, which is not negative."""
    x = x.float()
    if fmt.dtype is not torch.uint8 and random is None:
        return cast_finite(x, fmt).view(torch.uint8)
    x = x.nan_to_num(fmt.max if fmt.signed else 0.0)
    size = x.abs().clamp(max=fmt.max) * 2.0 ** -(fmt.min_exponent + 14)
    drop = 10 - fmt.mantissa_bits
    if random is None:
        codes = (truncate(size, 10) + (1 << (drop - 1))) >> drop
    elif fmt.signed:
        half = size.half().view(torch.int16).int()
        codes = (half + ((random << 26 & _WORD) >> (32 - drop)).int()) >> drop
    else:
        # White noise: codes of 4 bits are far apart, and with even noise a v that decays would leave them too early.
        if fmt.bits == 4:
            random = ((random ^ (random >> 15)) * 0x846CA68B & _WORD) >> 9
        codes = (truncate(size, 23) + noise_of_v(random, 13 + drop)) >> (13 + drop)
    sign = 1 << (fmt.bits - 1) if fmt.signed else 0
    codes = codes.clamp(max=(1 << fmt.bits) - 1 - sign)
    if fmt.signed:
        codes = codes | torch.where(torch.signbit(x), sign, 0)
    return codes.to(torch.uint8)


def truncate(
    x: Tensor,  # float32, not negative, below 2
    mantissa_bits: int,  # 10 for float16
) -> Tensor:  # int32, the same shape
    """Return the bits of `x` in a float with the exponents of float16, rounded toward zero."""
    subnormal = (x * 2.0 ** (14 + mantissa_bits)).int()
    normal = (x.view(torch.int32) >> (23 - mantissa_bits)) - (112 << mantissa_bits)
    return torch.where(x < 2.0**-14, subnormal, normal)


def noise(
    shape: torch.Size,
    seed: Tensor,  # int32, 0-d: of the parameter
    phase: Tensor,  # int32, 0-d: of the step
) -> Tensor:  # int64, values in [0, 2^32)
    """Return a word of noise an element, the same on every device: hash(index, seed) + phase.

    In each step the same phase is added to all, so what an element is rounded with goes around a circle in equal parts
    (of irrational length, see `step_scalars.py`). Each value is as likely as with white noise, but rounding errors of
    successive steps cancel, where those of white noise add up: an average of beta2 = 0.999 forgets nothing for a
    thousand steps, and a master weight never does.

    A word has fields, whose carries do no harm: bits 24 to 31 are for the weight, 7 to 22 for v, 0 to 5 for m. Sixteen
    neighbours in a row share a hash and stand in sixteen places around the circle. The mixer is Wellons' lowbias32
    ("Prospecting for hash functions", 2018).
    """
    rows, cols = rows_cols(shape)
    column = torch.arange(cols, device=seed.device)
    index = torch.arange(rows, device=seed.device).unsqueeze(-1) * cols + column - column % 16
    x = (index * HASH + seed.long()) & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    x = (x ^ (x >> 16)) + phase + column % 16 * NEIGHBOUR
    return (x & _WORD).reshape(shape)


def noise_of_v(random: Tensor, bits: int) -> Tensor:  # int32
    """Return the field for v of `noise`, 16 bits, as so many."""
    field = (random >> 7).int() & 0xFFFF
    return field >> (16 - bits) if bits < 16 else field << (bits - 16)


def cast_finite(
    x: Tensor,  # float32, finite, any shape
    fmt: MiniFloat,  # e4m3 or e5m2
) -> Tensor:  # fmt.dtype, the same shape
    """Return `x` as an FP8 tensor; callers look for infinity and NaN.

    torch rounds correctly, but its overflow gives NaN or the maximum, depending on the version; so x is clamped first.
    """
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def decode(
    codes: Tensor,  # uint8 (or fmt.dtype), any shape
    fmt: MiniFloat,
) -> Tensor:  # float32, the same shape
    """Return the values of `codes`. Exact: every code of every format is a float32."""
    if fmt.dtype is not torch.uint8:
        return codes.view(fmt.dtype).float()
    code = codes.to(torch.int16)
    half = (code & 0x7F if fmt.signed else code) << (10 - fmt.mantissa_bits)
    if fmt.signed:  # bit 7 to bit 15
        half = half | (code & 0x80) << 8
    return half.view(torch.float16).float() * 2.0 ** (fmt.min_exponent + 14)


def sqrt_rn(x: Tensor) -> Tensor:
    """Return the correctly rounded float32 square root of `x` (float32).

    torch's vectorized CPU square root is off by one bit for one float32 in six (seen in torch 2.13); from double it is
    exact, since no root of a float32 lies within a double's error of a rounding boundary.
    """
    return x.double().sqrt().float()
