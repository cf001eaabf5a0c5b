"""One cast to 16 bits for the layers that stay in bfloat16 and read the same float32 input.

Why: under autocast each of torch's layers casts its float32 input for itself: q, k and v three times. Their backwards
cast three gradients to float32 one by one, and autograd adds them up in two more passes. That is ten times the input's
bytes that nobody needs, and eight launches.

How: the first layer that reads an activation casts it, in as many copies as layers read it in the last step, which
share one memory. Autograd then hands the gradients of all copies to one node, and one kernel adds them up in float32
(`kernels/widen.py`), in the order in which autograd would. So values are autocast's own, bit for bit, and so are
gradients where up to four layers and nothing else read the activation; elsewhere they are added in another order. One
activation is kept for backward in the place of several.

Limits: an input with one reader is torch's to cast. Leaves of autograd are cast by each layer, see `notes.py`; writes
through `.data` to what is no leaf, between two readers, are not seen. In the first step each layer casts for itself,
and is counted; one that was alone in two steps in a row is not looked at again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8stack.kernels import ops
from fp8stack.kernels.reference.widen import MOST

from .bf16_storage import output_dtype
from .casts import Products, in_backward
from .notes import note, noted
from .rmsnorm import PLAIN


def narrowed(x: Tensor, products: Products) -> Tensor:
    """Return `x`, float32, in autocast's dtype if layers share it; else `x` itself, for autocast to cast."""
    if products.alone > 1 or x.is_leaf or type(x) not in PLAIN or not torch.is_grad_enabled():
        return x
    # how the layer multiplies that came first, and the copies that are left
    first, copies = noted(x, "narrow") or (None, [])
    if not copies:
        if _is_transformed():
            return x
        forward = not in_backward()  # else it is a recomputation
        if first is not None and first.counted < MOST:
            first.counted += forward
            return x
        if forward:
            products.alone = products.alone + 1 if products.counted == 1 else 0
            products.readers = products.counted
        dtype, count = output_dtype(x), products.readers
        copies = [*_apply(x, dtype, count)] if count > 1 and dtype is not torch.float32 else []
        note(x, "narrow", (products, copies))
    return copies.pop(0) if copies and copies[0].dtype is output_dtype(x) else x


def _is_transformed() -> bool:
    """Return whether a function in Python would not do: functorch, forward-mode derivatives, torch.jit.trace."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


class _Narrow(torch.autograd.Function):
    """x in 16 bits, as several tensors over one memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        y = x.to(dtype)
        return y, *(y.detach() for _ in range(count - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        given = [g for g in reversed(grads) if g is not None]  # the last reader's comes first
        if not given:
            return None, None, None
        # create_graph=True, and is_grads_batched=True
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(given[0]):
            return sum(given[1:], given[0].float()), None, None
        return ops.widened_sum(*given), None, None


# What torch does in Python before it calls C++ is for functorch, see `narrowed`.
_apply: Any = super(torch.autograd.Function, _Narrow).apply
