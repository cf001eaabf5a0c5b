"""How sure a number is, and how many steps a loss takes: what records of several seeds and curves are read with.

`over_seeds` is Student's interval of a mean, of 95 %: seeds are few, and each is a run of its own.

`extra_steps` compares two curves where both have reached a loss: the higher one of their last. A level that ends .5 %
higher may have needed 3 % more steps for it, or 30 %, as the curve is steep or flat there: that is what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

# Student's 97.5 % quantiles for 1, 2, ... degrees of freedom
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
)  # fmt: skip

Curve = Sequence[Sequence[float]]  # of (step, loss), by step


def over_seeds(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half the width of its 95 % interval; None for one value.

    Beyond STUDENT the normal distribution's quantile, widened by its first correction (off by less than .1 %).
    """
    mean, free = fmean(values), len(values) - 1
    if free < 1:
        return mean, None
    z = NormalDist().inv_cdf(0.975)
    quantile = STUDENT[free - 1] if free <= len(STUDENT) else z + (z**3 + z) / (4 * free)
    return mean, quantile * stdev(values) / math.sqrt(len(values))


def steps_to(curve: Curve, loss: float) -> float | None:
    """Return the step from which a curve stays at a loss or below, between its points on a line; None: it does not."""
    if not curve or curve[-1][1] > loss:
        return None
    above = [i for i, (_, value) in enumerate(curve) if value > loss]
    if not above:
        return float(curve[0][0])
    (step, value), (after, lower) = curve[above[-1]], curve[above[-1] + 1]
    return step + (after - step) * (value - loss) / (value - lower)


def extra_steps(curve: Curve, base: Curve) -> float:
    """Return by how much more steps a curve took than `base` to the lowest loss that both have reached, as a share."""
    loss = max(curve[-1][1], base[-1][1])
    own, theirs = (steps_to(c, loss) or math.inf for c in (curve, base))  # each ends there or below
    return own / theirs - 1
