"""The experts of transformers' mixtures: grouped products in FP8 with nothing in bfloat16 between the casts.

    y[t] = sum over the experts e of token t of  weight[t, e] × down[e](act(gate[e](x[t])) × up[e](x[t]))

Why: transformers permutes the tokens to the order of their experts, multiplies, activates, multiplies, weights and
permutes back, in bfloat16, or float32 where the weights are. Casting what it permutes costs what the products save.

How. Every class of experts that transformers' registry serves (`ALL_EXPERTS_FUNCTIONS`) has the same attributes and
three arguments in the same order: tokens, the indices of their experts, and the router's weights. Such a module gets a
subclass of its class, whose forward is this:

1. `ops.route` gives each pair of token and expert a row. The rows of an expert are padded to a multiple of 16.
2. Tokens are cast first and then taken by row: a quarter of the bytes. The transposed codes that the gradients of
   weights want are written on the way.
3. If the gate is act(gate) × up, with an act that `kernels/activation.py` knows, one autograd node does it all:
   `kernels/expert_activation.py` casts the activation and its gradients, with the router's weights in them. An `act_fn`
   that is replaced later, or gets a hook, is called.
4. Otherwise (biases, GPT-OSS's limited gate, norms behind experts) the two products are nodes of their own, which cast
   the rows that they get, and what is between them is the module's own code.

The weights may be stored in bfloat16, whatever the dtype of the tokens. Scales are current ones; see `grouped.py`.

Limits: with config._experts_implementation other than "grouped_mm", "batched_mm", "eager" or None, which name
transformers' plain ways to compute the same, the module's own forward runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ModelError
from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.kernels.reference.activation import ACTIVATIONS

from . import casts, grouped, linear
from .bf16_storage import autocast_is_on, output_dtype
from .mixin import Mixin, has_hooks
from .select import LeastRows, least_rows_of_experts

TAKEN = ("grouped_mm", "batched_mm", "eager", None)
_MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate", "config")


def is_experts(module: nn.Module) -> bool:
    """Return whether the forward of a module is what transformers' registry of experts says."""
    forward: Any = getattr(type(module), "forward", None)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return isinstance(module, Fp8Experts) or (
        "get_interface" in names and all(hasattr(module, name) for name in _MARKS)
    )


def class_of_experts(module: nn.Module) -> type[nn.Module]:
    """Return the class of experts that the module is of, without what FSDP2 or fp8stack made over it."""
    classes = (cls for cls in type(module).__mro__ if cls is not Fp8Experts)
    return next(cls for cls in classes if "forward" in vars(cls))


def stacks_of(module: nn.Module) -> list[str]:
    """Return the names of the two stacks of matrices."""
    return ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]


def unfit(module: Any) -> str:
    """Return why experts are not multiplied in FP8, or an empty string."""
    if (how := _implementation(module)) not in TAKEN:
        return f'experts_implementation="{how}" has products of its own; "grouped_mm" is taken'
    stacks = [module._parameters.get(name) for name in stacks_of(module)]
    if any(stack is None or stack.dim() != 3 for stack in stacks):
        return "its weights are not two stacks of matrices"
    return next(filter(None, map(grouped.obstacle, stacks)), "")


def least_rows_of(module: Any) -> LeastRows:
    """Return from how many pairs of token and expert on FP8 is faster, if the weights are of 16 bits."""
    _, one, other = module.down_proj.shape
    return least_rows_of_experts(one, other, 3 if module.has_gate else 2, module.num_experts)


def _implementation(module: Any) -> Any:
    return getattr(module.config, "_experts_implementation", None)


class Fp8Experts(Mixin):
    """Experts that multiply in FP8; `convert.py` mixes it into their class."""

    mixin_prefix = "Fp8"
    products: tuple[casts.Products, casts.Products]
    # Its act_fn at the call, and that of ACTIVATIONS; "": what is between the products is its own code.
    tried: tuple[Any, str]
    plain_forward: Any
    argument_names: tuple[str, ...]
    down_proj: nn.Parameter

    @staticmethod
    def mixin_methods(cls: type[nn.Module]) -> dict[str, Any]:
        """Return the forward of `cls` by the name that ours calls, and what its arguments are called."""
        names = tuple(inspect.signature(cls.forward).parameters)[1:]
        return {"plain_forward": cls.forward, "argument_names": names}

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return what experts make of [tokens, in], with their indices and weights, [tokens, count]: [tokens, out]."""
        left = self.argument_names[len(given) :]
        if named and {*named} == {*left}:
            given, named = (*given, *(named[name] for name in left)), {}
        fits = len(given) == 3 and not named and isinstance(given[0], Tensor) and given[0].ndim == 2
        if fits and _implementation(self) in TAKEN and self._pays(*given[:2]):
            with torch._C.DisableTorchFunction():  # see Fp8Layer
                return self._compute(*given)
        x, dtype = given[0] if given else None, self.down_proj.dtype
        if fits and self.products[0].finished and not autocast_is_on(given[0]):
            made: Tensor = self.plain_forward(given[0].to(dtype), *given[1:])
            return made.to(given[0].dtype)
        if isinstance(x, Tensor) and x.dtype is not dtype and not autocast_is_on(x):
            raise ModelError(
                f"experts {self.products[0].layer} store their weights in {dtype} and got {x.dtype} tokens for "
                f"experts_implementation={_implementation(self)!r}, which takes one dtype. Choose "
                '"grouped_mm" and give tokens [tokens, in], their experts and weights; or call fp8stack.restore.'
            )
        result: Tensor = self.plain_forward(*given, **named)
        return result

    def _pays(self, x: Tensor, top_k_index: Tensor) -> bool:
        """Return whether FP8 is faster, by the pairs of token and expert, or the only way for these dtypes."""
        if self.products[0].finished:
            return False
        dtype = self.down_proj.dtype  # torch multiplies float32 in float32, also under autocast
        if dtype is torch.float32 or not (dtype is x.dtype or autocast_is_on(x)):
            return True
        return self.products[0].pays(x, top_k_index.numel())

    def _compute(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module: Any = self
        if not top_k_index.numel():  # zero gradients, as from transformers
            nothing = top_k_weights.sum()
            for p in self.parameters(recurse=False):
                nothing = nothing + p.flatten()[:0].sum()
            return x + nothing.to(x.dtype)
        act, activation = self.tried
        if module._modules.get("act_fn") is not act or (activation and has_hooks(act)):
            activation = ""
        ends, pairs, places = groups = ops.route(top_k_index, module.num_experts)
        first, down = (getattr(self, name) for name in stacks_of(self))
        weights, turned = top_k_weights.reshape(top_k_index.shape), module.is_transposed
        if activation:
            options = [
                grouped.grouped_options(p, self.training, output_dtype(x), turned) for p in self.products
            ]  # fmt: skip
            return _multiply(x, first, down, weights, *groups, activation, options).to(x.dtype)
        rows = torch.where(pairs[:, None] < 0, 0, x[pairs.clamp(min=0) // places.shape[1]])
        h = grouped.multiply(rows, first, turned, ends, self.products[0], self.training)
        h = _biased(module, h, stacks_of(self)[0], ends)
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        y = grouped.multiply(h, down, turned, ends, self.products[1], self.training)
        y = _biased(module, y, "down_proj", ends)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        weighted: Tensor = y[places.clamp(min=0)] * torch.where(places < 0, 0, weights)[..., None]
        return weighted.sum(1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}fp8=e4m3, current, grouped"


def activation_of(module: Any) -> str:
    """Return the activation with which a module computes act(gate) × up between its products; "": something else.

    Its gate is transformers' own, and its `act_fn` a module of torch's or transformers' without state, which a trial
    tells from others.
    """
    act, gate = vars(module)["_modules"].get("act_fn"), getattr(type(module), "_apply_gate", None)
    plain = module.has_gate and not (module.has_bias or getattr(module, "has_post_expert_norm", 0))
    own = getattr(gate, "__name__", "") != "_default_apply_gate" or "_apply_gate" in vars(module)
    if act is None or own or not plain or [*act.children(), *act.parameters(), *act.buffers()]:
        return ""
    if type(act).__module__ not in ("torch.nn.modules.activation", "transformers.activations"):
        return ""
    x = torch.linspace(-9, 9, 181, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        made = type(act).forward(act, x)  # without its hooks
    fitting = (n for n, f in ACTIVATIONS.items() if torch.allclose(made, f(x), 1e-4, 1e-5))
    return next(fitting, "")


def _biased(module: Any, y: Tensor, name: str, ends: Tensor) -> Tensor:
    """Add the bias of each row's expert."""
    if not module.has_bias:
        return y
    rows = torch.arange(len(y), device=y.device, dtype=torch.int32)
    expert = torch.searchsorted(ends, rows, right=True)
    bias: Tensor = getattr(module, f"{name}_bias")
    return y + bias[expert].to(y.dtype)


@casts.operator(
    "experts(Tensor x, Tensor first, Tensor down, Tensor weights, Tensor ends, Tensor pairs, Tensor places, "
    "str activation"
)
def _multiply(*given: Any) -> Tensor:
    result: Tensor = _Experts.apply(*given)
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [tokens, in]
        first: Tensor,  # [experts, 2 · hidden, in], or [experts, in, 2 · hidden] if its options.turned
        down: Tensor,  # [experts, in, hidden], or [experts, hidden, in]
        weights: Tensor,  # [tokens, count]
        ends: Tensor,  # these three of `ops.route`
        pairs: Tensor,
        places: Tensor,
        activation: str,
        options: list[casts.Options],
    ) -> Tensor:  # [tokens, in]
        own, of_down = options
        dtype = own.dtype
        codes, x_scale, _, _ = casts.cast_matrix(x, E4M3, transposed=False)
        need_x, need_first, *_ = need = ctx.needs_input_grad
        codes, codes_t = ops.take_rows(codes, pairs, places.shape[1], True, need_first)
        operand, scale, first_codes = grouped.cast_stack(first, own, need_x, len(codes))
        gate_up = grouped.product(codes, x_scale, operand, scale, ends, dtype, own.fast)
        h_codes, h_scale = ops.expert_activation(gate_up, weights, pairs, activation)
        operand, down_scale, down_codes = grouped.cast_stack(
            down, of_down, True in need, len(codes)
        )
        y = grouped.product(h_codes, h_scale, operand, down_scale, ends, dtype, own.fast)
        ctx.settings = activation, options, x.dtype
        ctx.save_for_backward(
            codes_t, x_scale, gate_up, weights, h_scale, first, first_codes, scale, down, down_codes, down_scale,
            ends, pairs, places,
        )  # fmt: skip
        return ops.sum_rows(y, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return linear.backward_once(_backward, ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes_t, x_scale, gate_up, weights, h_scale, *saved = ctx.saved_tensors
    first, first_codes, first_scale, down, down_codes, down_scale, ends, pairs, places = saved
    activation, (own, of_down), x_dtype = ctx.settings
    (need_x, need_first, need_down, need_weights), _ = casts.runs(ctx, 4, own.traced(grad))
    dx = d_first = d_down = d_weights = None
    g = casts.cast_matrix(grad, E4M3, transposed=False)
    g_codes, g_codes_t = ops.take_rows(g.codes, pairs, places.shape[1], True, need_down)
    operand = grouped.stack_for_backward(down, down_codes, down_scale, of_down)
    dh = grouped.product(g_codes, g.scale, *operand, ends, own.dtype, own.fast)
    d_codes, d_codes_t, d_scale, h_codes_t, sums = ops.expert_activation_backward(
        dh, gate_up, weights, pairs, h_scale, activation
    )
    if need_down:
        pair = (g_codes_t, g.scale), (h_codes_t, h_scale)
        d_down = grouped.weight_gradient(*pair, ends, down.dtype, of_down)
    if need_first:
        pair = (d_codes_t, d_scale), (codes_t, x_scale)
        d_first = grouped.weight_gradient(*pair, ends, first.dtype, own)
    if need_x:
        operand = grouped.stack_for_backward(first, first_codes, first_scale, own)
        dx = grouped.product(d_codes, d_scale, *operand, ends, x_dtype, own.fast)
        dx = ops.sum_rows(dx, places)
    if need_weights:
        d_weights = ops.sum_rows(sums[:, None], places.view(-1, 1))
        d_weights = d_weights.view_as(weights).to(weights.dtype)
    return dx, d_first, d_down, d_weights, *(None,) * 5
