"""The machine that a command runs on: its devices and software, and what is known to go wrong there.

A problem is an error where it stops fp8stack or its GPU kernels; a warning costs speed, or breaks something beside it.
What concerns a DeepSpeed configuration or a model is in `integrations/incompatibilities/`.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from fp8stack.capability import cudnn_folders, cudnn_remedy, indexed
from fp8stack.kernels.ops import kernel_backend
from fp8stack.version import __version__

LIBRARIES = (
    "deepspeed", "accelerate", "transformers", "lightning", "torchao", "bitsandbytes", "transformer_engine",
)  # fmt: skip
_DRIVER = Path("/proc/driver/nvidia/version")


class Problem(NamedTuple):
    """Something found: "error" or "warning", what it is, and the remedy."""

    severity: str
    what: str
    remedy: str


def device() -> torch.device:
    """Return the current GPU, or the CPU where there is none."""
    return indexed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


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


def find_problems() -> list[Problem]:
    """Return what is known to be wrong with this machine, errors first."""
    found = [*_of_the_gpu(), *_of_versions(installed_versions())]
    if remedy := cudnn_remedy():
        found.append(Problem("error", f"{len(cudnn_folders())} cuDNNs are loaded", remedy))
    return sorted(found, key=lambda problem: problem.severity != "error")


def _of_the_gpu() -> Iterator[Problem]:
    known, built = driver(), f"torch {torch.__version__}"
    if known and torch.version.cuda is None and torch.version.hip is None:
        what = f"{built} is built without CUDA, and there is an NVIDIA driver ({known})"
        remedy = "Install a build of torch with CUDA: https://pytorch.org/get-started/locally"
        yield Problem("error", what, remedy)
    elif known and not torch.cuda.is_available():
        what = f"{built} (CUDA {torch.version.cuda}) finds no GPU with the NVIDIA driver {known}"
        remedy = "Update the driver, or install a torch for an older CUDA; CUDA_VISIBLE_DEVICES is "
        yield Problem("error", what, f"{remedy}{os.environ.get('CUDA_VISIBLE_DEVICES')!r}.")
    backend, why = kernel_backend()
    if torch.cuda.is_available() and backend != "triton":
        what = f"kernels do not run in Triton: {why}; the torch reference kernels are much slower"
        yield Problem("error", what, 'pip install "triton>=3.2", and unset FP8STACK_KERNELS.')


def _of_versions(versions: dict[str, str]) -> Iterator[Problem]:
    """Compare with what fp8stack's own metadata asks for, the strictest of its extras."""
    least: dict[str, str] = {}
    for line in metadata.requires("fp8stack") or [] if "fp8stack" in versions else []:
        needed = re.match(r"([\w.-]+)>=([\d.]+)", line)
        if needed and not re.search(r'extra == "(test|lint|dev)"', line):
            name, wanted = needed.group(1).lower(), needed.group(2)
            least[name] = max(least.get(name, wanted), wanted, key=TorchVersion)
    for name, wanted in least.items():
        # without what comes behind the numbers: 2.8.0a0 counts as 2.8.0
        own = re.match(r"[\d.]*\d", versions.get(name, wanted))
        if own and TorchVersion(own.group()) < wanted:
            severity = "error" if name == "torch" else "warning"
            what = f"{name} {versions[name]} is older than fp8stack works with ({wanted})"
            yield Problem(severity, what, f'pip install "{name}>={wanted}"')
