"""The operands of FP8 products: what is cast, when, and what is kept.

An activation is cast once for all layers that read it: the last one cast is remembered, so that q, k and v (or gate and
up) share its codes. A norm that found out how large its output is leaves a note of it, which spares the cast behind it
a pass over the same values. A weight is cast once for all micro-batches between two changes of it, and for
recomputation: its `WeightCache` knows the codes by the weight's version counter. Writes through `.data` leave no trace
there, so a training step by hand shows in something else: a backward ran, and no gradient waits for a step any more.
An optimizer's step frees the codes, which have no use after it. With delayed scaling the cache also keeps the scale,
which the next cast takes while it fits, and so reads the weight once (`ops.recast`). In evaluation a weight is always
cast anew, since moving averages are swapped in through `.data`; nor is anything remembered while a CUDA graph is
captured, whose replays read new weights. Under torch.compile casts are part of the graph, where Inductor joins the
search for the largest magnitude to whatever made the tensor.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8stack.formats import E4M3, E5M2, MiniFloat
from fp8stack.kernels import ops
from fp8stack.kernels.reference.cast_delayed import DelayedState
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
    amax: Tensor | None = None,  # what `ops.cast` takes, if it is known
) -> Operand:
    """Quantize a matrix with one scale, its own."""
    if torch.compiler.is_compiling() and x.numel():
        amax = x.abs().amax().float()  # here, where Inductor needs no kernel for it
    if fmt_t is None or fmt_t is fmt or not codes or not transposed:
        own = fmt if codes or fmt_t is None else fmt_t
        plain, turned, scale = ops.cast(x, own, codes, transposed, amax)
        return Operand(plain, scale, turned, scale)
    plain, _, scale = ops.cast(x, fmt, True, False, amax)
    _, turned, scale_t = ops.cast(x, fmt_t, False, True, amax)
    return Operand(plain, scale, turned, scale_t)


_last: list[tuple[Any, Any, Operand, Any]] = []
"""The activation cast last: a weak reference, what it was cast for, operand and history. Any thread may replace it."""


def cast_input(x: Tensor, products: Products, train: bool, transposed: bool) -> Operand:
    """Return the operand of `x` [..., cols]; that of the last call if it was for the same tensor."""
    # A static input is one tensor in every capture of a CUDA graph, and must be cast in each. Without gradients the
    # same tensor may come again with other contents that no version tells of: a buffer of NumPy's, of a graph.
    if torch.compiler.is_compiling():
        return _cast_x(x.detach(), products, train, transposed)
    if (
        not (torch.is_grad_enabled() and x.requires_grad)
        or x.is_inference()
        or (x.grad_fn is None and _capturing(x))
    ):
        return _cast_x(x, products, train, transposed)
    key = (x._version, products.formats, products.fp8_recipe, train, _stream(x))
    for tensor, known, operand, state in _last[:1]:
        if tensor() is x and known == key and (operand.codes_t.numel() or not transposed):
            products.graph_state = state
            return operand
    _last.clear()  # frees it before the next is allocated
    operand = _cast_x(x, products, train, transposed)
    products.graph_state = products.x_state
    _last[:] = [(weakref.ref(x, _forget), key, operand, products.x_state)]
    return operand


_noted: list[tuple[Any, Any, Tensor]] = []
"""What `note_parts` was told last: a weak reference to the tensor, its state then, its parts. Kept as `_last` is."""


def note_parts(x: Tensor, parts: Tensor) -> None:
    """Note the magnitudes of the parts of `x`, int32 [a power of two], for its cast; not under torch.compile."""
    if not x.is_inference():  # which has no version
        _noted[:] = [(weakref.ref(x, _forget), _state(x), parts)]


def _parts_of(x: Tensor) -> Tensor | None:
    """Return what was noted of this very tensor, unless it changed since."""
    for tensor, state, parts in _noted[:1]:
        if tensor() is x and state == _state(x):
            return parts
    return None


def _state(x: Tensor) -> tuple[int, int, bool]:
    # A CUDA graph keeps no parts that were found before it, and another stream has not waited for them.
    return x._version, _stream(x), _capturing(x)


def _forget(tensor: Any) -> None:
    """Free what is kept of an activation that is gone."""
    for kept in (_last, _noted):
        if kept and kept[0][0] is tensor:
            kept.clear()


def forget_input() -> None:
    """Free the codes of the activation cast last, which has no further use once backward begins."""
    _last.clear()


def _cast_x(x: Tensor, products: Products, train: bool, transposed: bool) -> Operand:
    fmt, fmt_t, _ = products.formats
    if products.fp8_recipe == "current":
        amax = None if torch.compiler.is_compiling() else _parts_of(x)
        return cast_matrix(x, fmt, fmt_t, True, transposed, amax)
    if products.fp8_recipe == "blockwise":
        return _without_t(Operand(*ops.cast_1x128(x, fmt)), transposed)
    merged = torch.compiler.is_compiling() and transposed  # equal calls of a graph with a backward
    state = (merged and products.graph_state) or products.x_state
    assert state is not None
    again = train and in_backward()  # evaluation took the next cast's scale, and goes on taking it
    codes, turned, scale = ops.cast_delayed(x, fmt, state.handle, train and not again, again)
    if fmt_t is fmt or not transposed:
        return _without_t(Operand(codes, scale, turned, scale), transposed)
    return Operand(codes, scale, *cast_matrix(x, fmt_t, None, False, True)[2:])


def _without_t(operand: Operand, transposed: bool) -> Operand:
    """Leave out the transpose if nobody will want it, so that it is not saved for backward."""
    return operand if transposed else operand._replace(codes_t=operand.codes_t.new_empty((0, 0)))


def cast_gradient(grad: Tensor, how: How, need_x: bool, need_w: bool) -> Operand:
    """Return the operand of a layer's incoming gradient [..., cols]."""
    if not torch.compiler.is_compiling():
        forget_input()
        _backward[0] = torch._C._current_graph_task_id()
    fmt = FORMATS[how.formats].g
    if how.fp8_recipe == "current":
        return cast_matrix(grad, fmt, None, need_x, need_w)
    if how.fp8_recipe == "blockwise":
        return Operand(*ops.cast_1x128(grad, fmt))
    codes, turned, scale = ops.cast_delayed(grad, fmt, how.g_state, how.train, False)
    return Operand(codes, scale, turned, scale)


_backward = [-1]
"""Autograd's number of the backward that went through a layer last. Any thread may replace it."""


def in_backward() -> bool:
    """Is autograd running, which makes a forward a recomputation?"""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class WeightCodes(NamedTuple):
    """A weight in FP8, laid out for the forward product and for backward's (empty where that is made later)."""

    forward: Tensor  # [out, in]
    scale: Tensor  # float32, 0-d, or one for each square of 128
    backward: Tensor  # [in, out]
    backward_scale: Tensor


class WeightCache:
    """The codes of one weight, for the layers that share it, until an optimizer's step."""

    kept: ClassVar[weakref.WeakSet[WeightCache]] = weakref.WeakSet()  # those that hold codes

    def __init__(
        self,
        weight: Tensor | None,
        keep: str,
        turned: bool = False,
        squares: bool = False,
        follows: bool = False,
    ) -> None:
        self._weight: Any = (lambda: None) if weight is None else weakref.ref(weight)
        self.keep = keep  # a choice of Recipe.weight_cache
        self.turned = turned  # the weight is [in, out]
        self.squares = squares  # a scale for each 128×128
        self.last_scale = DelayedState(0) if follows else None  # the next cast's while it fits
        if self.last_scale and weight is not None:
            self.last_scale.on(weight.device)  # now: CUDA graphs hold its address
        self._of: tuple[int, ...] = ()
        self._since = -1  # the backward that was the last one when the codes were made
        self._codes: WeightCodes | None = None
        self.casts = 0  # how often this weight was cast

    @classmethod
    def of(cls, weight: Tensor | None, recipe: Recipe, turned: bool = False) -> WeightCache:
        """Return an empty cache as `recipe` wants it."""
        squares, follows = (recipe.fp8_recipe == name for name in ("blockwise", "delayed"))
        return cls(weight, recipe.weight_cache, turned, squares, follows)

    def __reduce__(self) -> Any:
        # The weight of a copy is another.
        follows = self.last_scale is not None
        return WeightCache, (None, self.keep, self.turned, self.squares, follows)

    def codes(self, weight: Tensor, train: bool, backward: bool) -> tuple[WeightCodes, str]:
        """Return the codes of `weight` and how backward gets its own: "fp8+t", as they are, else as in Recipe.

        `train` allows to keep the codes and find them again, `backward` says whether there will be a backward product.
        """
        if torch.compiler.is_compiling():
            return self._cast(weight, backward, train and self.keep != "off"), "fp8+t"
        keep = "fp8+t" if self.squares and self.keep == "fp8" else self.keep
        if self._weight() is not weight:
            if not weight.is_leaf or torch.distributed.is_initialized():
                # FSDP's whole weights come and go in memory that no counter tells about.
                return self._cast(weight, False), "off"
            # loaded by assignment, or a copy's
            self._weight, self._codes = weakref.ref(weight), None
        inference = torch.is_inference_mode_enabled() or weight.is_inference()
        if not train or keep == "off" or _capturing(weight) or inference:
            return self._cast(weight, backward and keep == "fp8+t"), keep
        # Some optimizers' kernels change weights and no version.
        stream, device = _stream(weight), weight.get_device()
        of = weight.data_ptr(), weight._version, count_steps()[0], stream, device
        codes = self._codes
        if codes is None or self._of != of or self._stepped_by_hand(weight):
            self._codes = codes = None  # frees them before the next are allocated
            # Another stream has not waited for the scale.
            elsewhere = self._of[4:] == (device,) and self._of[3] != stream
            codes = self._cast(weight, keep == "fp8+t", not elsewhere)
            if type(codes.forward) is Tensor:  # not a fake one's
                self._codes, self._since = codes, -2 if in_backward() else _backward[0]
                self._of = of
                self.kept.add(self)
        return codes, keep

    def _stepped_by_hand(self, weight: Tensor) -> bool:
        """May the weight have been stepped through `.data`, which neither its version nor an optimizer tells?

        So it may if a backward ran since the codes were made, and the gradient that it left is gone.
        """
        if self._since == _backward[0]:
            return False
        leaf = weight if weight._base is None else weight._base  # of a view, the parameter
        return leaf.requires_grad and leaf.grad is None and not in_backward()

    def _cast(self, weight: Tensor, backward: bool, follow: bool = False) -> WeightCodes:
        if not torch.compiler.is_compiling():
            self.casts += 1
        w = weight.detach()
        if self.squares:
            blocks = ops.cast_128x128(w, E4M3)
            codes = WeightCodes(*blocks[2:], *blocks[:2]) if self.turned else WeightCodes(*blocks)
            return codes if backward else codes._replace(backward=codes.backward.new_empty((0, 0)))
        layouts = not self.turned or backward, self.turned or backward
        if follow and self.last_scale is not None:
            plain, turned, scale = ops.recast(w, E4M3, self.last_scale.handle, *layouts)
        else:
            plain, scale, turned, _ = cast_matrix(w, E4M3, None, *layouts)
        if self.turned:
            plain, turned = turned, plain
        return WeightCodes(plain, scale, turned, scale)

    @property
    def weight(self) -> Tensor | None:
        """The weight, while it lives."""
        return self._weight()  # type: ignore[no-any-return]

    def follow(self, scale: Tensor | None) -> None:
        """Let the next cast take this scale if it fits, its own if that is None; kept codes are freed."""
        self._of = ()
        self.forget()
        if self.last_scale and (weight := self._weight()) is not None:
            self.last_scale.on(weight.device)[0] = 0.0 if scale is None else scale

    def forget(self) -> None:
        """Free the codes."""
        self._codes = None  # the scale still serves: a cast looks whether it does


class How(NamedTuple):
    """What the backward of one product needs to know, in values that torch.compile takes for constants."""

    turned: bool  # the weight is [in, out]
    mode: str  # what WeightCache.codes said
    formats: str  # a key of FORMATS
    fp8_recipe: str
    g_state: int  # the handle of a DelayedState, -1 if the recipe has none
    train: bool
    dtype: torch.dtype  # of the output
    fast: bool  # sum the forward product with fewer bits
    probe: Any = None  # a monitor's, while it samples; never in a graph

    @property
    def squares(self) -> bool:
        """Does the weight have a scale for each 128×128?"""
        return self.fp8_recipe == "blockwise"


class Products:
    """How the products of a layer are made: formats, the recipe of their scales, and the codes of its weight."""

    chooser: Any = None  # of select="auto": nn/select.py
    graph_state: Any = None  # that of the layer whose cast of the same input eager mode found last
    probe: Any = None  # a monitor's, while it samples: monitor.py

    def __init__(self, weights: WeightCache, recipe: Recipe, layer: str = "") -> None:
        self.weights = weights
        self.layer = layer  # its name in the model
        self.fp8_recipe = recipe.fp8_recipe
        # Blocks of 128 have no use for the range of E5M2.
        self.name = "e4m3" if recipe.fp8_recipe == "blockwise" else recipe.fp8_format
        self.formats = FORMATS[self.name]
        self.fast = bool(recipe.fp8_fast_accum)
        self.x_state = self.g_state = None
        if recipe.fp8_recipe == "delayed":
            history = recipe.amax_history_len, recipe.fp8_margin
            latest = recipe.amax_compute_algo == "most_recent"
            self.x_state, self.g_state = (DelayedState(*history, latest) for _ in range(2))
            if (weight := weights.weight) is not None:
                # now: not in the memory of a graph that is being captured
                for state in (self.x_state, self.g_state):
                    state.on(weight.device)

    def how(self, mode: str, train: bool, dtype: torch.dtype) -> How:
        """Return what backward needs to know."""
        state = -1 if self.g_state is None else self.g_state.handle
        probe = self.probe if train and not torch.compiler.is_compiling() else None
        turned = self.weights.turned
        return How(turned, mode, self.name, self.fp8_recipe, state, train, dtype, self.fast, probe)

    def __str__(self) -> str:
        return f"{self.name}, {self.fp8_recipe}"


def codes_for_backward(
    weight: Tensor, codes: Tensor, scale: Tensor, how: How
) -> tuple[Tensor, Tensor]:
    """Return the codes [in, out] of a weight and their scale, of what forward saved."""
    if how.mode == "fp8":
        return ops.transpose(codes), scale
    return (codes, scale) if how.mode == "fp8+t" else _cast_for_backward(weight, how)


def _cast_for_backward(weight: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Cast a weight for the backward product alone."""
    if how.fp8_recipe == "blockwise":
        codes, scale, codes_t, scale_t = ops.cast_128x128(weight.detach(), E4M3)
        return (codes, scale) if how.turned else (codes_t, scale_t)
    both = cast_matrix(weight.detach(), E4M3, None, how.turned, not how.turned)
    return (both.codes if how.turned else both.codes_t), both.scale


@cache
def count_steps() -> list[int]:
    """Return a count, kept up to date, of the steps of all optimizers since the first call; each frees kept codes."""
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1
        with suppress(KeyError):  # none is left, or another thread took it
            while True:
                WeightCache.kept.pop().forget()

    register_optimizer_step_post_hook(add)
    return count


def _stream(x: Tensor) -> int:
    return int(torch._C._cuda_getCurrentRawStream(x.get_device())) if x.is_cuda else 0


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
