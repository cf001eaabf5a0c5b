"""A matrix in FP8 with a scale known before it is read; the twin of `reference/cast_delayed.py`, bit for bit.

One kernel: every program casts a tile with the scale that the state holds and adds the tile's amax to the state's; the
last one to finish, by a ticket, writes the history and the next scale. A first kernel gives an empty state a scale
from the matrix itself, and returns at once from any other.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import MiniFloat

from .cast import FLAT, TILE
from .fp8 import casts_in_hardware, encode_ocp, scale_and_inverse
from .launch import Launcher, on_device, raw_stream
from .reference.cast import aligned
from .reference.cast_delayed import HEADER, SEEDED, DelayedState

_BYTES = tl.constexpr(tl.pointer_type(tl.uint8))
_INTS = tl.constexpr(tl.pointer_type(tl.int32))
_HEADER = tl.constexpr(HEADER)
_hardware = cache(casts_in_hardware)


@triton.jit
def _seed_kernel(x_ptr, state_ptr, seed_ptr, numel, FLAT: tl.constexpr):
    """Write the bits of the largest magnitude of x to `seed`, which is 0, if the state has no scale."""
    if tl.load(state_ptr) == 0:
        offset = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
        x = tl.load(x_ptr + offset, mask=offset < numel, other=0.0).to(tl.float32)
        tl.atomic_max(seed_ptr, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))


@triton.jit
def _cast_delayed_kernel(
    x_ptr, state_ptr, seed_ptr, codes_ptr, codes_t_ptr, scale_ptr, rows, cols, rows16, cols16, history, growth,
    SEED: tl.constexpr, AGAIN: tl.constexpr, UPDATE: tl.constexpr, MOST_RECENT: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    HISTORY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    scale = tl.load(state_ptr)
    if AGAIN:
        scale = tl.where(scale > 0, tl.load(state_ptr + 1), 0.0)
    if SEED:
        own = (tl.load(seed_ptr).to(tl.float32, bitcast=True) * growth).to(tl.int32, bitcast=True)
        seeded, _inverse = scale_and_inverse(own, MAX)
        scale = tl.where(tl.load(state_ptr) > 0, scale, seeded)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    tile, across = tl.program_id(0), tl.cdiv(cols16, COLS)
    r = (tile // across) * ROWS + tl.arange(0, ROWS)
    c = (tile % across) * COLS + tl.arange(0, COLS)
    at = x_ptr + r[:, None].to(tl.int64) * cols + c[None, :]
    inside = (r < rows16)[:, None] & (c < cols16)[None, :]
    if EVEN:
        x = tl.load(at).to(tl.float32)
    else:
        x = tl.load(at, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < 0x7F800000
    scaled = tl.where(finite, tl.where(inverse > 0, x * inverse, 0.0), 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -MAX), MAX)
    code = tl.where(finite, encode_ocp(scaled, MANTISSA, HARDWARE), 0x7F).to(tl.uint8)
    out = codes_ptr.to(_BYTES, bitcast=True) + r[:, None].to(tl.int64) * cols16 + c[None, :]
    out_t = codes_t_ptr.to(_BYTES, bitcast=True) + c[:, None].to(tl.int64) * rows16 + r[None, :]
    if EVEN:
        tl.store(out, code)
        tl.store(out_t, tl.trans(code))
    else:
        tl.store(out, code, mask=inside)
        tl.store(out_t, tl.trans(code), mask=tl.trans(inside))
    if tile == 0:
        tl.store(scale_ptr, scale)
    if UPDATE:
        counts = state_ptr.to(_INTS, bitcast=True)
        # [2] position, [3] this cast's amax, [4] how many programs are done
        tl.atomic_max(counts + 3, tl.max(tl.max(bits, axis=1), axis=0))
        if tl.atomic_add(counts + 4, 1) == tl.num_programs(0) - 1:
            most = tl.atomic_max(counts + 3, 0)
            position = tl.load(counts + 2)
            live = (most > 0) & (most < 0x7F800000)
            n = tl.arange(0, HISTORY)
            past = tl.load(state_ptr + _HEADER + n, mask=n < history, other=0.0)
            amax = most.to(tl.float32, bitcast=True)
            largest = tl.maximum(tl.max(tl.where(n == position, 0.0, past), axis=0), amax)
            if MOST_RECENT:
                largest = amax
            new, _inverse = scale_and_inverse((largest * growth).to(tl.int32, bitcast=True), MAX)
            if live:
                tl.store(state_ptr + _HEADER + position, amax)
                tl.store(state_ptr, new)
                tl.store(counts + 2, (position + 1) % history)
            tl.store(state_ptr + 1, scale)
            tl.store(counts + 3, 0)
            tl.store(counts + 4, 0)


_launch_seed = Launcher(_seed_kernel, num_warps=4)
_launch_cast = Launcher(_cast_delayed_kernel, num_warps=8, enable_fp_fusion=False)


def cast_delayed(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    fmt: MiniFloat,  # e4m3 or e5m2
    of: DelayedState,  # updated
    update: bool,  # take this amax into the history
    again: bool,  # with the last cast's scale
) -> tuple[
    Tensor, Tensor, Tensor
]:  # codes [rows16, cols16], codes_t [cols16, rows16], scale float32 0-d
    """Quantize a matrix with the scale in `of`."""
    x = x if x.is_contiguous() else x.detach().contiguous()
    numel, cols = x.numel(), x.shape[-1]
    rows = numel // max(cols, 1)
    rows16, cols16 = aligned(rows), aligned(cols)
    codes = x.new_empty((rows16, cols16), dtype=fmt.dtype)
    codes_t = x.new_empty((cols16, rows16), dtype=fmt.dtype)
    if not numel:
        return codes, codes_t, x.new_zeros((), dtype=torch.float32)
    state, seed = of.on(x.device), of.casts <= SEEDED
    scale = x.new_empty((), dtype=torch.float32)
    found = x.new_zeros(1, dtype=torch.int32) if seed else state
    with on_device(x.device):
        stream, key = raw_stream(x), (rows, cols, x.dtype, fmt.dtype, x.device, x.data_ptr() % 16)
        if seed:
            grid = (-(-numel // FLAT), 1, 1)
            _launch_seed(key, grid, stream, x, state, found, numel, FLAT)
        how = (seed, again, update, of.most_recent)
        even = rows % TILE == 0 and cols % TILE == 0
        grid = (-(-rows16 // TILE) * -(-cols16 // TILE), 1, 1)
        _launch_cast(
            (*key, *how, of.history, of.margin), grid, stream,
            x, state, found, codes, codes_t, scale, rows, cols, rows16, cols16, of.history, 2.0**of.margin,
            *how, fmt.mantissa_bits, fmt.max, _hardware(x.device), even,
            triton.next_power_of_2(of.history), TILE, TILE,
        )  # fmt: skip
    return codes, codes_t, scale
