"""Triton kernels that quantize and dequantize with a scale per block of 128; the twin of `reference/quantize.py`.

Why: FP8 gradients and stored states are made and read outside the optimizer's step too: by backward, by collectives, by
checkpoints.

How: a program owns 16 blocks, finds the largest magnitude of each, and writes codes and scale, bit for bit as the
reference. A block never crosses a row, so the tail of a row is masked; rows that are a multiple of 128 take a path
without masks. `quantize_list` and `clamp_list` take many tensors in one launch, from a pointer table: a column of
programs for each of them, every program with as many of its blocks as it takes.

Limits: codes of 4 bits, which only checkpoints quantize here, are left to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK, E4M3, E5M2, MiniFloat, rows_cols, scale_shape

from .fp8 import block_offsets, casts_in_hardware, decode, encode_blocks, store_rounded
from .launch import UNFUSED, launched
from .pointer_table import COLUMN, WIDTH, upload_columns
from .reference import quantize as reference
from .state_codecs import encode_state, root
from .step import TYPES, groups_of
from .tile_io import places, pointer

BLOCKS = 16
PROGRAMS = 1024  # at most, for each tensor of a list: what keeps a GPU busy with one tensor alone
_WIDTH = tl.constexpr(WIDTH)
_GRAD, _CODES, _SCALE, _BLOCKS = (
    tl.constexpr(COLUMN[name]) for name in ("grad", "codes", "grad_block_scale", "blocks")
)


@launched(num_warps=4, **UNFUSED)
def _quantize_blocks_kernel(
    x_ptr, codes_ptr, scale_ptr, n_blocks, blocks_per_row, cols,
    MANTISSA: tl.constexpr, SQUARED: tl.constexpr, STATE: tl.constexpr,
    HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, inside, offset, mask = block_offsets(n_blocks, blocks_per_row, cols, BLOCKS, EVEN)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if SQUARED:
        x = root(x, False)
    if STATE == "":
        code, scale = encode_blocks(x, MANTISSA, HARDWARE)
    else:
        code, scale = encode_state(x, 0, STATE, False, False)
    tl.store(codes_ptr + offset, code, mask=mask)
    tl.store(scale_ptr + block, scale, mask=inside)


@launched(num_warps=4, **UNFUSED)
def _quantize_list_kernel(
    table_ptr, low, high, TYPE: tl.constexpr, ROWS: tl.constexpr,
    MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = table_ptr + tl.program_id(1).to(tl.int64) * _WIDTH
    grad, codes = pointer(row, _GRAD, TYPE, ROWS), pointer(row, _CODES, tl.uint8, ROWS)
    scales, count = pointer(row, _SCALE, tl.float32, "any"), tl.load(row + _BLOCKS).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCKS, count, tl.num_programs(0) * BLOCKS):
        block, inside, offset, mask, _bytes, _byte_mask = places(row, first, ROWS, BLOCKS)
        x = tl.load(grad + offset, mask=mask, other=0)
        if TYPE == tl.uint8:  # E4M3 already, to be limited
            scale = tl.load(scales + block, mask=inside, other=0.0)
            x = decode(x, 3, -6, True) * scale[:, None]
            x = tl.where((x >= low) | (x != x), x, low)  # NaN stays, and a limit may be NaN
            x = tl.where((x <= high) | (x != x), x, high)
        code, scale = encode_blocks(x.to(tl.float32), MANTISSA, HARDWARE)
        tl.store(codes + offset, code, mask=mask)
        tl.store(scales + block, scale, mask=inside)


@launched(num_warps=4, **UNFUSED)
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
    store_rounded(out_ptr + offset, value, mask)


def quantize_blocks(x: Tensor, fmt: MiniFloat) -> tuple[Tensor, Tensor]:
    """Quantize `x` with one scale for each block of 128 elements of a row."""
    if fmt.bits == 4:  # for checkpoints only
        return reference.quantize_blocks(x, fmt)
    codes = x.new_empty(x.shape, dtype=fmt.dtype)
    scale = x.new_empty(scale_shape(x.shape), dtype=torch.float32)
    quantize_blocks_into(x, fmt, codes, scale)
    return codes, scale


def quantize_blocks_into(x: Tensor, fmt: MiniFloat, codes: Tensor, scale: Tensor) -> None:
    """Quantize `x`, in 8 bits, into existing contiguous memory."""
    if scale.numel():
        x, codes = x.contiguous(), codes.view(torch.uint8)
        cols = rows_cols(x.shape)[1]
        codec = "" if fmt in (E4M3, E5M2) else fmt.name
        _quantize_blocks_kernel(
            (-(-scale.numel() // BLOCKS), 1, 1), x, codes, scale, scale.numel(), -(-cols // BLOCK), cols,
            fmt.mantissa_bits, fmt.squared, codec, casts_in_hardware(x.device), cols % BLOCK == 0, BLOCKS,
        )  # fmt: skip


def quantize_list(
    tensors: Sequence[Tensor], fmt: MiniFloat, results: Sequence[tuple[int, int]]
) -> None:
    """Write E4M3 or E5M2 codes and scales of `tensors`, all on one device, to addresses."""
    # copies of those that are not contiguous live until the launch
    _encode_list([x.contiguous() for x in tensors], results, fmt)


def clamp_list(tensors: Sequence[tuple[Tensor, Tensor]], low: float, high: float) -> None:
    """Limit the values of E4M3 tensors on one device, contiguous codes and scales, in place."""
    addresses = [(codes.data_ptr(), scale.data_ptr()) for codes, scale in tensors]
    _encode_list([codes for codes, _ in tensors], addresses, E4M3, low, high)


def _encode_list(
    tensors: Sequence[Tensor],  # values; or codes, whose values are limited
    results: Sequence[tuple[int, int]],  # addresses of codes and scales
    fmt: MiniFloat,
    low: float = -math.inf,
    high: float = math.inf,
) -> None:
    device = tensors[0].device
    given = [(x.dtype, x.shape, x.data_ptr()) for x in tensors]
    for dtype, layout, of, columns in groups_of(given):
        columns["codes"], columns["grad_block_scale"] = zip(*(results[i] for i in of), strict=True)
        programs = min(-(-max(columns["blocks"]) // BLOCKS), PROGRAMS)
        if programs:
            _quantize_list_kernel(
                (programs, len(of), 1), upload_columns(columns, device), low, high,
                TYPES[dtype], layout, fmt.mantissa_bits, casts_in_hardware(device), BLOCKS,
            )  # fmt: skip


def dequantize_blocks(
    codes: Tensor,  # fmt.dtype, fmt.codes_shape(shape)
    scale: Tensor,  # float32 [rows, ceil(cols / 128)]
    fmt: MiniFloat,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,  # of the values; needed for codes of 4 bits only
) -> Tensor:  # dtype, `shape` or that of codes
    """Return code × scale (squared for a squared format), rounded to `dtype`."""
    if fmt.bits == 4:  # for checkpoints only
        return reference.dequantize_blocks(codes, scale, fmt, dtype, shape)
    out = codes.new_empty(codes.shape, dtype=dtype)
    if scale.numel():
        codes, scale = codes.contiguous().view(torch.uint8), scale.contiguous()
        cols = rows_cols(codes.shape)[1]
        _dequantize_blocks_kernel(
            (-(-scale.numel() // BLOCKS), 1, 1), codes, scale, out, scale.numel(), -(-cols // BLOCK), cols,
            fmt.mantissa_bits, fmt.min_exponent, fmt.signed, fmt.squared, cols % BLOCK == 0, BLOCKS,
        )  # fmt: skip
    return out
