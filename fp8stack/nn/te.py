"""FP8 layers that TransformerEngine computes.

A `TeLayer` is a Linear or Conv1D whose class was changed, like `Fp8Layer`: parameters, ties, hooks, names and
state_dict stay as they are, and changing the class back undoes it. The `te.Linear` that does the work is made without
memory at the first forward, lies outside the module tree, and is lent the layer's weight and bias for each call. So it
always gets the layer's present tensors (after `.to()`, `load_state_dict(assign=True)`, FSDP2), and no `_extra_state`
appears.

Recipe: each layer is given one and enters it itself. Activation checkpointing recomputes in the backward pass, outside
any context that the user put around the model, and so that is FP8 too.

Sizes: TransformerEngine checks some of cuBLAS's needs in forward; the others fail in backward. So tokens are padded
with zeros here, as are a weight and bias whose sizes do not fit (a vocabulary of 50257); the output is cut back, as a
view. A padded weight is copied at every forward, and so is Conv1D's, which TransformerEngine wants as [out, in].

Dtypes: the output has the input's dtype, or autocast's where that is on. Operands are cast to FP8 from the dtype they
are stored in (O2's weights are bfloat16 under float32 activations). If the output is float32, a bias is added in
bfloat16, the only way that cuBLAS has. Gradients have the dtype of their tensors.

Weights are cast in every forward. TransformerEngine keeps both layouts until backward; under FSDP2 it keeps none.

Delayed scaling: TransformerEngine keeps the histories of all layers of a process together. Whenever an outermost
autocast ends, which here would be once a layer, it updates all of them and reduces them over all ranks. So here each
layer updates its own history, at its next forward in training and on its rank alone. Evaluation does not update, nor
does recomputation, which sees the scales of the pass that it repeats. At the first step the history is empty (after
loading a checkpoint, too: the state_dict has none), and the scales come from the tensors themselves.

Under torch.compile a layer is a graph break, and behind it PyTorch compiles wrong gradients of cuDNN's attention: a
warning says so. Infinities: TransformerEngine's casts keep NaN but turn infinities into the largest finite value, also
in the gradients that a GradScaler checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.functional import linear, pad

from fp8stack.capability import load_te
from fp8stack.errors import UnsupportedDeviceError, warn
from fp8stack.levels import Recipe

from .bf16_storage import Layer, output_dtype
from .casts import in_backward
from .layer_kinds import weight_of
from .linear import bf16_matmul, check_input, title, unsafe_view
from .mixin import mixed_class


class TeLayer(Layer):
    """A layer that TransformerEngine computes; `convert.py` mixes it into the class of a Linear or a Conv1D."""

    mixin_prefix = "Te"
    te: Engine

    def multiply(self, input: Tensor) -> Tensor:
        if self.te.finished:
            return bf16_matmul(input, weight_of(self), self.bias, self.te.layer)
        run = _break_graph if torch.compiler.is_compiling() else _forward
        return run(self, input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, te={self.te.recipe.fp8_recipe}"


TeLinear = mixed_class(TeLayer, nn.Linear)


class Engine:
    """Computes one layer with a `te.Linear` that has no parameters of its own. A copy has only recipe and name."""

    finished = False  # multiplies in bfloat16 from now on: finishing.py

    def __init__(self, recipe: Recipe, weight: Tensor | None = None, layer: str = "") -> None:
        self.recipe = recipe
        self.layer = layer  # its name in the model
        self._home = None if weight is None else id(weight)  # compared, never followed
        self._linear: Any = None
        self._device: torch.device | None = None
        self._seeded = [False, False]  # delayed scaling: forward, backward have first scales

    def __reduce__(self) -> Any:
        return Engine, (self.recipe, None, self.layer), {"finished": self.finished}

    def multiply(self, layer: TeLayer, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows @ weight.T + bias: [tokens, in] -> [tokens, out] in `dtype`."""
        library, recipe = load_te(), te_recipe(self.recipe)
        # every dimension of a product must be a multiple of this
        step = 32 if self.recipe.fp8_recipe in ("mxfp8", "nvfp4") else 16
        tokens = rows.shape[0]
        weight, bias = weight_of(layer).contiguous(), cast(Tensor | None, layer.bias)
        out_features = weight.shape[0]
        below, right, down = (-size % step for size in (*weight.shape, tokens))
        mode: AbstractContextManager[Any] = nullcontext()
        inner, delayed = dtype, self.recipe.fp8_recipe == "delayed"
        if self.recipe.fp8_recipe == "nvfp4":  # its Hadamard transform takes bfloat16 only
            inner = torch.bfloat16
            rows, mode = rows.to(inner), torch.autocast("cuda", enabled=False)
        if right or down:
            rows = pad(rows, (0, right, 0, down))
        if right or below:
            weight = pad(weight, (0, right, 0, below))
            bias = None if bias is None else pad(bias, (0, below))
        with torch.cuda.device(rows.device), mode:
            module = self._module(layer, rows.device, weight.shape)
            module._parameters["weight"] = weight
            if bias is not None:
                module._parameters["bias"] = bias
            # Set beforehand: else it insists that parameters have the input's dtype.
            module.__dict__["activation_dtype"] = inner
            # If FSDP2 gathered this weight, nothing of it is saved for backward, not even codes.
            module.__dict__["_is_fsdp2"] = self._comes_and_goes(layer.weight)
            # The outer one is off: an outermost one that is on would update the histories of the user's own te modules.
            with (
                library.te.autocast(enabled=False, recipe=recipe),
                library.te.autocast(enabled=True, recipe=recipe),
            ):
                library.state.is_first_fp8_module()  # takes the mark that would make backward update them
                try:
                    scales = self._scales(module, rows, weight, layer.training)
                    with scales if delayed else nullcontext():
                        output: Tensor = module(rows)
                finally:
                    module._parameters.update(dict.fromkeys(module._parameters))
        if delayed and output.requires_grad and not self._seeded[1]:
            output.register_hook(partial(self._seed_backward, module))
        if below or down:
            output = output[:tokens, :out_features]
        return output.to(dtype)

    def _module(self, layer: TeLayer, device: torch.device, shape: torch.Size) -> Any:
        """Return the `te.Linear`, made at the first forward on a device."""
        if self._linear is None or self._device != device:
            te = load_te().te
            with te.quantized_model_init(enabled=False):
                self._linear = te.Linear(
                    shape[1], shape[0], bias=layer.bias is not None, params_dtype=layer.weight.dtype, device="meta",
                )  # fmt: skip
            self._device, self._seeded = device, [False, False]
        return self._linear

    def _comes_and_goes(self, weight: Tensor) -> bool:
        """Is this a whole weight that FSDP2 put in the place of the layer's own?"""
        known = self._home is not None and torch.distributed.is_available()
        return known and torch.distributed.is_initialized() and self._home != id(weight)

    @contextmanager
    def _scales(self, module: Any, rows: Tensor, weight: Tensor, training: bool) -> Iterator[None]:
        """Delayed scaling: update the scales before a forward in training; undo what an evaluation recorded."""
        module.init_fp8_metadata()  # makes histories and scales, if there are none
        meta = module.fp8_meta
        # Now it looks registered: TransformerEngine does not add it to the histories that it updates together.
        meta.setdefault(load_te().state.get_buffer_info(), ())
        history = meta["scaling_fwd"].amax_history  # [steps, tensors]; row 0 is being recorded
        if not self._seeded[0]:
            history[0, 0], history[0, 1] = _finite_amax(rows), _finite_amax(weight)
            _update(meta["scaling_fwd"])
            if training:
                self._seeded[0] = True
            else:
                history.zero_()
        elif training and not in_backward():
            _update(meta["scaling_fwd"])
            _update(meta["scaling_bwd"])
        recorded = None if training else history[0].clone()
        try:
            yield
        finally:
            if recorded is not None:
                history[0].copy_(recorded)

    def _seed_backward(self, module: Any, grad: Tensor) -> None:
        """Let the first gradient set its own scale: at 1, a small one would vanish."""
        if not self._seeded[1]:
            state = module.fp8_meta["scaling_bwd"]
            state.amax_history[0, 0] = _finite_amax(grad)
            _update(state)
            self._seeded[1] = True


@cache
def te_recipe(settings: Recipe) -> Any:
    """Return TransformerEngine's recipe. Options are given, so that its environment variables do not set them."""
    recipes = load_te().recipe
    hybrid, e4m3 = recipes.Format.HYBRID, recipes.Format.E4M3
    own = {"fp8_format": hybrid if settings.fp8_format == "hybrid" else e4m3}
    forward = recipes.MMParams(use_split_accumulator=not settings.fp8_fast_accum)
    history = {name: getattr(settings, name) for name in ("amax_history_len", "amax_compute_algo")}
    history |= {"margin": settings.fp8_margin, "reduce_amax": False}
    name, options = {
        "current": ("Float8CurrentScaling", own | {"fp8_gemm_fprop": forward}),
        "delayed": ("DelayedScaling", own | history),
        "blockwise": ("Float8BlockScaling", {"fp8_format": e4m3}),
        "mxfp8": ("MXFP8BlockScaling", {"fp8_format": e4m3}),
        "nvfp4": ("NVFP4BlockScaling", {}),
    }[settings.fp8_recipe.replace("auto", "current")]
    kind: Any = getattr(recipes, name)
    if "backward_override" in {f.name for f in fields(kind)}:
        options["backward_override"] = None
    return kind(**options)


def _forward(layer: TeLayer, input: Tensor) -> Tensor:
    name, weight = layer.te.layer, weight_of(layer)
    out_features, in_features = weight.shape
    check_input(input, in_features, name)
    if not input.is_cuda:
        raise UnsupportedDeviceError(
            f"{title(name)} got input on {input.device}; TransformerEngine runs on cuda devices. Move the input there, "
            "or fp8stack.restore the model to use it elsewhere."
        )
    dtype = output_dtype(input)
    if not input.numel():  # TransformerEngine fails on it
        bias = None if layer.bias is None else layer.bias.to(dtype)
        with torch.autocast("cuda", enabled=False):
            return linear(input.to(dtype), weight.to(dtype), bias)
    output = layer.te.multiply(layer, input.reshape(-1, in_features), dtype)
    # te.Linear returns a view that autograd lets nobody change in place (nn.ReLU(inplace=True)).
    shape = (*input.shape[:-1], out_features)
    return unsafe_view(output, shape)


@_disable_dynamo  # `torch.compiler.disable` would import torch._dynamo now, which takes a second
def _break_graph(layer: TeLayer, input: Tensor) -> Tensor:
    if input.is_cuda:
        _warn_of_attention()
    return _forward(layer, input)


@cache
def _warn_of_attention() -> None:
    if torch.backends.cuda.cudnn_sdp_enabled():
        warn(
            "a layer of TransformerEngine is a graph break, and behind a break PyTorch compiles wrong gradients of "
            "cuDNN's attention (seen with 2.11). If this model uses scaled_dot_product_attention, take "
            'compute="native", which breaks no graph, or say torch.backends.cuda.enable_cudnn_sdp(False).'
        )


def _finite_amax(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.detach().abs().amax().float(), nan=0.0, posinf=0.0)


def _update(state: Any) -> None:
    """Move the amax recorded since the last call into the history, and compute the scales from that."""
    recipe = state.recipe
    load_te().tex.fused_amax_and_scale_update_after_reduction(
        state.amax_history[0].clone(), [state.amax_history], [state.scale], recipe.amax_compute_algo, state.dtype,
        recipe.margin,
    )  # fmt: skip
