"""What `initialize` did, as data and as the summary card that is logged once, on rank 0.

The card goes to the logger "fp8stack" at level INFO. If logging is not configured, the card goes to stderr, so that a
script shows it without any set-up. FP8STACK_QUIET=1 silences it.
"""

from __future__ import annotations

import logging
import os
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from .levels import Recipe
from .nn.casts import Products
from .nn.convert import LayerChoices
from .nn.coverage import Coverage, by_value, listed
from .nn.experts import Fp8Experts, is_experts
from .nn.finishing import products_in
from .nn.select import describe
from .version import __version__

logger = logging.getLogger("fp8stack")

WIDTH = 110
_MASTERS = {
    "split24": "with an 8-bit remainder", "split32": "with a 16-bit remainder",
    "fp16": "with a float16 master", "fp32": "with a float32 master",
    "none": "alone, rounded stochastically",
}  # fmt: skip


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
    # layers, attention among them, in FP8 (or bf16)
    converted: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)  # modules that multiply by bare parameters
    share: float = 1.0  # of the elements of matrices, embeddings apart, those that multiply so too
    outside: dict[str, str] = field(default_factory=dict)  # matrices that do not: reason
    # Layers left out: reason and remedy
    skipped: dict[str, str] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)  # layers that make logits in bfloat16
    # products in bfloat16 of layers that multiply in FP8 otherwise, such as "forward" or "dgrad wgrad"
    in_bf16: dict[str, str] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)  # weights now in bfloat16 with a remainder
    kept: dict[str, str] = field(default_factory=dict)  # matrices that keep their dtype: reason
    frozen: list[str] = field(default_factory=list)  # frozen weights that are kept in FP8
    unfrozen: dict[str, str] = field(default_factory=dict)  # those that are not: reason
    frozen_gib: tuple[float, float] = (0.0, 0.0)  # of both, now and before
    bytes_per_parameter: float = 0.0  # of matrices: weight, master, gradient and optimizer state
    multiplied: set[str] = field(default_factory=set)  # bare parameters multiplied in FP8 so far
    # other products of theirs, by reason, and modules that were left out
    left_alone: Counter[str] = field(default_factory=Counter)
    fallbacks: list[str] = field(default_factory=list)  # what is not as the level says, and why
    # of layers in FP8 for many rows only: from how many
    selected: dict[str, str] = field(default_factory=dict)
    # of those: in bf16 in the last eager forward with gradients
    few_rows: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)  # RMSNorms and MLPs
    fused_losses: list[str] = field(default_factory=list)  # models whose head and loss are one

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        plain = {"multiplied": sorted(self.multiplied), "left_alone": dict(self.left_alone)}
        return asdict(self) | plain

    def __str__(self) -> str:
        lines = [
            f"fp8stack {self.version} · {self.level} · {self.device}",
            f"GEMM {self.gemm} · gradients {self.gradients} · states {self.states} · master {self.master}",
            f"compute {self.compute} ({self.compute_reason})",
            f"{self.gemm.split()[0]} multiplies {'up to ' * bool(self.selected or self.bare)}{100 * self.share:.0f} % "
            "of the matrix parameters (embeddings apart): "
            f"{len(self.converted)} layer{'s' * (len(self.converted) != 1)}"
            + (f", {len(self.bare)} modules of bare parameters" if self.bare else "")
            + (" (current scaling)" if self.bare and "delayed" in self.gemm else "")
            + (f"; outside: {listed(self.outside)}" if self.outside else ""),
        ]
        if self.heads:
            also = ", and their gradients" * self.in_bf16.keys().isdisjoint(self.heads)
            lines.append(f"logits in bf16{also}: {', '.join(self.heads)}")
        partly = {n: products for n, products in self.in_bf16.items() if n not in self.heads}
        for products, names in by_value(partly).items():
            told = f"{len(names)} × {products.replace(' ', ' and ')} in bf16: {names[0]}"
            lines.append(told + ", ..." * (len(names) > 1))
        # such as quantized ones, whose weights are not counted
        others = [n for n in self.skipped if not any(m.startswith(f"{n}.") for m in self.outside)]
        if others:
            lines.append(f"left alone: {listed({n: self.skipped[n] for n in others})}")
        if self.stored or self.kept:
            masters = " or ".join(_MASTERS[kind] for kind in self.master.split(" or "))
            lines.append(f"{len(self.stored)} matrices stored as bf16 {masters}")
            lines[-1] += f"; kept in their dtype: {listed(self.kept)}" if self.kept else ""
        if self.frozen or self.unfrozen:
            lines.append("frozen weights in FP8: {:.3g} GiB of {:.3g}".format(*self.frozen_gib))
            lines[-1] += f"; as they are: {listed(self.unfrozen)}" if self.unfrozen else ""
        if self.bytes_per_parameter:  # without an optimizer there is nothing to count
            size = f"{self.bytes_per_parameter:.2f} bytes per parameter of matrices"
            lines.append(f"{size} (float32 AdamW: 16)")
        for choice, names in by_value(self.selected).items():
            lines.append(f"{len(names)} × {choice}: {names[0]}")
        if self.few_rows:
            lines.append(f"of these in bf16 in the last eager forward: {len(self.few_rows)}")
        if self.fused:
            lines.append(f"{len(self.fused)} RMSNorms and MLPs joined with casts of layers in FP8")
        if self.fused_losses:
            told = "head and loss in one, without logits (not in graphs of torch.compile)"
            lines.append(f"{told}: {', '.join(self.fused_losses)}")
        if self.left_alone:
            left = [f"{n} × {reason}" for reason, n in self.left_alone.most_common(4)]
            lines.append("products by bare parameters left to torch: " + "; ".join(left))
        lines.append("fallbacks: " + ("; ".join(self.fallbacks) if self.fallbacks else "none"))
        wrapper = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="    ")
        wrapper.break_long_words = wrapper.break_on_hyphens = False  # names are copied
        return "\n".join(map(wrapper.fill, lines)).strip()


def report_of(
    recipe: Recipe,
    layers: LayerChoices,
    coverage: Coverage,
    compute: str,
    reason: str,
    device: torch.device,
    fallbacks: list[str],
) -> Report:
    """Return the report on what was decided."""
    formats = {"hybrid": "e4m3/e5m2", "e4m3": "e4m3", "e5m2": "e5m2, weights e4m3"}
    used = "e4m3" if recipe.fp8_recipe == "blockwise" else formats[recipe.fp8_format]
    gemm = f"fp8 {used}, {recipe.fp8_recipe} scaling"
    if compute == "bf16" or recipe.fp8_recipe in ("mxfp8", "nvfp4"):
        gemm = "bf16" if compute == "bf16" else recipe.fp8_recipe
    grouped = any(is_experts(module) for _, module, _ in layers.gemm)
    if grouped and compute == "native" and gemm != "fp8 e4m3, current scaling":
        gemm += " (experts: e4m3, current scaling)"
    words = {"keep": "as given", "8bit": "8-bit block 128", "fp8": "fp8 e4m3 block 128"}
    states = words.get(recipe.states, recipe.states)
    if recipe.optimizer_backend.startswith("bitsandbytes") and recipe.states == "8bit":
        states = "bitsandbytes 8-bit block 256"
        states += " paged" if recipe.optimizer_backend == "bitsandbytes-paged" else ""
    on_gpu = device.type == "cuda"
    states += " in pinned host memory" if recipe.offload == "cpu" and on_gpu else ""
    freed = recipe.step_in_backward
    before = sum(p.nbytes for _, p, _ in layers.frozen)
    now = sum(p.nbytes if why else p.numel() for _, p, why in layers.frozen)
    return Report(
        level=recipe.level,
        device=torch.cuda.get_device_name(device) if on_gpu else "CPU (reference kernels)",
        version=__version__,
        gemm=gemm,
        compute=compute,
        compute_reason=reason,
        gradients="used in backward and freed" if freed else words[recipe.gradients],
        states=states,
        master="the weight" if recipe.master == "keep" else recipe.master,
        converted=[name for name, _, _ in layers.gemm],
        share=coverage.share,
        bare=coverage.bare,
        outside=coverage.outside,
        skipped=dict(layers.skipped),
        heads=layers.heads,
        in_bf16={n: layers.in_bf16[n] for n, _, _ in layers.gemm if n in layers.in_bf16},
        stored=[name for name, _ in layers.stored],
        kept=dict(layers.kept),
        frozen=[name for name, _, why in layers.frozen if not why],
        unfrozen={name: why for name, _, why in layers.frozen if why},
        frozen_gib=(now / 2**30, before / 2**30),
        fallbacks=fallbacks,
    )


def note_selected(report: Report, model: nn.Module) -> Report:
    """Note which layers multiply in FP8 for many rows only, and which did not in the last forward with gradients."""
    every = (p for p in products_in(model) if isinstance(p, Products) and not p.finished)
    rules = [(p, p.least_rows) for p in every if p.least_rows]
    experts = {p for m in model.modules() if isinstance(m, Fp8Experts) for p in m.products}
    report.selected = {p.layer: describe(least, p in experts) for p, least in rules}
    # an attention has three, of which one may be in FP8
    partly = {p.layer for p, _ in rules if p.paid}
    few = (p.layer for p, _ in rules if p.paid is False and p.layer not in partly)
    report.few_rows = [*dict.fromkeys(few)]
    return report


def say(text: object) -> None:
    """Log a report or a text, on rank 0 only."""
    distributed, rank = torch.distributed, os.environ.get("RANK", "0")
    if distributed.is_available() and distributed.is_initialized():
        rank = str(distributed.get_rank())
    is_first = rank == "0" or not rank.isdigit()  # what is no number is of another launcher
    if os.environ.get("FP8STACK_QUIET", "0") not in ("", "0") or not is_first:
        return
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": text}))  # to stderr
