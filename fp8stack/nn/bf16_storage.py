"""Layers whose weight is stored in bfloat16 while they compute as the user wrote them.

At O2 a float32 weight matrix becomes bfloat16 plus 8 bits held by the optimizer. That is a change of storage, not of
the model: a Linear that stays out of FP8 and an Embedding keep the dtype of their outputs, so residual streams, norms
and losses see what they saw before. Like `Fp8Linear`, these are the same modules under another class.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        # CUDA's kernel sums in float32 whatever the dtype; the CPU's sums in the dtype it is given.
        weight = self.weight if self.weight.is_cuda else self.weight.float()
        rows = nn.functional.embedding(
            input, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return rows.to(self.output_dtype)
