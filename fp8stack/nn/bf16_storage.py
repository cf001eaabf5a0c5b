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


def stored_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in the dtype of x or autocast's, whatever the weight is stored in."""
    # autocast casts both itself
    if weight.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)
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
