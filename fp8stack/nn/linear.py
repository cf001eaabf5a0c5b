"""FP8 layers over `torch._scaled_mm`, on a CPU plain torch; what is cast and kept, `casts.py` says.

    forward    y  = x  @ w.T     E4M3 × E4M3
    backward   dx = dy @ w       E5M2 × E4M3   (hybrid; E4M3 × E4M3 with fp8_format="e4m3")
               dw = dy.T @ x     the same

Each operand is quantized with one scale (or one a block), and the products are accumulated in float32. FP8 GEMMs want
every dimension in multiples of 16, tokens in multiples of 64 to be fast, and on Ada and Hopper both operands laid out
along the inner dimension: one kernel writes an operand's codes padded and in both layouts (`kernels/cast.py`), so that
a layer takes nine launches with current scaling, two for each operand and three products; eleven where its weight is
cast again in backward. What is saved for backward is the transposed FP8 input, one byte an element where a bf16 layer
saves two.

The layer is an `nn.Linear` or a Conv1D whose class was changed: its parameters, hooks, name and state_dict are
untouched, and changing the class back undoes it. A weight stored in bfloat16 (O2) is read as it is; the output has the
dtype of the input, or autocast's where autocast is on.

Under torch.compile a layer is one operator (`casts.operator`): Dynamo would take 0.1 s to trace it. AOTAutograd runs
it, autograd.Function included: Inductor gets the casts and the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ModelError
from fp8stack.formats import E4M3, FLOATS
from fp8stack.kernels import ops
from fp8stack.kernels.reference.cast import ALIGNMENT
from fp8stack.tensor_kinds import is_sharded

from . import casts
from .bf16_storage import Layer, output_dtype, stored_linear
from .frozen import values_of
from .layer_kinds import sizes_of, weight_of
from .mixin import mixed_class
from .narrow import narrowed

_FUSED_BIAS = (torch.bfloat16, torch.float16)
unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default


class Fp8Layer(Layer):
    """A layer that multiplies in FP8; `convert.py` mixes it into the class of a Linear or a Conv1D."""

    mixin_prefix = "Fp8"
    products: casts.Products

    def multiply(self, input: Tensor) -> Tensor:
        products = self.products
        # Under the mode of `matmuls.py`, each torch call in here would go through Python, and products of a
        # parametrization, or those that do not pay, be made in FP8.
        with torch._C.DisableTorchFunction():
            if products.pays(input):
                return fp8_matmul(input, self.weight, self.bias, products, self.training)
            weight = weight_of(self)
            if torch.compiler.is_compiling() or input.dtype is not torch.float32:
                return stored_linear(input, weight, self.bias)
            # Autocast is on, or it would pay.
            return nn.functional.linear(narrowed(input, products), weight, self.bias)

    def extra_repr(self) -> str:
        own = super().extra_repr() or "nf={}, nx={}".format(*sizes_of(self))
        return f"{own}, " + ("bf16" if self.products.finished else f"fp8={self.products}")

    __repr__ = nn.Module.__repr__  # Conv1D's own leaves out what is told here


def is_fp8_layer(module: nn.Module | None) -> bool:
    """Return whether a module multiplies in FP8 and nothing made a class over its own."""
    return isinstance(module, Fp8Layer) and type(module) is module.mixed_class


class Bf16Layer(Layer):
    """A layer that multiplies in bfloat16: what a level uses on a device without FP8 GEMMs."""

    mixin_prefix = "Bf16"
    layer_name = ""  # in the model

    def multiply(self, input: Tensor) -> Tensor:
        return bf16_matmul(input, weight_of(self), self.bias, self.layer_name)


def bf16_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, layer: str) -> Tensor:
    """Return x @ weight.T + bias [..., out], multiplied in bfloat16, in the dtype of x or autocast's.

    x is [..., in], weight [out, in], bias [out].
    """
    check_input(x, weight.shape[1], layer, fp8=False)
    dtype = output_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        output = nn.functional.linear(x.bfloat16(), weight.bfloat16()).to(dtype)
    return output if bias is None else output + bias.to(dtype)


Fp8Linear = mixed_class(Fp8Layer, nn.Linear)
Bf16Linear = mixed_class(Bf16Layer, nn.Linear)


def fp8_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: casts.Products, train: bool
) -> Tensor:
    """Return x @ weight.T + bias [..., out], multiplied in FP8, in the dtype of x or autocast's.

    x is [..., in], weight [out, in], bias [out]. A weight [in, out], which `products` tells, gives x @ weight + bias.
    `train` says whether delayed scaling's histories move on. After `fp8stack.finish` it is a product in bfloat16.
    """
    if products.finished:
        w = weight.t() if products.turned else weight
        return bf16_matmul(x, w, bias, products.layer)
    check_input(x, weight.shape[0 if products.turned else 1], products.layer)
    backward = x.requires_grad or weight.requires_grad
    return _multiply(x, weight, bias, [products.options(train, output_dtype(x), backward)])


@casts.operator("linear(Tensor x, Tensor weight, Tensor? bias")
def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, given: list[casts.Options]) -> Tensor:
    (options,), grad = given, torch.is_grad_enabled()
    x8 = w8 = _NO_OPERAND
    kept = grad and weight.requires_grad and "wgrad" not in options.in_bf16
    if kept or "forward" not in options.in_bf16:
        x8 = casts.cast_input(x, options, kept)
        if options.probe is not None:
            # what wgrad reads has scales of squares, where forward reads nothing
            scale = x8.scale_t.t() if (squares := "forward" in options.in_bf16) else x8.scale
            options.probe("x", x, scale, casts.FORMATS[options.formats].x, squares)
    if "forward" not in options.in_bf16:
        kept = grad and x.requires_grad and "dgrad" not in options.in_bf16
        w8 = casts.cast_weight(weight, options, kept, x8.codes.shape[0])
        if options.probe is not None:
            options.probe("w", values_of(weight), w8.scale, E4M3, w8.scale.ndim == 2)
    if bias is not None and options.dtype in _FUSED_BIAS:
        bias = bias.to(options.dtype)
    # What torch does in Python before it calls C++ is for functorch, and takes as long as a launch.
    apply = _Fp8Matmul.apply if torch._C._are_functorch_transforms_active() else _apply
    result: Tensor = apply(x, weight, bias, *x8, *w8, options)
    return result


_NO_OPERAND: Any = (None,) * 4


class _Fp8Matmul(torch.autograd.Function):
    """x @ w.T with FP8 operands; saves the codes of x, and those of w where backward does not make them.

    A product that is in bfloat16 reads what its operands were cast from, which is saved then.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., in]
        weight: Tensor,  # [out, in], or [in, out] if options.turned
        bias: Tensor | None,  # [out]
        x_codes: Tensor,  # [rows, in]; codes are padded, see casts.Operand. None where nothing reads them
        x_scale: Tensor,
        x_codes_t: Tensor,  # [in, rows]
        x_scale_t: Tensor,
        w_codes: Tensor,  # [out, in]
        w_scale: Tensor,
        w_codes_t: Tensor,  # [in, out], or empty: backward casts the weight again
        w_scale_t: Tensor,
        options: casts.Options,
    ) -> Tensor:  # [..., out]
        ctx.options, dtype = options, options.dtype
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # The weight is saved for its version counter too: backward after a step is an error, as without FP8. It is not
        # where the input needs no gradient: torch swaps no parameter that a graph has saved.
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        saved = x_codes_t, x_scale_t, w_codes_t, w_scale_t
        plain_x = x if weight.requires_grad and "wgrad" in options.in_bf16 else None
        ctx.save_for_backward(*saved, weight if x.requires_grad else None, plain_x)
        if "forward" in options.in_bf16:
            w = values_of(weight)
            return bf16_matmul(x, w.t() if options.turned else w, bias, "")
        size = weight.shape[1] if options.turned else weight.shape[0]
        # The product can add the bias where it has one scale a tensor and no padding.
        added = bias if size % ALIGNMENT == 0 and x_scale.ndim == 0 else None
        y = product(x_codes, x_scale, w_codes, w_scale, dtype, options.fast, added)
        y = crop(y, (*x.shape[:-1], size))
        return y if bias is None or bias is added else y + bias.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return backward_once(_backward, ctx, grad)


Gradients = tuple[Tensor | None, ...]


def backward_once(backward: Callable[..., Gradients], ctx: Any, grad: Tensor) -> Gradients:
    """Return `backward(ctx, grad)`, gradients that raise where they are differentiated themselves.

    torch's `once_differentiable` takes 5 µs for that, and lets those of a `grad` that is a constant pass for constants.
    """
    if not torch.is_grad_enabled():  # as always without create_graph=True
        return backward(ctx, grad)
    with torch.no_grad():
        gradients = backward(ctx, grad)
    refuse: Any = torch._C._functions.DelayedError(_TWICE, len(gradients))
    return tuple(refuse(*(g if g is None else g.detach().requires_grad_() for g in gradients)))


_TWICE = (
    b"second derivatives through an FP8 layer were asked for (create_graph=True), and casts to FP8 have none. "
    b"Leave the layer out with initialize(..., skip=[...]), or call fp8stack.restore(model) before."
)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_codes_t, x_scale, w_codes, w_scale, weight, x = ctx.saved_tensors
    options: casts.Options = ctx.options
    (need_x, need_w, need_b), learn = casts.runs(ctx, 3, options.traced(grad))
    x_in_fp8, w_in_fp8 = (name not in options.in_bf16 for name in ("dgrad", "wgrad"))
    dx = dw = db = None
    if (need_x and x_in_fp8) or (need_w and w_in_fp8):
        g = casts.cast_gradient(grad, options, need_x and x_in_fp8, need_w and w_in_fp8, learn)
        if options.probe is not None:
            options.probe("g", grad, g.scale, casts.FORMATS[options.formats].g, False)
    if need_x:
        if x_in_fp8:
            w_codes, w_scale = casts.weight_for_backward(weight, w_codes, w_scale, options)
            dx = product(g.codes, g.scale, w_codes, w_scale, ctx.x_dtype)
            dx = crop(dx, ctx.x_shape)
        else:
            w = values_of(weight)
            dx = _bf16_gradient(grad, w if options.turned else w.t(), ctx.x_dtype)
    if need_w:
        if w_in_fp8:
            operands = (g.codes_t, g.scale_t), (x_codes_t, x_scale)
            dw = weight_gradient(*operands, ctx.weight_dtype, ctx.weight_shape, options)
        else:
            pair = (x, grad) if options.turned else (grad, x)
            left, right = (t.reshape(-1, t.shape[-1]) for t in pair)
            dw = _bf16_gradient(left.t(), right.t(), ctx.weight_dtype)
    if need_b:
        db = bias_gradient(grad, ctx.bias_dtype)
    return dx, dw, db, *_NONE


def _bf16_gradient(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b.T, multiplied in bfloat16, in `dtype`, whatever autocast says around a backward."""
    with torch.autocast(a.device.type, enabled=False):
        return nn.functional.linear(a.bfloat16(), b.bfloat16()).to(dtype)


_NONE = (None,) * 9
_apply: Any = super(torch.autograd.Function, _Fp8Matmul).apply


def product(
    a: Tensor,  # FP8 codes [m, k], contiguous
    a_scale: Tensor,  # float32, 0-d, [m], or [m, k / 128], or of squares
    b: Tensor,  # FP8 codes [n, k], contiguous
    b_scale: Tensor,  # float32, 0-d, or [n, k / 128], or of squares
    dtype: torch.dtype,
    fast: bool = False,  # sum with fewer bits, where the GPU has a way to
    bias: Tensor | None = None,  # [n]; None with scales of blocks
) -> Tensor:  # [m, n] in dtype
    """Return (a × a_scale) @ (b × b_scale).T + bias."""
    if not a.is_cuda and torch.is_autocast_enabled("cpu"):  # which rounds what a CPU adds up
        with torch.autocast("cpu", enabled=False):
            return product(a, a_scale, b, b_scale, dtype, fast, bias)
    if a_scale.ndim == 2:
        return ops.matmul_blocks(a, a_scale, b, b_scale, dtype)
    if a_scale.ndim == 1 or not a.is_cuda:
        y: Tensor = ops.matmul_rows(a, a_scale, b, b_scale, dtype, fast)
    else:
        fused = bias if dtype in _FUSED_BIAS else None
        y = torch._scaled_mm(a, b.t(), a_scale, b_scale, fused, None, dtype, fast)
        bias = None if bias is fused else bias
    return y if bias is None else y + bias.to(dtype)


def weight_gradient(
    g: tuple[Tensor, Tensor],  # codes [out, rows] of the output's gradient, and scale
    x: tuple[Tensor, Tensor],  # codes [in, rows] of the input, and scale
    dtype: torch.dtype,
    shape: torch.Size,
    options: casts.Options,
) -> Tensor:
    """Return the gradient of a weight of that shape: [out, in], or [in, out] if it is turned."""
    left, right = (x, g) if options.turned else (g, x)
    return crop(product(*left, *right, dtype), shape)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of `grad` [..., cols] over its rows, added up in float32."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def crop(x: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Take the padding off a product [rows16, cols16], and give it a shape [..., cols]."""
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    if x.shape[0] != rows:
        x = x[:rows]
    if x.shape[1] != shape[-1]:
        x = x[:, : shape[-1]].contiguous()
    # Autograd lets nobody write to a view that a Function returns (nn.ReLU(inplace=True)).
    return x if len(shape) == 2 and not x._is_view() else unsafe_view(x, shape)


def check_input(x: Tensor, features: int, layer: str = "", fp8: bool = True) -> None:
    """Raise ModelError unless `x` is [..., features] in a dtype that layers cast; for FP8 a plain tensor, too."""
    if fp8 and (is_sharded(x) or x.layout is not torch.strided or x.is_nested):
        kind = "nested" if x.is_nested else "sparse"
        kind = "sharded (DTensor)" if is_sharded(x) else kind
        raise ModelError(
            f"{title(layer)} got {kind} input; FP8 takes plain tensors. Make it dense first, or leave the layer out "
            f"with {_skip(layer)}. Under tensor parallelism, call fp8stack.initialize after parallelize_module."
        )
    if x.dtype not in FLOATS:
        raise ModelError(
            f"{title(layer)} of {features} features got {x.dtype} input; it takes float32, bfloat16 and float16. "
            f"Cast it first, or leave the layer out with {_skip(layer)}."
        )
    shape = x.shape  # size(-1) takes four times as long
    if not shape or shape[-1] != features:
        raise ModelError(
            f"{title(layer)} got input of shape {tuple(shape)}; its last dimension must be {features}."
        )


def title(layer: str) -> str:
    """Return what messages call a layer of that name."""
    return f"Linear layer {layer}" if layer else "a Linear layer"


def _skip(layer: str) -> str:
    return f'skip=["{layer}"]' if layer else "skip=[...]"
