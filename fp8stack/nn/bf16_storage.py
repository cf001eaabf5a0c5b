"""Layers whose weight is stored in bfloat16 while they compute as the user wrote them.

At O2 a float32 weight matrix becomes bfloat16 plus 8 bits held by the optimizer. That is a change of storage, not of
the model: a Linear that stays out of FP8 and an Embedding keep the dtype of their outputs, so residual streams, norms
and losses see what they saw before. Like `Fp8Linear`, these are the same modules under another class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layer_kinds import weight_of
from .mixin import Mixin, mixed_class


class Layer(Mixin):
    """A Linear or a Conv1D that computes in another way: the base of mix-ins for them."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias: [..., in] -> [..., out], in the dtype of the input or autocast's."""
        if input.is_nested and not self.training:  # as torch's encoder gives it
            return stored_linear(input, weight_of(self), self.bias)
        return self.multiply(input)

    def multiply(self, input: Tensor) -> Tensor:
        """Return the same for an input that is no nested tensor."""
        return stored_linear(input, weight_of(self), self.bias)


class StoredLayer(Layer):
    """A layer that reads its bfloat16 weight in the dtype of its input."""

    mixin_prefix = "Stored"


StoredLinear = mixed_class(StoredLayer, nn.Linear)


def autocast_is_on(x: Tensor) -> bool:
    """Return whether autocast is on for the device of `x`, whose name takes longer to find than the rest."""
    return torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type)


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that `nn.Linear` would give for this input: autocast's where it is on, else the input's."""
    device = "cuda" if x.is_cuda else x.device.type  # the name takes longer than the rest
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def stored_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in the dtype of x or autocast's, whatever the weight is stored in."""
    if not autocast_is_on(x):  # which casts both itself
        weight = weight.to(x.dtype)
        bias = bias if bias is None else bias.to(x.dtype)
    return nn.functional.linear(x, weight, bias)


class StoredRows(Mixin):
    """An `nn.Embedding` with a bfloat16 weight whose output has the dtype the weight had before.

    Its gradient is summed in float32, as a frequent token adds up thousands of rows.
    """

    mixin_prefix = "Stored"
    output_dtype: torch.dtype
    weight: nn.Parameter
    padding_idx: int | None
    scale_grad_by_freq: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the weight at `input`: [...] -> [..., embedding_dim]."""
        # A GPU's kernel sums gradients in float32 whatever the weight's dtype, the CPU's in that dtype.
        weight = self.weight if self.weight.is_cuda else self.weight.float()
        rows = nn.functional.embedding(
            input, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return rows.to(self.output_dtype)


StoredEmbedding = mixed_class(StoredRows, nn.Embedding)


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
