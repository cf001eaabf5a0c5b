"""`python -m fp8stack doctor`: what is known not to work with a DeepSpeed configuration and a model.

The configuration is read as DeepSpeed reads it: JSON, with comments where hjson is installed. The level is that of its
"fp8stack" section, or the one given, or O2. The model is made by a function of a Python file. Nothing is trained and
DeepSpeed is not imported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8stack.errors import ConfigError, ModelError, did_you_mean
from fp8stack.integrations.deepspeed.section import check_recipe, find_section, stage_of

from .situation import Finding, Situation
from .table import check, with_allowed

_WIDTH = 110


def diagnose(path: str, model: str | None = None, opt_level: str | None = None) -> tuple[str, bool]:
    """Return the findings as text, and whether one of them is an error.

    path: of DeepSpeed's configuration.
    model: "file.py:function", a function that takes nothing and returns a model, or (model, optimizer).
    opt_level: where the configuration names none.

    Raises:
        ConfigError: for a file that cannot be read, or a section or level that is not valid or not for DeepSpeed.
        ModelError: for a function that cannot be called, or returns something else.
    """
    config = read_config(Path(path))
    default = None if "fp8stack" in config else "O2"
    section = find_section(config, opt_level or default)
    built, optimizer = (None, None) if model is None else _build(model)
    recipe = None if section is None else section.recipe
    if recipe is not None:
        check_recipe(recipe, stage_of(config))
    situation = Situation(config, built, optimizer, recipe)
    findings = with_allowed(check(situation), section.allow if section else ())
    versions = ", ".join(f"{name} {version}" for name, version in situation.versions.items())
    level = "fp8stack not enabled" if recipe is None else recipe.level
    title = f"fp8stack doctor · {path} · {level}\n{versions}\n\n"
    return title + _table(findings), any(f.severity == "error" for f in findings)


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: if there is none; the message names line and column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        config = _read_hjson(text)
        if config is None:
            raise ConfigError(
                f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}."
            ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path} holds a {type(config).__name__}; a DeepSpeed configuration is a JSON object."
        )
    return config


def _read_hjson(text: str) -> Any:
    """Return what DeepSpeed's own reader makes of a text; None if it cannot, or is not installed."""
    if find_spec("hjson") is None:
        return None
    import hjson

    try:
        return json.loads(json.dumps(hjson.loads(text)))
    except hjson.HjsonDecodeError:
        return None


def _build(target: str) -> tuple[nn.Module, Any]:
    """Call "file.py:function" and return (model, optimizer or None)."""
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise ModelError(f"--model {target!r} must be a file and a function: train.py:build_model.")
    folder = str(Path(file).resolve().parent)
    sys.path.insert(0, folder)  # as if the file were run, for what it imports
    try:
        result = _call(_function(file, name), target)
    finally:
        sys.path.remove(folder)
    model, optimizer = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    fits = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    if not isinstance(model, nn.Module) or not fits:
        raise ModelError(
            f"{target} returned {_kind(result)}; it must return a torch.nn.Module, or a module and an optimizer."
        )
    return model, optimizer


def _function(file: str, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location("_fp8stack_doctor", file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise ModelError(f"--model: there is no Python file {file!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    _call(lambda: spec.loader.exec_module(module), file)  # type: ignore[union-attr]
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ModelError(f"{file} has no function {name!r}.{did_you_mean(name, known)}")
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[], Any], name: str) -> Any:
    try:
        return function()
    except Exception as error:  # the user's code: whatever it raises
        raise ModelError(
            f"{name} raised {type(error).__name__}: {error}. It is run without arguments."
        ) from error


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__


def _table(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, and below what happens and what to do."""
    if not findings:
        return "Nothing known stands against it.\n"
    rows = [("severity", "#", "name", "found")]
    rows += [(f.severity, str(f.row.number), f.row.id, f"{f.where}: {f.value}") for f in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
    for row in dict.fromkeys(f.row for f in findings):
        text = f"{row.number}. {row.symptom} {row.remedy}"
        lines += ["", *textwrap.wrap(text, _WIDTH, subsequent_indent="    ")]
    return "\n".join(lines) + f"\n\n{_count(findings)}\n"


def _count(findings: Iterable[Finding]) -> str:
    """Return "1 error, 2 warnings"."""
    severities = [f.severity for f in findings]
    names = {"error": "errors", "warning": "warnings", "info": "notes"}
    counts = {names[s]: severities.count(s) for s in names if s in severities}
    return ", ".join(f"{n} {name[:-1] if n == 1 else name}" for name, n in counts.items())
