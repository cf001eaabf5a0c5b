"""SwiGLU blocks whose activation and its gradients exist in FP8 only.

    down(silu(gate(x)) × up(x))

The activation is written in FP8 by the kernel that computes it, and both gradients likewise (`kernels/swiglu.py`): a
step moves half the bytes for them. Of the activation nothing is kept: backward, which reads gate and up anyway, writes
the transposed codes that the product for the weight's gradient wants; torch keeps it and silu(gate). `fuse` finds such
blocks among a model's modules by the names of their layers and takes one only if its forward, run on random weights as
in training, gives the very numbers of the formula, and only if it owns nothing but three weights; so a block with
dropout, a bias, a parameter of its own, a hook on an inner layer or another activation is left as it is. Inner modules
that are replaced later, or get a hook, are called; other attributes that change later are not looked at. RMSNorms are
fused too: see `rmsnorm.py`. On a GPU `initialize` calls `fuse`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.kernels.reference.delayed_state import STATES

from .casts import (
    FORMATS,
    Options,
    cast_gradient,
    cast_input,
    cast_weight,
    in_backward,
    runs,
    weight_for_backward,
)
from .linear import Fp8Linear, backward_once, check_input, crop, output_dtype, product
from .mixin import TESTED, Fused, fuse_modules, has_hooks, run_with
from .rmsnorm import fuse_norms
from .select import pays

NAMES = (
    ("gate_proj", "up_proj", "down_proj"),  # Hugging Face's Llama and its kin
    ("w1", "w3", "w2"),  # Meta's
)


def fuse(model: nn.Module, skipped: Container[nn.Module] = ()) -> list[str]:
    """Fuse the SwiGLU blocks and the RMSNorms of a model with native FP8 layers, but for those that are skipped.

    Returns their names. `fp8stack.restore` undoes it.
    """
    if not any(isinstance(module, Fp8Linear) for module in model.modules()):
        return []
    blocks = fuse_modules(model, FusedSwiGLU, _is_swiglu, skipped)
    for module in map(model.get_submodule, blocks):
        vars(module)[TESTED] = dict(module.named_children())
    return [*blocks, *fuse_norms(model, skipped)]


class FusedSwiGLU(Fused):
    """Mixed into the class of a block, whose `forward` it replaces."""

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return down(silu(gate(x)) × up(x)) of the one argument x: [..., features] -> [..., features]."""
        # An activation that was replaced since, or has a hook, is called.
        inner = self._modules
        tested: dict[str, nn.Module] = vars(self)[TESTED]
        same = all(inner.get(name) is m and not has_hooks(m) for name, m in tested.items())
        layers = _layers_of(self) if same else None
        # None: an inner layer was changed since.
        if layers is None or named or len(given) != 1 or not _all_pay(given[0], layers):
            result: Tensor = self.plain_forward(*given, **named)
            return result
        return _swiglu(given[0], *layers)


def _layers_of(module: nn.Module) -> tuple[Fp8Linear, Fp8Linear, Fp8Linear] | None:
    """Return gate, up and down, if the module has such layers and they can be joined."""
    for names in NAMES:
        layers = [module._modules.get(name) for name in names]
        if all(type(layer) is Fp8Linear and _is_plain(layer, layers[0]) for layer in layers):
            return tuple(layers)  # type: ignore[return-value]
    return None


def _all_pay(x: Tensor, layers: tuple[Fp8Linear, ...]) -> bool:
    return all(pays(x, p.least_rows, p.graphed) for p in (layer.products for layer in layers))


def _is_plain(layer: Fp8Linear, first: Any) -> bool:
    """Is there nothing to the layer but the product of a weight, made as the first one's is?"""
    products = layer.products
    return (
        layer.bias is None
        and layer.training is first.training
        and products.name == first.products.name
        and products.fp8_recipe == first.products.fp8_recipe
        and products.fp8_recipe in ("current", "delayed")
        and products.formats.x is E4M3
        # a sampled step runs them one by one
        and (torch.compiler.is_compiling() or products.probe is None)
    )


def _is_swiglu(module: nn.Module) -> bool:
    """Does the module compute down(silu(gate(x)) × up(x)) in training, to the last bit, of these weights alone?

    Its own forward is run on small layers with random weights in the place of its own, which may be zero.
    """
    layers = _layers_of(module) or ()
    weights = {id(layer.weight) for layer in layers}
    owned = {id(p) for p in module.parameters()}
    alone = owned == weights and next(module.buffers(), None) is None
    if not layers or not alone or any(map(has_hooks, [*module.modules()][1:])):
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        sizes = (32, 48), (32, 48), (48, 32)
        small = [nn.Linear(*size, False, "cpu", torch.float32) for size in sizes]
        x = torch.randn(2, 16, 32, device="cpu", dtype=torch.float32)
        gate, up, down = small
        expected = down(nn.functional.silu(gate(x)) * up(x))
        places: dict[int, Any] = {id(a): b for a, b in zip(layers, small, strict=True)}
        found = run_with(module, x, places)
    return isinstance(found, Tensor) and torch.equal(found, expected)


def _swiglu(x: Tensor, gate: Fp8Linear, up: Fp8Linear, down: Fp8Linear) -> Tensor:
    check_input(x, gate.weight.shape[1], gate.products.layer)
    train = gate.training
    grad = torch.is_grad_enabled()
    dtype = output_dtype(x)
    x8 = cast_input(x, gate.products, train, grad)
    weights: list[Tensor] = []
    options: list[Options] = []
    for layer in (gate, up, down):
        weights += cast_weight(layer.weight, layer.products, train, grad, x8.codes.shape[0])[:3]
        options.append(layer.products.options(train, dtype))
    again = train and in_backward()
    state = down.products.x_state
    h_scaling = ([] if state is None else [state.handle], train and not again, again)
    result: Tensor = _SwiGLU.apply(
        x, gate.weight, up.weight, down.weight, *x8[:3], h_scaling, *weights, *options
    )
    return result


class _SwiGLU(torch.autograd.Function):
    """The whole block; saves the codes of x, gate and up, and the activation's scale."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., in]
        w_gate: Tensor,  # [hidden, in]
        w_up: Tensor,  # [hidden, in]
        w_down: Tensor,  # [out, hidden]
        x_codes: Tensor,  # [rows, in]; codes are padded, see casts.Operand
        x_scale: Tensor,
        x_codes_t: Tensor,  # [in, rows]
        h_scaling: tuple[list[int], bool, bool],  # of, update, again of `ops.swiglu_cast`
        # codes, scale and backward's codes of gate, of up and of down; then the Options of gate, up and down
        *weights_and_options: Any,
    ) -> Tensor:  # [..., out]
        g_forward, g_scale, g_backward, u_forward, u_scale, u_backward = weights_and_options[:6]
        d_forward, d_scale, d_backward, *options = weights_and_options[6:]
        dtype = options[0].dtype
        gate = product(x_codes, x_scale, g_forward, g_scale, dtype, options[0].fast)
        up = product(x_codes, x_scale, u_forward, u_scale, dtype, options[1].fast)
        codes, h_scale = ops.swiglu_cast(gate, up, E4M3, *h_scaling)
        y = product(codes, h_scale, d_forward, d_scale, dtype, options[2].fast)
        ctx.options, ctx.x_shape, ctx.x_dtype = options, x.shape, x.dtype
        if h_scaling[0] and not torch.compiler.is_compiling():
            # Backward may outlive the layers.
            ctx.g_states = [STATES[each.g_state] for each in options]
        ctx.save_for_backward(
            x_codes_t, x_scale, gate, up, h_scale, w_gate, w_up, w_down,
            g_backward, g_scale, u_backward, u_scale, d_backward, d_scale,
        )  # fmt: skip
        return crop(y, (*x.shape[:-1], w_down.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return backward_once(_backward, ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_codes_t, x_scale, gate, up, h_scale, w_gate, w_up, w_down, *codes = ctx.saved_tensors
    options: tuple[Options, Options, Options] = ctx.options
    (need_x, need_gate, need_up, need_down), learn = runs(ctx, 4)
    dx = dw_gate = dw_up = dw_down = None
    d = cast_gradient(grad, options[2], True, need_down, learn)
    d_codes = weight_for_backward(w_down, codes[4], codes[5], options[2])
    dh = product(d.codes, d.scale, *d_codes, options[2].dtype)
    states = [each.g_state for each in options[:2] if each.g_state >= 0]
    dg, dg_t, dg_scale, du, du_t, du_scale, h_t = ops.swiglu_backward_cast(
        dh, gate, up, h_scale, FORMATS[options[0].formats].g, states, learn and options[0].train
    )
    if need_down:
        dw_down = crop(product(d.codes_t, d.scale, h_t, h_scale, w_down.dtype), w_down.shape)
    if need_x:
        g_codes = weight_for_backward(w_gate, codes[0], codes[1], options[0])
        dx = product(dg, dg_scale, *g_codes, ctx.x_dtype)
        u_codes = weight_for_backward(w_up, codes[2], codes[3], options[1])
        dx = crop(dx + product(du, du_scale, *u_codes, ctx.x_dtype), ctx.x_shape)
    if need_gate:
        dw_gate = crop(product(dg_t, dg_scale, x_codes_t, x_scale, w_gate.dtype), w_gate.shape)
    if need_up:
        dw_up = crop(product(du_t, du_scale, x_codes_t, x_scale, w_up.dtype), w_up.shape)
    return dx, dw_gate, dw_up, dw_down, *(None,) * 16
