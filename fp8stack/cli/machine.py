"""The machine that a command runs on: its devices and software, and what a level comes to there."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fp8stack.api import choose_compute, choose_stepper
from fp8stack.errors import Fp8StackError
from fp8stack.levels import Recipe
from fp8stack.version import __version__

LIBRARIES = (
    "deepspeed", "accelerate", "transformers", "lightning", "torchao", "bitsandbytes", "transformer_engine",
)  # fmt: skip
_DRIVER = Path("/proc/driver/nvidia/version")


def device() -> torch.device:
    """Return the current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name_of(device: torch.device) -> str:
    """Return what a person calls `device`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def driver() -> str | None:
    """Return the version of NVIDIA's kernel driver, None without one."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text())
    except OSError:
        return None
    return found.group(1) if found else "of no version"


def installed_versions() -> dict[str, str]:
    """Return the versions of all installed packages, by name in lower case."""
    found = ((d.metadata["Name"], d.version) for d in metadata.distributions())
    return {name.lower(): version for name, version in found if name}


def environment() -> dict[str, Any]:
    """Return versions of the system and of libraries (None: not there), and the GPUs."""
    cuda, installed = torch.cuda.is_available(), installed_versions()
    count = torch.cuda.device_count() if cuda else 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    nccl = cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "fp8stack": __version__,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed.get("triton"),
        "cuda": torch.version.cuda,
        "driver": driver(),
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "gpus": [
            {"name": g.name, "capability": f"{g.major}.{g.minor}", "memory_bytes": g.total_memory}
            for g in gpus
        ],
        "libraries": {name: installed[name] for name in LIBRARIES if name in installed},
    }


def outcome(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return what multiplies and what steps an AdamW at `recipe`, why, and what falls back; or why it does not run."""
    adamw = torch.optim.AdamW([torch.zeros(1, device=device, requires_grad=True)])
    try:
        compute = choose_compute(recipe, device)
        chosen, told = choose_stepper(recipe, adamw, device)
    except Fp8StackError as error:
        return {"runs": False, "reason": str(error)}
    keeps = recipe.gradients == recipe.states == "keep"
    backend = "fp8stack" if chosen.optimizer_backend == "auto" else chosen.optimizer_backend
    return {
        "runs": True,
        "compute": compute.name,
        "reason": compute.reason,
        "optimizer": "as given" if keeps else backend,
        "fallbacks": [*compute.fallbacks, *told],
    }
