"""Cross entropy of rows of logits and its gradient, which takes their place: torch's log_softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, scale: Tensor, gradient: bool) -> Tensor:
    """Return the cross entropy of each row with its label: float32 [rows].

    Args:
        logits: float32, bfloat16 or float16 [rows, words], contiguous. With `gradient` they become
            (softmax(logits) - onehot(label)) × scale, computed in float32 and rounded to their dtype.
        labels: int64 [rows], from 0 to words - 1.
        scale: float32 [rows].
    """
    labels = labels[:, None]
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = -log_p.gather(1, labels)[:, 0]
    if gradient:
        p = log_p.exp_()
        p.scatter_(1, labels, p.gather(1, labels) - 1)
        logits.copy_(p.mul_(scale[:, None]))
    return losses
