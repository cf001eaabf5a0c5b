"""What is known to go wrong on a machine, found before anything is trained: `fp8stack doctor` prints it.

An error stops fp8stack or its GPU kernels; a warning costs speed, or breaks something beside it. What concerns a
DeepSpeed configuration or a model is in `integrations/incompatibilities/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch

from fp8stack.capability import cudnn_folders, cudnn_remedy
from fp8stack.kernels.ops import kernel_backend

from . import machine


class Problem(NamedTuple):
    """Something found: "error" or "warning", what it is, and the remedy."""

    severity: str
    what: str
    remedy: str


def find() -> list[Problem]:
    """Return what is known to be wrong with this machine, errors first."""
    found = [*_gpu(), *_versions(machine.installed_versions())]
    if remedy := cudnn_remedy():
        found.append(Problem("error", f"{len(cudnn_folders())} cuDNNs are loaded", remedy))
    return sorted(found, key=lambda problem: problem.severity != "error")


def _gpu() -> Iterator[Problem]:
    driver = machine.driver()
    if driver and torch.version.cuda is None and torch.version.hip is None:
        yield Problem(
            "error",
            f"torch {torch.__version__} is built without CUDA, and there is an NVIDIA driver ({driver})",
            "Install a build of torch with CUDA: https://pytorch.org/get-started/locally",
        )
    elif driver and not torch.cuda.is_available():
        yield Problem(
            "error",
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU with the NVIDIA driver {driver}",
            f"Update the driver, or install a torch for an older CUDA; CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}.",
        )
    backend, why = kernel_backend()
    if torch.cuda.is_available() and backend != "triton":
        what = f"kernels do not run in Triton: {why}; the torch reference kernels are much slower"
        yield Problem("error", what, 'pip install "triton>=3.2", and unset FP8STACK_KERNELS.')


def _versions(versions: dict[str, str]) -> Iterator[Problem]:
    """Compare with what fp8stack's own metadata asks for."""
    least: dict[str, tuple[int, ...]] = {}
    for line in metadata.requires("fp8stack") or [] if "fp8stack" in versions else []:
        needed = re.match(r"([\w.-]+)>=([\d.]+)", line)
        if needed and not re.search(r'extra == "(test|lint|dev)"', line):
            name, version = needed.group(1).lower(), _numbers(needed.group(2))
            least[name] = max(least.get(name, ()), version)
    for name, version in least.items():
        if name in versions and _numbers(versions[name]) < version:
            wanted = ".".join(map(str, version))
            severity = "error" if name == "torch" else "warning"
            what = f"{name} {versions[name]} is older than fp8stack works with ({wanted})"
            yield Problem(severity, what, f'pip install "{name}>={wanted}"')


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
