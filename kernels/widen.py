"""A Triton kernel that adds up the 16-bit gradients of one tensor in float32; the twin of `reference/widen.py`.

Why: it reads each once and writes the sum once, 2 bytes an element for each and 4. Casts to float32 and additions move
6 an element for each, and 12 for each addition.

Limits: contiguous tensors (others are copied).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .launch import launched
from .reference import widen as reference

ELEMENTS = 4096  # of a program


@launched(num_warps=8)
def _widened_sum_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, out_ptr, numel, COUNT: tl.constexpr, ELEMENTS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < numel
    total = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(c_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 3:
        total += tl.load(d_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total, mask=inside)


def widened_sum(first: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of up to four tensors of one shape in float32."""
    given = [x.contiguous() for x in (first, *others)]
    out = torch.empty_like(given[0], dtype=torch.float32)
    if not out.numel():
        return out
    filled = (*given, *[given[0]] * (reference.MOST - len(given)))
    programs = -(-out.numel() // ELEMENTS)
    _widened_sum_kernel((programs, 1, 1), *filled, out, out.numel(), len(given), ELEMENTS)
    return out
