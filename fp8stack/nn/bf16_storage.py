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
    """An `nn.Embedding` with a bfloat16 weight whose output has the dtype the weight had before."""

    output_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the weight at `input`: [...] -> [..., embedding_dim]."""
        result: Tensor = _Lookup.apply(
            input, self.weight, self.output_dtype, self.padding_idx, self.scale_grad_by_freq
        )
        return result


class _Lookup(torch.autograd.Function):
    """Embedding lookup whose gradient is summed in float32: a frequent token adds up thousands of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        index: Tensor,
        weight: Tensor,
        dtype: torch.dtype,
        padding: int | None,
        by_freq: bool,
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.settings = (weight.shape[0], -1 if padding is None else padding, by_freq)
        ctx.w_dtype = weight.dtype
        return nn.functional.embedding(index, weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        # CUDA's kernel sums in float32 whatever the dtype; the CPU's sums in the dtype it is given.
        grad = grad.to(ctx.w_dtype) if grad.is_cuda else grad.float()
        summed = torch.ops.aten.embedding_dense_backward(grad, index, *ctx.settings)
        return None, summed.to(ctx.w_dtype), None, None, None
