"""The operands of FP8 products: what is cast, when, and what is kept.

An activation is cast once for all layers that read it: the last one cast is remembered, so that q, k and v (or gate
and up) share its codes. A weight is cast once for all micro-batches between two changes of it, and for recomputation:
its `WeightCache` knows the codes by the weight's version counter. In evaluation a weight is always cast anew, since
weights swapped in through `.data`, as moving averages are, leave no trace in that counter; nor is anything remembered
while a CUDA graph is captured, whose replays read new weights. Under torch.compile casts are part of the graph, where
Inductor joins the search for the largest magnitude to whatever made the tensor.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack.formats import E4M3, E5M2, MiniFloat
from fp8stack.kernels import ops
from fp8stack.levels import Recipe


class Formats(NamedTuple):
    """The formats of a layer's products. Weights are E4M3 always; no GPU multiplies E5M2 by E5M2."""

    x: MiniFloat  # input, forward
    x_t: MiniFloat  # input, in the product that gives the weight's gradient
    g: MiniFloat  # gradient of the output


FORMATS = {
    "hybrid": Formats(E4M3, E4M3, E5M2),
    "e4m3": Formats(E4M3, E4M3, E4M3),
    "e5m2": Formats(E5M2, E4M3, E5M2),
}


class Operand(NamedTuple):
    """A matrix in FP8, in the layouts that were asked for (the others are empty); sizes are multiples of 16."""

    codes: Tensor  # [rows, cols]
    scale: Tensor  # float32, 0-d
    codes_t: Tensor  # [cols, rows]
    scale_t: Tensor


def cast_matrix(
    x: Tensor,  # [..., cols], read as [rows, cols]
    fmt: MiniFloat,
    fmt_t: MiniFloat | None = None,  # of the transpose, if another
    codes: bool = True,
    transposed: bool = True,
) -> Operand:
    """Quantize a matrix with one scale, its own."""
    if torch.compiler.is_compiling():
        amax: Tensor | None = x.abs().amax()
    else:
        amax = None
    if fmt_t is None or fmt_t is fmt or not codes or not transposed:
        own = fmt if codes or fmt_t is None else fmt_t
        plain, turned, scale = ops.cast(x, own, codes, transposed, amax)
        return Operand(plain, scale, turned, scale)
    plain, _, scale = ops.cast(x, fmt, True, False, amax)
    _, turned, scale_t = ops.cast(x, fmt_t, False, True, amax)
    return Operand(plain, scale, turned, scale_t)


class _Last(threading.local):
    """The activation cast last in this thread."""

    tensor: Any = staticmethod(lambda: None)  # a weak reference
    key: Any = None
    operand: Operand | None = None


_last = _Last()


def cast_input(x: Tensor, formats: Formats, transposed: bool) -> Operand:
    """Return the operand of `x` [..., cols]; that of the last call if it was for the same tensor."""
    # A static input is one tensor in every capture of a CUDA graph, and must be cast in each.
    if torch.compiler.is_compiling() or (x.grad_fn is None and _capturing(x)):
        return cast_matrix(x.detach(), formats.x, formats.x_t, True, transposed)
    key = (x._version, formats, _stream(x))
    if _last.tensor() is x and _last.key == key:
        operand = _last.operand
        if operand is not None and (operand.codes_t.numel() or not transposed):
            return operand
    _last.operand = None  # frees it before the next is allocated
    operand = cast_matrix(x, formats.x, formats.x_t, True, transposed)
    _last.tensor, _last.key, _last.operand = weakref.ref(x), key, operand
    return operand


def forget_input() -> None:
    """Free the codes of the activation cast last."""
    _last.operand = None


class WeightCodes(NamedTuple):
    """A weight in FP8, laid out for the forward product and for backward's (empty where that is made later)."""

    forward: Tensor  # [out, in]
    scale: Tensor  # float32, 0-d
    backward: Tensor  # [in, out]


class WeightCache:
    """The codes of one weight, for the layers that share it."""

    def __init__(self, weight: Tensor | None, keep: str, turned: bool = False) -> None:
        self._weight: Any = (lambda: None) if weight is None else weakref.ref(weight)
        self.keep = keep  # a choice of Recipe.weight_cache
        self.turned = turned  # the weight is [in, out]
        self._of: tuple[int, int] | None = None
        self._codes: WeightCodes | None = None
        self.casts = 0  # how often this weight was cast

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache(None, self.keep, self.turned)  # the copy's weight is another

    def __reduce__(self) -> Any:
        return WeightCache, (None, self.keep, self.turned)

    def codes(self, weight: Tensor, train: bool, backward: bool) -> tuple[WeightCodes, str]:
        """Return the codes of `weight` and how backward gets its own: "fp8+t", as they are, else as in Recipe.

        `train` allows to keep the codes and find them again, `backward` says whether there will be a backward product.
        """
        if torch.compiler.is_compiling():
            return self._cast(weight, backward), "fp8+t"
        if self._weight() is not weight:
            # FSDP's whole weights come and go in memory that no counter tells about.
            return self._cast(weight, False), "off"
        if not train or self.keep == "off" or _capturing(weight):
            return self._cast(weight, backward and self.keep == "fp8+t"), self.keep
        of = weight.data_ptr(), weight._version
        if self._codes is None or self._of != of:
            self._codes = None  # frees them before the next are allocated
            self._codes = self._cast(weight, self.keep == "fp8+t")
            self._of = of
        return self._codes, self.keep

    def _cast(self, weight: Tensor, backward: bool) -> WeightCodes:
        if not torch.compiler.is_compiling():
            self.casts += 1
        both = cast_matrix(
            weight.detach(), E4M3, None, not self.turned or backward, self.turned or backward
        )
        if self.turned:
            return WeightCodes(both.codes_t, both.scale, both.codes)
        return WeightCodes(both.codes, both.scale, both.codes_t)

    def forget(self) -> None:
        """Free the codes."""
        self._codes = None


class Products:
    """How the products of a layer are made: formats, the recipe of their scales, and the codes of its weight."""

    def __init__(self, weights: WeightCache, recipe: Recipe) -> None:
        self.weights = weights
        self.fp8_format = recipe.fp8_format
        self.fp8_recipe = recipe.fp8_recipe

    @property
    def formats(self) -> Formats:
        return FORMATS[self.fp8_format]

    def __str__(self) -> str:
        return f"{self.fp8_format}, {self.fp8_recipe}"


def cast_for_backward(weight: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
    """Cast a weight for the backward product alone: (codes [in, out], scale)."""
    both = cast_matrix(weight.detach(), E4M3, None, turned, not turned)
    return (both.codes if turned else both.codes_t), both.scale


def _stream(x: Tensor) -> int:
    return int(torch._C._cuda_getCurrentRawStream(x.get_device())) if x.is_cuda else 0


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
