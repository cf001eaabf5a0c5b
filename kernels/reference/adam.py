"""One step of Adam or AdamW on one tensor, in whatever formats its state is kept.

Kingma and Ba, "Adam", 2015, algorithm 1; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019,
algorithm 2. Everything is decoded to float32, updated, and encoded again; each line below is one rounding, in this
order, which the Triton kernel repeats:

    g = gradient × grad_mul                 loss scale and maximize are folded into grad_mul
    g = g + weight_decay × w                Adam (coupled) only
    m = beta1 × m + (1 - beta1) × g
    v = beta2 × v + (1 - beta2) × (g × g)
    w = w × decay                           AdamW only, decay = 1 - lr × weight_decay
    w = w - step_size × (m / (sqrt(v) × inv_sqrt_bc2 + eps))

with step_size = lr / (1 - beta1^t) and inv_sqrt_bc2 = 1 / sqrt(1 - beta2^t). These five numbers arrive in `hyper`, a
tensor on the device of the weights, so that neither a learning rate nor the decision to skip needs the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3, S1E3M4, UE3M5

from .fp8 import sqrt_rn
from .master import join, split
from .quantize import dequantize_blocks, quantize_blocks

HYPER = ("grad_mul", "decay", "step_size", "inv_sqrt_bc2", "apply")
"""Columns of `hyper`, float32, padded to 8 so that each row of a table of them is aligned. `apply` is 1, or 0 to leave
weight and state as they are."""


def adam_step(
    weight: Tensor,  # float32, bfloat16 or float16, any shape; updated
    master: Tensor | None,  # int8 remainder of a bfloat16 weight, or a float32 copy; updated
    grad: Tensor,  # float32, bfloat16, float16, or e4m3 codes with grad_scale
    grad_scale: Tensor | None,  # float32 [rows, ceil(cols / 128)]
    m: Tensor,  # s1e3m4 codes with m_scale, or a floating-point tensor; updated
    m_scale: Tensor | None,
    v: Tensor,  # ue3m5 codes with v_scale, or a floating-point tensor; updated
    v_scale: Tensor | None,
    hyper: Tensor,  # float32 [8], see HYPER
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Update one tensor in place; nothing is written where `apply` is 0."""
    apply = hyper[4]
    w, m32, v32 = update(
        grad.float() if grad_scale is None else dequantize_blocks(grad, grad_scale, E4M3),
        load_master(weight, master),
        m.float() if m_scale is None else dequantize_blocks(m, m_scale, S1E3M4),
        v.float() if v_scale is None else dequantize_blocks(v, v_scale, UE3M5),
        hyper, beta1, beta2, eps, weight_decay, decoupled,
    )  # fmt: skip
    store_master(weight, master, w, apply)
    if m_scale is None or v_scale is None:
        write(m, m32, apply)
        write(v, v32, apply)
    else:
        for old, new in zip((m, m_scale), quantize_blocks(m32, S1E3M4), strict=True):
            write(old, new, apply)
        for old, new in zip((v, v_scale), quantize_blocks(v32, UE3M5), strict=True):
            write(old, new, apply)


def update(
    g: Tensor,  # float32, as are w, m and v, all of one shape
    w: Tensor,
    m: Tensor,
    v: Tensor,
    hyper: Tensor,  # float32 [8], see HYPER
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # the new w, m and v
    """The arithmetic of the step, whatever the formats."""
    grad_mul, decay, step_size, inv_sqrt_bc2 = hyper[:4].unbind()
    g = g * grad_mul
    if not decoupled and weight_decay != 0:
        g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    if decoupled:
        w = w * decay
    return w - step_size * (m / (sqrt_rn(v) * inv_sqrt_bc2 + eps)), m, v


def load_master(weight: Tensor, master: Tensor | None) -> Tensor:
    """Return the float32 value that the optimizer accumulates in."""
    if master is None:
        return weight.float()
    return join(weight, master) if master.dtype is torch.int8 else unless_written(weight, master)


def unless_written(weight: Tensor, master: Tensor) -> Tensor:
    """Return float32 `master` where `weight` is its rounding, and the weight where somebody else wrote to it."""
    return torch.where(master.to(weight.dtype) == weight, master, weight.float())


def store_master(weight: Tensor, master: Tensor | None, w: Tensor, apply: Tensor) -> None:
    """Write float32 `w` to the weight and its master where `apply` is 1."""
    if master is None:
        write(weight, w, apply)
    elif master.dtype is torch.int8:
        high, low = split(w)
        write(weight, high, apply)
        write(master, low, apply)
    else:
        write(master, w, apply)
        write(weight, w, apply)


def write(old: Tensor, new: Tensor, apply: Tensor) -> None:
    """Store `new` (cast to the dtype of `old`) where the device scalar `apply` is 1, without asking the host."""
    old.copy_(torch.where(apply > 0, new.to(old.dtype), old))
