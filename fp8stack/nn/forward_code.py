"""What the forward of a class does, as far as its code tells: the weights that it reads, and whether it multiplies.

The code of `forward` is looked at, and of the methods, properties and functions of its own module that it names, and so
on. What is found by `getattr`, or made at run time, is not seen.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_LOOKS = (("LOAD_ATTR", "device"), ("LOAD_ATTR", "shape"))  # which take no values
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
_OPAQUE = ("torch", "fp8stack.nn.fused_loss")  # whose products are made there as they are to be
_PRODUCTS = {
    "addmm", "baddbmm", "bmm", "einsum", "grouped_mm", "_grouped_mm", "linear", "matmul", "mm", "tensordot",
}  # fmt: skip


def is_of_library(module: nn.Module) -> bool:
    """Return whether nobody but the authors of torch and the like wrote the forward of `module`."""
    kind = type(module)
    if kind.__module__ == "torch.nn.utils.parametrize":  # a class that it made over another
        kind = kind.__bases__[0]
    return kind.__module__.partition(".")[0] in ("torch", "fp8stack", "transformer_engine", "peft")


def owners_read(kind: type[nn.Module]) -> set[str]:
    """Return the names `x` for which the code reads `x.weight`, and not only where it is, or its shape."""
    return set().union(*map(_owners, _codes(kind)))


def products_in(kind: type[nn.Module]) -> set[str]:
    """Return the names of matrix products in the code, "@" among them. A submodule may have such a name, too."""
    return set().union(*map(_products, _codes(kind)))


def recomputes_functions(kind: type[nn.Module]) -> bool:
    """Return whether the code may have a function of its own recomputed by activation checkpointing.

    It has one that multiplies, which it may give to anything; or the forward is under a decorator that checkpoints.
    """
    every = (const for code in _codes(kind) for const in code.co_consts)
    inner = (const for const in every if isinstance(const, CodeType))
    if any(_products(code) for code in inner if code.co_name not in _COMPREHENSIONS):
        return True
    layer = inspect.getattr_static(kind, "forward", None)
    while isinstance(layer, FunctionType) and hasattr(layer, "__wrapped__"):
        names, known = (*layer.__code__.co_names, *layer.__code__.co_freevars), layer.__globals__
        if any("checkpoint" in f"{getattr(known.get(n), '__module__', '')}.{n}" for n in names):
            return True
        layer = layer.__wrapped__
    return False


@lru_cache(4096)
def _owners(code: CodeType) -> set[str]:
    read = [*_instructions(code)]
    triples = zip(read, read[1:], read[2:], strict=False)
    weights = (x for x in triples if (x[1].opname, x[1].argval) == ("LOAD_ATTR", "weight"))
    names = (x.argval for x, _, use in weights if (use.opname, use.argval) not in _LOOKS)
    # Python 3.13 loads two variables in one instruction: the last is what the weight is of.
    return {name[-1] if isinstance(name, tuple) else name for name in names}


@lru_cache(4096)
def _products(code: CodeType) -> set[str]:
    read = _instructions(code)
    written = any("MATRIX_MULTIPLY" in i.opname or i.argrepr in ("@", "@=") for i in read)
    return {*code.co_names} & _PRODUCTS | ({"@"} if written else set())


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    return (i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG")


def _codes(kind: type[nn.Module]) -> Iterator[CodeType]:
    found: list[Any] = [inspect.getattr_static(kind, "forward", None)]
    seen: set[Any] = set()
    for one in found:  # which grows
        function = one.__func__ if isinstance(one, (staticmethod, classmethod)) else one
        function = function.fget if isinstance(function, property) else function
        if isinstance(function, FunctionType):
            with suppress(ValueError):  # functions that wrap each other
                function = inspect.unwrap(function)
        code = function.__code__ if isinstance(function, FunctionType) else function
        if not isinstance(code, CodeType) or code in seen:
            continue
        seen.add(code)
        yield code
        found += code.co_consts  # functions inside
        known = function.__globals__ if isinstance(function, FunctionType) else {}
        for name in code.co_names:
            if not hasattr(nn.Module, name):
                found.append(inspect.getattr_static(kind, name, None))
            own = known.get(name)
            if isinstance(own, FunctionType) and not (own.__module__ or "").startswith(_OPAQUE):
                found.append(own)
