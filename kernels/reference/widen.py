"""The sum of the 16-bit gradients of one tensor, in float32.

    sum = ((float32(first) + second) + third) + ...

It rounds as autograd does where it casts each to float32 and adds them up as they come.
"""

from __future__ import annotations

from torch import Tensor

MOST = 4  # tensors


def widened_sum(first: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of up to four bfloat16 or float16 tensors of one shape, float32."""
    return sum(others, first.float())
