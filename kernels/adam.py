"""One Adam or AdamW step on one tensor in one pass: decode, update, encode, in registers.

The arithmetic is `reference/adam.py`'s, operation for operation and without contraction, so the bits agree. A program
owns 8 blocks of 128 elements and reads each byte of state once: weight, master, gradient, m and v and their scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import E4M3, S1E3M4, UE3M5, scale_shape

from .fp8 import block_offsets, decode, encode_blocks, round_to
from .quantize import LAUNCH, block_geometry

BLOCKS = 8
_NONE, _SPLIT, _FLOAT = 0, 1, 2  # what `master` is

G_BITS, G_EXP = tl.constexpr(E4M3.mantissa_bits), tl.constexpr(E4M3.min_exponent)
M_BITS, M_EXP = tl.constexpr(S1E3M4.mantissa_bits), tl.constexpr(S1E3M4.min_exponent)
V_BITS, V_EXP = tl.constexpr(UE3M5.mantissa_bits), tl.constexpr(UE3M5.min_exponent)
M_MAX, V_MAX = tl.constexpr(S1E3M4.max), tl.constexpr(UE3M5.max)


@triton.jit
def _adam_kernel(
    weight_ptr, master_ptr, grad_ptr, grad_scale_ptr, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr, hyper_ptr,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    n_blocks, blocks_per_row, cols,
    DECOUPLED: tl.constexpr, MASTER: tl.constexpr, GRAD_BLOCKS: tl.constexpr, STATE_BLOCKS: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    grad_mul = tl.load(hyper_ptr)
    decay = tl.load(hyper_ptr + 1)
    step_size = tl.load(hyper_ptr + 2)
    inv_sqrt_bc2 = tl.load(hyper_ptr + 3)
    n_blocks = tl.where(
        tl.load(hyper_ptr + 4) > 0, n_blocks, 0
    )  # a skipped step reads and writes nothing
    block, inside, offset, mask = block_offsets(n_blocks, blocks_per_row, cols, BLOCKS, EVEN)

    g = tl.load(grad_ptr + offset, mask=mask, other=0)
    if GRAD_BLOCKS:
        g = decode(g, G_BITS, G_EXP, True)
        g = g * tl.load(grad_scale_ptr + block, mask=inside, other=0.0)[:, None]
    g = g.to(tl.float32) * grad_mul

    w = tl.load(weight_ptr + offset, mask=mask, other=0)
    if MASTER == 1:  # weight_ptr holds the bits of bfloat16 as int16
        low = tl.load(master_ptr + offset, mask=mask, other=0).to(tl.int32) << 8
        high = w.to(tl.int32) << 16
        magnitude = high & 0x7FFFFFFF  # see reference/master.py
        misfit = ((magnitude == 0) & (low < 0)) | ((magnitude == 0x7F800000) & (low > 0))
        w = (high + tl.where(misfit, 0, low)).to(tl.float32, bitcast=True)
    elif MASTER == 2:
        # A weight that is not the rounded master was written by somebody else, and counts.
        master = tl.load(master_ptr + offset, mask=mask, other=0.0)
        w = w.to(tl.float32)
        w = tl.where(round_to(master, weight_ptr.dtype.element_ty) == w, master, w)
    else:
        w = w.to(tl.float32)
    if not DECOUPLED and weight_decay != 0:
        g = g + weight_decay * w

    m = tl.load(m_ptr + offset, mask=mask, other=0)
    v = tl.load(v_ptr + offset, mask=mask, other=0)
    if STATE_BLOCKS:
        m = decode(m, M_BITS, M_EXP, True)
        m = m * tl.load(m_scale_ptr + block, mask=inside, other=0.0)[:, None]
        v = decode(v, V_BITS, V_EXP, False)
        v = v * tl.load(v_scale_ptr + block, mask=inside, other=0.0)[:, None]
        v = v * v
    m = beta1 * m.to(tl.float32) + one_minus_beta1 * g
    v = beta2 * v.to(tl.float32) + one_minus_beta2 * (g * g)

    if DECOUPLED:
        w = w * decay
    root = tl.sqrt_rn(v)
    w = w - step_size * tl.div_rn(m, root * inv_sqrt_bc2 + eps)

    if MASTER == 1:
        bits = w.to(tl.int32, bitcast=True)
        rounded = bits + 0x80
        high = (rounded + 0x8000) >> 16
        low = (rounded >> 8) - (high << 8)
        special = (bits & 0x7F800000) == 0x7F800000
        quiet = (bits >> 16) | tl.where((bits & 0x7FFFFF) != 0, 0x40, 0)
        tl.store(weight_ptr + offset, tl.where(special, quiet, high).to(tl.int16), mask=mask)
        tl.store(master_ptr + offset, tl.where(special, 0, low).to(tl.int8), mask=mask)
    else:
        if MASTER == 2:
            tl.store(master_ptr + offset, w, mask=mask)
        rounded = round_to(w, weight_ptr.dtype.element_ty)
        tl.store(weight_ptr + offset, rounded.to(weight_ptr.dtype.element_ty), mask=mask)

    if STATE_BLOCKS:
        code, scale = encode_blocks(m, M_BITS, M_EXP, M_MAX, True, False)
        tl.store(m_ptr + offset, code.to(tl.uint8), mask=mask)
        tl.store(m_scale_ptr + block, scale, mask=inside)
        code, scale = encode_blocks(root, V_BITS, V_EXP, V_MAX, False, True)
        tl.store(v_ptr + offset, code.to(tl.uint8), mask=mask)
        tl.store(v_scale_ptr + block, scale, mask=inside)
    else:
        tl.store(m_ptr + offset, m.to(m_ptr.dtype.element_ty), mask=mask)
        tl.store(v_ptr + offset, v.to(v_ptr.dtype.element_ty), mask=mask)


def adam_step(
    weight: Tensor,  # float32, bfloat16 or float16; updated
    master: Tensor | None,  # int8 remainder of a bfloat16 weight, or a float32 copy; updated
    grad: Tensor,  # float32, bfloat16, float16, or e4m3 codes with grad_scale
    grad_scale: Tensor | None,
    m: Tensor,  # s1e3m4 codes with m_scale, or a floating-point tensor; updated
    m_scale: Tensor | None,
    v: Tensor,  # ue3m5 codes with v_scale, or a floating-point tensor; updated
    v_scale: Tensor | None,
    hyper: Tensor,  # float32 [8], see reference/adam.py
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Update one tensor in place; nothing is written where `apply` is 0."""
    rows, blocks_per_row = scale_shape(weight.shape)
    n_blocks = rows * blocks_per_row
    if not n_blocks:
        return
    if not weight.is_contiguous():  # channels_last, or a transposed view: blocks are row-major
        row_major = weight.contiguous()
        state = (master, grad, grad_scale, m, m_scale, v, v_scale, hyper)
        adam_step(row_major, *state, beta1, beta2, eps, weight_decay, decoupled)
        weight.copy_(row_major)
        return
    kind = _NONE
    if master is not None:
        kind = _SPLIT if master.dtype is torch.int8 else _FLOAT
    _, cols, even = block_geometry(weight.shape)
    _adam_kernel[(triton.cdiv(n_blocks, BLOCKS),)](
        weight.view(torch.int16) if kind == _SPLIT else weight,
        weight if master is None else master,
        grad.contiguous() if grad_scale is None else grad.contiguous().view(torch.uint8),
        hyper if grad_scale is None else grad_scale,
        m, hyper if m_scale is None else m_scale,
        v, hyper if v_scale is None else v_scale,
        hyper, beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay,
        n_blocks, blocks_per_row, cols,
        decoupled, kind, grad_scale is not None, m_scale is not None, even, BLOCKS,
        **LAUNCH,
    )  # fmt: skip
