"""RMSNorm that tells the cast behind it how large its output is; the twin of `reference/rmsnorm.py`.

Why: the cast leaves out its search for the largest magnitude, and with it a read of the whole output.

How: a program holds whole rows in registers, several where they are short, and goes on to the next until there are none
left. So each tensor is moved once: 2 + 2 bytes an element forward and 4 + 2 backward in bfloat16. Forward keeps the
largest magnitude that each program wrote. Rows are done from the last to the first: L2 still holds what was written
last, and the cast begins with the first.

Backward adds dy × x̂ up in float32, each program for itself, and a second kernel adds those sums: no atomics, so the
gradient of the weight has the same bits every time. The sums take 4 bytes for a column and a program, so fewer programs
run there.

Limits: sums are in another order than the reference's, and the root is the GPU's own, so results may be one rounding
away. Rows of 8,192 elements are the longest: those of 16,384 spill in backward (on sm_90, 103 times in bfloat16 and 583
times in float32).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import bits_of_magnitude, round_to, store_rounded
from .launch import Launcher, launched, next_power_of_2
from .reference import rmsnorm as reference

PARTS = 1024  # programs forward, each with a part; a power of two
PROGRAMS = 256  # backward
TILE = 4096  # elements that a program holds at once, unless one row is longer
SUMMED = 32  # columns of the sums of all programs that one program adds


@triton.jit
def _next_rows(i, c, rows, cols, ROWS: tl.constexpr):
    """Return the numbers of the rows of this program's round `i` and which of them exist, [ROWS]; then the offsets of
    their elements in columns `c` and which of those exist, [ROWS, COLS]. Rounds go from the last rows to the first."""
    tile = tl.cdiv(rows, ROWS) - 1 - tl.program_id(0) - i * tl.num_programs(0)
    r = tile * ROWS + tl.arange(0, ROWS)
    exists = (r >= 0) & (r < rows)
    at = r[:, None].to(tl.int64) * cols + c[None, :]
    return r, exists, at, exists[:, None] & (c < cols)[None, :]


@triton.jit
def _rmsnorm_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, parts_ptr, eps, rows, cols, rounds,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, COLS)
    w = tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
    most = tl.zeros((ROWS,), dtype=tl.int32)
    for i in range(rounds):
        r, exists, at, inside = _next_rows(i, c, rows, cols, ROWS)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / cols + eps)
        y = round_to(x * rstd[:, None] * w, y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(rstd_ptr + r, rstd, mask=exists)
        bits = tl.max(bits_of_magnitude(y), axis=1)
        # Rows that do not exist are NaN if eps is 0 or a weight infinite, and NaN would be the largest.
        most = tl.maximum(most, tl.where(exists, bits, 0))
    tl.store(parts_ptr + tl.program_id(0), tl.max(most, axis=0))


@triton.jit
def _rmsnorm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, sums_ptr, rows, cols, rounds,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, COLS)
    w = tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for i in range(rounds):
        r, exists, at, inside = _next_rows(i, c, rows, cols, ROWS)
        d = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + r, mask=exists, other=0.0)[:, None]
        h = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * rstd
        d_w = d * w
        dx = rstd * (d_w - h * (tl.sum(d_w * h, axis=1) / cols)[:, None])
        store_rounded(dx_ptr + at, dx, inside)
        if WEIGHT:
            total += d * h
    if WEIGHT:
        out = sums_ptr + tl.program_id(0).to(tl.int64) * cols + c
        tl.store(out, tl.sum(total, axis=0), mask=c < cols)


@launched(num_warps=8)
def _rmsnorm_sums_kernel(
    sums_ptr, out_ptr, programs, cols, PROGRAMS: tl.constexpr, COLS: tl.constexpr
):
    p, c = tl.arange(0, PROGRAMS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (p < programs)[:, None] & (c < cols)[None, :]
    sums = tl.load(sums_ptr + p[:, None] * cols + c[None, :], mask=inside, other=0.0)
    store_rounded(out_ptr + c, tl.sum(sums, axis=0), c < cols)


# by the warps of a program: 16 elements a thread
_launch_forward = {n: Launcher(_rmsnorm_kernel, num_warps=n) for n in (8, 16)}
_launch_backward = {n: Launcher(_rmsnorm_backward_kernel, num_warps=n) for n in (8, 16)}


@lru_cache(maxsize=4096)
def _tiling(rows: int, cols: int) -> tuple[int, int, int, int]:
    """Return the rows and columns of a program's tile, the number of tiles and the warps of a program."""
    width = next_power_of_2(cols)
    height = max(TILE // width, 1)
    return height, width, -(-rows // height), 8 if width <= TILE else 16


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x / rms(x) × weight, 1 / rms(x), and the largest magnitudes of parts of the first."""
    cols = x.shape[-1]
    if x.numel() == 0:
        return reference.rmsnorm(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    rows = x.numel() // cols
    height, width, tiles, warps = _tiling(rows, cols)
    programs = min(PARTS, next_power_of_2(tiles))
    y, rstd = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    parts = x.new_empty(programs, dtype=torch.int32)
    _launch_forward[warps](
        (programs, 1, 1),
        x, weight, y, rstd, parts, eps, rows, cols, -(-tiles // programs), height, width,
    )  # fmt: skip
    return y, rstd, parts


def rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_weight: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of weight."""
    cols = x.shape[-1]
    if x.numel() == 0:
        return reference.rmsnorm_backward(dy, x, weight, rstd, need_weight)
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    rows = x.numel() // cols
    height, width, tiles, warps = _tiling(rows, cols)
    programs = min(PROGRAMS, tiles)
    dx = torch.empty_like(x)
    sums = x.new_empty((programs if need_weight else 0, cols), dtype=torch.float32)
    dweight = torch.empty_like(weight) if need_weight else None
    _launch_backward[warps](
        (programs, 1, 1),
        dy, x, weight, rstd, dx, sums, rows, cols, -(-tiles // programs), need_weight, height, width,
    )  # fmt: skip
    if dweight is not None:
        height = next_power_of_2(programs)
        grid = -(-cols // SUMMED), 1, 1
        _rmsnorm_sums_kernel(grid, sums, dweight, programs, cols, height, SUMMED)
    return dx, dweight
