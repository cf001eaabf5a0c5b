"""What makes runs differ: random numbers, whose generators a checkpoint keeps (torch's, the device's and Python's), and
kernels of a GPU that add up in whatever order their blocks come to it.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.utils.deterministic


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


def make_deterministic() -> None:
    """Have this process add up in one order, from here on: before anything is computed on a GPU.

    Of attention there is the flash kernel then, and the plain formula where that cannot be (float32, older GPUs): the
    others have no backward of one order. PyTorch raises RuntimeError for an operation that has none.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch asks for it
    torch.use_deterministic_algorithms(True)
    # which is for finding bugs, and writes all memory twice
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
