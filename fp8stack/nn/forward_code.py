"""What the forward of a class does, as far as its code tells: the weights that it reads, and whether it multiplies.

The code of `forward` is looked at, and of the methods, properties and functions of its own module that it names, and so
on. What is found by `getattr`, or made at run time, is not seen.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import nn

_PRODUCTS = {
    "addmm", "baddbmm", "bmm", "einsum", "grouped_mm", "_grouped_mm", "linear", "matmul", "mm", "tensordot",
}  # fmt: skip


def is_of_library(module: nn.Module) -> bool:
    """Return whether nobody but the authors of torch and the like wrote the forward of `module`."""
    return type(module).__module__.partition(".")[0] in ("torch", "fp8stack", "transformer_engine")


def owners_read(kind: type[nn.Module]) -> set[str]:
    """Return the names `x` for which the code reads `x.weight`."""
    return {
        owner.argval
        for code in _codes(kind)
        for owner, read in pairwise(dis.get_instructions(code))
        if read.opname == "LOAD_ATTR" and read.argval == "weight"
    }


def multiplies(kind: type[nn.Module]) -> bool:
    """Return whether the code names a matrix product, or writes `@`."""
    return any(
        not _PRODUCTS.isdisjoint(code.co_names)
        or any("MATRIX_MULTIPLY" in i.opname or i.argrepr in ("@", "@=") for i in dis.get_instructions(code))
        for code in _codes(kind)
    )  # fmt: skip


def recomputes_functions(kind: type[nn.Module]) -> bool:
    """Return whether the code may give a function of its own to activation checkpointing."""
    codes = [*_codes(kind)]
    inner = any(isinstance(const, CodeType) for code in codes for const in code.co_consts)
    return inner and any("checkpoint" in name for code in codes for name in code.co_names)


def _codes(kind: type[nn.Module]) -> Iterator[CodeType]:
    found: list[Any] = [inspect.getattr_static(kind, "forward", None)]
    seen: set[Any] = set()
    for one in found:  # which grows
        function = inspect.unwrap(getattr(one, "fget", one))
        code = getattr(function, "__code__", function)
        if not isinstance(code, CodeType) or code in seen:
            continue
        seen.add(code)
        yield code
        found += code.co_consts  # functions inside
        known = getattr(function, "__globals__", {})
        for name in code.co_names:
            if not hasattr(nn.Module, name):
                found.append(inspect.getattr_static(kind, name, None))
            if inspect.isfunction(known.get(name)) and not known[name].__module__.startswith(
                "torch"
            ):
                found.append(known[name])
