"""FP8 weights for the next forward, written by the optimizer's step.

The scale has to be known before the first code is written, and the largest new weight is known after the last. So the
scale comes from the weights before the step, with room to grow by an eighth, more than a step of a sane learning rate
does; a tensor that outgrows it all the same is cast again, with its exact scale. Nothing ever saturates.

    scales[1] = amax of the last weights / 448 × HEADROOM       what the step casts with
    scales[0] = scales[1], or amax / 448 where that is too small: the scale of the codes
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3

from .fp8 import cast_finite
from .quantize import scale_and_inverse

HEADROOM = 1.125


def emit(
    weight: Tensor,  # float32, bfloat16 or float16: as the step left it
    codes: Tensor,  # e4m3, the same shape; overwritten
    scales: Tensor,  # float32 [4]; updated
    apply: Tensor,  # float32, 0-d: 0 leaves everything as it is
) -> None:
    """Write the codes of `weight`, their scale, and the scale for the next step."""
    x = weight.float()
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    exact, exact_inverse = scale_and_inverse(amax, E4M3)
    given = scales[1].clone()
    fits = amax <= given * E4M3.max
    inverse = torch.where(fits, torch.where(given > 0, 1 / given, 0.0), exact_inverse)
    new = cast_finite(torch.where(inverse > 0, x * inverse, 0.0), E4M3)
    live = apply > 0
    old = codes.view(torch.uint8)
    old.copy_(torch.where(live, new.view(torch.uint8), old))
    scales[0].copy_(torch.where(live, torch.where(fits, given, exact), scales[0]))
    scales[1].copy_(torch.where(live, exact * HEADROOM, given))
