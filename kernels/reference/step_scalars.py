"""The scalars of a step: one row of `hyper` (see `step.py`) for each parameter, computed on the device.

    fine       = largest gradient × unscale < 2^63  and no overflow was found        (false for NaN)
    clip       = min(1, max_norm / (norm × unscale + 1e-6))                          1 without max_norm
    apply      = fine and the parameter has a gradient
    step      += apply
    grad_mul   = unscale × clip × sign                                               sign = -1 to maximize
    step_size  = lr / (1 - beta1^step),  inv_sqrt_bc2 = 1 / sqrt(1 - beta2^step)     Adam; lr and 1 otherwise
    gain       = 1 - beta1 (Adam, Lion, Muon);  1 - dampening, but 1 at the first step (SGD)

All are computed in float64 and then rounded to float32. Counts are float64: in float32 adding 1 to 2^24 changes
nothing. Columns of `group`: lr, beta1, beta2, eps, decoupled_decay, coupled_decay, sign, dampening. `verdict` describes
the gradients: unscale, max_norm (infinity: do not clip), norm, largest, found_inf. The clip coefficient is that of
torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import GRAD_LIMIT

from .fp8 import HASH

# Adam's epsilon counts as at least this, so that a zero moment is divided by more than zero. Every root of a positive
# float32 is larger.
LEAST_EPS = 2.0**-126

TURNS = (0x9E3779B9, 0xBB67AE85, 0x6A09E667)
"""How far a step moves the noise of v, m and weights around a circle of 2^32: by the golden ratio, and the roots of 3
and 2. No multiple of them comes near a whole circle soon, so gradients may repeat themselves every few steps."""


def scalars(
    algorithm: str,
    group: Tensor,  # float64 [parameters, 8], see above
    active: Tensor,  # bool [parameters]: has a gradient
    steps: Tensor,  # float64 [parameters]; updated
    verdict: Tensor,  # float32 [5], see above
    skipped: Tensor,  # float64, 0-d; updated
    seed: Tensor,  # int32 [parameters]: gives each parameter noise of its own, see `seed_of`
) -> Tensor:  # float32 [parameters, 16]
    """Return the scalars of every parameter, and count the step or the skip."""
    unscale, max_norm, norm, largest, found_inf = verdict.double().unbind()
    fine = (largest * unscale < GRAD_LIMIT) & (found_inf == 0)
    skipped += (~fine).double()
    apply = fine & active
    steps += apply.double()
    lr, beta1, beta2, eps, decoupled, coupled, sign, dampening = group.unbind(1)
    count = steps.clamp(min=1)
    clip = (max_norm / (norm * unscale + 1e-6)).clamp(max=1)
    hyper = torch.zeros(len(steps), 16, dtype=torch.float32, device=steps.device)
    one = torch.ones_like(lr)
    adam, sgd = algorithm == "adam", algorithm == "sgd"
    columns = [
        unscale * clip * sign,
        1 - lr * decoupled,
        lr / (1 - beta1**count) if adam else lr,
        (1 - beta2**count) ** -0.5 if adam else one,
        apply.double(),
        beta1,
        torch.where(count > 1, 1 - dampening, 1.0) if sgd else 1 - beta1,
        beta2,
        1 - beta2,
        eps.clamp(min=LEAST_EPS),
        coupled,
    ]
    hyper[:, : len(columns)] = torch.stack(columns, 1)
    phase = phase_of(count.long())
    for i, word in ((11, seed), (12, phase << 32 >> 32)):
        hyper[:, i] = word.to(torch.int32).view(torch.float32)
    return hyper


def seed_of(number: int, first: int) -> int:
    """Return the seed, int32, of a parameter, of which the element number `first` of the whole is the first here."""
    # Not the hash's multiplier for parameters too: their noise would be the same, moved by one element.
    return (number * 0x85EBCA77 + first * HASH + 2**31) % 2**32 - 2**31


def phase_of(step: Tensor) -> Tensor:  # int64
    """Return what is added to all noise in a step: in each field the step times an irrational part of the circle."""
    v, m, w = (step * turn & 0xFFFFFFFF for turn in TURNS)
    return (w >> 24 << 24) + (v >> 16 << 7) + (m >> 26)
