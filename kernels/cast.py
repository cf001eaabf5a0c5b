"""A matrix in FP8 with one scale, in both layouts that FP8 products want; the twin of `reference/cast.py`, bit for bit.

Why: a product reads an operand along its rows in one direction of training and along its columns in the other. One
kernel that writes both layouts reads the matrix once, not twice.

How, `cast`: two kernels. The first writes the largest magnitude of each of up to 512 parts of the matrix, as integers,
in which NaN and infinity win. The second reduces those again in each program, which costs less than a third launch, and
casts tiles, writing each as it lies and transposed (`transpose_tiles.py`). So a cast keeps no state, waits for nothing
and needs no buffer zeroed before it. It moves 2 + 2 bytes to read and 1 + 1 to write for an element in bfloat16. The
first kernel walks from the end of the matrix to its start and the second from start to end: each begins with what was
used last, which L2 still holds. Where the magnitudes of parts are known, as behind a norm (`rmsnorm.py`), the second
kernel is the whole cast.

How, `recast`: it reads a matrix once. Its first kernel casts with a scale from before, and each program leaves the
largest magnitude of its tile in a place of its own. The second kernel, of few programs, compares those with the scale:
it returns if that fits, else it casts every tile anew. All programs decide alike, by what none of them writes: the
first kernel leaves them that scale too, so that the second may write the next one over it.

Limits: contiguous matrices (others are copied); E4M3 and E5M2.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import MiniFloat

from .fp8 import bits_of_magnitude, casts_in_hardware, encode_scaled, reciprocal, scale_and_inverse
from .launch import UNFUSED, launched, next_power_of_2
from .ops import raw_stream
from .reference.cast import ALIGNMENT, LEAST, MOST, Cast, aligned
from .reference.delayed_state import STATES
from .transpose_tiles import load_float, magnitude, place_tile, store_both

PARTS = 512
FLAT = 8192
ROWS, COLS = 64, 128  # of a tile, measured on an H200
SLOTS = 4096  # magnitudes of tiles that a program reads at once
PROGRAMS = 256  # of the kernel that has nothing to do most of the time
_LEAST, _MOST = tl.constexpr(LEAST), tl.constexpr(MOST)


@launched(num_warps=8, **UNFUSED)
def _parts_kernel(x_ptr, parts_ptr, numel, rounds, PARTS: tl.constexpr, FLAT: tl.constexpr):
    most = tl.zeros((FLAT,), dtype=tl.int32)
    last = tl.cdiv(numel, FLAT) - 1
    for i in range(rounds):
        tile = last - tl.program_id(0) - i * PARTS
        offset = tile.to(tl.int64) * FLAT + tl.arange(0, FLAT)
        x = tl.load(x_ptr + offset, mask=(offset >= 0) & (offset < numel), other=0.0).to(tl.float32)
        most = tl.maximum(most, bits_of_magnitude(x))
    tl.store(parts_ptr + tl.program_id(0), tl.max(most, axis=0))


@triton.jit
def encode_rows(x0, x1, x2, x3, inverse, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    c0 = encode_scaled(x0, inverse, MANTISSA, HARDWARE)
    c1 = encode_scaled(x1, inverse, MANTISSA, HARDWARE)
    c2 = encode_scaled(x2, inverse, MANTISSA, HARDWARE)
    c3 = encode_scaled(x3, inverse, MANTISSA, HARDWARE)
    return c0, c1, c2, c3


@triton.jit
def _cast_tile(
    x_ptr, codes_ptr, codes_t_ptr, tile, inverse, rows, cols, rows16, cols16,
    MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    CODES: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Cast a tile with the reciprocal of a scale, and return its magnitudes, of four rows together."""
    q, c = place_tile(tile, tl.cdiv(cols16, COLS), ROWS, COLS)
    x0, x1, x2, x3 = load_float(x_ptr, q, c, rows, cols, EVEN)
    c0, c1, c2, c3 = encode_rows(x0, x1, x2, x3, inverse, MANTISSA, HARDWARE)
    store_both(
        c0, c1, c2, c3, codes_ptr, codes_t_ptr, q, c, rows16, cols16, CODES, TRANSPOSED, HARDWARE, EVEN
    )  # fmt: skip
    return magnitude(x0, x1, x2, x3)


@launched(num_warps=8, **UNFUSED)
def _cast_tiles_kernel(
    x_ptr, parts_ptr, codes_ptr, codes_t_ptr, scale_ptr, rows, cols, rows16, cols16,
    MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    CODES: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    bits = tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), axis=0)
    scale, inverse = scale_and_inverse(bits, MANTISSA)
    _cast_tile(
        x_ptr, codes_ptr, codes_t_ptr, tl.program_id(0), inverse, rows, cols, rows16, cols16,
        MANTISSA, HARDWARE, CODES, TRANSPOSED, EVEN, ROWS, COLS,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)


@launched(num_warps=8, **UNFUSED)
def _recast_tiles_kernel(
    x_ptr, previous_ptr, slots_ptr, codes_ptr, codes_t_ptr, rows, cols, rows16, cols16,
    MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    CODES: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    previous = tl.load(previous_ptr)
    inverse = reciprocal(previous)
    bits = _cast_tile(
        x_ptr, codes_ptr, codes_t_ptr, tl.program_id(0), inverse, rows, cols, rows16, cols16,
        MANTISSA, HARDWARE, CODES, TRANSPOSED, EVEN, ROWS, COLS,
    )  # fmt: skip
    tl.store(slots_ptr + tl.program_id(0), tl.max(tl.max(bits, axis=1), axis=0))
    if tl.program_id(0) == 0:
        tl.store(slots_ptr + tl.num_programs(0), previous.to(tl.int32, bitcast=True))


@launched(num_warps=8, **UNFUSED)
def _refit_kernel(
    x_ptr, next_ptr, slots_ptr, codes_ptr, codes_t_ptr, scale_ptr, rows, cols, rows16, cols16,
    MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    CODES: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SLOTS: tl.constexpr, UPDATE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows16, ROWS) * tl.cdiv(cols16, COLS)
    most = tl.zeros((SLOTS,), dtype=tl.int32)
    for first in range(0, tiles, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        most = tl.maximum(most, tl.load(slots_ptr + slot, mask=slot < tiles, other=0))
    own, inverse = scale_and_inverse(tl.max(most, axis=0), MANTISSA)
    previous = tl.load(slots_ptr + tiles).to(tl.float32, bitcast=True)
    fits = (own > previous * _LEAST) & (own <= previous * _MOST)
    if EXACT:
        fits = (own == previous) & (own > 0)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, tl.where(fits, previous, own))
        if UPDATE:
            tl.store(next_ptr, tl.where(fits, previous, own))
    if fits == 0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _cast_tile(
                x_ptr, codes_ptr, codes_t_ptr, tile, inverse, rows, cols, rows16, cols16,
                MANTISSA, HARDWARE, CODES, TRANSPOSED, EVEN, ROWS, COLS,
            )  # fmt: skip


class _Scratch(threading.local):
    """Small pieces of memory for the casts of one thread, by stream: allocating each would cost as much as a launch."""

    def __init__(self) -> None:
        # where the parts' magnitudes lie between the two launches
        self.parts: dict[tuple[int, int, int], Tensor] = {}
        self.scales: dict[tuple[int, int, int], Iterator[Tensor]] = {}

    def take(self, x: Tensor, parts: int = PARTS) -> tuple[Tensor, Tensor]:
        """Return (int32 [parts], float32 0-d): memory for this cast, and memory of its own for its scale."""
        # Replays of a captured graph use it when they like; autograd saves nothing made in inference mode.
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or torch.is_inference_mode_enabled():
            return fresh(x, parts)
        key = x.get_device(), raw_stream(x), parts
        try:
            return self.parts[key], next(self.scales[key])
        except (KeyError, StopIteration):
            self.parts[key] = x.new_empty(parts, dtype=torch.int32)
            # 16 bytes apart: cuBLAS takes no scale that is not aligned to that
            self.scales[key] = iter(x.new_empty(64, 4, dtype=torch.float32)[:, 0].unbind())
            return self.parts[key], next(self.scales[key])


_scratch = _Scratch()


def fresh(x: Tensor, parts: int = PARTS) -> tuple[Tensor, Tensor]:
    """Return what `_Scratch.take` does, in memory of its own."""
    return x.new_empty(parts, dtype=torch.int32), x.new_empty((), dtype=torch.float32)


class _Geometry(NamedTuple):
    """What follows from the arguments of a cast."""

    shape: tuple[int, int]
    shape_t: tuple[int, int]
    parts: int  # whose magnitudes are looked for, or known
    parts_args: tuple[int, ...]
    programs: int
    sizes: tuple[int, int, int, int]  # rows and columns, without padding and with it
    casting: tuple[int, bool]  # bits of the format's mantissa, and whether the GPU casts
    even: bool  # no tile is cut
    slots: int  # for a magnitude of each tile and a scale; a power of two
    args: tuple[Any, ...]


@lru_cache(maxsize=4096)
def _geometry(
    rows: int,
    cols: int,
    mantissa: int,  # bits of the format
    codes: bool,
    transposed: bool,
    known: int,  # parts whose largest magnitudes are known, 0 if none
    rows_to: int,
    device: torch.device,
) -> _Geometry:
    rows16, cols16 = aligned(rows, rows_to), aligned(cols)
    tiles = max(-(-rows * cols // FLAT), 1)
    parts = known or min(PARTS, next_power_of_2(tiles))
    sizes, casting = (rows, cols, rows16, cols16), (mantissa, casts_in_hardware(device))
    even = rows % ROWS == 0 and cols % COLS == 0
    programs = -(-rows16 // ROWS) * -(-cols16 // COLS)
    return _Geometry(
        (rows16, cols16) if codes else (0, 0),
        (cols16, rows16) if transposed else (0, 0),
        parts,
        (rows * cols, -(-tiles // parts), parts, FLAT),
        programs,
        sizes,
        casting,
        even,
        next_power_of_2(programs + 1),
        (*sizes, *casting, codes, transposed, even, ROWS, COLS),
    )


def cast(
    x: Tensor,
    fmt: MiniFloat,
    codes: bool = True,
    transposed: bool = True,
    amax: Tensor | None = None,
    rows_to: int = ALIGNMENT,
    reuse: bool = True,  # small memory may be kept from call to call, which a compiled graph's pool refuses
) -> Cast:
    """Quantize a matrix with one scale."""
    known = 0 if amax is None else amax.numel()
    x, g, out, out_t = prepare(x, fmt, codes, transposed, known, rows_to)
    if not x.numel():
        return out, out_t, x.new_zeros((), dtype=torch.float32)
    if amax is None:
        bits, scale = _scratch.take(x) if reuse else fresh(x)
        _parts_kernel((g.parts, 1, 1), x, bits, *g.parts_args)
    else:
        bits = amax if amax.dtype is torch.int32 else amax.float().view(torch.int32)
        scale = x.new_empty((), dtype=torch.float32)
    _cast_tiles_kernel((g.programs, 1, 1), x, bits, out, out_t, scale, *g.args, g.parts)
    return out, out_t, scale


def recast(
    x: Tensor,
    fmt: MiniFloat,
    of: int | Tensor,
    codes: bool = True,
    transposed: bool = True,
    exact: bool = False,
    reuse: bool = True,  # as in `cast`
) -> Cast:
    """Quantize a matrix with the scale of its last cast if that fits it, else with its own."""
    x, g, out, out_t = prepare(x, fmt, codes, transposed, 0, ALIGNMENT)
    if not x.numel():
        return out, out_t, x.new_zeros((), dtype=torch.float32)
    update = isinstance(of, int)
    previous = STATES[of].on(x.device) if isinstance(of, int) else of
    slots, scale = _scratch.take(x, g.slots) if reuse else fresh(x, g.slots)
    _recast_tiles_kernel((g.programs, 1, 1), x, previous, slots, out, out_t, *g.args)
    _refit_kernel(
        (min(g.programs, PROGRAMS), 1, 1),
        x, previous, slots, out, out_t, scale, *g.args, min(g.slots, SLOTS), update, exact,
    )  # fmt: skip
    return out, out_t, scale


def prepare(
    x: Tensor, fmt: MiniFloat, codes: bool, transposed: bool, known: int, rows_to: int
) -> tuple[Tensor, _Geometry, Tensor, Tensor]:
    """Return x as kernels read it, what follows from the arguments, and memory for codes and their transpose."""
    if not x.is_contiguous():
        x = x.detach().contiguous()
    cols = x.shape[-1]
    rows, mantissa = x.numel() // max(cols, 1), fmt.mantissa_bits
    g = _geometry(rows, cols, mantissa, codes, transposed, known, rows_to, x.device)
    out, out_t = (
        x.new_empty(shape, dtype=fmt.dtype) if any(shape) else _nothing(fmt.dtype, x.device)
        for shape in (g.shape, g.shape_t)
    )
    return x, g, out, out_t


@lru_cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what stands for a layout that was not asked for: one tensor for all casts."""
    with torch.inference_mode(False):  # autograd saves it
        return torch.empty((0, 0), dtype=dtype, device=device)
