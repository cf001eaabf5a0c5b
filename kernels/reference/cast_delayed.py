"""A matrix in FP8 with a scale known before it is read: "delayed scaling", from the amax of the last casts.

A cast that updates its state (`delayed_state.py`) writes its amax to the history. It then computes the next cast's
scale, 2^margin × amax / max, from the largest or the latest amax of the history (Micikevicius et al., "FP8 Formats for
Deep Learning", 2022, section 4; the margin is TransformerEngine's). An amax that is zero or not finite leaves scale and
history as they are. Values too large for the scale saturate; infinity and NaN become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import TINY, MiniFloat

from .cast import Cast, as_matrix, largest_magnitude, transpose
from .delayed_state import HEADER, STATES, DelayedState
from .fp8 import cast_finite
from .quantize import scale_and_inverse


def cast_delayed(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    fmt: MiniFloat,  # e4m3 or e5m2
    of: int,  # the handle of a DelayedState; updated if `update` and it learns
    update: bool,  # write this amax to the history
    again: bool,  # use the last cast's scale
) -> Cast:  # codes [rows16, cols16], codes_t [cols16, rows16], scale float32 0-d
    """Quantize a matrix with the scale in its state."""
    own_state = STATES[of]
    update = own_state.learns(update) and x.numel() > 0
    state = own_state.on(x.device, update)
    amax = largest_magnitude(x)
    own, _ = scale_and_inverse(amax * 2.0**own_state.margin, fmt)
    scale = torch.where(state[0] > 0, state[1 if again else 0], own)
    codes = encode_saturating(as_matrix(x), scale, fmt)
    if update:
        _update(state, amax, scale, fmt, own_state)
    return codes, transpose(codes), scale


def encode_saturating(
    x: Tensor,  # float32
    scale: Tensor,  # float32, 0-d
    fmt: MiniFloat,
) -> Tensor:  # fmt.dtype
    """Return the codes of x / scale: the largest code where that is too large, NaN where x is not finite."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = cast_finite(torch.where(x.isfinite(), x * inverse, 0.0), fmt)
    return torch.where(x.isfinite(), codes.view(torch.uint8), 0x7F).view(fmt.dtype)


def _update(state: Tensor, amax: Tensor, scale: Tensor, fmt: MiniFloat, of: DelayedState) -> None:
    history, at = state[HEADER:], state.view(torch.int32)[2:3]
    others = history.scatter(0, at.long(), 0.0)
    largest = amax if of.most_recent else torch.maximum(others.amax(), amax)
    new, _ = scale_and_inverse(largest * 2.0**of.margin, fmt)
    # an amax too small for a scale counts as zero
    live = (amax > 0) & amax.isfinite() & (new >= TINY)
    history.scatter_(0, at.long(), torch.where(live, amax, history[at.long()]).reshape(1))
    state[1].copy_(scale)
    state[0].copy_(torch.where(live, new, state[0]))
    at.copy_(torch.where(live, (at + 1) % len(history), at))
