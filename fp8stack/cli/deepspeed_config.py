"""`fp8stack doctor --deepspeed`: what is known not to work with a DeepSpeed configuration and a model.

The configuration is read as DeepSpeed reads it: JSON, with comments where hjson is installed. The level is that of its
"fp8stack" section, or the one given, or O2. The model is made by a function of a Python file. Nothing is trained and
DeepSpeed is not imported.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8stack.errors import ConfigError, reason_of
from fp8stack.integrations.deepspeed.optimizer import OURS, type_of
from fp8stack.integrations.deepspeed.optimizer import build as build_optimizer
from fp8stack.integrations.deepspeed.section import check_recipe, find_section, stage_of, zero_of
from fp8stack.integrations.known import Situation, check, with_allowed
from fp8stack.levels import Recipe

from .output import table
from .target import build

if TYPE_CHECKING:
    from rich.console import Console

SECTIONS = {
    "optimizer",
    "scheduler",
    "zero_optimization",
    "bf16",
    "bfloat16",
    "fp16",
    "amp",
    "msamp",
    "data_types",
}
KEYS = SECTIONS | {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp8stack", "torch_autocast",
    "communication_data_type", "gradient_clipping", "prescale_gradients", "sparse_gradients", "pipeline", "compile",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "activation_checkpointing", "tensor_parallel",
    "checkpoint", "hybrid_engine", "elasticity", "autotuning", "steps_per_print", "wall_clock_breakdown",
    "flops_profiler", "comms_logger",
}  # fmt: skip
"""Of the top level of a DeepSpeed configuration, which has at least one of these."""


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
    default = None if "fp8stack" in config else "O2"
    section = find_section(config, opt_level or default)
    model, optimizer = (None, None) if target is None else build(target)
    recipe = None if section is None else section.recipe
    if recipe is not None:
        check_recipe(recipe, stage_of(config))
    if optimizer is None:
        _check_type(config, recipe)
    situation = Situation(config, model, optimizer, recipe)
    findings = with_allowed(check(situation), section.allow if section else ())
    return {
        "config": path,
        "level": None if recipe is None else recipe.level,
        "versions": dict(situation.versions),
        "findings": [
            {
                "severity": f.severity,
                "number": f.row.number,
                "name": f.row.id,
                "where": f.where,
                "value": f.value,
                "symptom": f.row.symptom,
                "remedy": f.row.remedy,
            }
            for f in findings
        ],
    }


def _check_type(config: dict[str, Any], recipe: Recipe | None) -> None:
    """Raise ConfigError for an optimizer of the JSON that cannot be made, where fp8stack would make it."""
    if type_of(config) in OURS or (type_of(config) and recipe and recipe.states != "keep"):
        build_optimizer(config, [torch.nn.Parameter(torch.empty(8, 8, device="meta"))], recipe)


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: if there is none, the message names line and column; if it has no key of DeepSpeed's; or
            another value than an object for a section or an optimizer's "params".
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        config = _read_hjson(text)
        if config is None:
            raise ConfigError(
                f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}."
            ) from error
    except (ValueError, RecursionError) as error:  # whole numbers of thousands of digits
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path} holds a {type(config).__name__}; a DeepSpeed configuration is a JSON object."
        )
    if not config.keys() & KEYS:
        held = f"keys are {', '.join(config):.80}" if config else "it is empty"
        raise ConfigError(
            f"{path} has no key of a DeepSpeed configuration ({held}). Give the file that holds "
            '"train_batch_size", "zero_optimization" and so on.'
        )
    if isinstance(config.get("zero_optimization"), bool):  # deprecated, but DeepSpeed reads it
        config["zero_optimization"] = zero_of(config)
    _check_objects(config, SECTIONS, str(path))
    _check_objects(config.get("optimizer") or {}, {"params"}, f'"optimizer" of {path}')
    return config


def _check_objects(held: dict[str, Any], keys: set[str], where: str) -> None:
    """Raise ConfigError if a value under one of `keys` is neither an object nor null."""
    for key in sorted(keys & held.keys()):
        if held[key] is not None and not isinstance(held[key], dict):
            raise ConfigError(
                f'"{key}": {json.dumps(held[key])} in {where} must be an object, such as {{"{key}": {{...}}}}.'
            )


def _read_hjson(text: str) -> Any:
    """Return what DeepSpeed's own reader makes of a text; None if it cannot, or is not installed."""
    if find_spec("hjson") is None:
        return None
    import hjson

    try:
        return json.loads(json.dumps(hjson.loads(text)))
    except hjson.HjsonDecodeError:
        return None


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show a line for each finding, and below what happens and what to do."""
    level = data["level"] or "fp8stack not enabled"
    console.print(f"DeepSpeed configuration {data['config']} · {level}")
    console.print(", ".join(f"{name} {version}" for name, version in data["versions"].items()))
    findings = data["findings"]
    if not findings:
        console.print("Nothing known stands against it.")
        return
    rows = (
        (f["severity"], f["number"], f["name"], f"{f['where']}: {f['value']}") for f in findings
    )
    console.print(table(("severity", "#", "name", "found"), rows, right="#"))
    for number, text in {f["number"]: f"{f['symptom']} {f['remedy']}" for f in findings}.items():
        console.print(f"{number}. {text}")
    severities = [f["severity"] for f in findings]
    names = {"error": "errors", "warning": "warnings", "info": "notes"}
    counts = {names[s]: severities.count(s) for s in names if s in severities}
    told = (f"{n} {name[:-1] if n == 1 else name}" for name, n in counts.items())
    console.print(f"\n{', '.join(told)}")
