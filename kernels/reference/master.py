"""The 24-bit master weight: a bfloat16 weight and one byte of what its rounding cut off.

A float32 is 32 bits; bfloat16 is its upper 16. Rounded to 24 bits (16 of mantissa), it splits by integer arithmetic:

    join    bits = (bfloat16 << 16) + (remainder << 8)                   remainder in [-128, 127]
    split   r = bits + 0x80;   hi = (r + 0x8000) >> 16;   remainder = (r >> 8) - (hi << 8)

so the bfloat16 half is the rounded weight that the model computes with, and the pair is the master that the optimizer
accumulates in: relative error at most 2^-16, 3 bytes instead of 2 + 4. NaN and infinity keep remainder 0.

Somebody else may write to the weight (load it, clamp it, zero a row) and leave an old remainder. `join` then gives a
master within half a step of what was written. Added to zero, a negative remainder would make a NaN, and so would a
positive one added to infinity; `split` makes neither pair, and `join` ignores the remainder there. (Beyond 3.39e38 the
bfloat16 half is infinity and the remainder negative.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000


def split(
    master: Tensor,  # float32, any shape
) -> tuple[Tensor, Tensor]:  # bfloat16 and int8, the same shape
    """Split a float32 weight into its bfloat16 half and the remainder byte."""
    bits = master.contiguous().view(torch.int32)
    special = (bits & _EXPONENT) == _EXPONENT
    rounded = bits + 0x80
    high = (rounded + 0x8000) >> 16
    remainder = (rounded >> 8) - (high << 8)
    quiet = (bits >> 16) | torch.where(
        (bits & 0x7FFFFF) != 0, 0x40, 0
    )  # a NaN whose upper half is infinity
    high = torch.where(special, quiet, high)
    remainder = torch.where(special, 0, remainder)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int8)


def join(
    weight: Tensor,  # bfloat16, any shape
    remainder: Tensor,  # int8, the same shape
) -> Tensor:  # float32, the same shape
    """Return the float32 master of a split weight."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    low = remainder.to(torch.int32) << 8
    magnitude = high & 0x7FFFFFFF
    misfit = ((magnitude == 0) & (low < 0)) | ((magnitude == _EXPONENT) & (low > 0))
    return (high + torch.where(misfit, 0, low)).view(torch.float32)
