"""The random number generators of a rank, as a checkpoint keeps them: torch's, the device's, and Python's."""

from __future__ import annotations

import random
from typing import Any

import torch


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


def get_state(device: torch.device) -> dict[str, Any]:
    """Return tensors and plain types for `set_state`."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back; `state` may hold more, and that of a GPU is for a GPU."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
