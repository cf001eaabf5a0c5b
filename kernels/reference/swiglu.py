"""SwiGLU joined to the casts around it: the activation's output and its two gradients exist in FP8 only.

    h   = silu(gate) × up                silu(g) = g × s,  s = 1 / (1 + exp(-g))
    dg  = dh × up × s × (1 + gate × (1 - s)),   du = dh × silu(gate)

(Shazeer, "GLU Variants Improve Transformer", 2020.) All is computed in float32 from the stored gate and up; torch uses
three kernels and rounds in between. Casts are those of `cast.py`, or of `cast_delayed.py` if states are given. Backward
reads gate and up anyway and computes h from them again, so nothing of h is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8stack.formats import E4M3, MiniFloat

from .cast import Cast, as_matrix, cast
from .cast_delayed import cast_delayed, encode_saturating


def swiglu_cast(
    gate: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    up: Tensor,  # likewise
    fmt: MiniFloat,
    of: Sequence[int] = (),  # the handle of a DelayedState, or none: current scaling
    update: bool = False,  # see cast_delayed
    again: bool = False,
) -> tuple[Tensor, Tensor]:  # codes [rows16, cols16], scale float32 0-d
    """Return silu(gate) × up in FP8."""
    codes, _, scale = _cast(_forward(gate, up), fmt, of, update, again)
    return codes, scale


def swiglu_backward_cast(
    dh: Tensor,  # the gradient of silu(gate) × up, [rows, cols]
    gate: Tensor,
    up: Tensor,
    h_scale: Tensor,  # the scale that swiglu_cast returned
    fmt: MiniFloat,
    of: Sequence[int] = (),  # handles of gate's DelayedState and up's, or none
    update: bool = False,
) -> tuple[Tensor, ...]:
    """Return codes, codes_t and scale of gate's gradient, then of up's, then E4M3 codes_t of silu(gate) × up."""
    d, g, u = dh.float(), gate.float(), up.float()
    s = torch.sigmoid(g)
    silu = g * s
    of_gate = _cast(d * u * (s * (1 + g * (1 - s))), fmt, of[:1], update, False)
    of_up = _cast(d * silu, fmt, of[1:], update, False)
    codes = encode_saturating(as_matrix(silu * u), h_scale, E4M3)
    return *of_gate, *of_up, codes.t().contiguous()


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.float()
    return g * torch.sigmoid(g) * up.float()


def _cast(x: Tensor, fmt: MiniFloat, of: Sequence[int], update: bool, again: bool) -> Cast:
    return cast_delayed(x, fmt, of[0], update, again) if of else cast(x, fmt)
