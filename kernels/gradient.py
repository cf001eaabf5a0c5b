"""A Triton kernel that adds a micro-batch to a block-scaled gradient; the twin of `reference/gradient.py`.

Why: with accumulation, backward adds to every gradient. For an element the kernel moves 4 bytes of codes, the addend
and next to nothing of scales, in one launch; the reference, in torch's operations, takes some forty launches and as
many temporary tensors in float32.

How: a program owns 8 blocks. It holds the sum of each in registers from the first read to the last write, so that
codes, scales and residual are written where they were read.

Limits: contiguous codes, scales and residuals, as every `BlockScaledTensor` has; a view of an addend is copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK, E4M3, rows_cols

from .fp8 import block_offsets, casts_in_hardware, decode, encode_blocks
from .launch import UNFUSED, launched

BLOCKS = 8
_MANTISSA, _MIN_EXPONENT = tl.constexpr(E4M3.mantissa_bits), tl.constexpr(E4M3.min_exponent)


@triton.jit
def _values(codes_ptr, scale_ptr, offset, mask, block, inside):
    code = tl.load(codes_ptr + offset, mask=mask, other=0)
    scale = tl.load(scale_ptr + block, mask=inside, other=0.0)
    return decode(code, _MANTISSA, _MIN_EXPONENT, True) * scale[:, None]


@triton.jit
def _store_blocks(x, codes_ptr, scale_ptr, offset, mask, block, inside, HARDWARE: tl.constexpr):
    """Quantize `x` [BLOCKS, 128], store it, and return what the codes say."""
    code, scale = encode_blocks(x, _MANTISSA, HARDWARE)
    tl.store(codes_ptr + offset, code, mask=mask)
    tl.store(scale_ptr + block, scale, mask=inside)
    return decode(code, _MANTISSA, _MIN_EXPONENT, True) * scale[:, None]


@launched(num_warps=4, **UNFUSED)
def _accumulate_blocks_kernel(
    codes_ptr, scale_ptr, residual_codes_ptr, residual_scale_ptr, x_ptr, n_blocks, blocks_per_row, cols,
    HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, inside, offset, mask = block_offsets(n_blocks, blocks_per_row, cols, BLOCKS, EVEN)
    total = _values(codes_ptr, scale_ptr, offset, mask, block, inside)
    total += _values(residual_codes_ptr, residual_scale_ptr, offset, mask, block, inside)
    total += tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    rounded = _store_blocks(total, codes_ptr, scale_ptr, offset, mask, block, inside, HARDWARE)
    _store_blocks(
        total - rounded, residual_codes_ptr, residual_scale_ptr, offset, mask, block, inside, HARDWARE
    )  # fmt: skip


def accumulate_blocks(
    codes: Tensor,  # e4m3, any shape; overwritten
    scale: Tensor,  # float32 [rows, ceil(cols / 128)]; overwritten
    residual_codes: Tensor,  # e4m3, like codes; overwritten
    residual_scale: Tensor,  # float32, like scale; overwritten
    x: Tensor,  # float32, bfloat16 or float16, like codes
) -> None:
    """Add `x` to a block-scaled E4M3 tensor with a residual, in place."""
    if scale.numel():
        cols = rows_cols(codes.shape)[1]
        _accumulate_blocks_kernel(
            (-(-scale.numel() // BLOCKS), 1, 1),
            codes.view(torch.uint8), scale, residual_codes.view(torch.uint8), residual_scale, x.contiguous(),
            scale.numel(), -(-cols // BLOCK), cols, casts_in_hardware(x.device), cols % BLOCK == 0, BLOCKS,
        )  # fmt: skip
