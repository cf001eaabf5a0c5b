"""The activation between the two products of experts, joined to the casts; twin of `reference/expert_activation.py`.

Why: torch's kernels for SiLU, the product with up, the one with the router's weights, and the casts behind them move 20
bytes an element forward and 40 backward. This moves 8 + 1 and 12 + 5.

How: as `activation.py` with current scaling: a kernel looks for the largest magnitude of what it computes, a second one
computes it again and casts. Backward's adds up each row of its tile for the gradient of the weights; torch adds those
sums. Gate and up are read as halves of the rows that one product wrote, and their gradients are written so.

Limits: those of `activation.py`; the number of rows is a multiple of 64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import E4M3

from .activation import COLS, PARTS, ROWS, store_scale, values
from .cast_delayed import cast_rows
from .fp8 import bits_of_magnitude, casts_in_hardware, reciprocal
from .launch import launched, next_power_of_2
from .transpose_tiles import place_tile

_MANTISSA = tl.constexpr(E4M3.mantissa_bits)


@triton.jit
def _load(ptr, r, c, cols, stride, EVEN: tl.constexpr):
    at = ptr + r[:, None].to(tl.int64) * stride + c[None, :]
    return tl.load(at, mask=None if EVEN else (c < cols)[None, :], other=None if EVEN else 0.0)


@triton.jit
def _row_values(
    d_ptr, x_ptr, w_ptr, index_ptr, r, c, cols,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return of the rows r: h, gradients of gate and up (or h), and the gradient of h times h without the weight."""
    g = _load(x_ptr, r, c, cols, 2 * cols, EVEN)
    u = _load(x_ptr + cols, r, c, cols, 2 * cols, EVEN)
    pair = tl.load(index_ptr + r)
    weight = tl.load(w_ptr + pair, mask=pair >= 0, other=0).to(tl.float32)[:, None]
    if BACKWARD:
        d = _load(d_ptr, r, c, cols, cols, EVEN).to(tl.float32)
        h, a, b = values(d * weight, g, u, ACTIVATION, True, True, HARDWARE)
        return h * weight, a, b, d * h
    else:
        h, _a, _b = values(g, g, u, ACTIVATION, True, False, HARDWARE)
        h = h * weight
        return h, h, h, h


@launched(num_warps=8)
def _expert_parts_kernel(
    d_ptr, x_ptr, w_ptr, index_ptr, parts_ptr, cols, tiles, rounds,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    most = tl.zeros((ROWS, COLS), dtype=tl.int32)
    for i in range(rounds):  # from the end, as `cast.py` does
        tile = tiles - 1 - tl.program_id(0) - i * PARTS
        if tile >= 0:
            r = (tile // tl.cdiv(cols, COLS)) * ROWS + tl.arange(0, ROWS)
            c = (tile % tl.cdiv(cols, COLS)) * COLS + tl.arange(0, COLS)
            h, a, b, _s = _row_values(
                d_ptr, x_ptr, w_ptr, index_ptr, r, c, cols, ACTIVATION, BACKWARD, HARDWARE, EVEN
            )
            if BACKWARD:
                most = tl.maximum(most, bits_of_magnitude(a))
                most = tl.maximum(most, bits_of_magnitude(b))
            else:
                most = tl.maximum(most, bits_of_magnitude(h))
    tl.store(parts_ptr + tl.program_id(0), tl.max(tl.max(most, axis=1), axis=0))


@launched(num_warps=8)
def _expert_cast_kernel(
    d_ptr, x_ptr, w_ptr, index_ptr, parts_ptr, codes_ptr, codes_t_ptr, scale_ptr, h_t_ptr, h_scale_ptr, sums_ptr,
    rows, cols,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    inverse = store_scale(
        parts_ptr, parts_ptr, 1.0, scale_ptr, False, False, False, PARTS, _MANTISSA
    )
    across = tl.cdiv(cols, COLS)
    q, c = place_tile(tl.program_id(0), across, ROWS, COLS)
    h0, a0, b0, s0 = _row_values(
        d_ptr, x_ptr, w_ptr, index_ptr, 4 * q, c, cols, ACTIVATION, BACKWARD, HARDWARE, EVEN
    )
    h1, a1, b1, s1 = _row_values(
        d_ptr, x_ptr, w_ptr, index_ptr, 4 * q + 1, c, cols, ACTIVATION, BACKWARD, HARDWARE, EVEN
    )
    h2, a2, b2, s2 = _row_values(
        d_ptr, x_ptr, w_ptr, index_ptr, 4 * q + 2, c, cols, ACTIVATION, BACKWARD, HARDWARE, EVEN
    )
    h3, a3, b3, s3 = _row_values(
        d_ptr, x_ptr, w_ptr, index_ptr, 4 * q + 3, c, cols, ACTIVATION, BACKWARD, HARDWARE, EVEN
    )
    if BACKWARD:
        # columns beyond a half are not those of the other one
        left = c if EVEN else tl.where(c < cols, c, 2 * cols)
        right = c + cols if EVEN else tl.where(c < cols, c + cols, 2 * cols)
        cast_rows(
            a0, a1, a2, a3, inverse, codes_ptr, codes_t_ptr, q, left, rows, 2 * cols,
            True, True, _MANTISSA, HARDWARE, EVEN,
        )  # fmt: skip
        cast_rows(
            b0, b1, b2, b3, inverse, codes_ptr, codes_t_ptr, q, right, rows, 2 * cols,
            True, True, _MANTISSA, HARDWARE, EVEN,
        )  # fmt: skip
        cast_rows(
            h0, h1, h2, h3, reciprocal(tl.load(h_scale_ptr)), h_t_ptr, h_t_ptr, q, c, rows, cols,
            False, True, _MANTISSA, HARDWARE, EVEN,
        )  # fmt: skip
        at = sums_ptr + (tl.program_id(0) % across).to(tl.int64) * rows + 4 * q
        tl.store(at, tl.sum(s0, axis=1))
        tl.store(at + 1, tl.sum(s1, axis=1))
        tl.store(at + 2, tl.sum(s2, axis=1))
        tl.store(at + 3, tl.sum(s3, axis=1))
    else:
        cast_rows(
            h0, h1, h2, h3, inverse, codes_ptr, codes_ptr, q, c, rows, cols,
            True, False, _MANTISSA, HARDWARE, EVEN,
        )  # fmt: skip


def expert_activation(
    gate_up: Tensor,  # bfloat16, float16 or float32 [rows, 2 · cols]; rows a multiple of 64, cols of 16
    weights: Tensor,  # of pairs, floats of any shape
    index: Tensor,  # int32 [rows], the pair in each row, -1 for none: its weight is 0
    activation: str,
) -> tuple[Tensor, Tensor]:  # E4M3 codes [rows, cols], scale float32 0-d
    """Return act(gate) × up × weight in FP8."""
    codes, _, scale, _, _ = _run(None, gate_up, weights, index, None, activation)
    return codes, scale


def expert_activation_backward(
    dh: Tensor,  # the gradient of what expert_activation cast, [rows, cols]
    gate_up: Tensor,
    weights: Tensor,
    index: Tensor,
    h_scale: Tensor,  # the scale that expert_activation returned
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes [rows, 2 · cols], codes_t and scale of gate_up's gradient, E4M3 codes_t [cols, rows] of what
    expert_activation cast, and the gradient of each row's weight, float32 [rows]."""
    return _run(dh.contiguous(), gate_up, weights, index, h_scale, activation)


def _run(
    dh: Tensor | None,  # None: forward
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    h_scale: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, w, backward = x.contiguous(), weights.contiguous(), dh is not None
    rows, cols = x.shape[0], x.shape[1] // 2
    width = 2 * cols if backward else cols
    like: Any = {"dtype": E4M3.dtype}
    codes, scale = x.new_empty((rows, width), **like), x.new_zeros((), dtype=torch.float32)
    codes_t = h_t = codes
    across = -(-cols // COLS)
    sums = scale
    if backward:
        codes_t, h_t = x.new_empty((width, rows), **like), x.new_empty((cols, rows), **like)
        sums = x.new_empty((across, rows), dtype=torch.float32)
    if x.numel():
        d, tiles = x if dh is None else dh, rows // ROWS * across
        parts = min(PARTS, next_power_of_2(tiles))
        found = x.new_empty((parts,), dtype=torch.int32)
        how = activation, backward, casts_in_hardware(x.device), cols % COLS == 0
        _expert_parts_kernel(
            (parts, 1, 1), d, x, w, index, found, cols, 2 * tiles, -(-2 * tiles // parts), *how, parts, ROWS // 2, COLS
        )  # fmt: skip
        _expert_cast_kernel(
            (tiles, 1, 1), d, x, w, index, found, codes, codes_t, scale, h_t,
            scale if h_scale is None else h_scale, sums, rows, cols, *how, parts, ROWS, COLS,
        )  # fmt: skip
    return codes, codes_t, scale, h_t, sums.sum(0) if backward else scale
