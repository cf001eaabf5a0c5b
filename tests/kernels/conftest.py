"""Inputs that several kernel tests need: float32 values where a cast can go wrong, random ones of every exponent."""

import pytest
import torch
from helpers import grid


def neighbours(x):
    """Return `x` with the float32 just below and just above each element."""
    x = x.float()
    down, up = (torch.nextafter(x, torch.full_like(x, end)) for end in (-torch.inf, torch.inf))
    return torch.cat([x, down, up])


def make_special_values(fmt):
    """Return the grid of `fmt`, its midpoints, its ends and overflow, each ± 1 ulp, of both signs if it is signed."""
    values = grid(fmt)
    top_step = values[-1] - values[-2]
    edges = [
        0,
        2.0**-149,
        2.0**-127,
        2.0**-126,
        fmt.min_positive / 2,
        fmt.max + top_step / 2,
        fmt.max + top_step,
    ]
    edges = torch.tensor([*edges, 1e30, 3.4e38], dtype=torch.float64)
    x = neighbours(torch.cat([values, (values[1:] + values[:-1]) / 2, edges]))
    x = x.abs()
    return torch.cat([x, -x]) if fmt.signed else x


@pytest.fixture
def special_values():
    return make_special_values


@pytest.fixture
def random_bits():
    """Return a function that draws finite float32 values uniformly over bit patterns: every exponent, both signs."""

    def draw(count):
        bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
        x = bits.view(torch.float32)
        return torch.where(x.isfinite(), x, 1.0)

    return draw


@pytest.fixture
def adam_hyper():
    """Return a function that fills the `hyper` row of a step, as the optimizer does."""

    def fill(step=1, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, grad_mul=1.0, apply=1.0):
        correction1, correction2 = (1 - beta**step for beta in betas)
        row = [grad_mul, 1 - lr * weight_decay, lr / correction1, correction2**-0.5, apply, 0, 0, 0]
        return torch.tensor(row, dtype=torch.float32)

    return fill
