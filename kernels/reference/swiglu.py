"""SwiGLU joined to the casts around it: the activation's output and its two gradients exist in FP8 only.

    h   = silu(gate) × up                silu(g) = g × s,  s = 1 / (1 + exp(-g))
    dg  = dh × up × s × (1 + gate × (1 - s)),   du = dh × silu(gate)

(Shazeer, "GLU Variants Improve Transformer", 2020.) Computed in float32 from the stored gate and up; what torch does in
three kernels rounds in between. Casts are `cast.py`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import MiniFloat

from .cast import cast

Cast = tuple[Tensor, Tensor, Tensor]  # codes, codes_t, scale


def swiglu_cast(
    gate: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    up: Tensor,  # likewise
    fmt: MiniFloat,
) -> Cast:
    """Return silu(gate) × up in FP8."""
    g = gate.float()
    return cast(g * torch.sigmoid(g) * up.float(), fmt)


def swiglu_backward_cast(
    dh: Tensor,  # the gradient of silu(gate) × up, [rows, cols]
    gate: Tensor,
    up: Tensor,
    fmt: MiniFloat,
) -> tuple[Tensor, ...]:  # codes, codes_t, scale of gate's gradient; the same of up's
    """Return the gradients of gate and up in FP8."""
    d, g, u = dh.float(), gate.float(), up.float()
    s = torch.sigmoid(g)
    return *cast(d * u * (s * (1 + g * (1 - s))), fmt), *cast(d * (g * s), fmt)
