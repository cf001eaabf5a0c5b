"""Statistics of a cast to FP8; the twin of `reference/monitor.py`, which says what they are.

Why: ten numbers of a matrix by torch's operations would read it ten times.

How: each of up to 1,024 programs counts for its tiles in registers, then adds to the same ten numbers once.

Limits: integers are the reference's. Signal and noise are sums of the same float64 terms in another order: their last
bits differ, and from call to call too.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fp8stack.formats import MiniFloat

from .fp8 import bits_of_magnitude, decode, encode_ocp
from .launch import UNFUSED, launched
from .reference.monitor import FIELDS, SUMS, thresholds

FLAT = 2048
_PROGRAMS = 1024  # each adds to the same numbers once
_ELEMENTS = tl.constexpr(len(FIELDS) - 1)


@launched(num_warps=8, **UNFUSED)
def _count_kernel(
    x_ptr, scale_ptr, out_ptr, sums_ptr, numel, cols, block_rows, stride_r, stride_c, rounds,
    ZERO: tl.constexpr, CLIPPED: tl.constexpr, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    none = tl.zeros((FLAT,), dtype=tl.int32)
    largest, scales, under, over, bad = none, none, none, none, none
    dead = tl.zeros((FLAT // 128,), dtype=tl.int32)
    signal = tl.zeros((FLAT,), dtype=tl.float64)
    noise = tl.zeros((FLAT,), dtype=tl.float64)
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
        bits = bits_of_magnitude(x)
        finite = bits < 0x7F800000
        inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
        magnitude = tl.where(finite, tl.abs(x), 0.0)
        scaled = magnitude * inverse
        told = finite & (scale == scale)
        largest = tl.maximum(largest, tl.where(finite, bits, 0))
        scales = tl.maximum(scales, bits_of_magnitude(scale))
        small = told & (scaled <= ZERO)  # so is what lies outside
        lost = (small & (bits > 0)).to(tl.int32)
        under += lost
        over += (told & (scaled >= CLIPPED)).to(tl.int32)
        bad += (bits >= 0x7F800000).to(tl.int32)
        silent = tl.min(tl.reshape(small.to(tl.int32), (FLAT // 128, 128)), 1)
        dead += silent * tl.max(tl.reshape(lost, (FLAT // 128, 128)), 1)
        code = encode_ocp(scaled, MANTISSA, False)
        value = decode(code, MANTISSA, MIN_EXPONENT, True).to(tl.float64) * scale.to(tl.float64)
        exact = tl.where(told, magnitude, 0.0).to(tl.float64)
        error = tl.where(told, exact - value, 0.0)
        signal += exact * exact
        noise += error * error
    tl.atomic_max(out_ptr, tl.max(largest, 0).to(tl.int64))
    tl.atomic_max(out_ptr + 1, tl.max(scales, 0).to(tl.int64))
    tl.atomic_add(out_ptr + 2, tl.sum(under, 0).to(tl.int64))
    tl.atomic_add(out_ptr + 3, tl.sum(over, 0).to(tl.int64))
    tl.atomic_add(out_ptr + 4, tl.sum(bad, 0).to(tl.int64))
    tl.atomic_add(out_ptr + 5, tl.sum(dead, 0).to(tl.int64))
    tl.atomic_add(sums_ptr, tl.sum(signal, 0))
    tl.atomic_add(sums_ptr + 1, tl.sum(noise, 0))
    if tl.program_id(0) == 0:
        size = tl.full((), numel, tl.int64)
        tl.atomic_add(out_ptr + 6, (size + 127) // 128)
        tl.atomic_add(out_ptr + _ELEMENTS, size)


def count(x: Tensor, scale: Tensor, fmt: MiniFloat, out: Tensor, squares: bool = False) -> None:
    """Add the statistics of a cast to `out`."""
    x, numel = x.detach().contiguous(), x.numel()
    if not numel:
        return
    strides = (scale.stride()[::-1] if squares else scale.stride()) if scale.ndim else (0, 0)
    tiles = -(-numel // FLAT)
    programs = min(tiles, _PROGRAMS)
    _count_kernel(
        (programs, 1, 1),
        x, scale, out, out[SUMS].view(torch.float64), numel, x.shape[-1], 128 if squares else 1, *strides,
        -(-tiles // programs), *thresholds(fmt), fmt.mantissa_bits, fmt.min_exponent, scale.ndim > 0, FLAT,
    )  # fmt: skip
