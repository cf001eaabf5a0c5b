"""The number formats of fp8stack and the one meaning of "scale".

Everywhere in this library   **value = code × scale**.   There is no inverse scale.

A format is a small binary float: `mantissa_bits`, the exponent of its smallest normal number, and its largest
finite value. The exponent-zero codes are subnormals, so zero is exact. Codes take one byte, or half of one.

| name      | sign, exponent, mantissa | largest | smallest > 0 | used for                                   |
|-----------|--------------------------|---------|--------------|--------------------------------------------|
| e4m3      | 1, 4, 3                  | 448     | 2^-9         | activations, weights, gradients, the wire  |
| e5m2      | 1, 5, 2                  | 57344   | 2^-16        | gradients of activations (backward GEMMs)  |
| s1e3m4    | 1, 3, 4                  | 31      | 2^-6         | Adam's m, momentum                         |
| ue3m5     | 0, 3, 5                  | 31.5    | 2^-7         | Adam's v, stored as its square root        |
| e4m3_root | as e4m3                  | 448     | 2^-9         | v as its square root, `states="fp8"`       |
| ue3m1     | 0, 3, 1 (4 bits)         | 24      | 2^-3         | v as its square root, `states="4bit"`      |

E4M3 and E5M2 are the OCP 8-bit formats (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, table 1).
The others spend every code on finite values, because optimizer states need relative precision within a block of 128; a
block that holds a NaN or an infinity has a NaN as its scale. Rounding is to nearest. Ties go to even for e4m3 and e5m2
(as in hardware) and away from zero for the others, for which values within 2^-20 of a tie count as ties. A step dithers
(`kernels/reference/fp8.py`): an average that changes by a thousandth would never move to its nearest neighbour.

**Block scaling.** A tensor of shape [d0, ...] is read as rows = d0, cols = numel / d0 (a 1-d or 0-d tensor is one
row). Codes have the tensor's shape; scales are float32 [rows, ceil(cols / 128)]; a block never crosses a row, so any
slice along dim 0 is a plain slice of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 128
"""Elements that share a scale."""

NUDGE = 1 + 2.0**-20
"""Values are multiplied by this before they are rounded to an optimizer format. A tie then rounds the same way whatever
the last bits of a scale or a root are: FP8 gradients put one element in ten of the first step's states on a tie."""

TINY = 2.0**-126
"""Smallest normal float32. A block of an optimizer format whose scale would fall below it is a block of zeros."""

LEAST_SCALE = 2.0**-127
"""Scales of E4M3 and E5M2, in states too, are not smaller: the inverse of this one is still a float32."""

GRAD_LIMIT = 2.0**63
"""A gradient of this magnitude counts as non-finite. Adam's v, its square, would come so near to float32's largest that
formats round it to infinity."""


@dataclass(frozen=True)
class MiniFloat:
    """A float of one byte or less. `max` is its largest finite value, `min_exponent` that of its smallest normal."""

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    signed: bool = True
    dtype: torch.dtype = torch.uint8  # what a tensor of its codes is stored as
    squared: bool = False  # True: the codes hold the square root of a non-negative value
    bits: int = 8  # 4: two codes a byte, the even column in the low half

    def __reduce__(self) -> str:
        """Copies and pickles are the constant below: formats are compared by identity."""
        return self.name.upper()

    @property
    def min_positive(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def codes_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of a tensor of `shape`: the same, or [rows, ceil(cols / 2)] for 4 bits."""
        if self.bits == 8:
            return tuple(shape)
        rows, cols = rows_cols(shape)
        return rows, -(-cols // 2)

    def values_shape(self, codes: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor whose codes have shape `codes`, an even number of columns for 4 bits."""
        return tuple(codes) if self.bits == 8 else (codes[0], 2 * codes[1])


E4M3 = MiniFloat("e4m3", 3, -6, 448.0, dtype=torch.float8_e4m3fn)
E5M2 = MiniFloat("e5m2", 2, -14, 57344.0, dtype=torch.float8_e5m2)
S1E3M4 = MiniFloat("s1e3m4", 4, -2, 31.0)
UE3M5 = MiniFloat("ue3m5", 5, -2, 31.5, signed=False, squared=True)
E4M3_ROOT = MiniFloat(
    "e4m3_root", 3, -6, 448.0, signed=False, dtype=torch.float8_e4m3fn, squared=True
)
UE3M1 = MiniFloat("ue3m1", 1, -2, 24.0, signed=False, squared=True, bits=4)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of tensors that are cast to these formats."""

FORMATS: dict[str, MiniFloat] = {f.name: f for f in (E4M3, E5M2, S1E3M4, UE3M5, E4M3_ROOT, UE3M1)}


def rows_cols(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Return the (rows, cols) that block scaling reads a tensor of `shape` as.

    >>> rows_cols((4, 3, 5)), rows_cols((7,)), rows_cols(())
    ((4, 15), (1, 7), (1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Return the shape [rows, ceil(cols / 128)] of the scales of a block-scaled tensor of `shape`."""
    rows, cols = rows_cols(shape)
    return rows, -(-cols // BLOCK)
