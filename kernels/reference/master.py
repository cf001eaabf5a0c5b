"""Master weights: the float32 value that an optimizer accumulates in, kept in fewer bits.

**Split.** A float32 is 32 bits; bfloat16 is its upper 16. Rounded to 24 bits (16 of mantissa), or left whole, it splits
by integer arithmetic into the bfloat16 weight that the model computes with and a remainder of one or two bytes:

    24 bits   r = bits + noise;  hi = (r + 0x8000) >> 16;      remainder = (r >> 8) - (hi << 8)     in [-128, 127]
              bits = (hi << 16) + (remainder << 8)             relative error at most 2^-16
    32 bits   hi = (bits + 0x8000) >> 16;                      remainder = bits - (hi << 16)        exact

Other code may write the weight (load it, clamp it, zero a row) and leave the old remainder. The pair is then within
half a step of the written value. But a negative remainder added to zero would make a NaN, and so would a positive one
added to infinity. `split` makes neither pair, and `join` takes the weight alone wherever the sum is NaN.

**Stochastic rounding** needs no master: a float32 goes up or down to bfloat16 with a probability that keeps its mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(
    master: Tensor,  # float32, any shape
    dtype: torch.dtype = torch.int8,  # or torch.int16: no bit is lost
    # int64 like master, the words of `fp8.noise`: dithered; without, to nearest
    random: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # bfloat16 and `dtype`, the same shape
    """Split a float32 weight into its bfloat16 half and the remainder."""
    bits = _bits(master)
    if dtype is torch.int8:
        rounded = bits + (0x80 if random is None else (random >> 24).int())
        high = (rounded + 0x8000) >> 16
        remainder = (rounded >> 8) - (high << 8)
    else:
        high = (bits + 0x8000) >> 16
        remainder = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(dtype)


def join(
    weight: Tensor,  # bfloat16, any shape
    remainder: Tensor,  # int8 or int16, the same shape
) -> Tensor:  # float32, the same shape
    """Return the float32 master of a split weight."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    low = remainder.to(torch.int32) << (8 if remainder.dtype is torch.int8 else 0)
    joined = (high + low).view(torch.float32)
    return torch.where(joined.isnan(), high.view(torch.float32), joined)


def dither(
    x: Tensor,  # float32, any shape
    random: Tensor,  # int64 like x, in [0, 2^16)
) -> Tensor:  # bfloat16, the same shape
    """Round to one of the two nearest bfloat16 values, at random, so that the mean is `x`."""
    high = (_bits(x) + random.to(torch.int32)) >> 16
    return high.to(torch.int16).view(torch.bfloat16)


def _bits(x: Tensor) -> Tensor:
    """Return the bits of float32 `x`; every NaN becomes the one that rounding cannot turn into a number."""
    x = x.contiguous()
    return torch.where(x.isnan(), _NAN, x.view(torch.int32))
