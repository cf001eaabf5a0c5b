"""SwiGLU joined to the casts around it; the twin of `reference/swiglu.py`.

Each direction is two kernels, as a cast is (`cast.py`): one looks for the largest magnitude of what it computes, the
other computes it again and casts. For an element in bfloat16 forward moves 4 + 4 bytes in and 2 out, backward 6 + 6 in
and 4 out, where torch's kernels and the casts behind them move 16 and 30. The exponential is the GPU's, so results
may lie one code from the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import MiniFloat

from .cast import store_both
from .fp8 import casts_in_hardware, encode_ocp, scale_and_inverse
from .launch import Launcher, on_device, raw_stream, without_single_column
from .reference.cast import aligned
from .reference.swiglu import Cast

PARTS, FLAT, ROWS, COLS = 1024, 2048, 64, 64  # measured on an H200, over [8192, 14336]


@triton.jit
def _forward(g, u):
    g, u = g.to(tl.float32), u.to(tl.float32)
    return g * tl.sigmoid(g) * u


@triton.jit
def _backward(d, g, u):
    d, g, u = d.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
    s = tl.sigmoid(g)
    return d * u * (s * (1 + g * (1 - s))), d * (g * s)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _swiglu_parts_kernel(
    d_ptr, g_ptr, u_ptr, parts_ptr, numel, rounds, BACKWARD: tl.constexpr, PARTS: tl.constexpr, FLAT: tl.constexpr
):  # fmt: skip
    first = tl.zeros((FLAT,), dtype=tl.int32)
    second = first
    last = tl.cdiv(numel, FLAT) - 1
    for i in range(rounds):  # from the end, as `cast.py` does
        at = (last - tl.program_id(0) - i * PARTS).to(tl.int64) * FLAT + tl.arange(0, FLAT)
        inside = (at >= 0) & (at < numel)
        g = tl.load(g_ptr + at, mask=inside, other=0.0)
        u = tl.load(u_ptr + at, mask=inside, other=0.0)
        if BACKWARD:
            dg, du = _backward(tl.load(d_ptr + at, mask=inside, other=0.0), g, u)
            first, second = tl.maximum(first, _bits(dg)), tl.maximum(second, _bits(du))
        else:
            first = tl.maximum(first, _bits(_forward(g, u)))
    tl.store(parts_ptr + tl.program_id(0), tl.max(first, axis=0))
    if BACKWARD:
        tl.store(parts_ptr + PARTS + tl.program_id(0), tl.max(second, axis=0))


@triton.jit
def _cast_both(
    x, parts_ptr, codes_ptr, codes_t_ptr, scale_ptr, r, c, rows16, cols16,
    PARTS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Cast a tile with the scale of the parts, and store it as it lies and transposed."""
    bits = tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), axis=0)
    scale, inverse = scale_and_inverse(bits, MAX)
    code = encode_ocp(tl.where(inverse > 0, x * inverse, 0.0), MANTISSA, HARDWARE)
    store_both(code, codes_ptr, codes_t_ptr, r, c, rows16, cols16, True, True, EVEN)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)


@triton.jit
def _swiglu_cast_kernel(
    d_ptr, g_ptr, u_ptr, parts_ptr, a_ptr, a_t_ptr, a_scale_ptr, b_ptr, b_t_ptr, b_scale_ptr,
    rows, cols, rows16, cols16,
    BACKWARD: tl.constexpr, PARTS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr,
    HARDWARE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile, across = tl.program_id(0), tl.cdiv(cols16, COLS)
    r = (tile // across) * ROWS + tl.arange(0, ROWS)
    c = (tile % across) * COLS + tl.arange(0, COLS)
    at = r[:, None].to(tl.int64) * cols + c[None, :]
    known = (r < rows)[:, None] & (c < cols)[None, :]
    g = tl.load(g_ptr + at, mask=known, other=0.0)
    u = tl.load(u_ptr + at, mask=known, other=0.0)
    if BACKWARD:
        dg, du = _backward(tl.load(d_ptr + at, mask=known, other=0.0), g, u)
        _cast_both(
            dg, parts_ptr, a_ptr, a_t_ptr, a_scale_ptr, r, c, rows16, cols16,
            PARTS, MANTISSA, MAX, HARDWARE, EVEN,
        )  # fmt: skip
        _cast_both(
            du, parts_ptr + PARTS, b_ptr, b_t_ptr, b_scale_ptr, r, c, rows16, cols16,
            PARTS, MANTISSA, MAX, HARDWARE, EVEN,
        )  # fmt: skip
    else:
        _cast_both(
            _forward(g, u), parts_ptr, a_ptr, a_t_ptr, a_scale_ptr, r, c, rows16, cols16,
            PARTS, MANTISSA, MAX, HARDWARE, EVEN,
        )  # fmt: skip


_launch_parts = Launcher(_swiglu_parts_kernel, num_warps=8)
_launch_cast = Launcher(_swiglu_cast_kernel, num_warps=8)


def swiglu_cast(gate: Tensor, up: Tensor, fmt: MiniFloat) -> Cast:
    """Return silu(gate) × up in FP8."""
    return _run(None, gate, up, fmt)[:3]  # type: ignore[return-value]


def swiglu_backward_cast(
    dh: Tensor, gate: Tensor, up: Tensor, fmt: MiniFloat
) -> tuple[Tensor, ...]:
    """Return the gradients of gate and up in FP8: codes, codes_t, scale of one, then of the other."""
    return _run(dh, gate, up, fmt)


def _run(dh: Tensor | None, gate: Tensor, up: Tensor, fmt: MiniFloat) -> tuple[Tensor, ...]:
    backward = dh is not None
    gate, up = (without_single_column(x.contiguous()) for x in (gate, up))
    d = gate if dh is None else without_single_column(dh.contiguous())
    rows, cols = gate.shape
    rows16, cols16 = aligned(rows), aligned(cols)
    results: list[Tensor] = []
    for _ in range(1 + backward):
        results.append(gate.new_empty((rows16, cols16), dtype=fmt.dtype))
        results.append(gate.new_empty((cols16, rows16), dtype=fmt.dtype))
        results.append(gate.new_empty((), dtype=torch.float32))
    if not gate.numel():
        return tuple(x if x.ndim else x.zero_() for x in results)
    out = results if backward else results + results  # forward writes no second
    tiles = -(-gate.numel() // FLAT)
    parts = min(PARTS, triton.next_power_of_2(tiles))
    bits = gate.new_empty(2 * parts, dtype=torch.int32)
    even = rows % ROWS == 0 and cols % COLS == 0
    places = [x.data_ptr() % 16 for x in (d, gate, up)]
    key = (rows, cols, gate.dtype, up.dtype, d.dtype, fmt.dtype, backward, gate.device, *places)
    with on_device(gate.device):
        stream = raw_stream(gate)
        _launch_parts(
            key, (parts, 1, 1), stream,
            d, gate, up, bits, gate.numel(), -(-tiles // parts), backward, parts, FLAT,
        )  # fmt: skip
        _launch_cast(
            key, (-(-rows16 // ROWS) * -(-cols16 // COLS), 1, 1), stream,
            d, gate, up, bits, *out, rows, cols, rows16, cols16,
            backward, parts, fmt.mantissa_bits, fmt.max, casts_in_hardware(gate.device), even, ROWS, COLS,
        )  # fmt: skip
    return tuple(results)
