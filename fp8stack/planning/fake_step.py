"""What a forward and backward pass of a real model hold, measured on tensors without data.

A formula for activations has to be written for each family of models, and is wrong without a word where a model
differs. Here the model itself runs:

1. It is built on the meta device. Its parameters and buffers become fake tensors of torch's `FakeTensorMode`, which
   have a device, a shape and a dtype, and no data.
2. `initialize` brings it to the level.
3. It runs forward and backward. Every operator puts out fake tensors. `_Live` adds the bytes of each storage when it is
   made, and takes them off when it is freed. So what autograd saves is counted, each storage once, and so is all else
   that is alive beside it.

The fake device is the CPU, because a torch without CUDA makes no fake CUDA tensors. Operators save the same there as on
a GPU, but for two:

- `_GpuAttention` calls what SDPA calls on a GPU: flash attention for 16 bits without a mask, else the memory-efficient
  kernel, and where neither can (float32 with heads that share keys, a mask with such heads, a mask whose last dimension
  does not lie in a row) the written-out form, which keeps scores.
- Autocast on a GPU makes float32 of what goes into a list of functions, and a CPU's list lacks most of them.
  `CudaAutocast` adds these. `pow` in GPT-2's activation puts out twice the bytes for it.

Limits: a model that looks at values (`.item()`, loops over the experts that were hit) cannot run, and is refused. What
a kernel uses inside itself is not seen. Products by bare parameters are in bfloat16. Of at most `FEW_ROWS` tokens the
codes of weights are kept, as in one process, also where there will be several. cuDNN's attention, and an `nn.RMSNorm`
that is not fused, which is one kernel on a GPU and several on a CPU, keep a tensor more or less in a block.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8stack.errors import ModelError, first_line
from fp8stack.tensor_kinds import inner_tensors

from .resident_memory import Precision, at_the_level

_CPU = torch.device("cpu")
_HALF = (torch.float16, torch.bfloat16)
# "CUDA Ops that can autocast to float32", https://docs.pytorch.org/docs/stable/amp.html; reversed division and power
# are methods of tensors. `cross_entropy` is another matter: see `_cross_entropy`.
_FLOAT32_IN_AUTOCAST = frozenset((
    "__rdiv__", "__rpow__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
    "cosine_embedding_loss", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
    "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2",
    "log_softmax", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss",
    "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
))  # fmt: skip


@dataclass(frozen=True)
class Held:
    """Bytes that one forward and backward pass hold beside parameters and buffers."""

    kept: int  # when forward is over: activations, and copies of weights that backward needs
    forward: int  # the most before that
    # Between one gradient and the next: the most without gradients, and the share of their bytes that was there.
    backward: tuple[tuple[int, float], ...]
    unreached: tuple[str, ...]  # trainable parameters that got no gradient

    def moments(self, gradients: int, early: int = 0) -> dict[str, int]:
        """Return the most before the loss and in backward, with gradients of so many bytes in all.

        early: bytes of gradients that are there from the start.
        """
        back = (most + max(early, round(share * gradients)) for most, share in self.backward)
        return {"loss": early + self.forward, "backward": max(back)}


def measure_step(
    model: nn.Module, precision: Precision, run: Callable[[nn.Module], Any], what: str, gpu: bool
) -> Held:
    """Run `model`, which is on the meta device and is changed, forward and backward at a precision.

    run: calls the model with a batch that it makes; returns an output with a `loss`, or tensors to go back from.
    what: the name of the model, for errors.
    gpu: MLPs and RMSNorms are fused, and `select="auto"` leaves layers in bfloat16, as on a GPU.

    Raises:
        ModelError: where it does not run on tensors without data.
        ConfigError, UnsupportedDeviceError: what `initialize` would raise.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _become_fake(model)
    if precision.recipe is not None:
        recipe = replace(precision.recipe, offload="none", step_in_backward=False)
        recipe = replace(recipe, optimizer_backend="auto")  # none of which changes a pass
        optimizer = torch.optim.AdamW(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that fake storages have no address
            at_the_level(model, optimizer, recipe, _CPU, gpu)
    live = _Live(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision.autocast)
    try:
        with warnings.catch_warnings(), mode, _GpuAttention(), CudaAutocast():
            warnings.simplefilter("ignore")
            with autocast:
                run(model)  # a first time, from which layers know with whom they share an input
            with live:
                with autocast:
                    output = run(model)
                    output = getattr(output, "loss", output)
                ends = tuple(t for t in tree_leaves(output) if getattr(t, "requires_grad", False))
                del output
                forward, kept, live.most = live.most, live.bytes, live.bytes
                # `backward` would leave the modes of functions, which checkpointing needs to make activations again
                back: Any = torch.autograd.graph._engine_run_backward
                ones = tuple(torch.ones_like(end) for end in ends)
                back(ends, ones, False, False, (), allow_unreachable=True, accumulate_grad=True)
                live.note_gradient(None)
    except Exception as error:  # of any model's code, or of an operator without a fake
        told = f"{what} does not run on tensors without data ({first_line(error)})"
        remedy = "Its activations cannot be counted; `fp8stack estimate --sizes` has a decoder's"
        raise ModelError(f"{told}. {remedy}.") from error
    named = model.named_parameters()
    unreached = tuple(n for n, p in named if p.requires_grad and p not in live.reached)
    passed = tuple((most - had, had / max(live.gradients, 1)) for most, had in live.passed)
    return Held(kept, forward, passed, unreached)


def _become_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake ones on the CPU; ties stay ties."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and old not in made:
                    new = torch.empty_like(old, device=_CPU)
                    learns = isinstance(old, nn.Parameter)
                    made[old] = nn.Parameter(new, old.requires_grad) if learns else new
                if old is not None:
                    tensors[name] = made[old]  # type: ignore[assignment]


class _Live(TorchDispatchMode):
    """Counts the bytes of storages that operators make, while they are alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.most = self.gradients = 0
        self.passed: list[tuple[int, int]] = []  # see Held.backward, in bytes
        self.reached: set[Tensor] = set()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for tensor in (*model.parameters(), *model.buffers()):
            self._known.update(part.untyped_storage() for part in inner_tensors(tensor.data))
            if tensor.requires_grad:  # behind the hook that makes an FP8 gradient of it
                tensor.register_post_accumulate_grad_hook(self.note_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in filter(lambda leaf: isinstance(leaf, Tensor), tree_leaves(output)):
            for storage in (part.untyped_storage() for part in inner_tensors(tensor)):
                if storage not in self._known:
                    self._known.add(storage)
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.bytes)
        return output

    def _free(self, nbytes: int) -> None:
        self.bytes -= nbytes

    def note_gradient(self, parameter: Tensor | None) -> None:
        """Note the most since the gradient before; None: backward is over."""
        self.passed.append((self.most, self.gradients))
        self.most = self.bytes
        if parameter is not None and parameter.grad is not None:
            self.reached.add(parameter)
            self.gradients += parameter.grad.nbytes


class _GpuAttention(TorchFunctionMode):
    """Calls what a GPU calls for attention, and for grouped products of float32, whose fake takes bfloat16 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        grouped = getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)
        if func in grouped and args[0].dtype is not torch.bfloat16:
            return _GroupedProduct.apply(*args[:2])  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class CudaAutocast(TorchFunctionMode):
    """Makes float32 of what CUDA's autocast makes float32, where a CPU's is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and kwargs.get("dtype") is None:
            if func is F.cross_entropy:
                return _cross_entropy(*args, **kwargs)
            if getattr(func, "__name__", "") in _FLOAT32_IN_AUTOCAST:
                args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
        return func(*args, **kwargs)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Keep logarithms in the dtype of `input` and in float32, since CUDA's autocast makes float32 of the latter alone.

    Losses with smoothed labels or with probabilities for targets are taken in float32.
    """
    if kwargs.get("label_smoothing") or target.is_floating_point():
        return F.cross_entropy(_in_float32(input), target, weight, *args, **kwargs)
    kwargs.pop("label_smoothing", None)
    logarithms = F.log_softmax(input, min(1, input.ndim - 1))
    return F.nll_loss(_in_float32(logarithms), target, weight, *args, **kwargs)


class _GroupedProduct(torch.autograd.Function):
    """What a grouped product of tokens [rows, in] and weights [groups, in, out] puts out and keeps."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty(tokens.shape[0], weights.shape[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weights = ctx.saved_tensors
        return torch.empty_like(tokens), torch.empty_like(weights)


def _attention(
    q: Tensor,  # [..., heads, tokens, size]
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what SDPA returns, by the operator that keeps what a GPU's kernel keeps."""
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (t.to(torch.get_autocast_dtype("cpu")) for t in (q, k, v))
    plain = attn_mask is None and q.shape[-1] == v.shape[-1] <= 256
    if q.ndim == 4 and plain and q.dtype in _HALF:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    # T5's biases lie the other way in transformers 5.17
    in_a_row = attn_mask is None or attn_mask.stride(-1) == 1
    if q.ndim == 4 and q.shape[-3] == k.shape[-3] and in_a_row:
        if attn_mask is not None:  # a bias in the dtype of q, which a boolean mask is made
            attn_mask = attn_mask.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        more = (attn_mask, True, dropout_p, is_causal)
        return efficient(q, k, v, *more, scale=scale)[0]  # type: ignore[no-any-return]
    own: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **own)
