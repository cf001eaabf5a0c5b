"""FILE:function on a command line: a model from a function of the user's own Python file.

The file is imported with its folder on sys.path, as if it were run, but not as `__main__`. One with relative imports is
imported as the module of its package that it is, as `python -m` would do from the folder that the package lies in; the
modules beside it have their plain names too, after all others. The function takes nothing and returns a model, or
(model, optimizer).
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fp8stack.errors import ModelError, did_you_mean

_NO_PACKAGE = (
    " A relative import needs a package: put an empty __init__.py beside the file, or name the modules beside it "
    "without the dot."
)
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
    module_name, outer, beside = _place(file)
    added = [outer, *beside]
    sys.path.insert(0, outer)
    sys.path += beside
    try:
        with redirect_stdout(sys.stderr):  # stdout is the command's
            function = _function(file, name, module_name)
            with torch.device("meta") if meta else nullcontext():
                result = _call(function, target, _ON_META if meta else "")
    finally:
        # These very strings: the same folders may have been there before, and the file may have changed the list.
        sys.path[:] = [entry for entry in sys.path if not any(entry is ours for ours in added)]
    model, optimizer = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    fits = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    if not isinstance(model, nn.Module) or not fits:
        raise ModelError(
            f"{target} returned {_kind(result)}; it must return a torch.nn.Module, or a module and an optimizer."
        )
    return model, optimizer


def _place(file: str) -> tuple[str, str, list[str]]:
    """Return the name that a file is imported by within its package, or "", and the folders to import from.

    Of the folders one comes first. The others come last: that of a file in a package, since a module beside it may be
    named as one of Python's.
    """
    path = Path(file).resolve()
    folder = path.parent
    if not _imports_relatively(path) or not (folder / "__init__.py").exists():
        return "", str(folder), []
    parts = [] if path.name == "__init__.py" else [path.stem]
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    for part in parts:
        if "." in part:  # other names that are no identifiers can be imported, as by `python -m`
            raise ModelError(
                f"{file} imports relatively, and {part!r} in its path has a dot, which separates packages. Rename it "
                f"to {part.replace('.', '_')}."
            )
    return ".".join(parts), str(folder), [str(path.parent)]


def _imports_relatively(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # told when it is imported
        return False
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def _function(file: str, name: str, module_name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location("_fp8stack_target", file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise ModelError(f"there is no Python file {file!r}.")
    if module_name:
        _forget(module_name, file)
        module = _call(lambda: importlib.import_module(module_name), file)
        if not _is_of(module, file):
            raise ModelError(
                f"{file} is {module_name} by its folders, and {getattr(module, '__file__', None) or module} was "
                "imported by that name. Rename one."
            )
    else:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for their module
        _call(lambda: spec.loader.exec_module(module), file)  # type: ignore[union-attr]
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ModelError(f"{file} has no function {name!r}.{did_you_mean(name, known)}")
    return function  # type: ignore[no-any-return]


def _forget(module_name: str, file: str) -> None:
    """Have a file that was imported before read again, as it is now; a module of another file stays."""
    module = sys.modules.get(module_name)
    if module is not None and _is_of(module, file):
        del sys.modules[module_name]


def _is_of(module: ModuleType, file: str) -> bool:
    return Path(getattr(module, "__file__", None) or "").resolve() == Path(file).resolve()


def _call(function: Callable[[], Any], name: str, more: str = "") -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises
        if isinstance(error, ImportError) and "no known parent package" in str(error):
            more = _NO_PACKAGE
        raise ModelError(
            f"{name} raised {type(error).__name__}: {error}. It is run without arguments.{more}"
        ) from error


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__
