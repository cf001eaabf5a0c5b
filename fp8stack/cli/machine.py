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
    "torch", "deepspeed", "accelerate", "transformers", "lightning", "torchao", "bitsandbytes", "transformer_engine",
)  # fmt: skip
_DRIVER = Path("/proc/driver/nvidia/version")


def device() -> torch.device:
    """Return the current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name_of(device: torch.device) -> str:
    """Return what a person calls `device`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def driver() -> str | None:
    """Return the version of NVIDIA's kernel driver, None without one."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text())
    except OSError:
        return None
    return found.group(1) if found else "of no version"


def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed, by name."""
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {name: installed[name] for name in LIBRARIES if name in installed}


def environment() -> dict[str, Any]:
    """Return versions of the system and of libraries (None: not there), and the GPUs."""
    cuda = torch.cuda.is_available()
    gpus = (
        [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        if cuda
        else []
    )
    nccl = cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    try:
        triton: str | None = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "fp8stack": __version__,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "driver": driver(),
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "gpus": [
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory_bytes": gpu.total_memory,
            }
            for gpu in gpus
        ],
        "libraries": {k: v for k, v in installed_versions().items() if k != "torch"},
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
