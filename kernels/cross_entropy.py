"""Cross entropy of rows of logits, whose gradient takes their place; the twin of `reference/cross_entropy.py`.

Why: torch's functions write softmax and gradient in float32, 22 bytes an element and two more tensors of logits. This
moves 6, in bfloat16: logits are read twice, the second time perhaps out of L2, and their gradient is written over them.

How: a program has a row. Each lane keeps the largest logit that it has seen and the sum of exponentials relative to
that, which all lanes put together at the end; then it goes over the row again.

Limits: sums are in another order than the reference's, so results may be one rounding away. A label that is no word
makes its loss NaN, where the reference raises.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .fp8 import store_rounded
from .launch import launched, next_power_of_2

WORDS = 4096  # that a program holds at once
_LEAST = tl.constexpr(-3.0e38)  # finite: a lane that has seen -inf alone has a sum of 0


@launched(num_warps=8)
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, scale_ptr, losses_ptr, words, GRADIENT: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * words
    label = tl.load(labels_ptr + row)
    known = (label >= 0) & (label < words)
    own = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    lane = tl.arange(0, WORDS)
    most = tl.full((WORDS,), _LEAST, dtype=tl.float32)
    total = tl.zeros((WORDS,), dtype=tl.float32)
    for start in range(0, words, WORDS):
        c = start + lane
        x = tl.load(logits_ptr + c, mask=c < words, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, x)
        total = total * tl.exp(most - larger) + tl.exp(x - larger)
        most = larger
    top = tl.max(most, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(most - top), axis=0))
    tl.store(losses_ptr + row, log_sum - own)
    if GRADIENT:
        scale = tl.load(scale_ptr + row)
        for start in range(0, words, WORDS):
            c = start + lane
            x = tl.load(logits_ptr + c, mask=c < words, other=0.0).to(tl.float32)
            p = tl.exp(x - log_sum)
            store_rounded(logits_ptr + c, tl.where(c == label, p - 1.0, p) * scale, c < words)


def cross_entropy(logits: Tensor, labels: Tensor, scale: Tensor, gradient: bool) -> Tensor:
    """Do what the reference does."""
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        held = min(next_power_of_2(words), WORDS)
        _cross_entropy_kernel((rows, 1, 1), logits, labels, scale, losses, words, gradient, held)
    return losses
