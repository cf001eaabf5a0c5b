"""What makes runs differ: random numbers, whose generators a checkpoint keeps (torch's, the device's and Python's), and
kernels of a GPU that add up in whatever order their blocks come to it.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.utils.deterministic

from fp8stack.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS, with which it adds up in one order


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


def make_deterministic(device: torch.device) -> None:
    """Have this process add up in one order from here on, until it ends; nothing has been multiplied on a GPU yet.

    PyTorch raises RuntimeError for an operation that has no such order.

    Raises:
        ConfigError: if the environment has a workspace for cuBLAS that rules it out.
    """
    given = os.environ.get(WORKSPACE)
    if given not in (None, *WORKSPACES):  # some versions of PyTorch raise in the first product
        raise ConfigError(
            f"--deterministic and {WORKSPACE}={given}: cuBLAS adds up in one order with "
            f"{' or '.join(WORKSPACES)} alone. Unset the variable, or set it to one of them."
        )
    os.environ[WORKSPACE] = given or WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    # which is for finding bugs, and writes all memory twice
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "cuda" and given is None:
        # PyTorch asks for the variable once, in the first product; what makes products of one order is the workspace
        # that it gives cuBLAS for each stream. The size of that it reads from the variable again before each product of
        # cuBLASLt, FP8 ones among them, with a regular expression, on the host.
        one = torch.ones(16, 16, device=device)
        torch.mm(one, one)
        del os.environ[WORKSPACE]
