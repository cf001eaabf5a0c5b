"""Activations of MLPs joined to the casts around them: what they give, and its gradients, exist in FP8 only.

    h  = act(gate) × up, or act(gate) where there is no up           act(g) = g × s(g)
    dg = dh × up × act'(gate),   du = dh × act(gate)

    silu        s = 1 / (1 + exp(-g))            Elfwing et al., arXiv:1702.03118; SwiGLU: Shazeer, arXiv:2002.05202
    gelu        s = (1 + erf(g / √2)) / 2        Hendrycks and Gimpel, arXiv:1606.08415
    gelu_tanh   s = 1 / (1 + exp(-2y)),  y = √(2/π) × (g + 0.044715 g³)      the same; tanh(y) = 2s - 1
    relu        s = 1 where g > 0, else 0

All is computed in float32 from the stored gate and up; torch uses up to three kernels and rounds in between. Casts are
those of `cast.py`, or of `cast_delayed.py` if states are given. Backward reads gate and up anyway and computes h from
them again, so nothing of h is kept. For layers with biases it returns the sums of dg and du over all rows, too: the
gradients of those biases, of values that are never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8stack.formats import E4M3, MiniFloat

from .cast import TOKENS, Cast, as_matrix, cast
from .cast_delayed import cast_delayed, encode_saturating

APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "relu": F.relu,
    **{name: partial(F.gelu, approximate=how) for name, how in APPROXIMATE.items()},
}  # fmt: skip
"""By their names, what torch has for them."""
ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715
FLAT = 16.0
"""Beyond this magnitude GELU is 0 or g itself, in float32; its cube could overflow."""


def activation_cast(
    gate: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    up: Tensor | None,  # likewise
    activation: str,  # of ACTIVATIONS
    fmt: MiniFloat,
    of: Sequence[int] = (),  # the handle of a DelayedState, or none: current scaling
    update: bool = False,  # see cast_delayed
    again: bool = False,
) -> tuple[Tensor, Tensor]:  # codes [rows16, cols16], scale float32 0-d
    """Return act(gate) × up in FP8."""
    value, _ = activate(gate.float(), activation)
    codes, _, scale = _cast(value if up is None else value * up.float(), fmt, of, update, again)
    return codes, scale


def activation_backward_cast(
    dh: Tensor,  # the gradient of act(gate) × up, [rows, cols]
    gate: Tensor,
    up: Tensor | None,
    h_scale: Tensor,  # the scale that activation_cast returned
    activation: str,
    fmt: MiniFloat,
    of: Sequence[int] = (),  # handles of gate's DelayedState and up's, or none
    update: bool = False,
    sums: bool = False,
) -> list[Tensor]:
    """Return codes, codes_t and scale of gate's gradient, then of up's if there is one, then E4M3 codes_t of
    act(gate) × up; and with `sums` the gradients of gate and up summed over all rows, float32 [cols]."""
    d = dh.float()
    value, slope = activate(gate.float(), activation)
    gradients = [d * slope] if up is None else [d * up.float() * slope, d * value]
    casts = [_cast(x, fmt, of[i : i + 1], update, False) for i, x in enumerate(gradients)]
    h = value if up is None else value * up.float()
    codes = encode_saturating(as_matrix(h), h_scale, E4M3)
    results = [t for each in casts for t in each] + [codes.t().contiguous()]
    return results + [x.sum(0) for x in gradients if sums]


def activate(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return act(g) and act'(g), of float32."""
    if activation == "relu":
        return torch.relu(g), (~(g <= 0)).float()
    if activation != "silu":  # the bits of torch's own, which are beyond FLAT NaN
        how, near = APPROXIMATE[activation], g.clamp(-FLAT, FLAT)
        slope = torch.ops.aten.gelu_backward(torch.ones_like(g), near, approximate=how)
        return ACTIVATIONS[activation](g), slope
    s = torch.sigmoid(g)
    return g * s, s * (1 + g * (1 - s))


def _cast(x: Tensor, fmt: MiniFloat, of: Sequence[int], update: bool, again: bool) -> Cast:
    return cast_delayed(x, fmt, of[0], update, again) if of else cast(x, fmt, rows_to=TOKENS)
