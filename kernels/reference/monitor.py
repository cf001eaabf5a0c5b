"""What became of a matrix when it was cast to FP8, told from the matrix and its scale; its codes are not read.

`out`, int64 [6], is added to (the first two are maximized), so that all calls of a step can share it:

    amax         bits (float32) of the largest finite magnitude
    scale        bits of the largest scale, NaN above all
    underflow    elements that are not zero, but whose codes are
    overflow     finite elements that `encode` clips: above the largest code by half a step or more
    nonfinite    NaN and infinity
    elements     all of them

Integers, so that neither the order nor the device of the sums shows. Elements under a scale that is NaN are not finite
as a whole: none of them underflows or overflows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8stack.formats import BLOCK, MiniFloat

FIELDS = ("amax", "scale", "underflow", "overflow", "nonfinite", "elements")


def thresholds(fmt: MiniFloat) -> tuple[float, float]:
    """Return the largest magnitude that rounds to zero, and the smallest that is clipped."""
    half_step: float = 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits - 1)
    return fmt.min_positive / 2, fmt.max + half_step


def count(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    scale: Tensor,  # float32: 0-d, [rows or more, cols / 128 or more], or [cols / 128 or more, rows / 128] of squares
    fmt: MiniFloat,
    out: Tensor,  # int64 [6], written
    squares: bool = False,  # a scale for each 128×128
) -> None:
    """Add the statistics of a cast to `out`."""
    x = x.detach().reshape(-1, x.shape[-1]).float()
    if not x.numel():
        return
    each = scale
    if scale.ndim:
        rows, cols = (torch.arange(size, device=x.device) for size in x.shape)
        across = (cols // BLOCK).unsqueeze(0)
        each = (
            scale[across, (rows // BLOCK).unsqueeze(1)]
            if squares
            else scale[rows.unsqueeze(1), across]
        )
    inverse = torch.where(each > 0, 1.0 / each, 0.0)
    zero, clipped = thresholds(fmt)
    magnitude, finite = x.abs(), x.isfinite()
    scaled = magnitude * inverse
    told = finite & ~each.isnan()
    counts = (
        told & (magnitude > 0) & (scaled <= zero),
        told & (scaled >= clipped),
        ~finite,
        torch.ones_like(finite),
    )
    largest = torch.where(finite, magnitude, 0.0).amax()
    bits = [m.contiguous().view(torch.int32).amax().long() for m in (largest, each.abs())]
    out[:2] = torch.maximum(out[:2], torch.stack(bits))
    out[2:] += torch.stack([c.sum() for c in counts])
