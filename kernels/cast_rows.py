"""A matrix in FP8 with a scale for each row, and products of it; the twin of `reference/cast_rows.py`, bit for bit.

Why: a scale for each token costs no search for the largest magnitude of all tokens.

How: a program holds whole rows in registers, several where they are short, and goes on to the next until there are none
left: 2 bytes to read and 1 to write for an element in bfloat16. It keeps the largest magnitude that it saw, so that a
cast with one scale need not look for that (`cast.py`). Rows that are too long for registers are read twice, the second
time from the L1 or L2 cache. Products are cuBLAS's, with a vector of scales for either operand.

What is cast may be the activation of an MLP, which is computed again where rows are read twice.

Limits: products need sm_90 and give bfloat16; other dtypes are made of float32, and scaled by rows afterwards.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import MiniFloat

from .activation import values
from .fp8 import BYTES, bits_of_magnitude, casts_in_hardware, encode_scaled, scale_and_inverse
from .launch import UNFUSED, launched, next_power_of_2
from .reference import cast_rows as reference
from .reference.cast import TOKENS, aligned
from .reference.cast_rows import Rows, parts_of

LONGEST = 8192  # columns that a program holds at once
TILE = 8192  # elements that it holds, unless one row is longer


@triton.jit
def _load(ptr, r, c, rows, cols):
    """Return the elements of some rows and columns, zeros beyond the matrix, in float32."""
    at = r[:, None].to(tl.int64) * cols + c[None, :]
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _tile(
    x_ptr, u_ptr, r, c, rows, cols,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return what is cast: x, or its activation, times u if there is one."""
    x = _load(x_ptr, r, c, rows, cols)
    if ACTIVATION is not None:
        u = _load(u_ptr, r, c, rows, cols) if GATED else x
        x, _a, _b = values(x, x, u, ACTIVATION, GATED, False, HARDWARE)
    return x


@triton.jit
def _store(codes_ptr, code, r, c, rows64, cols16):
    """Store uint8 codes of some rows and columns."""
    at = r[:, None].to(tl.int64) * cols16 + c[None, :]
    inside = (r < rows64)[:, None] & (c < cols16)[None, :]
    tl.store(codes_ptr.to(BYTES, bitcast=True) + at, code, mask=inside)


@launched(num_warps=8, **UNFUSED)
def _cast_rows_kernel(
    x_ptr, u_ptr, codes_ptr, scale_ptr, parts_ptr, rows, cols, rows64, cols16, rounds,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    c, most = tl.arange(0, COLS), tl.zeros((ROWS,), dtype=tl.int32)
    for i in range(rounds):
        r = (tl.program_id(0) + i * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        if WHOLE:
            x = _tile(x_ptr, u_ptr, r, c, rows, cols, ACTIVATION, GATED, HARDWARE)
            bits = tl.max(bits_of_magnitude(x), axis=1)
        else:
            bits = tl.zeros((ROWS,), dtype=tl.int32)
            for first in range(0, cols, COLS):
                x = _tile(x_ptr, u_ptr, r, first + c, rows, cols, ACTIVATION, GATED, HARDWARE)
                bits = tl.maximum(bits, tl.max(bits_of_magnitude(x), axis=1))
        scale, inverse = scale_and_inverse(bits, MANTISSA)
        tl.store(scale_ptr + r, scale, mask=r < rows64)
        most = tl.maximum(most, bits)
        if WHOLE:
            code = encode_scaled(x, inverse[:, None], MANTISSA, HARDWARE)
            _store(codes_ptr, code, r, c, rows64, cols16)
        else:
            for first in range(0, cols16, COLS):
                x = _tile(x_ptr, u_ptr, r, first + c, rows, cols, ACTIVATION, GATED, HARDWARE)
                code = encode_scaled(x, inverse[:, None], MANTISSA, HARDWARE)
                _store(codes_ptr, code, r, first + c, rows64, cols16)
    tl.store(parts_ptr + tl.program_id(0), tl.max(most, axis=0))


@lru_cache(maxsize=4096)
def tiling(rows: int, cols: int) -> tuple[int, int, int, int]:
    """Return the rows and columns of a program's tile, how many programs there are, and how many tiles each does."""
    width = min(next_power_of_2(cols), LONGEST)
    height = max(TILE // width, 1)
    programs = parts_of(rows)
    return height, width, programs, -(-rows // (height * programs))


def cast_rows(x: Tensor, fmt: MiniFloat) -> Rows:
    """Quantize a matrix with a scale for each row."""
    return _cast(x, None, None, fmt) if x.numel() else reference.cast_rows(x, fmt)


def activation_cast_rows(
    gate: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    up: Tensor | None,  # likewise
    activation: str,
    fmt: MiniFloat,
) -> tuple[Tensor, Tensor]:  # codes [rows64, cols16], scale float32 [rows64]
    """Return act(gate) × up in FP8, with a scale for each row."""
    if not gate.numel():
        return reference.activation_cast_rows(gate, up, activation, fmt)
    return _cast(gate, up, activation, fmt)[:2]


def _cast(x: Tensor, up: Tensor | None, activation: str | None, fmt: MiniFloat) -> Rows:
    x = x if x.is_contiguous() else x.detach().contiguous()
    u = x if up is None else up.contiguous()
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    rows64, cols16 = aligned(rows, TOKENS), aligned(cols)
    height, width, programs, rounds = tiling(rows64, cols16)
    codes = x.new_empty((rows64, cols16), dtype=fmt.dtype)
    scale = x.new_empty(rows64, dtype=torch.float32)
    parts = x.new_empty(programs, dtype=torch.int32)  # one each
    _cast_rows_kernel(
        (programs, 1, 1),
        x, u, codes, scale, parts, rows, cols, rows64, cols16, rounds, activation, up is not None,
        fmt.mantissa_bits, casts_in_hardware(x.device), cols16 <= width, height, width,
    )  # fmt: skip
    return codes, scale, parts


def matmul_rows(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return (a × a_scale) @ (b × b_scale).T."""
    if dtype is not torch.bfloat16:
        one = a_scale.new_ones(())
        y = torch._scaled_mm(a, b.t(), one, one, None, None, torch.float32, fast)
        return y.mul_(b_scale).mul_(a_scale.unsqueeze(1)).to(dtype)
    # cuBLAS takes a vector of either
    scales = a_scale.unsqueeze(1), b_scale.expand(1, len(b)).contiguous()
    return torch._scaled_mm(a, b.t(), *scales, None, None, dtype, fast)
