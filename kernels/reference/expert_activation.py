"""The activation between the two products of experts, joined to the casts around it.

    h  = act(gate) × up × weight           gate and up are the halves of one product, [rows, 2 · cols]
    d(gate) = dh × weight × up × act'(gate),   d(up) = dh × weight × act(gate)
    d(weight) = sum over columns of dh × act(gate) × up

`weight` is what the router gives a token for an expert. It multiplies here, and not what the second product makes of h:
the same but for rounding, and then neither that nor its gradient has to be kept or cast row by row. All is computed in
float32. The gradients of gate and up are one operand again, with one scale. See `activation.py` for act.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3

from .activation import activate
from .cast import TOKENS, cast
from .cast_delayed import encode_saturating


def expert_activation(
    gate_up: Tensor,  # bfloat16, float16 or float32 [rows, 2 · cols]; rows a multiple of 64, cols of 16
    weights: Tensor,  # of pairs, floats of any shape
    index: Tensor,  # int32 [rows], the pair in each row, -1 for none: its weight is 0
    activation: str,  # of ACTIVATIONS
) -> tuple[Tensor, Tensor]:  # E4M3 codes [rows, cols], scale float32 0-d
    """Return act(gate) × up × weight in FP8."""
    gate, up = gate_up.float().chunk(2, 1)
    value, _ = activate(gate, activation)
    h = value * up * _by_row(weights, index)
    codes, _, scale = cast(h, E4M3, True, False, rows_to=TOKENS)
    return codes, scale


def expert_activation_backward(
    dh: Tensor,  # the gradient of what expert_activation cast, [rows, cols]
    gate_up: Tensor,
    weights: Tensor,
    index: Tensor,
    h_scale: Tensor,  # the scale that expert_activation returned
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes [rows, 2 · cols], codes_t and scale of gate_up's gradient, E4M3 codes_t [cols, rows] of what
    expert_activation cast, and the gradient of each row's weight, float32 [rows]."""
    gate, up = gate_up.float().chunk(2, 1)
    value, slope = activate(gate, activation)
    dh, weight = dh.float(), _by_row(weights, index)
    h, d = value * up, dh * weight
    codes, codes_t, scale = cast(torch.cat([d * up * slope, d * value], 1), E4M3, rows_to=TOKENS)
    h_codes = encode_saturating(h * weight, h_scale, E4M3)
    return codes, codes_t, scale, h_codes.t().contiguous(), (dh * h).sum(1)


def _by_row(weights: Tensor, index: Tensor) -> Tensor:
    found = weights.float().flatten()[index.clamp(min=0).long()]
    return torch.where(index < 0, 0.0, found)[:, None]
