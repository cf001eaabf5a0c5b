"""Where the numbers go: TensorBoard, Weights & Biases, or a file of JSON lines. None of them is imported.

A writer is known by its method: `add_scalar(name, value, step)` as TensorBoard's SummaryWriter has it, `log(dict)` as a
W&B run has it. W&B gets the sampled step as "fp8/step" and none of its own: a sample arrives when the run has gone on,
and W&B drops what belongs to an earlier step. `run.define_metric("fp8/*", step_metric="fp8/step")` plots over it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8stack.errors import ConfigError


def check_writer(writer: Any) -> None:
    """Raise ConfigError for what is neither a file that can be written nor has one of the methods."""
    if isinstance(writer, str | os.PathLike):
        path = Path(writer)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"cannot write to {path}. Give a file in a folder that is there.")
        return
    methods = (getattr(writer, name, None) for name in ("add_scalar", "log"))
    if isinstance(writer, logging.Logger) or not any(map(callable, methods)):
        raise ConfigError(
            f"cannot write to {writer!r}. Give a path (JSONL), a SummaryWriter (add_scalar) or a W&B run (log)."
        )


def write(writer: Any, metrics: dict[str, float], step: int) -> None:
    """Write the metrics of one step; JSON has no NaN and no infinity, which become null."""
    if isinstance(writer, str | os.PathLike):
        known = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
        line = json.dumps({"step": step, "time": time.time(), **known}, allow_nan=False)
        path = Path(writer)
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            with suppress(OSError):
                os.truncate(path, size)  # no half a line, to which the next would be added
            raise
    elif hasattr(writer, "add_scalar"):
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
    else:
        writer.log({**metrics, "fp8/step": step})
