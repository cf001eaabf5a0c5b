"""`fp8stack plan FILE:function`: what `initialize` would do to a model, without the memory for one.

    fp8stack plan train.py:build_model --opt-level O2 --skip 'head' --batch train.py:example_batch

The model is built on the meta device, and `initialize` itself decides and changes it there. Bytes are then counted on
tensors without data, as `fp8stack.memory.measure` counts live ones: before, of the model and torch's optimizer; after,
at the level. A function that returns a model alone is planned with torch's AdamW.

With --batch the model also runs forward and backward on tensors without data, before (under bf16 autocast, if its
weights are float32) and at the level, and what that holds is measured (`planning/fake_step.py`). Without it activations
are not counted, nor the FP8 codes that a forward keeps for its backward, and the table says so. On a machine with a GPU
the card then counts the layers for which the batch has too few rows of input to be in FP8.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fp8stack.api import Decisions, get_report
from fp8stack.conversion import check_model
from fp8stack.errors import ConfigError
from fp8stack.levels import Recipe
from fp8stack.memory import PARTS
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.planning import Held, at_level, at_the_level, measure_step, use_after_step
from fp8stack.report import Report

from . import machine
from .load_function import build, call
from .output import Lines, show, size, table
from .recipe import recipe_of


def run(options: argparse.Namespace) -> int:
    recipe = recipe_of(options)
    model, optimizer = build(options.target, meta=True)
    data = plan(model, optimizer, recipe, machine.device())
    if options.batch:
        compute = data["report"]["compute"]
        if compute == "te":
            raise ConfigError("--batch is for native layers: add --compute native or leave it out.")
        data["passes"] = {}
        passes, data["report"]["few_rows"] = _measure(options, replace(recipe, compute=compute))
        for when, held in passes.items():
            use = data["bytes"][when]
            stays = sum(use.values()) - use["grad"] - use.get("host", 0)
            peak = stays + max(held.moments(use["grad"]).values())
            data["passes"][when] = {"kept": held.kept, "peak": peak, "unreached": held.unreached}
    show(options, data, draw)
    return 0


def _measure(options: argparse.Namespace, recipe: Recipe) -> tuple[dict[str, Held], list[str]]:
    """Run a batch through the model before and at a level, on tensors without data.

    Return what that held, and the layers for which the batch has too few rows to be in FP8.
    """
    batch = call(options.batch)

    def forward(model: nn.Module) -> Any:
        fake = tree_map(lambda x: torch.empty_like(x) if isinstance(x, Tensor) else x, batch)
        if isinstance(fake, dict):
            return model(**fake)
        return model(*fake) if isinstance(fake, (tuple, list)) else model(fake)

    passes, gpu = {}, machine.device().type == "cuda"
    for when in ("before", "after"):
        model, _ = build(options.target, meta=True)
        level = at_level(recipe, next(model.parameters()).dtype)
        precision = level if when == "after" else replace(level, recipe=None)
        passes[when] = measure_step(model, precision, forward, options.target, gpu)
    return passes, get_report(model).few_rows


def plan(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe, device: torch.device
) -> dict[str, Any]:
    """Return the report of `initialize`, layers and bytes of a model on the meta device, to be trained on `device`.

    The model is at the level afterwards.

    Raises:
        ConfigError, ModelError, UnsupportedDeviceError: what `initialize` would raise.
    """
    check_model(model, recipe, planned=True)
    optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
    before, kind = use_after_step(model, optimizer).bytes, type(optimizer).__name__
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    optimizer.state.clear()
    decisions, stepping = at_the_level(model, optimizer, recipe, device)
    after = use_after_step(model, stepping, decisions).bytes
    matrices = _matrices(model, kinds, decisions, stepping)
    if not after["m"] + after["v"]:  # as of SGD without momentum
        matrices = [{**matrix, "states": "none"} for matrix in matrices]
    if decisions.recipe.offload == "cpu" and device.type == "cuda":
        after["host"] = sum(after[part] for part in ("master", "m", "v"))
        after.update(dict.fromkeys(("master", "m", "v"), 0))
    return {
        "optimizer": kind, "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad), "matrices": matrices,
        "bytes": {"before": before, "after": after}, "report": decisions.report.to_dict(),
    }  # fmt: skip


def draw(data: dict[str, Any]) -> Lines:
    """Show the report, matrices (those of one shape and fate together), and bytes by kind."""
    report, both = Report(**data["report"]), data["bytes"]
    yield (
        f"{data['parameters']:,} parameters, {data['trainable']:,} of them trained by {data['optimizer']}"
    )
    yield str(report)
    groups: Counter[tuple[str, ...]] = Counter()
    for m in data["matrices"]:
        alike = {"name": re.sub(r"\d+", "*", m["name"]), "shape": "×".join(map(str, m["shape"]))}
        groups[tuple({**m, **alike}.values())] += 1
    rows = ((name, count, *rest) for (name, *rest), count in groups.items())
    header = ("matrix", "n", "of", "shape", "GEMM", "weight", "gradient", "states")
    yield table(header, rows, right="n")
    held = {part: [b[part] for b in both.values()] for part in PARTS}
    lines = [(part, *map(size, numbers)) for part, numbers in held.items() if any(numbers)]
    sums = [sum(b.values()) for b in both.values()]
    lines.append(("total", *map(size, sums)))
    lines.append(("bytes/parameter", *(f"{n / max(data['parameters'], 1):.2f}" for n in sums)))
    passes = list(data.get("passes", {}).values())
    if passes:
        lines.append(("activations", *(size(held["kept"]) for held in passes)))
        lines.append(("peak of a step", *(size(held["peak"]) for held in passes)))
    yield table(("", "before", report.level), lines, right=f"before {report.level}")
    for name in passes[0]["unreached"][:1] if passes else []:
        found = f"{len(passes[0]['unreached'])} parameters got no gradient from the batch ({name})"
        yield f"note: {found}; what leads to them is not in the activations."
    missing = "" if passes else "Activations come on top: --batch FILE:function measures them. "
    yield f"{missing}Nothing was allocated."


def _matrices(
    model: nn.Module, kinds: dict[str, str], decisions: Decisions, optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Return what became of every matrix: module class, shape, GEMMs, weight, gradient and states."""
    report, format_ = decisions.report, decisions.report.gemm.split()[0]
    gemms = dict.fromkeys([*report.converted, *report.bare], format_)
    result = []
    for name, module in model.named_modules():
        for own, p in module.named_parameters(recurse=False):
            if p.ndim < 2:
                continue
            dtype = str(p.dtype).removeprefix("torch.")
            weight, states = dtype, "keep"
            if isinstance(optimizer, BlockwiseOptimizer):
                master, states = optimizer.master_format(p), optimizer.moment_format(p)
                weight += f" + {master}" if master not in (None, "none") else ""
            fp8 = decisions.recipe.gradients == "fp8" and p in decisions.quantized
            full = f"{name}.{own}".lstrip(".")
            row = {
                "name": full, "module": kinds[name], "shape": list(p.shape),
                "gemm": "" if full in report.outside else gemms.get(name, ""), "weight": weight,
                "gradient": "fp8" if fp8 else dtype, "states": dtype if states == "keep" else states,
            }  # fmt: skip
            result.append(row if p.requires_grad else row | {"gradient": "none", "states": "none"})
    return result
