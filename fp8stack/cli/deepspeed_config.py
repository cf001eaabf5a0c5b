"""`fp8stack doctor --deepspeed`: what is known not to work with a DeepSpeed configuration and a model.

The configuration is read as DeepSpeed reads it: JSON, with comments where hjson is installed. The level is that of its
"fp8stack" section, or the one given, or O2. The model is made by a function of a Python file. Nothing is trained, and
DeepSpeed is not imported.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fp8stack.errors import ConfigError, reason_of
from fp8stack.integrations.deepspeed.optimizer import OURS, type_of
from fp8stack.integrations.deepspeed.optimizer import build as build_optimizer
from fp8stack.integrations.deepspeed.section import check_recipe, find_section, stage_of
from fp8stack.integrations.incompatibilities import TrainingRun, check, zero_of

from . import machine
from .load_function import build
from .output import Lines

SECTIONS = (
    "amp", "bf16", "bfloat16", "data_types", "fp16", "msamp", "optimizer", "scheduler", "zero_optimization",
)  # fmt: skip
"""Keys whose values are JSON objects."""
KEYS = {*SECTIONS, "fp8stack", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""A DeepSpeed configuration has at least one of these."""


def diagnose(path: str, target: str | None = None, opt_level: str | None = None) -> dict[str, Any]:
    """Return level, versions and findings, errors first.

    path: of DeepSpeed's configuration.
    target: "file.py:function", a function that takes nothing and returns a model, or (model, optimizer).
    opt_level: where the configuration names none.

    Raises:
        ConfigError: for a file that cannot be read, or a section, level or optimizer that `initialize` would refuse.
        ModelError: for a function that cannot be called, or returns something else.
    """
    config = read_config(Path(path))
    section = find_section(config, opt_level or (None if "fp8stack" in config else "O2"))
    model, optimizer = (None, None) if target is None else build(target)
    recipe = None if section is None else section.recipe
    if recipe is not None:
        check_recipe(recipe, stage_of(config))
    kind = type_of(config)
    makes = kind in OURS or (kind and recipe and recipe.states != "keep")
    if optimizer is None and makes:  # raises for one that fp8stack cannot make
        build_optimizer(config, [torch.nn.Parameter(torch.empty(8, 8, device="meta"))], recipe)
    run = TrainingRun(config, model, optimizer, recipe)
    return {
        "config": path,
        "level": None if recipe is None else recipe.level,
        "versions": {"torch": torch.__version__, **machine.environment()["libraries"]},
        "findings": [
            {"severity": f.severity, "where": f.where, "value": f.value}
            | {"name": f.row.name, "symptom": f.row.symptom, "remedy": f.row.remedy}
            for f in check(run, section.allow if section else ())
        ],
    }


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: for a file that cannot be read or holds something else, or a section that is no object.
    """
    # what DeepSpeed reads them with, which takes comments, where it is installed
    reader = import_module("hjson" if find_spec("hjson") else "json")
    try:
        config = reader.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(config, dict) or not config.keys() & KEYS:
        held = f"has the keys {[*config]}" if isinstance(config, dict) else f"is {config!r}"
        raise ConfigError(
            f"{path} {held:.100}: no DeepSpeed configuration. Give the JSON object that holds "
            '"train_batch_size", "zero_optimization" and so on.'
        )
    if isinstance(config.get("zero_optimization"), bool):  # deprecated, but DeepSpeed reads it
        config["zero_optimization"] = zero_of(config)
    sections = {key: config.get(key) for key in SECTIONS}
    if isinstance(sections["optimizer"], dict):
        sections["params"] = sections["optimizer"].get("params")
    for key, value in sections.items():
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f'"{key}": {json.dumps(value)} in {path} must be an object.')
    return config


def draw(data: dict[str, Any]) -> Lines:
    """Show each finding with what happens and what to do."""
    yield f"DeepSpeed configuration {data['config']} · {data['level'] or 'fp8stack not enabled'}"
    yield ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    for f in data["findings"]:
        found = f"{f['severity']}: {f['name']} ({f['where']}: {f['value']})."
        yield f"{found} {f['symptom']} {f['remedy']}"
    if not data["findings"]:
        yield "Nothing known stands against it."
