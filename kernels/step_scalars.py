"""The scalars of a step, computed on the device in one small launch; the twin of `reference/step_scalars.py`.

Why: the decision to skip a step, the clip coefficient and the count of steps must not wait for the host.

How: a program computes a row of `hyper` for each of 128 parameters, in float64, and rounds it to float32.

Limits: powers are exponentials of logarithms, so a last bit may differ from the reference.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from fp8stack.formats import GRAD_LIMIT

from .launch import UNFUSED, launched
from .pointer_table import COLUMN, WIDTH
from .reference.step_scalars import LEAST_EPS, TURNS

SIZE = 128
_WIDTH, _GRAD = tl.constexpr(WIDTH), tl.constexpr(COLUMN["grad"])
_LEAST_EPS, _GRAD_LIMIT = tl.constexpr(LEAST_EPS), tl.constexpr(GRAD_LIMIT)
_TURN_V, _TURN_M, _TURN_W = (tl.constexpr(turn) for turn in TURNS)


@launched(num_warps=4, **UNFUSED)
def _scalars_kernel(
    table_ptr, group_ptr, group_of_ptr, seed_ptr, steps_ptr, verdict_ptr, skipped_ptr, hyper_ptr, count,
    ALGORITHM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    unscale = tl.load(verdict_ptr).to(tl.float64)
    max_norm = tl.load(verdict_ptr + 1).to(tl.float64)
    norm = tl.load(verdict_ptr + 2).to(tl.float64)
    largest = tl.load(verdict_ptr + 3).to(tl.float64)
    fine = tl.where(largest * unscale < _GRAD_LIMIT, 1.0, 0.0)  # 0 for NaN
    fine = tl.where(tl.load(verdict_ptr + 4) == 0, fine, 0.0)
    if tl.program_id(0) == 0:
        tl.store(skipped_ptr, tl.load(skipped_ptr) + 1.0 - fine)
    active = tl.load(table_ptr + i * _WIDTH + _GRAD, mask=inside, other=0) != 0
    apply = tl.where(active, 1.0, 0.0) * fine
    step = tl.load(steps_ptr + i, mask=inside, other=0.0) + apply
    tl.store(steps_ptr + i, step, mask=inside)

    group = group_ptr + tl.load(group_of_ptr + i, mask=inside, other=0) * 8
    lr = tl.load(group, mask=inside, other=0.0)
    beta1 = tl.load(group + 1, mask=inside, other=0.5)
    beta2 = tl.load(group + 2, mask=inside, other=0.5)
    times = tl.maximum(step, 1.0)
    step_size = lr
    inv_sqrt_bc2 = lr * 0 + 1.0
    gain = 1.0 - beta1
    if ALGORITHM == "adam":
        step_size = lr / (1.0 - tl.where(beta1 > 0, tl.exp(times * tl.log(beta1)), 0.0))
        inv_sqrt_bc2 = 1.0 / tl.sqrt(1.0 - tl.where(beta2 > 0, tl.exp(times * tl.log(beta2)), 0.0))
    elif ALGORITHM == "sgd":
        dampening = tl.load(group + 7, mask=inside, other=0.0)
        gain = tl.where(times > 1, 1.0 - dampening, 1.0)
    clip = tl.minimum(max_norm / (norm * unscale + 1e-6), 1.0)
    count = times.to(tl.int64).to(tl.uint32)
    phase = (count * _TURN_W >> 24 << 24) + (count * _TURN_V >> 16 << 7) + (count * _TURN_M >> 26)

    out = hyper_ptr + i * 16
    sign = tl.load(group + 6, mask=inside, other=1.0)
    tl.store(out, (unscale * clip * sign).to(tl.float32), mask=inside)
    decay = 1.0 - lr * tl.load(group + 4, mask=inside, other=0.0)
    tl.store(out + 1, decay.to(tl.float32), mask=inside)
    tl.store(out + 2, step_size.to(tl.float32), mask=inside)
    tl.store(out + 3, inv_sqrt_bc2.to(tl.float32), mask=inside)
    tl.store(out + 4, apply, mask=inside)
    tl.store(out + 5, beta1.to(tl.float32), mask=inside)
    tl.store(out + 6, gain.to(tl.float32), mask=inside)
    tl.store(out + 7, beta2.to(tl.float32), mask=inside)
    tl.store(out + 8, (1.0 - beta2).to(tl.float32), mask=inside)
    eps = tl.maximum(tl.load(group + 3, mask=inside, other=0.0), _LEAST_EPS)
    tl.store(out + 9, eps.to(tl.float32), mask=inside)
    coupled = tl.load(group + 5, mask=inside, other=0.0)
    tl.store(out + 10, coupled.to(tl.float32), mask=inside)
    seed = tl.load(seed_ptr + i, mask=inside, other=0)
    tl.store(out + 11, seed.to(tl.float32, bitcast=True), mask=inside)
    tl.store(out + 12, phase.to(tl.float32, bitcast=True), mask=inside)


def scalars(
    algorithm: str,
    table: Tensor,  # int64 [parameters, 16]; a parameter without a gradient has address 0
    group: Tensor,  # float64 [groups, 8]
    group_of: Tensor,  # int32 [parameters]: the row of `group` for each parameter
    seed: Tensor,  # int32 [parameters]
    steps: Tensor,  # float64 [parameters]; updated
    verdict: Tensor,  # float32 [5]
    skipped: Tensor,  # float64, 0-d; updated
    hyper: Tensor,  # float32 [parameters, 16]; written
) -> None:
    """Write the scalars of every parameter to `hyper`, and count the step or the skip, as the reference does."""
    count = len(steps)
    _scalars_kernel(
        (-(-count // SIZE), 1, 1),
        table, group, group_of, seed, steps, verdict, skipped, hyper, count, algorithm, SIZE,
    )  # fmt: skip
