"""FP8 weights for the next forward, written by the optimizer's step; the twin of `reference/emit.py`.

The step's kernel writes codes with a scale that was chosen before it, and the largest new weight (`step.py`, EMIT). Two
small launches follow: where a weight has outgrown the scale, its tensor is cast again; then the next scale is chosen.
Programs of the first read whole spans and nearly always return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import encode, scale_and_inverse
from .launch import Launcher
from .norm import TILE, span_of
from .pointer_table import COLUMN, WIDTH
from .reference.emit import HEADROOM
from .state_codecs import E4M3_MAX
from .step import TYPES
from .tile_io import pointer

_WIDTH, _HEADROOM = tl.constexpr(WIDTH), tl.constexpr(HEADROOM)
_WEIGHT, _CODES, _SCALES = (tl.constexpr(COLUMN[n]) for n in ("weight", "emit", "emit_scale"))


@triton.jit
def _outgrown(scales):
    """Return the bits of the largest new weight, and whether it needs another scale than the step took."""
    bits = tl.load(scales.to(tl.pointer_type(tl.int32)) + 2)
    fits = bits.to(tl.float32, bitcast=True) <= tl.load(scales + 1) * E4M3_MAX
    return bits, fits == 0


@triton.jit
def _recast_kernel(table_ptr, owner_ptr, hyper_ptr, TYPE: tl.constexpr, TILE: tl.constexpr):
    row, first, span, numel = span_of(table_ptr, owner_ptr)
    apply = tl.load(hyper_ptr + tl.load(owner_ptr + tl.program_id(0)) * 16 + 4)
    bits, outgrown = _outgrown(pointer(row, _SCALES, tl.float32, "any"))
    if (apply > 0) & outgrown:
        _scale, inverse = scale_and_inverse(bits, E4M3_MAX)
        weight = pointer(row, _WEIGHT, TYPE, "any")
        codes = pointer(row, _CODES, tl.uint8, "any")
        for i in range(0, span, TILE):
            at = (first + i).to(tl.int64) * 128 + tl.arange(0, TILE * 128)
            x = tl.load(weight + at, mask=at < numel, other=0.0).to(tl.float32)
            x = tl.where(inverse > 0, x * inverse, 0.0)
            tl.store(codes + at, encode(x, 3, -6, E4M3_MAX).to(tl.uint8), mask=at < numel)


@triton.jit
def _next_kernel(table_ptr, hyper_ptr):
    tensor = tl.program_id(0)
    scales = pointer(table_ptr + tensor.to(tl.int64) * _WIDTH, _SCALES, tl.float32, "any")
    if tl.load(hyper_ptr + tensor * 16 + 4) > 0:
        bits, outgrown = _outgrown(scales)
        exact, _inverse = scale_and_inverse(bits, E4M3_MAX)
        tl.store(scales, tl.where(outgrown, exact, tl.load(scales + 1)))
        tl.store(scales + 1, exact * _HEADROOM)
        tl.store(scales + 2, 0.0)


_launch_recast = Launcher(_recast_kernel, num_warps=4, enable_fp_fusion=False)
_launch_next = Launcher(_next_kernel, num_warps=1)


def finish(
    rows: Tensor,  # int64 [tensors, 16], see pointer_table.py
    owner: Tensor,  # int32 [programs], by `norm.spans`
    hyper: Tensor,  # float32 [tensors, 16]
    dtype: torch.dtype,  # of the weights
) -> None:
    """Make codes and scales of a step's emitted weights valid."""
    if len(owner):
        _launch_recast((len(owner), 1, 1), rows, owner, hyper, TYPES[dtype], TILE)
        _launch_next((len(rows), 1, 1), rows, hyper)
