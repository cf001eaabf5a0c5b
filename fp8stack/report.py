"""What `initialize` did, as data and as the summary card that is logged once, on rank 0.

The card goes to the logger "fp8stack" at level INFO. Where nobody has configured logging it is written to stderr, once,
so that a script shows it without setting anything up; FP8STACK_QUIET=1 silences it.
"""

from __future__ import annotations

import logging
import os
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .levels import Recipe
from .nn.convert import LayerPlan
from .version import __version__

logger = logging.getLogger("fp8stack")
logger.addHandler(logging.NullHandler())

WIDTH = 110
_MASTERS = {
    "split24": "with an 8-bit remainder",
    "split32": "with a 16-bit remainder",
    "fp16": "with a float16 master",
    "fp32": "with a float32 master",
    "none": "alone, rounded stochastically",
}


@dataclass
class Report:
    """The result of one `initialize` call. Names are those of `model.named_modules()` and `named_parameters()`."""

    level: str
    device: str
    version: str
    gemm: str  # formats and recipe, such as "fp8 e4m3/e5m2, current scaling", or "bf16"
    compute: str  # what multiplies: "te", "native" or "bf16"
    compute_reason: str  # why that
    gradients: str
    states: str
    master: str
    converted: list[str] = field(default_factory=list)  # Linear layers in FP8 (or bf16)
    skipped: dict[str, str] = field(
        default_factory=dict
    )  # Linear layers left out: reason and remedy
    stored: list[str] = field(default_factory=list)  # weights now in bfloat16 with a remainder
    kept: dict[str, str] = field(default_factory=dict)  # matrices that keep their dtype: reason
    bytes_per_parameter: float = 0.0  # of matrices: weight, master, gradient and optimizer state
    multiplied: set[str] = field(default_factory=set)  # bare parameters multiplied in FP8 so far
    # other products of theirs, by reason, and modules that were left out
    left_alone: Counter[str] = field(default_factory=Counter)
    fallbacks: list[str] = field(default_factory=list)  # what is not as the level says, and why
    selected: dict[str, str] = field(default_factory=dict)  # select="auto": layer, choice and times

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            **asdict(self),
            "multiplied": sorted(self.multiplied),
            "left_alone": dict(self.left_alone),
        }

    def __str__(self) -> str:
        linear = len(self.converted) + len(self.skipped)
        lines = [
            f"fp8stack {self.version} · {self.level} · {self.device}",
            f"GEMM {self.gemm} · gradients {self.gradients} · states {self.states} · master {self.master}",
            f"compute {self.compute} ({self.compute_reason})",
            f"{len(self.converted)} of {linear} Linear layers in {self.gemm.split()[0]}"
            + _listing("; left out: ", self.skipped),
        ]
        if self.stored or self.kept:
            lines.append(f"{len(self.stored)} matrices stored as bf16 {_MASTERS[self.master]}")
            lines[-1] += _listing("; kept in their dtype: ", self.kept)
        if self.bytes_per_parameter:  # without an optimizer there is nothing to count
            lines.append(
                f"{self.bytes_per_parameter:.2f} bytes per parameter of matrices (float32 AdamW: 16)"
            )
        if self.selected:
            by_choice: dict[str, list[str]] = {}
            for name, choice in self.selected.items():
                by_choice.setdefault(choice, []).append(name)
            lines += [f"{len(names)} × {choice}: {names[0]}" for choice, names in by_choice.items()]
        if self.left_alone:
            left = [f"{n} × {reason}" for reason, n in self.left_alone.most_common(4)]
            lines.append("products by bare parameters left to torch: " + "; ".join(left))
        lines.append("fallbacks: " + ("; ".join(self.fallbacks) if self.fallbacks else "none"))
        first, *rest = (
            "\n".join(textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    "))
            for line in lines
        )
        return "\n".join([first.strip(), *rest])


def _gemm(recipe: Recipe, compute: str) -> str:
    """Return what the card calls the format of GEMMs."""
    if compute == "bf16":
        return "bf16"
    if recipe.fp8_recipe in ("mxfp8", "nvfp4"):
        return recipe.fp8_recipe
    if recipe.fp8_recipe == "blockwise":
        return "fp8 e4m3, blockwise scaling"
    formats = {"hybrid": "e4m3/e5m2", "e4m3": "e4m3", "e5m2": "e5m2, weights e4m3"}
    return f"fp8 {formats[recipe.fp8_format]}, {recipe.fp8_recipe} scaling"


def report_of(
    recipe: Recipe,
    plan: LayerPlan,
    compute: str,
    reason: str,
    device: torch.device,
    fallbacks: list[str],
) -> Report:
    words = {"keep": "as given", "fp8": "fp8 e4m3 block 128"}
    states = {"keep": "as given", "8bit": "8-bit block 128", "fp8": "fp8 e4m3 block 128"}
    if recipe.optimizer_backend.startswith("bitsandbytes"):
        paged = " paged" * recipe.optimizer_backend.endswith("paged")
        states["8bit"] = f"bitsandbytes 8-bit block 256{paged}"
    where = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (reference kernels)"
    )
    return Report(
        level=recipe.level,
        device=where,
        version=__version__,
        gemm=_gemm(recipe, compute),
        compute=compute,
        compute_reason=reason,
        gradients="used in backward and freed"
        if recipe.step_in_backward
        else words[recipe.gradients],
        states=states.get(recipe.states, recipe.states)
        + (" in pinned host memory" if recipe.offload == "cpu" and device.type == "cuda" else ""),
        master="the weight" if recipe.master == "keep" else recipe.master,
        converted=[name for name, _ in plan.gemm],
        skipped=dict(plan.skipped),
        stored=[name for name, _ in plan.stored],
        kept=dict(plan.kept),
        fallbacks=fallbacks,
    )


def emit(report: Report) -> None:
    """Log the card, on rank 0 only."""
    say(str(report))


def say(text: str) -> None:
    """Log a text, on rank 0 only."""
    if os.environ.get("FP8STACK_QUIET", "0") not in ("", "0") or _rank() != 0:
        return
    if any(not isinstance(h, logging.NullHandler) for h in _handlers()):
        logger.info("%s", text)
        return
    handler = logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        logger.info("%s", text)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _listing(title: str, reasons: dict[str, str]) -> str:
    """Return up to four names with reasons, layers of one reason together."""
    if not reasons:
        return ""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    shown = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
        for reason, names in list(by_reason.items())[:4]
    ]
    more = f", and {len(by_reason) - 4} more reasons" if len(by_reason) > 4 else ""
    return title + ", ".join(shown) + more


def _handlers() -> list[logging.Handler]:
    return logger.handlers + logging.getLogger().handlers


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0
