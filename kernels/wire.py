"""E4M3 blocks as ranks send them to each other, and their sums; the twin of `reference/wire.py`, bit for bit.

Why: with torch's operations, packing and adding up would move each byte several times; a collective's time is bytes.

How: every kernel is one pass. Packing reads the tensor and writes chunks, 2 + 1.03 bytes an element in bfloat16; a
reduction reads what all ranks sent of a stripe, 1.03 bytes an element of each; unpacking reads chunks and writes the
tensor. A program does 16 blocks, wherever the borders of stripes and rows are.

Limits: contiguous tensors; chunks begin at multiples of 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK

from .fp8 import FLOATS, block_offsets, casts_in_hardware, decode_e4m3, encode_blocks, store_rounded
from .launch import UNFUSED, launched
from .reference.wire import Layout, scales_of, share_and_rest

BLOCKS = 16


@triton.jit
def _places(block, per, pitch):
    """Return where codes and scales of blocks lie in the chunks: int64 offsets in bytes and in floats."""
    chunk = (block // per) * tl.cast(pitch, tl.int64)
    within = block % per
    return chunk + within * 128, (chunk + tl.cast(per, tl.int64) * 128) // 4 + within


@launched(num_warps=4, **UNFUSED)
def _pack_kernel(
    x_ptr, scale_ptr, wire_ptr, n_blocks, all_blocks, blocks_per_row, cols, per, pitch,
    CODES: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, inside, offset, mask = block_offsets(n_blocks, blocks_per_row, cols, BLOCKS, EVEN)
    exists = block < all_blocks
    code_at, scale_at = _places(block, per, pitch)
    x = tl.load(x_ptr + offset, mask=mask, other=0)
    if CODES:
        code, scale = x, tl.load(scale_ptr + block, mask=inside, other=0.0)
    else:
        code, scale = encode_blocks(x.to(tl.float32), 3, HARDWARE)
    at = code_at[:, None] + tl.arange(0, 128)[None, :]
    tl.store(wire_ptr + at, code, mask=exists[:, None] & (at >= 0))
    tl.store(wire_ptr.to(FLOATS, bitcast=True) + scale_at, scale, mask=exists)


@triton.jit
def _load_blocks(codes_ptr, scales_ptr, code_at, scale_at, exists):
    """Load blocks: codes [BLOCKS, 128] and their scales."""
    at = code_at[:, None] + tl.arange(0, 128)[None, :]
    code = tl.load(codes_ptr + at, mask=exists[:, None] & (at >= 0), other=0)
    return code, tl.load(scales_ptr + scale_at, mask=exists, other=0.0)


@triton.jit
def divide(x, by, DIVIDE: tl.constexpr):
    return tl.div_rn(x, tl.zeros_like(x) + by) if DIVIDE else x


@launched(num_warps=4, **UNFUSED)
def _reduce_kernel(
    codes_ptr, scales_ptr, out_ptr, out_scales_ptr,
    ranks, share, rest, blocks, per, code_step, scale_step, code_pitch, scale_pitch, numel,
    DIVIDE: tl.constexpr, PACK: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < blocks
    code_at = (block // per) * code_step + (block % per) * 128
    scale_at = (block // per) * scale_step + block % per
    total = tl.zeros((BLOCKS, 128), dtype=tl.float32)
    for rank in range(ranks):
        codes = codes_ptr + rank * tl.cast(code_pitch, tl.int64)
        scales = scales_ptr + rank * tl.cast(scale_pitch, tl.int64)
        code, scale = _load_blocks(codes, scales, code_at, scale_at, exists)
        total += decode_e4m3(code, HARDWARE) * (scale * share)[:, None]
    total = divide(total, rest, DIVIDE)
    if PACK:
        code, scale = encode_blocks(total, 3, HARDWARE)
        at = code_at[:, None] + tl.arange(0, 128)[None, :]
        tl.store(out_ptr + at, code, mask=exists[:, None] & (at >= 0))
        tl.store(out_scales_ptr + scale_at, scale, mask=exists)
    else:
        at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        store_rounded(out_ptr + at, total, at < numel)


@launched(num_warps=4, **UNFUSED)
def _unpack_kernel(
    wire_ptr, out_ptr, scale_ptr, n_blocks, blocks_per_row, cols, per, pitch,
    CODES: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, inside, offset, mask = block_offsets(n_blocks, blocks_per_row, cols, BLOCKS, EVEN)
    code_at, scale_at = _places(block, per, pitch)
    scales_ptr = wire_ptr.to(FLOATS, bitcast=True)
    code, scale = _load_blocks(wire_ptr, scales_ptr, code_at, scale_at, inside)
    if CODES:
        tl.store(out_ptr + offset, code, mask=mask)
        tl.store(scale_ptr + block, scale, mask=inside)
    else:
        store_rounded(out_ptr + offset, decode_e4m3(code, HARDWARE) * scale[:, None], mask)


def pack(
    x: Tensor, layout: Layout, out: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Quantize a tensor into chunks, one scale a block; with `scale`, lay out the codes that `x` holds."""
    if out is None:
        out = x.new_empty((layout.world, layout.pitch), dtype=torch.uint8)
    blocks = layout.world * layout.per
    if blocks:
        _pack_kernel(
            (-(-blocks // BLOCKS), 1, 1),
            x, x if scale is None else scale, out,
            layout.blocks, blocks, layout.blocks_per_row, layout.cols, layout.per, layout.pitch,
            scale is not None, casts_in_hardware(x.device), layout.cols % BLOCK == 0, BLOCKS,
        )  # fmt: skip
    return out


def reduce_pack(chunks: Tensor, layout: Layout, divisor: float = 1.0) -> Tensor:
    """Add up stripes in float32, in the order of ranks, divide by `divisor`, and quantize the result."""
    out = torch.empty_like(chunks[0])
    if layout.pitch:
        codes, per = chunks.view(len(chunks), -1, layout.pitch), layout.per
        _reduce(codes, per, out, scales_of(out.view(-1, layout.pitch), per), 0, divisor)
    return out


def reduce_unpack(chunks: Tensor, out: Tensor, divisor: float = 1.0) -> None:
    """Add up a stripe in float32, in the order of ranks, divide by `divisor`, and round to the dtype of `out`."""
    per = Layout(1, out.numel(), 1).per
    _reduce(chunks[:, None], per, out, out, out.numel(), divisor)


def _reduce(
    codes: Tensor,  # uint8 [ranks, stripes, pitch]
    per: int,  # blocks of a stripe
    out: Tensor,
    out_scales: Tensor,
    numel: int,  # of `out`; 0: blocks, as they lie in `codes`
    divisor: float,
) -> None:
    scales, blocks = scales_of(codes, per), per * codes.shape[1]
    if not blocks:
        return
    steps = codes.stride(1), scales.stride(1), codes.stride(0), scales.stride(0)
    share, rest = share_and_rest(len(codes), divisor)
    _reduce_kernel(
        (-(-blocks // BLOCKS), 1, 1),
        codes, scales, out, out_scales, len(codes), share, rest, blocks, per, *steps, numel,
        rest != 1, not numel, casts_in_hardware(out.device), BLOCKS,
    )  # fmt: skip


def unpack(chunks: Tensor, out: Tensor, layout: Layout, scale: Tensor | None = None) -> None:
    """Decode a tensor; with `scale`, take it out of chunks in FP8."""
    if not layout.blocks:
        return
    _unpack_kernel(
        (-(-layout.blocks // BLOCKS), 1, 1),
        chunks, out, out if scale is None else scale,
        layout.blocks, layout.blocks_per_row, layout.cols, layout.per, layout.pitch,
        scale is not None, casts_in_hardware(out.device), layout.cols % BLOCK == 0, BLOCKS,
    )  # fmt: skip
