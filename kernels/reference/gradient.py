"""Adding a micro-batch to a block-scaled FP8 gradient.

E4M3 has 3 bits of mantissa: once a sum is sixteen times larger than the addend, rounding to nearest drops the addend
entirely, and a gradient accumulated over many micro-batches stops growing. So a sum keeps a second block-scaled tensor,
the *residual*, which holds the rounding error of the first:

    total    = code × scale + residual code × residual scale + x
    code     = quantize(total)
    residual = quantize(total - code × scale)

Together they carry about 8 bits of mantissa, like bfloat16, in 2.06 bytes a parameter; a gradient that is not
accumulated has no residual and takes 1.03. Readers use the first tensor alone: it is the rounded total.
"""

from __future__ import annotations

from torch import Tensor

from fp8stack.formats import E4M3

from .quantize import dequantize_blocks, quantize_blocks_into


def accumulate_blocks(
    codes: Tensor,  # e4m3, any shape; overwritten
    scale: Tensor,  # float32 [rows, ceil(cols / 128)]; overwritten
    residual_codes: Tensor,  # e4m3, like codes; overwritten
    residual_scale: Tensor,  # float32, like scale; overwritten
    x: Tensor,  # float32, bfloat16 or float16, like codes
) -> None:
    """Add `x` to a block-scaled E4M3 tensor with a residual, in place."""
    total = dequantize_blocks(codes, scale, E4M3)
    total = total + dequantize_blocks(residual_codes, residual_scale, E4M3) + x.float()
    quantize_blocks_into(total, E4M3, codes, scale)
    error = total - dequantize_blocks(codes, scale, E4M3)
    quantize_blocks_into(error, E4M3, residual_codes, residual_scale)
