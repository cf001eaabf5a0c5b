"""One step of SGD with momentum on one tensor, its momentum kept in 8-bit blocks or in floating point.

As in `torch.optim.SGD` (Sutskever et al., 2013, with torch's placement of the learning rate):

    g = gradient × grad_mul + weight_decay × w
    buffer = momentum × buffer + gain × g        gain = 1 - dampening, but 1 at the first step
    g = g + momentum × buffer   if nesterov, else buffer
    w = w - lr × g
"""

from __future__ import annotations

from torch import Tensor

from fp8stack.formats import E4M3, S1E3M4

from .adam import load_master, store_master, write
from .quantize import dequantize_blocks, quantize_blocks

HYPER = ("grad_mul", "lr", "gain", "apply")
"""Columns of `hyper`, float32, padded to 8."""


def sgd_step(
    weight: Tensor,  # float32, bfloat16 or float16, any shape; updated
    master: Tensor | None,  # int8 remainder of a bfloat16 weight, or a float32 copy; updated
    grad: Tensor,  # float32, bfloat16, float16, or e4m3 codes with grad_scale
    grad_scale: Tensor | None,  # float32 [rows, ceil(cols / 128)]
    buffer: Tensor | None,  # s1e3m4 codes with buffer_scale, or a floating-point tensor; updated
    buffer_scale: Tensor | None,
    hyper: Tensor,  # float32 [8], see HYPER
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Update one tensor in place; nothing is written where `apply` is 0."""
    grad_mul, lr, gain, apply = hyper[:4].unbind()
    g = grad.float() if grad_scale is None else dequantize_blocks(grad, grad_scale, E4M3)
    g = g * grad_mul
    w = load_master(weight, master)
    if weight_decay != 0:
        g = g + weight_decay * w
    if buffer is not None:
        if buffer_scale is None:
            b = momentum * buffer.float() + gain * g
            write(buffer, b, apply)
        else:
            b = momentum * dequantize_blocks(buffer, buffer_scale, S1E3M4) + gain * g
            for old, new in zip((buffer, buffer_scale), quantize_blocks(b, S1E3M4), strict=True):
                write(old, new, apply)
        g = g + momentum * b if nesterov else b
    store_master(weight, master, w - lr * g, apply)
