"""Casts of the operands of FP8 products: a layer's input, its weight, and the gradient of its output.

    operand    cast                                                       kept
    input      once for all layers of a model that read it                transposed codes, until backward
    weight     in every forward; in backward again, in the other layout   its scale, until backward
    gradient   once, both layouts                                         nothing

No codes outlive a forward and its backward, so no codes can be those of an earlier weight. Backward casts with the
scale that forward found, and so reads the weight once; what it holds of a weight in between is the weight itself, as
torch does. For inputs of few rows (`FEW_ROWS`), where reading a weight again would take a larger share of the time,
one kernel writes both layouts in forward and autograd keeps the second: one byte an element until backward. It does so
under torch.compile as well, where casts are part of the graph and Inductor joins the search for the largest magnitude
to whatever made the tensor.

A weight is read once in forward too where its scale can be guessed. With delayed scaling it is cast with the scale of
its last cast while that fits (`ops.recast`). With current scaling a parameter whose version did not change is cast
with the scale of its last cast, as in a further micro-batch; the kernel finds out whether that is its own, and casts
again if it is not. So a wrong guess costs time and changes no bit.

The layers of a model share an `InputCodes`, which holds the codes of the activation cast last until the next one is
cast, backward begins, or the activation goes. A mark on the activation itself says that they are its own; contents,
stream, formats and recipe have to be those of then. Leaves of autograd are cast by each layer: they are what users
write to without a trace (through `.data`, NumPy, collectives), and the static inputs of CUDA graphs.

A fused RMSNorm (`rmsnorm.py`) leaves the magnitudes of its output as another attribute of it, which spares the cast
behind it a pass over the same values.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.formats import E4M3, E5M2, MiniFloat
from fp8stack.kernels import ops
from fp8stack.kernels.reference.delayed_state import DelayedState
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

FEW_ROWS = 4096
"""Up to so many rows of input, backward's codes of the weight are made in forward and kept."""


class Options(NamedTuple):
    """How one product and its backward are made, in values that torch.compile takes for constants."""

    turned: bool  # the weight is [in, out]
    formats: str  # a key of FORMATS
    fp8_recipe: str
    g_state: int  # the handle of a DelayedState, -1 if the recipe has none
    train: bool
    dtype: torch.dtype  # of the output
    fast: bool  # sum the forward product with fewer bits
    inputs: InputCodes | None = None  # what backward empties first; never in a graph
    probe: Any = None  # a monitor's, while it samples; never in a graph


class Products:
    """How the products of a layer are made: formats, the recipe of their scales, and its histories."""

    chooser: Any = None  # of select="auto": select.py
    graph_state: Any = None  # that of the layer whose cast of the same input eager mode found last
    probe: Any = None  # a monitor's, while it samples: monitor.py
    last_weight: tuple[Any, Tensor] | None = None  # a key of its last cast, and the scale of then

    def __init__(
        self,
        recipe: Recipe,
        layer: str = "",  # its name in the model
        device: torch.device | None = None,  # where histories are made now, not at the first cast
        turned: bool = False,  # the weight is [in, out]
        inputs: InputCodes | None = None,  # what the layers of a model share
        w_state: WeightScale | None = None,  # what layers of one weight share
    ) -> None:
        self.layer, self.turned = layer, turned
        self.inputs = inputs or InputCodes()
        self.fp8_recipe = recipe.fp8_recipe
        # Blocks of 128 have no use for the range of E5M2.
        self.name = "e4m3" if recipe.fp8_recipe == "blockwise" else recipe.fp8_format
        self.formats = FORMATS[self.name]
        self.fast = bool(recipe.fp8_fast_accum)
        self.x_state: DelayedState | None = None
        self.g_state: DelayedState | None = None
        self.w_state: WeightScale | None = None
        if recipe.fp8_recipe == "delayed":
            history = recipe.amax_history_len, recipe.fp8_margin
            latest = recipe.amax_compute_algo == "most_recent"
            self.x_state, self.g_state = (DelayedState(*history, latest) for _ in range(2))
            self.w_state = w_state or WeightScale()
            if device is not None:  # a CUDA graph that is captured later holds their addresses
                for state in (self.x_state, self.g_state, self.w_state):
                    state.on(device)

    def options(self, train: bool, dtype: torch.dtype) -> Options:
        """Return what forward and backward need to know."""
        state = -1 if self.g_state is None else self.g_state.handle
        eager = not torch.compiler.is_compiling()
        return Options(
            self.turned, self.name, self.fp8_recipe, state, train, dtype, self.fast,
            self.inputs if eager else None, self.probe if train and eager else None,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.name}, {self.fp8_recipe}"

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the last scale, as a copy's weight may come to another device, and a monitor's probe."""
        left_out = ("last_weight", "probe")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}


class Operand(NamedTuple):
    """A matrix in FP8, in the layouts that were asked for (the others are empty); sizes are multiples of 16."""

    codes: Tensor  # [rows, cols]
    scale: Tensor  # float32, 0-d, or one for each block
    codes_t: Tensor  # [cols, rows]
    scale_t: Tensor


def cast_matrix(
    x: Tensor, fmt: MiniFloat, fmt_t: MiniFloat | None = None,  # of the transpose, if another
    codes: bool = True, transposed: bool = True, amax: Tensor | None = None,  # as `ops.cast` takes it
) -> Operand:  # fmt: skip
    """Quantize a matrix [..., cols], read as [rows, cols], with one scale, its own."""
    if torch.compiler.is_compiling() and x.numel():
        amax = x.abs().amax().float()  # here, where Inductor needs no kernel for it
    if fmt_t is None or fmt_t is fmt or not codes or not transposed:
        own = fmt if codes or fmt_t is None else fmt_t
        plain, turned, scale = ops.cast(x, own, codes, transposed, amax)
        return Operand(plain, scale, turned, scale)
    plain, _, scale = ops.cast(x, fmt, True, False, amax)
    _, turned, scale_t = ops.cast(x, fmt_t, False, True, amax)
    return Operand(plain, scale, turned, scale_t)


# --- inputs


class InputCodes:
    """The codes of the activation that the layers of one model cast last; copies of a model begin without."""

    # The mark's id, what they are valid for, the operand and its history; read and written as one.
    last: tuple[int, Any, Operand, DelayedState | None] | None = None

    def __reduce__(self) -> Any:
        return InputCodes, ()


class _Mark:
    """An attribute of the activation that the codes are of: they go when it goes."""

    def __init__(self, inputs: InputCodes) -> None:
        self.inputs = inputs

    def __del__(self) -> None:
        last = self.inputs.last
        if last is not None and last[0] == id(self):
            self.inputs.last = None

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # what weights_only lets in, should the activation be saved


def cast_input(x: Tensor, products: Products, train: bool, transposed: bool) -> Operand:
    """Return the operand of `x` [..., cols]; that of the last call if it was for the same tensor."""
    if torch.compiler.is_compiling():
        return _cast_x(x.detach(), products, train, transposed)
    if x.is_leaf or not torch.is_grad_enabled():
        return _cast_x(x, products, train, transposed)
    inputs, attributes = products.inputs, x.__dict__
    key = *_moment(x), products.formats, products.fp8_recipe, train
    mark, last = attributes.get("_fp8stack_mark"), inputs.last
    if last is not None and last[0] == id(mark) and last[1] == key:
        operand, products.graph_state = last[2:]
        if operand.codes_t.numel() or not transposed:
            return operand
    inputs.last = last = None  # frees the codes before the next are allocated
    operand = _cast_x(x, products, train, transposed)
    products.graph_state = products.x_state
    mark = attributes["_fp8stack_mark"] = _Mark(inputs)
    inputs.last = id(mark), key, operand, products.x_state
    return operand


def note_parts(x: Tensor, parts: Tensor) -> None:
    """Note the magnitudes of the parts of `x`, int32 [a power of two], for its cast; not under torch.compile."""
    if not x.is_inference():  # which has no version
        x.__dict__["_fp8stack_parts"] = _moment(x), parts


def _parts_of(x: Tensor) -> Tensor | None:
    """Return what was noted of this very tensor, unless it changed since."""
    moment, parts = x.__dict__.get("_fp8stack_parts", (None, None))
    return parts if moment is not None and moment == _moment(x) else None


def _moment(x: Tensor) -> tuple[int, int, int, bool]:
    """Return numbers that are others wherever what was found out about `x` is not to be used."""
    # The id, since a copy has the attributes of the tensor, and bare products share what is known of a weight. Another
    # stream has not waited for what was found, and a CUDA graph, replayed with other contents, must not begin with it.
    return id(x), x._version, _stream(x), _capturing(x)


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


# --- weights


class WeightScale(DelayedState):
    """The scale of a weight's last cast under delayed scaling, which the next cast takes while it fits."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stream: int | None = None  # of the last cast

    def __reduce__(self) -> Any:
        return WeightScale, ()

    def serves(self, weight: Tensor, train: bool) -> bool:
        """Return whether the cast of `weight` that comes now may take the scale, and leave its own."""
        if torch.compiler.is_compiling() or not train:
            return train  # in evaluation a weight has its own
        before, self.stream = self.stream, _stream(weight)
        # Another stream has not waited for the scale, and a CUDA graph must not begin with one from before it.
        known = before is None or before == self.stream
        return known and not _capturing(weight) and not torch.is_inference_mode_enabled()


def cast_weight(
    weight: Tensor, products: Products, train: bool, backward: bool, rows: int
) -> Operand:
    """Return the operand [out, in] of `weight` as it is now, its transpose only where backward's codes are kept.

    `backward` says that there will be a product for the gradient of the input, which has so many `rows`.
    """
    compiling = torch.compiler.is_compiling()
    if backward and not compiling:
        # A rank must keep nothing of FSDP's whole weights, which it could have in any process group.
        ranks = torch.distributed
        backward = rows <= FEW_ROWS and not (ranks.is_available() and ranks.is_initialized())
    w, turned = weight.detach(), products.turned
    if products.fp8_recipe == "blockwise":
        blocks = ops.cast_128x128(w, E4M3)
        blocks = (*blocks[2:], *blocks[:2]) if turned else blocks
        return _without_t(Operand(*blocks), backward)
    layouts = not turned or backward, turned or backward
    state = products.w_state
    if state is not None and state.serves(weight, train):
        plain, plain_t, scale = ops.recast(w, E4M3, state.handle, *layouts)
    elif compiling or not train or not isinstance(weight, nn.Parameter) or weight.is_inference():
        plain, scale, plain_t, _ = cast_matrix(w, E4M3, None, *layouts)
    else:
        # Versions miss writes through `.data`, so this is a guess: the kernel looks whether the scale is the weight's.
        key, last = (weight.get_device(), *_moment(weight)), products.last_weight
        if last is not None and last[0] == key and type(last[1]) is Tensor:
            plain, plain_t, scale = ops.recast_with(w, E4M3, last[1], *layouts, exact=True)
        else:
            plain, plain_t, scale = ops.cast(w, E4M3, *layouts)
        # Not of a cast that is captured: its graph's memory may be gone when the next graph is.
        products.last_weight = None if key[-1] else (key, scale)
    if turned:
        plain, plain_t = plain_t, plain
    return Operand(plain, scale, plain_t, scale)


def weight_for_backward(
    weight: Tensor, codes: Tensor, scale: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Return the codes [in, out] of a weight and their scale, of the codes (or none) and scale that forward saved."""
    if codes.numel():
        return codes, scale
    w, turned = weight.detach(), options.turned
    if options.fp8_recipe == "blockwise":
        plain, plain_scale, plain_t, scale_t = ops.cast_128x128(w, E4M3)
        return (plain, plain_scale) if turned else (plain_t, scale_t)
    plain, plain_t, scale = ops.recast_with(w, E4M3, scale, turned, not turned)
    return (plain if turned else plain_t), scale


# --- gradients


def cast_gradient(grad: Tensor, options: Options, need_x: bool, need_w: bool) -> Operand:
    """Return the operand of a layer's incoming gradient [..., cols]."""
    if options.inputs is not None:
        options.inputs.last = None
    fmt = FORMATS[options.formats].g
    if options.fp8_recipe == "current":
        return cast_matrix(grad, fmt, None, need_x, need_w)
    if options.fp8_recipe == "blockwise":
        return Operand(*ops.cast_1x128(grad, fmt))
    codes, turned, scale = ops.cast_delayed(grad, fmt, options.g_state, options.train, False)
    return Operand(codes, scale, turned, scale)


def in_backward() -> bool:
    """Is autograd running, which makes a forward a recomputation?"""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _stream(x: Tensor) -> int:
    return int(torch._C._cuda_getCurrentRawStream(x.get_device())) if x.is_cuda else 0


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
