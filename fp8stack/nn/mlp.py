"""MLPs whose activation and its gradients exist in FP8 only.

    down(act(gate(x)) × up(x))  or  down(act(up(x)))        act: SiLU, GELU, its tanh form, ReLU; biases or none

The activation is written in FP8 by the kernel that computes it, and its gradients likewise (`kernels/activation.py`): a
step moves half the bytes for them. Of the activation nothing is kept: backward, which reads gate and up anyway, writes
the transposed codes that the product for the weight's gradient wants; torch keeps it and act(gate).

`fuse` takes a module by what it computes, whatever the names of its layers: it has two or three FP8 layers, owns
nothing but their weights and biases, and its forward, run on random weights in training and evaluation, on small inputs
and large ones, gives the numbers of a formula and its gradients. So a block with dropout, limits of values, parameters
of its own, a hook on an inner layer, modules inside inner modules or another activation is left as it is, and so is one
that sets attributes. Inner modules that are replaced later, or get a hook or dropout, are called; other attributes that
change later are not looked at. The rows from which on FP8 pays are those of the block, for all its layers: see
`select.py`. RMSNorms are fused too: see `rmsnorm.py`. On a GPU `initialize` calls `fuse`.

Limits: blocks with biases need sizes in multiples of 16.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.kernels.reference.activation import ACTIVATIONS
from fp8stack.kernels.reference.cast import ALIGNMENT

from . import casts, linear
from .bf16_storage import output_dtype
from .layer_kinds import sizes_of
from .mixin import TESTED, Fused, fuse_modules, has_hooks, run_with
from .rmsnorm import fuse_norms
from .select import least_rows_of_mlp

RECIPES = ("current", "tokenwise", "delayed")  # of scales, that blocks are fused with


class Formula(NamedTuple):
    """What a block was found to compute."""

    children: dict[str, nn.Module | None]  # its submodules at that time
    layers: tuple[str, ...]  # the names of gate, up and down, or of up and down
    activation: str  # of the first one


def fuse(model: nn.Module, skipped: Container[nn.Module] = ()) -> list[str]:
    """Fuse the MLPs and the RMSNorms of a model with native FP8 layers, but for those that are skipped.

    Returns their names. `fp8stack.restore` undoes it.
    """
    if not any(isinstance(module, linear.Fp8Layer) for module in model.modules()):
        return []
    blocks = fuse_modules(model, FusedMLP, _formula_of, skipped)
    for module in map(model.get_submodule, blocks):
        layers = [getattr(module, name) for name in vars(module)[TESTED].layers]
        if all(layer.products.least_rows is not None for layer in layers):
            least = least_rows_of_mlp([sizes_of(layer) for layer in layers])
            for layer in layers:
                layer.products.least_rows = least
    return [*blocks, *fuse_norms(model, skipped)]


class FusedMLP(Fused):
    """Mixed into the class of a block, whose `forward` it replaces."""

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return the block's output of the one argument x: [..., features] -> [..., features]."""
        # None: made anew by its class, as slices of a Sequential are
        formula: Formula | None = vars(self).get(TESTED)
        inner: dict[str, Any] = self._modules
        # What was replaced or added since, has a hook or drops values is called.
        if formula is not None and inner == formula.children and len(given) == 1 and not named:
            layers: list[Any] = [inner[name] for name in formula.layers]
            pay = (linear.is_fp8_layer(m) and m.products.pays(given[0]) for m in layers)
            changed = (has_hooks(m) or vars(m).get("p") for m in inner.values() if m)
            if all(pay) and not any(changed) and _can_join(layers):
                with torch._C.DisableTorchFunction():  # see Fp8Layer
                    return _mlp(given[0], layers, formula.activation)
        result: Tensor = self.plain_forward(*given, **named)
        return result


def _can_join(layers: list[Any]) -> bool:
    """Is there nothing to the layers but products, made alike, and biases, of all or of none?"""
    return len(layers) > 0 and all(  # Dynamo of torch 2.11 knows no bool() of a list
        _kind(layer) == _kind(layers[0])
        and layer.products.fp8_recipe in RECIPES
        and casts.FORMATS[layer.products.name].x is E4M3
        and not layer.products.in_bf16
        # a sampled step runs them one by one
        and (torch.compiler.is_compiling() or layer.products.probe is None)
        for layer in layers
    )


def _kind(layer: linear.Fp8Layer) -> tuple[Any, ...]:
    """Return what layers that are joined have in common."""
    of = layer.products
    return layer.bias is None, layer.training, of.turned, of.name, of.fast, of.fp8_recipe


def _formula_of(module: nn.Module) -> Formula | None:
    """Return what the module computes in training of the weights of its layers alone, if that is a formula above.

    Its own forward is run on small layers with random weights in the place of its own, which may be zero.
    """
    layers_of = module._modules.items()
    named: dict[str, Any] = {name: m for name, m in layers_of if linear.is_fp8_layer(m)}
    layers = [*named.values()]
    if len(layers) not in (2, 3) or next(module.buffers(), None) is not None:
        return None
    owned = {id(p) for p in module.parameters()}
    alone = owned == {id(p) for layer in layers for p in layer.parameters()}
    biased = layers[0].bias is not None
    odd = biased and any(n % ALIGNMENT for layer in layers for n in layer.weight.shape)
    inner = [m for m in module._modules.values() if m is not None]
    watched = any(has_hooks(m) or m._modules for m in inner)
    if odd or watched or not (alone and _can_join(layers)):
        return None
    for names in permutations(named):
        *first, down = (named[name] for name in names)
        sizes, hidden = [sizes_of(m) for m in first], sizes_of(down)[1]
        fits = all(size == (hidden, sizes[0][1]) for size in sizes)
        if fits and (activation := _activation_of(module, [*first, down], biased)):
            return Formula({**module._modules}, names, activation)
    return None


def _activation_of(module: nn.Module, layers: list[linear.Fp8Layer], biased: bool) -> str:
    """Return the activation with which the module computes the formula of its layers in this order, if there is one."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        sizes = [(32, 48)] * (len(layers) - 1) + [(48, 32)]
        small = [nn.Linear(*size, biased, "cpu", torch.float32) for size in sizes]
        x = 3 * torch.randn(2, 16, 32, device="cpu", dtype=torch.float32)
        places: dict[int, Any] = {id(a): b for a, b in zip(layers, small, strict=True)}
        fitting = [*ACTIVATIONS]
        # In evaluation too; of large inputs limits of values show.
        for given, train in ((x, True), (x, False), (100 * x, True), (x[0], True)):
            given = given.detach().requires_grad_()
            found = run_with(module, given, places, training=train)
            fitting = [name for name in fitting if _is_formula(found, given, small, name)]
        for dtype in (torch.bfloat16, torch.float16):
            nn.ModuleList(small).to(dtype)
            if getattr(run_with(module, x.to(dtype), places), "dtype", None) is not dtype:
                return ""
    return fitting[0] if fitting else ""


def _is_formula(found: Any, x: Tensor, layers: list[nn.Linear], activation: str) -> bool:
    """Are these the numbers of the formula, of x, and its gradients?"""
    gate, *up, down = layers
    h = ACTIVATIONS[activation](gate(x))
    expected = down(h * up[0](x) if up else h)
    if not isinstance(found, Tensor) or found.shape != expected.shape or not found.requires_grad:
        return False
    leaves = [x, *(p for layer in layers for p in layer.parameters())]
    how: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    ours = found, *torch.autograd.grad(found.sum(), leaves, **how)
    theirs = expected, *torch.autograd.grad(expected.sum(), leaves, **how)
    # Some classes spell GELU out, which takes other roundings.
    return found.dtype is x.dtype and all(
        a is not None and torch.allclose(a, b, 1e-4, 1e-5 * float(b.detach().abs().max()))
        for a, b in zip(ours, theirs, strict=True)
    )


def _mlp(x: Tensor, layers: list[linear.Fp8Layer], activation: str) -> Tensor:
    first = layers[0]
    linear.check_input(
        x, first.weight.shape[0 if first.products.turned else 1], first.products.layer
    )
    dtype = output_dtype(x)
    weights = [layer.weight for layer in layers]
    backward = x.requires_grad or any(weight.requires_grad for weight in weights)
    options = [layer.products.options(first.training, dtype, backward) for layer in layers]
    biases = [layer.bias for layer in layers]
    return _compute(x, weights, biases, activation, options)


@casts.operator("mlp(Tensor x, Tensor[] weights, Tensor?[] biases, str activation")
def _compute(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    options: list[casts.Options],
) -> Tensor:
    grad = torch.is_grad_enabled()
    x8 = casts.cast_input(x, options[0], grad)
    operands: list[Tensor] = []
    for weight, own in zip(weights, options, strict=True):
        operands += casts.cast_weight(weight, own, grad, x8.codes.shape[0])[:3]
    state, dtype, again = options[-1].x_state, options[0].dtype, options[0].recomputes(x)
    h_scaling = ([] if state < 0 else [state], options[0].train and not again, again)
    # to which autocast casts those of torch's layers
    biases = [bias if bias is None else bias.to(dtype) for bias in biases]
    settings = activation, h_scaling, options
    result: Tensor = _MLP.apply(x, *weights, *biases, *x8, *operands, settings)
    return result


class _MLP(torch.autograd.Function):
    """The whole block; saves the codes of x, gate and up as they are, and the activation's scale."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., in]
        # weights, all [out, in] or all [in, out], of gate, up and down, or of up and down; their biases [out] or None;
        # the Operand of x; codes, scale and backward's
        # codes of each weight; the activation, of, update and again of `ops.activation_cast`,
        # the Options
        *tensors_and_settings: Any,
    ) -> Tensor:  # [..., out]
        *given, settings = tensors_and_settings
        activation, h_scaling, options = settings
        count = len(options)
        weights, biases = given[:count], given[count : 2 * count]
        x_codes, x_scale, x_codes_t, x_scale_t, *operands = given[2 * count :]
        codes, scales = operands[::3], operands[1::3]
        rows, dtype = x.numel() // max(x.shape[-1], 1), options[0].dtype
        turned = int(options[0].turned)
        inputs = []
        for i, weight in enumerate(weights[:-1]):
            fast = options[i].fast
            y = linear.product(x_codes, x_scale, codes[i], scales[i], dtype, fast, biases[i])
            # Rows of padding have the bias, too, and it may be the largest of all.
            padded = biases[i] is None
            inputs.append(y if padded else linear.crop(y, (rows, weight.shape[turned])))
        gate, up = inputs[0], inputs[1] if count == 3 else None
        if options[0].fp8_recipe == "tokenwise":
            h_codes, each = ops.activation_cast_rows(gate, up, activation, E4M3)
            # that of the largest magnitude, for backward
            h_scale = each.amax() if each.numel() else each.new_zeros(())
        else:
            h_codes, h_scale = ops.activation_cast(gate, up, activation, E4M3, *h_scaling)
            each = h_scale
        y = linear.product(
            h_codes, each, codes[-1], scales[-1], dtype, options[-1].fast, biases[-1]
        )
        ctx.settings, ctx.x_shape, ctx.x_dtype = settings, x.shape, x.dtype
        ctx.unused = len(given) - 2 * count + 1
        ctx.save_for_backward(
            x_codes_t, x_scale_t, h_scale, *inputs, *weights, *operands[2::3], *scales
        )
        return linear.crop(y, (*x.shape[:-1], weights[-1].shape[turned]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return linear.backward_once(_backward, ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    activation, _, options = ctx.settings
    count = len(options)
    x_codes_t, x_scale_t, h_scale, *saved = ctx.saved_tensors
    inputs, saved = saved[: count - 1], saved[count - 1 :]
    weights, codes, scales = saved[:count], saved[count : 2 * count], saved[2 * count :]
    (need_x, *need), learn = casts.runs(ctx, 1 + count, options[0].traced(grad))
    need_b = ctx.needs_input_grad[1 + count : 1 + 2 * count]
    gradients: list[Tensor | None] = [None] * (2 * count)
    d = casts.cast_gradient(grad, options[-1], True, need[-1], learn)
    d_codes = casts.weight_for_backward(weights[-1], codes[-1], scales[-1], options[-1])
    dh = linear.product(d.codes, d.scale, *d_codes, options[-1].dtype)
    gate, up = inputs[0], inputs[1] if count == 3 else None
    states = [each.g_state for each in options[:-1] if each.g_state >= 0]
    found = ops.activation_backward_cast(
        linear.crop(dh, gate.shape), gate, up, h_scale, activation, casts.FORMATS[options[0].formats].g, states,
        learn and options[0].train, any(need_b),
    )  # fmt: skip
    h_t, *sums = found[3 * count - 3 :]
    if need[-1]:
        gradients[count - 1] = linear.weight_gradient(
            (d.codes_t, d.scale), (h_t, h_scale), weights[-1].dtype, weights[-1].shape, options[-1]
        )
    dx = None
    for i, weight in enumerate(weights[:-1]):
        g_codes, g_codes_t, g_scale = found[3 * i : 3 * i + 3]
        if need_x:
            w_codes = casts.weight_for_backward(weight, codes[i], scales[i], options[i])
            part = linear.product(g_codes, g_scale, *w_codes, ctx.x_dtype)
            dx = part if dx is None else dx + part
        if need[i]:
            gradients[i] = linear.weight_gradient(
                (g_codes_t, g_scale), (x_codes_t, x_scale_t), weight.dtype, weight.shape, options[i]
            )
        if need_b[i]:
            gradients[count + i] = sums[i].to(options[i].dtype)
    if need_b[-1]:
        gradients[-1] = linear.bias_gradient(grad, options[-1].dtype)
    return None if dx is None else linear.crop(dx, ctx.x_shape), *gradients, *(None,) * ctx.unused
