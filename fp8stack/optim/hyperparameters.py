"""Checks hyper-parameters when an optimizer is made and at every step, because schedulers change them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fp8stack.errors import ConfigError


def check_range(group: dict[str, Any]) -> tuple[float, tuple[float, float], float, float]:
    """Return (lr, betas, eps, weight_decay) of a group.

    A learning rate on a GPU counts as 0 here, as does what the group does not have.

    Raises:
        ConfigError: naming the hyper-parameter, its value and its range.
    """
    betas, eps = group.get("betas", (0.0, 0.0)), group.get("eps", 0.0)
    if any(isinstance(b, Tensor) for b in betas):
        raise ConfigError(
            f"betas must be numbers, got {betas}; of the hyper-parameters only lr may be a tensor."
        )
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ConfigError(f"betas must lie in [0, 1), got {betas}.")
    decay = check_positive("weight_decay", group["weight_decay"])
    lr, (first, second) = group["lr"], map(float, betas)
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigError(f"lr must be one number, got a tensor of shape {tuple(lr.shape)}.")
        lr = 0.0 if lr.is_cuda else float(lr)  # reading it would wait for the GPU
    return check_positive("lr", lr), (first, second), check_positive("eps", eps), decay


def rates_on_gpu(groups: list[dict[str, Any]]) -> list[tuple[int, Tensor]]:
    """Return (index of the group, learning rate) for the learning rates that are tensors on a GPU."""
    rates = ((g, group["lr"]) for g, group in enumerate(groups))
    return [(g, lr) for g, lr in rates if isinstance(lr, Tensor) and lr.is_cuda]


def check_positive(name: str, value: float) -> float:
    """Return `value`; raise ConfigError unless it is a finite number >= 0."""
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ConfigError(f"{name} must be a finite number >= 0, got {value!r}.")
    return float(value)
