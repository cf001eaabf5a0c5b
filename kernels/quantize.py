"""Triton kernels that quantize and dequantize with a scale per block of 128; the twin of `reference/quantize.py`.

Why: FP8 gradients and stored states are made and read outside the optimizer's step too: by backward, by collectives, by
checkpoints.

How: a program owns 16 blocks, finds the largest magnitude of each, and writes codes and scale, bit for bit as the
reference. A block never crosses a row, so the tail of a row is masked; rows that are a multiple of 128 take a path
without masks.

Limits: codes of 4 bits, which only checkpoints quantize here, are left to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK, E4M3, E5M2, MiniFloat, rows_cols, scale_shape

from .fp8 import (
    block_offsets,
    casts_in_hardware,
    decode,
    encode_blocks,
)
from .launch import Launcher
from .reference import quantize as reference
from .state_codecs import encode_state, root

BLOCKS = 16
# Every multiplication and addition rounds on its own: contracting them would give other bits than the reference.
_ROUNDING = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _quantize_blocks_kernel(
    x_ptr, codes_ptr, scale_ptr, n_blocks, blocks_per_row, cols,
    MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, MAX: tl.constexpr,
    SQUARED: tl.constexpr, STATE: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, inside, offset, mask = block_offsets(n_blocks, blocks_per_row, cols, BLOCKS, EVEN)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if SQUARED:
        x = root(x, False)
    if STATE == "":
        code, scale = encode_blocks(x, MANTISSA, MAX, HARDWARE)
    else:
        code, scale = encode_state(x, 0, STATE, False)
    tl.store(codes_ptr + offset, code.to(tl.uint8), mask=mask)
    tl.store(scale_ptr + block, scale, mask=inside)


@triton.jit
def _dequantize_blocks_kernel(
    codes_ptr, scale_ptr, out_ptr, n_blocks, blocks_per_row, cols,
    MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr,
    SIGNED: tl.constexpr, SQUARED: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, inside, offset, mask = block_offsets(n_blocks, blocks_per_row, cols, BLOCKS, EVEN)
    code = tl.load(codes_ptr + offset, mask=mask, other=0)
    scale = tl.load(scale_ptr + block, mask=inside, other=0.0)
    value = decode(code, MANTISSA, MIN_EXPONENT, SIGNED) * scale[:, None]
    if SQUARED:
        value = value * value
    tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=mask)


_launch_quantize = Launcher(_quantize_blocks_kernel, **_ROUNDING)
_launch_dequantize = Launcher(_dequantize_blocks_kernel, **_ROUNDING)


def quantize_blocks(
    x: Tensor,  # float32, bfloat16 or float16, any shape
    fmt: MiniFloat,
) -> tuple[Tensor, Tensor]:  # codes: fmt.dtype, x's shape; scale: float32 [rows, ceil(cols / 128)]
    """Quantize `x` with one scale for each block of 128 elements of a row."""
    if fmt.bits == 4:  # for checkpoints only
        return reference.quantize_blocks(x, fmt)
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scale = torch.empty(scale_shape(x.shape), dtype=torch.float32, device=x.device)
    quantize_blocks_into(x, fmt, codes, scale)
    return codes, scale


def quantize_blocks_into(
    x: Tensor,  # float32, bfloat16 or float16, any shape
    fmt: MiniFloat,  # of 8 bits
    codes: Tensor,  # fmt.dtype, x's shape, contiguous, written
    scale: Tensor,  # float32 [rows, ceil(cols / 128)], contiguous, written
) -> None:
    """Quantize `x` with one scale for each block of 128 elements of a row, into memory that is there."""
    if scale.numel():
        x, codes = x.contiguous(), codes.view(torch.uint8)
        per_row, cols, even = block_geometry(x.shape)
        state = "" if fmt in (E4M3, E5M2) else fmt.name
        _launch_quantize(
            _grid(scale), x, codes, scale, scale.numel(), per_row, cols,
            fmt.mantissa_bits, fmt.min_exponent, fmt.max, fmt.squared, state, casts_in_hardware(x.device),
            even, BLOCKS,
        )  # fmt: skip


def dequantize_blocks(
    codes: Tensor,  # fmt.dtype, any shape
    scale: Tensor,  # float32 [rows, ceil(cols / 128)]
    fmt: MiniFloat,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,  # of the values, where codes of 4 bits do not tell
) -> Tensor:  # dtype, `shape` or that of codes
    """Return code × scale (squared for a squared format), rounded to `dtype`."""
    if fmt.bits == 4:  # for checkpoints only
        return reference.dequantize_blocks(codes, scale, fmt, dtype, shape)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if scale.numel():
        per_row, cols, even = block_geometry(codes.shape)
        codes, scale = codes.contiguous().view(torch.uint8), scale.contiguous()
        _launch_dequantize(
            _grid(scale), codes, scale, out, scale.numel(), per_row, cols,
            fmt.mantissa_bits, fmt.min_exponent, fmt.signed, fmt.squared, even, BLOCKS,
        )  # fmt: skip
    return out


def block_geometry(shape: torch.Size) -> tuple[int, int, bool]:
    """Return (blocks per row, columns, whether the columns are a multiple of 128)."""
    _, cols = rows_cols(shape)
    return -(-cols // BLOCK), cols, cols % BLOCK == 0


def _grid(scale: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(scale.numel(), BLOCKS), 1, 1
