"""Statistics of the cast of a matrix to FP8, computed from the matrix and its scale; the codes are not read.

Each call adds to `out`, int64 [10] (of the first two it keeps the maximum), so that all calls of a step can share it:

    amax         bits (float32) of the largest finite magnitude
    scale        bits of the largest scale; NaN counts as the largest
    underflow    elements that are not zero, but whose codes are
    overflow     finite elements that `encode` clips: above the largest code by half a step or more
    nonfinite    NaN and infinity
    dead         blocks whose codes are all zero, though not all of their elements are
    blocks       all of them: 128 elements each, as they lie in memory, the last one shorter
    signal       bits (float64) of the sum of the squared elements
    noise        bits (float64) of the sum of the squared errors that rounding and clipping made
    elements     all of them

Counts are integers, so they do not depend on the order or the device of the sums. Signal and noise are sums of exact
terms in float64, and their last bits do depend on it. An element counts for underflow, overflow, signal and noise only
if it is finite and its scale is not NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8stack.formats import BLOCK, MiniFloat

from .fp8 import cast_finite

FIELDS = (
    "amax", "scale", "underflow", "overflow", "nonfinite", "dead", "blocks", "signal", "noise", "elements",
)  # fmt: skip
SUMS = slice(FIELDS.index("signal"), FIELDS.index("elements"))  # the float64 ones


def thresholds(fmt: MiniFloat) -> tuple[float, float]:
    """Return the largest magnitude that rounds to zero, and the smallest that is clipped."""
    half_step: float = 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits - 1)
    return fmt.min_positive / 2, fmt.max + half_step


def count(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    scale: Tensor,  # float32: 0-d, [rows or more, cols / 128 or more], or [cols / 128 or more, rows / 128] for squares
    fmt: MiniFloat,
    out: Tensor,  # int64 [10], updated
    squares: bool = False,  # a scale for each 128×128
) -> None:
    """Add the statistics of a cast to `out`."""
    x = x.detach().reshape(-1, x.shape[-1]).float()
    if not x.numel():
        return
    each = scale
    if scale.ndim:
        rows, cols = (torch.arange(size, device=x.device) for size in x.shape)
        rows, scale = (rows // BLOCK, scale.t()) if squares else (rows, scale)
        each = scale[rows.unsqueeze(1), cols // BLOCK]
    inverse = torch.where(each > 0, 1.0 / each, 0.0)
    zero, clipped = thresholds(fmt)
    magnitude, finite = x.abs(), x.isfinite()
    scaled = magnitude * inverse
    told = finite & ~each.isnan()
    small = told & (scaled <= zero)
    under = small & (magnitude > 0)
    fill = -x.numel() % BLOCK
    silent = pad(small.flatten(), (0, fill), value=True).view(-1, BLOCK).all(1)
    lossy = pad(under.flatten(), (0, fill)).view(-1, BLOCK).any(1)
    over = told & (scaled >= clipped)
    largest = torch.where(finite, magnitude, 0.0).amax()
    bits = [m.contiguous().view(torch.int32).amax().long() for m in (largest, each.abs())]
    out[:2] = torch.maximum(out[:2], torch.stack(bits))
    out[2:6] += torch.stack([part.sum() for part in (under, over, ~finite, silent & lossy)])
    codes = cast_finite(torch.where(finite, scaled, 0.0), fmt).float()
    exact = magnitude.double()
    error = exact - codes.double() * each
    sums = [torch.where(told, value, 0.0).square().sum() for value in (exact, error)]
    out[SUMS].view(torch.float64).add_(torch.stack(sums))
    out[FIELDS.index("blocks")] += len(silent)
    out[FIELDS.index("elements")] += x.numel()
