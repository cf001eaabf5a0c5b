"""FILE:function on a command line: a model from a function of the user's own Python file.

The file is imported with its folder on sys.path, as if it were run, but not as `__main__`. The function takes nothing
and returns a model, or (model, optimizer).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8stack.errors import ModelError, did_you_mean

_ON_META = (
    " It is run on the meta device, where tensors have no data: leave moving the model to a GPU and loading weights "
    "into it out of the function."
)


def build(target: str, meta: bool = False) -> tuple[nn.Module, Any]:
    """Call "file.py:function" and return (model, optimizer or None).

    meta: build on the meta device, so that nothing is allocated.

    Raises:
        ModelError: for a file or function that does not exist or raises, or that returns something else.
    """
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise ModelError(f"{target!r} must be a file and a function: train.py:build_model.")
    folder = str(Path(file).resolve().parent)
    sys.path.insert(0, folder)  # as if the file were run, for what it imports
    try:
        with redirect_stdout(sys.stderr):  # stdout is the command's
            function = _function(file, name)
            with torch.device("meta") if meta else nullcontext():
                result = _call(function, target, _ON_META if meta else "")
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
    spec = importlib.util.spec_from_file_location("_fp8stack_target", file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise ModelError(f"there is no Python file {file!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    _call(lambda: spec.loader.exec_module(module), file)  # type: ignore[union-attr]
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ModelError(f"{file} has no function {name!r}.{did_you_mean(name, known)}")
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[], Any], name: str, more: str = "") -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises
        raise ModelError(
            f"{name} raised {type(error).__name__}: {error}. It is run without arguments.{more}"
        ) from error


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__
