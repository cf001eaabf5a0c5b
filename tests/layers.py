"""Native FP8 layers for tests: models at O0, their results and gradients, the casts that they make."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.capability import native_recipe
from fp8stack.kernels import ops

RECIPES = ("current", "delayed", "blockwise")
CASTS = (
    "cast",
    "recast",
    "recast_with",
    "cast_1x128",
    "cast_128x128",
    "cast_delayed",
    "swiglu_cast",
)


def native(model, device="cpu", **overrides):
    """Return the model at O0 with native layers, or skip the test where this GPU has no such recipe."""
    if device == "cuda":
        answer = native_recipe(overrides.get("fp8_recipe", "current"), device)
        if not answer:
            pytest.skip(answer.reason)
    options = {"opt_level": "O0", "compute": "native", **overrides}
    return fp8stack.initialize(model.to(device), **options)[0]


def linear(in_features=32, out_features=32, bias=True, device="cpu", **overrides):
    """Return one native layer; the same weights for the same seed."""
    return native(nn.Sequential(nn.Linear(in_features, out_features, bias)), device, **overrides)[0]


def results(model, x, gradient=None):
    """Return the output and the gradients of the input and of all parameters, which are zeroed before."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    y = model(x)
    y.backward(torch.ones_like(y) if gradient is None else gradient)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def count_casts(monkeypatch):
    """Return a list that the shape of every matrix joins when it is cast in eager mode."""
    seen = []

    def counting(function):
        def run(x, *args, **kwargs):
            seen.append(tuple(x.shape))
            return function(x, *args, **kwargs)

        return run

    for name in CASTS:
        monkeypatch.setattr(ops, name, counting(getattr(ops, name)))
    return seen


def record_sums(monkeypatch):
    """Return a list that is told of every later product whether it may be summed fast."""
    told = []
    multiply = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args: told.append(args[7]) or multiply(*args))
    return told


class SwiGLU(nn.Module):
    """A feed-forward block that `fuse` takes."""

    def __init__(self, features=32, inner=48):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(features, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, features, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class QKV(nn.Module):
    """Three layers that read one input."""

    def __init__(self, features=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(features, features, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) * self.v(x)


class Checkpointed(nn.Module):
    """A module that backward runs again."""

    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)
