"""Which matrices of a model multiply in FP8, which do not, and why.

Layers are one half (`convert.py`). The other half are products by bare parameters, `x @ self.w`: `bare_modules` chooses
the modules in whose forward such products are looked for (`matmuls.py`). With matmuls="auto" they are those that own a
matrix, or read the weight of another module, and whose code has a product. No other module pays for the look-up.

`count` then counts elements. Not counted are embeddings, which are looked up, quantized weights, and what is a matrix
in name only, as the [1, tokens, width] of positions.

Limits: whether a bare parameter is multiplied at all shows in the first forward, in `get_report(model).multiplied`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from fp8stack.errors import first_line
from fp8stack.formats import FLOATS
from fp8stack.levels import PRECISIONS, Recipe
from fp8stack.tensor_kinds import not_plain, whole_shape

from .convert import OWN_FORWARD, LayerChoices
from .experts import is_experts
from .forward_code import is_of_library, owners_read, products_in, recomputes_functions
from .layer_kinds import kind_of
from .matmuls import MultipliesParameters
from .mixin import mixed_class
from .select import TOO_SMALL

# Why a matrix is outside, with nothing to warn of: nobody knows of a product, or it is meant to be there.
_UNKNOWN = "the code of its module has no product; matmuls=True looks for one everywhere"
_OFF = "matmuls=False"
_ROUTER = "routers keep their dtype"
_CONVOLUTION = "convolutions stay as they are"
_OPEN = (_UNKNOWN, _OFF, _ROUTER, _CONVOLUTION, TOO_SMALL)
# And with a product that is known to be left out.
_CLOSURE = "a function inside its code multiplies, which checkpointing may recompute without FP8"
KEPT = (_ROUTER, _CLOSURE)
"""The reasons for which parameters are not multiplied in FP8 by other modules either."""
_GATHERED = "FSDP2 replaces it in each forward"
_TORCHS = "torch's own function multiplies by it"

_LISTS = (nn.ParameterList, nn.ParameterDict)
_NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)


@dataclass
class Coverage:
    """What multiplies in FP8."""

    share: float  # of the elements of matrices
    bare: list[str]  # names of modules that multiply by bare parameters
    outside: dict[str, str]  # by the names of matrices: why they do not
    fallbacks: list[str] = field(default_factory=list)  # what is to be warned of


def bare_modules(
    model: nn.Module, recipe: Recipe, skipped: dict[nn.Module, str], gathered: bool = False
) -> dict[nn.Module, str]:
    """Return the modules in which products by bare parameters are looked for: "", or the reason against it.

    `gathered` says that FSDP2 has sharded the model.
    """
    products, reads = cache(products_in), cache(owners_read)
    result: dict[nn.Module, str] = {}
    for module in model.modules():
        kind: Any = type(module)
        if module in skipped or is_of_library(module) or is_experts(module):
            continue
        held = [module, *(m for m in module.children() if isinstance(m, _LISTS))]
        owned = [p for m in held for p in m._parameters.values() if p is not None and _is_matrix(p)]
        owns = any(p.numel() >= recipe.min_numel for p in owned)
        reason = OWN_FORWARD if "forward" in vars(module) else ""
        if recipe.matmuls is not True:
            read, name = reads(kind), kind.__name__.lower()
            inside = read and any(n.rpartition(".")[2] in read for n, _ in module.named_modules())
            if kind_of(module) or not (owns or inside):
                continue
            found = products(kind) - module._modules.keys()
            reason = reason or (_OFF if recipe.matmuls is False else "" if found else _UNKNOWN)
            routes = "router" in name or name.endswith(("gate", "gating"))
            reason = reason or (_ROUTER if routes else "")
            reason = reason or (_CLOSURE if recomputes_functions(kind) else "")
            reason = reason or (_GATHERED if gathered else "")
        if not reason:
            try:
                mixed_class(MultipliesParameters, kind)
            except Exception as error:  # of the class's own metaclass
                reason = f"its class takes no subclass ({first_line(error)})"
        result.update(dict.fromkeys(held, reason))
    return result


def count(
    model: nn.Module,
    layers: LayerChoices,
    bare: dict[nn.Module, str],
    skipped: dict[nn.Module, str],
    least: int,
) -> Coverage:
    """Return what multiplies in FP8. `least`: bare parameters of fewer elements do not."""
    inside = {p for _, module, _ in layers.gemm for p in module._parameters.values()}
    why = {m: told for name, told in layers.skipped for m in model.get_submodule(name).modules()}
    chosen = {  # for bfloat16
        m
        for name, products in layers.in_bf16.items() if products == PRECISIONS["bf16"]
        for m in model.get_submodule(name).modules()
    }  # fmt: skip
    tables = (m for m in model.modules() if isinstance(m, _NO_PRODUCTS))
    seen = {p for m in tables for p in m._parameters.values()}
    sizes = Counter[str]()
    found = {}  # of the matrices outside: elements, the reason, whether that is meant
    for name, module in model.named_modules():
        for own, p in module._parameters.items():
            if p is None or p in seen or not _is_matrix(p):
                continue
            seen.add(p)
            shape = whole_shape(p)
            reason = why.get(module) or skipped.get(module) or bare.get(module)
            fits = shape.numel() >= least and len(shape) <= 3 and p.dtype in FLOATS
            if p in inside or (reason == "" and fits):
                sizes["fp8"] += shape.numel()
                continue
            reason = reason or (_reason(module) if reason is None else _UNKNOWN)
            if reason == _UNKNOWN and shape.numel() < least:
                reason = f"smaller than min_numel={least}"
            elif p.dtype not in FLOATS:
                reason = f"{p.dtype} is not cast to FP8"
            meant = module in skipped or module in chosen or reason in (TOO_SMALL, _OFF)
            sizes["meant" if meant else "left"] += shape.numel()
            found[f"{name}.{own}".lstrip(".")] = (shape.numel(), reason, meant)
    found = dict(sorted(found.items(), key=lambda item: -item[1][0]))  # the largest first
    share = sizes["fp8"] / sizes.total() if sizes.total() else 1.0
    own = [n for n, m in model.named_modules() if bare.get(m) == "" and not isinstance(m, _LISTS)]
    coverage = Coverage(share, own, {name: reason for name, (_, reason, _) in found.items()})
    few = sizes["left"] > sizes["fp8"]
    left = {
        name: reason
        for name, (elements, reason, meant) in found.items()
        if not meant and elements >= least and (few or reason not in _OPEN)
    }
    if left:
        told = f"{'only ' * few}{100 * share:.0f} % of the matrix parameters multiply in FP8"
        meant_to = "What is meant to stay can be named in skip=[...]"
        coverage.fallbacks.append(f"{told}: not {listed(left)}. {meant_to}")
    return coverage


def listed(reasons: dict[str, str]) -> str:
    """Return up to four reasons of names, each with the first of these."""
    by_reason = by_value(reasons)
    shown = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
        for reason, names in [*by_reason.items()][:4]
    ]
    return ", ".join(shown) + f", and {len(by_reason) - 4} more reasons" * (len(by_reason) > 4)


def by_value(values: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that have the same value together."""
    result: dict[str, list[str]] = {}
    for name, value in values.items():
        result.setdefault(value, []).append(name)
    return result


def _is_matrix(p: nn.Parameter | None) -> bool:
    if p is None or not_plain(p):
        return False
    shape = whole_shape(p)
    in_name_only = len(shape) > 2 and shape[0] == 1
    return sum(size > 1 for size in shape) > 1 and not in_name_only


def _reason(module: nn.Module) -> str:
    """Return why a matrix that is no layer's, and no bare parameter of a user's module, does not multiply in FP8."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return _CONVOLUTION
    return _TORCHS if isinstance(module, (nn.Bilinear, nn.MultiheadAttention)) else _UNKNOWN
