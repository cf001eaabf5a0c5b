"""Statistics of a cast to FP8; the twin of `reference/monitor.py`, which says what they are, integer for integer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import MiniFloat

from .launch import on_device
from .reference.monitor import FIELDS, thresholds

FLAT = 2048
_PROGRAMS = 1024  # each adds to the same numbers once
_ELEMENTS = tl.constexpr(len(FIELDS) - 1)
LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _count_kernel(
    x_ptr, scale_ptr, out_ptr, numel, cols, block_rows, stride_r, stride_c, rounds,
    ZERO: tl.constexpr, CLIPPED: tl.constexpr, BLOCKS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    largest = tl.zeros((FLAT,), dtype=tl.int32)
    scales = tl.zeros((FLAT,), dtype=tl.int32)
    under = tl.zeros((FLAT,), dtype=tl.int32)
    over = tl.zeros((FLAT,), dtype=tl.int32)
    bad = tl.zeros((FLAT,), dtype=tl.int32)
    for i in range(rounds):
        tile = tl.program_id(0) + i * tl.num_programs(0)
        offset = tile.to(tl.int64) * FLAT + tl.arange(0, FLAT)
        inside = offset < numel
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if BLOCKS:
            row = offset // cols
            at = scale_ptr + row // block_rows * stride_r + (offset - row * cols) // 128 * stride_c
            scale = tl.load(at, mask=inside, other=0.0)
        else:
            scale = tl.load(scale_ptr) + tl.zeros((FLAT,), dtype=tl.float32)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        finite = bits < 0x7F800000
        inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
        scaled = tl.where(finite, tl.abs(x), 0.0) * inverse
        told = finite & (scale == scale)
        largest = tl.maximum(largest, tl.where(finite, bits, 0))
        scales = tl.maximum(scales, scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        under += (told & (bits > 0) & (scaled <= ZERO)).to(tl.int32)
        over += (told & (scaled >= CLIPPED)).to(tl.int32)
        bad += (bits >= 0x7F800000).to(tl.int32)
    tl.atomic_max(out_ptr, tl.max(largest, 0).to(tl.int64))
    tl.atomic_max(out_ptr + 1, tl.max(scales, 0).to(tl.int64))
    tl.atomic_add(out_ptr + 2, tl.sum(under, 0).to(tl.int64))
    tl.atomic_add(out_ptr + 3, tl.sum(over, 0).to(tl.int64))
    tl.atomic_add(out_ptr + 4, tl.sum(bad, 0).to(tl.int64))
    if tl.program_id(0) == 0:
        tl.atomic_add(out_ptr + _ELEMENTS, tl.full((), numel, tl.int64))


def count(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    scale: Tensor,  # float32: 0-d, [rows or more, cols / 128 or more], or [cols / 128 or more, rows / 128] of squares
    fmt: MiniFloat,
    out: Tensor,  # int64 [6], written
    squares: bool = False,  # a scale for each 128×128
) -> None:
    """Add the statistics of a cast to `out`."""
    x, numel = x.detach().contiguous(), x.numel()
    if not numel:
        return
    strides = (scale.stride()[::-1] if squares else scale.stride()) if scale.ndim else (0, 0)
    tiles = -(-numel // FLAT)
    programs = min(tiles, _PROGRAMS)
    with on_device(x.device):
        _count_kernel[(programs,)](
            x, scale, out, numel, x.shape[-1], 128 if squares else 1, *strides, -(-tiles // programs),
            *thresholds(fmt), scale.ndim > 0, FLAT, **LAUNCH,
        )  # fmt: skip
