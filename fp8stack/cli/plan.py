"""`fp8stack plan FILE:function`: what `initialize` would do to a model, without the memory for one.

    fp8stack plan train.py:build_model --opt-level O2 --skip 'head'

The model is built on the meta device, and `initialize` itself decides and changes it there. Bytes are then counted on
tensors without data, as `fp8stack.memory.measure` counts live ones: before, of the model and torch's optimizer; after,
at the level. A function that returns a model alone is planned with torch's AdamW.

Not counted: activations, and the FP8 codes that a forward keeps for its backward.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from fp8stack.api import Decisions, carry_out, decide
from fp8stack.conversion import check_model
from fp8stack.errors import Fp8StackWarning
from fp8stack.levels import Recipe
from fp8stack.memory import PARTS, MemoryUse
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.planning import use_after_step

from . import machine
from .load_function import build
from .output import Commands, Console, add_command, show, size, table
from .recipe import add_recipe, recipe_of


def add_parser(commands: Commands) -> None:
    brief = "which layers of a model convert, which do not and why, and the bytes before and after"
    parser = add_command(commands, "plan", brief)
    parser.add_argument(
        "target", metavar="FILE:function", help="returns a model, or (model, optimizer)"
    )
    add_recipe(parser)


def run(options: argparse.Namespace) -> int:
    recipe = recipe_of(options)
    model, optimizer = build(options.target, meta=True)
    show(options, plan(model, optimizer, recipe, machine.device()), draw)
    return 0


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
    before = _held(use_after_step(model, optimizer))
    kind = type(optimizer).__name__
    decisions = decide(model, optimizer, recipe, planned_for=device)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    optimizer.state.clear()
    with warnings.catch_warnings():  # they are in the report
        warnings.simplefilter("ignore", Fp8StackWarning)
        session = carry_out(model, optimizer, decisions)
    if session.returned is None:
        raise RuntimeError("initialize returned no optimizer for the one it was given")
    after = _held(use_after_step(model, session.returned, decisions))
    matrices = _matrices(model, kinds, decisions, session.returned)
    if not after.keys() & {"m", "v"}:  # as of SGD without momentum
        matrices = [{**matrix, "states": "none"} for matrix in matrices]
    if decisions.recipe.offload == "cpu" and device.type == "cuda":
        after["host"] = sum(after.pop(part, 0) for part in ("master", "m", "v"))
    small = [m["name"] for m in matrices if math.prod(m["shape"]) < recipe.min_numel]
    return {
        "optimizer": kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "matrices": matrices,
        "small": small if decisions.recipe.gradients == "fp8" else [],
        "bytes": {"before": before, "after": after},
        "report": session.report.to_dict(),
    }


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show layers, those of one shape and fate together, then bytes by kind."""
    report, both = data["report"], data["bytes"]
    console.print(
        f"{data['parameters']:,} parameters, {data['trainable']:,} of them trained by {data['optimizer']}; "
        f"{report['level']} on {report['device']}\n"
        f"GEMMs {report['gemm']} ({report['compute']}: {report['compute_reason']})\n"
        f"gradients {report['gradients']}, states {report['states']}, master {report['master']}"
    )
    groups: Counter[tuple[str, ...]] = Counter()
    for m in data["matrices"]:
        alike = {"name": re.sub(r"\d+", "*", m["name"]), "shape": "×".join(map(str, m["shape"]))}
        groups[tuple({**m, **alike}.values())] += 1
    rows = ((name, count, *rest) for (name, *rest), count in groups.items())
    header = ("matrix", "n", "of", "shape", "GEMM", "weight", "gradient", "states")
    console.print(table(header, rows, right="n"))
    reasons: dict[str, list[str]] = {}
    for name, reason in {**report["skipped"], **report["kept"]}.items():
        if name.rpartition(".")[0] not in report["skipped"]:  # said of the module
            reasons.setdefault(reason, []).append(name or "the model")
    if data["small"]:
        few = "fewer elements than min_numel, so gradients and states stay as they are"
        reasons[few] = data["small"]
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        console.print(f"{names[0]}{more}: {reason}")
    sums = {when: sum(parts.values()) for when, parts in both.items()}
    kinds = [p for p in PARTS if both["before"].get(p) or both["after"].get(p)]
    lines = [(p, *(size(both[when].get(p, 0)) for when in both)) for p in kinds]
    lines.append(("total", *(size(total) for total in sums.values())))
    each = (f"{total / max(data['parameters'], 1):.2f}" for total in sums.values())
    lines.append(("bytes/parameter", *each))
    console.print(table(("", "before", report["level"]), lines, right=f"before {report['level']}"))
    console.print("Activations come on top; nothing was allocated.")
    for fallback in report["fallbacks"]:
        console.print(f"fallback: {fallback}")


def _matrices(
    model: nn.Module, kinds: dict[str, str], decisions: Decisions, optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Return what became of every matrix: module class, shape, GEMMs, weight, gradient and states."""
    fp8_layers, result = {name for name, _ in decisions.layers.gemm}, []
    for name, module in model.named_modules():
        for own, p in module.named_parameters(recurse=False):
            if p.ndim < 2:
                continue
            dtype = str(p.dtype).removeprefix("torch.")
            weight = gradient = states = dtype
            if isinstance(optimizer, BlockwiseOptimizer):
                master, kept_as = optimizer.master_format(p), optimizer.moment_format(p)
                weight += f" + {master}" if master not in (None, "none") else ""
                states = dtype if kept_as == "keep" else kept_as
            if decisions.recipe.gradients == "fp8" and p in decisions.quantized:
                gradient = "fp8"
            result.append(
                {
                    "name": f"{name}.{own}".lstrip("."),
                    "module": kinds[name],
                    "shape": list(p.shape),
                    "gemm": decisions.report.gemm.split()[0] if name in fp8_layers else "",
                    "weight": weight,
                    "gradient": gradient if p.requires_grad else "none",
                    "states": states if p.requires_grad else "none",
                }
            )
    return result


def _held(use: MemoryUse) -> dict[str, int]:
    return {part: nbytes for part, nbytes in use.bytes.items() if nbytes}
