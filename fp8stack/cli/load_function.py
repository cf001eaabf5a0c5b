"""FILE:function on a command line: a model from a function of the user's own Python file.

The file is imported with its folder on sys.path, as if it were run, but not as `__main__`. A file in a package (a
folder with an __init__.py) is imported as a module of it, as `python -m` would do from the folder that the package lies
in; the modules beside it also have their plain names, after all others. The function takes nothing and returns a model,
a model and its optimizer, or a batch for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
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
    result = call(target, meta)
    model, optimizer = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    fits = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    if not isinstance(model, nn.Module) or not fits:
        what = f"{target} returned {type(result).__name__}"
        raise ModelError(f"{what}; it must return a torch.nn.Module, or a module and an optimizer.")
    return model, optimizer


def call(target: str, meta: bool = False) -> Any:
    """Call "file.py:function", on the meta device or not, and return what it returns.

    Raises:
        ModelError: for a file or function that does not exist or raises.
    """
    file, _, name = target.rpartition(":")
    if not file or not name or "\0" in file:
        raise ModelError(f"{target!r} must be a file and a function: train.py:build_model.")
    path = Path(file).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise ModelError(f"there is no Python file {file!r}.")
    before, more = list(sys.path), ""
    try:
        function = _function(path, name)
        with torch.device("meta") if meta else nullcontext():
            more = _ON_META if meta else ""
            return function()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises
        what = f"{target} raised {type(error).__name__}: {error}"
        raise ModelError(f"{what}. It is run without arguments.{more}") from error
    finally:
        sys.path[:] = before


def _function(path: Path, name: str) -> Callable[[], Any]:
    """Import a file anew, as a module of its package if it is in one, and return its function."""
    root, package = path.parent, ""
    while (root / "__init__.py").exists():
        root, package = root.parent, f"{root.name}.{package}"
    sys.path[:] = [str(root), *sys.path, *([str(path.parent)] if package else [])]
    if package:
        import_module(package.rstrip("."))
    own = f"{package}{path.stem}" if package else "_fp8stack_target"
    spec: Any = spec_from_file_location(own, path)
    module = sys.modules[own] = module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ModelError(f"{path.name} has no function {name!r}.{did_you_mean(name, known)}")
    return function  # type: ignore[no-any-return]
