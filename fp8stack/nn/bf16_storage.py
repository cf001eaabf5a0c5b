"""Layers whose weight is stored in bfloat16 while they compute as the user wrote them.

At O2 a float32 weight matrix becomes bfloat16 plus 8 bits held by the optimizer. That is a change of storage, not of
the model: a Linear that stays out of FP8 and an Embedding keep the dtype of their outputs, so residual streams, norms
and losses see what they saw before. Like `Fp8Linear`, these are the same modules under another class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class StoredLinear(nn.Linear):
    """An `nn.Linear` that reads its bfloat16 weight in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return stored_linear(input, self.weight, self.bias)


def autocast_is_on(x: Tensor) -> bool:
    """Return whether autocast is on for the device of `x`, whose name takes longer to find than the rest."""
    return torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type)


def stored_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in the dtype of x or autocast's, whatever the weight is stored in."""
    if not autocast_is_on(x):  # which casts both itself
        weight = weight.to(x.dtype)
        bias = bias if bias is None else bias.to(x.dtype)
    return nn.functional.linear(x, weight, bias)


class StoredEmbedding(nn.Embedding):
    """An `nn.Embedding` with a bfloat16 weight whose output has the dtype the weight had before.

    Its gradient is summed in float32, as a frequent token adds up thousands of rows.
    """

    output_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the weight at `input`: [...] -> [..., embedding_dim]."""
        if self.weight.is_cuda:  # whose kernel sums in float32 whatever the dtype
            rows = nn.functional.embedding(
                input, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
            )
        else:
            rows = _Lookup.apply(input, self.weight, self.padding_idx, self.scale_grad_by_freq)
        return rows.to(self.output_dtype)


class _Lookup(torch.autograd.Function):
    """Rows of a weight in float32. The CPU's kernel would sum their gradients in the weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, weight: Tensor, padding_idx: int | None, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.settings = len(weight), -1 if padding_idx is None else padding_idx, by_frequency
        ctx.dtype = weight.dtype
        return nn.functional.embedding(index, weight).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (index,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(grad, index, *ctx.settings)
        return None, summed.to(ctx.dtype), None, None


class AveragedWeight(Tensor):
    """A tensor that torch's lerp moves towards one of another dtype, for which plain tensors raise.

    torch's AveragedModel moves a float32 copy towards the weights that a model keeps in bfloat16. Everything else that
    it does, or is done to it, gives plain tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LERPS and len(args) > 1:
            x, end, *rest = args
            if isinstance(x, Tensor):
                args = (x, end.to(x.dtype), *rest)
            else:
                args = (x, [e.to(own.dtype) for own, e in zip(x, end, strict=True)], *rest)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(AveragedWeight) if func in _ALIASES else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class CopiedWeight(AveragedWeight, nn.Parameter):
    """A parameter of a copied model."""

    __reduce_ex__ = nn.Parameter.__reduce_ex__


_LERPS = (Tensor.lerp_, Tensor.lerp, torch.lerp, torch._foreach_lerp_, torch._foreach_lerp)
_ALIASES = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
