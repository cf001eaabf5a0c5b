"""RMSNorm that also tells the cast behind it the largest magnitude of its output.

    rstd = 1 / sqrt(mean(x²) + eps)               one for each row
    y    = x × rstd × w

    dx   = rstd × (w dy - x̂ × mean(w dy × x̂)),    x̂ = x × rstd
    dw   = sum of dy × x̂ over the rows

(Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.) Everything is computed in float32 and rounded
once, when it is stored; models that cast x̂ before they multiply it by w round twice. A cast with one scale (`cast.py`)
needs the largest magnitude of its input. The norm has just computed that, so it returns it as `parts`: the largest
magnitude in each of several parts of y, as float32 bits without sign. Compared as integers, infinity is above every
finite value, and NaN is above infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_COLS = 8192  # the kernel holds whole rows in registers, which have no room for longer ones


def rmsnorm(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols]
    weight: Tensor,  # [cols], of any of those dtypes
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # y, as x; rstd, float32 [rows]; parts, int32 [a power of two]
    """Return x / rms(x) × weight, 1 / rms(x), and `parts` of the first."""
    values = x.detach().contiguous().float()
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    y = (values * rstd * weight.detach().float()).to(x.dtype)
    magnitudes = y.float().view(torch.int32).flatten() & 0x7FFFFFFF
    parts = magnitudes.amax(0, keepdim=True) if y.numel() else magnitudes.new_zeros(1)
    return y, rstd.flatten(), parts


def rmsnorm_backward(
    dy: Tensor,  # the gradient of y, as x
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    need_weight: bool = True,
) -> tuple[Tensor, Tensor | None]:  # dx, as x; dweight, as weight, if it is needed
    """Return the gradients of x and of weight."""
    rstd, d = rstd.view(*x.shape[:-1], 1), dy.contiguous().float()
    h, wd = x.contiguous().float() * rstd, d * weight.float()
    dx = rstd * (wd - h * (wd * h).mean(-1, keepdim=True))
    dweight = (d * h).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if need_weight else None
    return dx.to(x.dtype), dweight
