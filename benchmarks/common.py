"""What every benchmark shares: the conditions of a run and one schema of record.

A record is one JSON object a line: name, variant, params, metric, value, unit, then the conditions: gpu, cc, driver,
torch, triton, fp8stack, git, command, time. `docs` quote no number that has no record in `benchmarks/results`.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import fp8stack

ROOT = Path(__file__).resolve().parents[1]


def conditions() -> dict[str, Any]:
    """Return where and with what this process runs."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else "none (CPU)",
        "cc": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else "",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if gpu
        else "",
        "torch": torch.__version__,
        "triton": _triton_version(),
        "fp8stack": fp8stack.__version__,
        "git": os.environ.get("FP8STACK_GIT") or _output("git", "rev-parse", "--short=12", "HEAD"),
        "command": shlex.join(["python", *(Path(a).name if a[:1] == "/" else a for a in sys.argv)]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def append_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Add one line for each record, with this run's conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = conditions()
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps({**record, **shared}) + "\n")


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _output(*command: str) -> str:
    """Return the first line that a program prints, or an empty string if it cannot run."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else ""
