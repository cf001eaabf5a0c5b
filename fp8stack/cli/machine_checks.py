"""What is known to go wrong on a machine, found before anything is trained: `fp8stack doctor` prints it.

An error stops fp8stack or its GPU kernels; a warning costs speed, or breaks something beside it. What concerns a
DeepSpeed configuration or a model is in `integrations/incompatibilities/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

import fp8stack.kernels
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
    versions = machine.installed_versions()
    found = [*_gpu(), *_cudnn(), *_versions(versions), *_hidden(versions)]
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


def _cudnn() -> Iterator[Problem]:
    remedy, folders = cudnn_remedy(), installed_cudnn()
    if remedy:
        yield Problem("error", f"{len(cudnn_folders())} cuDNNs are loaded", remedy)
    elif len(folders) > 1:
        yield Problem(
            "warning",
            f"{len(folders)} cuDNNs are installed ({', '.join(folders)}): libraries that load it themselves, as "
            "TransformerEngine does, may take another one than torch",
            f"Let CUDNN_HOME and LD_LIBRARY_PATH name torch's alone: {folders[0]}",
        )


def installed_cudnn() -> list[str]:
    """Return the folders that hold a cuDNN which a library could load: torch's own first."""
    home = os.environ.get("CUDNN_HOME")
    folders = [Path(torch.__file__).parent.parent / "nvidia" / "cudnn" / "lib"]
    folders += [Path(home, part) for part in ("lib", "lib64", "") if home]
    folders += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    for place in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "local/cuda/lib64"):
        folders.append(Path("/usr", place))
    real = [os.path.realpath(f) for f in folders if any(f.glob("libcudnn.so*"))]
    return list(dict.fromkeys(real))


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


def _hidden(versions: dict[str, str]) -> Iterator[Problem]:
    """Look for Hugging Face's package `kernels`, hidden by the folder of that name in fp8stack's repository."""
    spec = find_spec("kernels")
    own = os.path.realpath(fp8stack.kernels.__path__[0])
    places = [os.path.realpath(p) for p in (spec.submodule_search_locations or [])] if spec else []
    if "kernels" in versions and own in places:
        yield Problem(
            "warning",
            f"fp8stack's repository is on sys.path, and its folder {own} hides Hugging Face's package kernels "
            f"{versions['kernels']}, which transformers imports",
            "Start Python from another folder, and leave the repository out of PYTHONPATH.",
        )
