"""How a tile of a tensor of any format is found, loaded and stored by a program that knows a row of a pointer table.

Why: the step and the norm read the same formats, each with its own arithmetic.

How: a tile is [blocks, 128]: whole blocks, the last of a row perhaps padded. A launch knows how rows lie (`ROWS`):
"flat" where blocks lie end to end, "sixteen" where a row's length is a multiple of 16, so that accesses stay 16 bytes
wide, and "any", where elements are accessed one by one. What a format does not need is compiled away.

Limits: 4-bit codes are packed two to a byte, and a row begins with a whole byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import state_codecs
from .fp8 import bits_of_magnitude, round_to, store_rounded
from .pointer_table import COLUMN

_BLOCKS, _PER_ROW, _COLS = (tl.constexpr(COLUMN[n]) for n in ("blocks", "blocks_per_row", "cols"))


@triton.jit
def pointer(row, INDEX: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr):
    """Return the address in a column of a table's row."""
    address = tl.load(row + INDEX).to(tl.pointer_type(TYPE))
    if ROWS != "any":
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def places(row, first, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the numbers of BLOCKS blocks from `first` on and which exist; offsets of elements and the mask of those
    that exist; the same of bytes that hold two 4-bit codes."""
    block = first + tl.arange(0, BLOCKS)
    inside = block < tl.load(row + _BLOCKS).to(tl.int32)
    lane = tl.arange(0, 128)[None, :]
    byte = tl.arange(0, 64)[None, :]
    wide = block.to(tl.int64)[:, None]
    if ROWS == "flat":
        start, packed = wide * 128, wide * 64
        mask, packed_mask = inside[:, None] & (lane >= 0), inside[:, None] & (byte >= 0)
    else:
        cols = tl.load(row + _COLS)
        if ROWS == "sixteen":
            cols = tl.multiple_of(cols, 16)
        per_row = tl.load(row + _PER_ROW).to(tl.int32)
        r = (block // per_row).to(tl.int64)[:, None]
        col = (block % per_row).to(tl.int64)[:, None] * 128
        start, packed = r * cols + col, r * ((cols + 1) // 2) + col // 2
        left = cols - col
        mask, packed_mask = inside[:, None] & (lane < left), inside[:, None] & (byte * 2 < left)
    return block, inside, start + lane, mask, packed + byte, packed_mask


@triton.jit
def load_master(weight, master, scale, offset, mask, MASTER: tl.constexpr, OTHER: tl.constexpr):
    w = tl.load(weight + offset, mask=mask, other=OTHER)
    if MASTER == "split":
        return state_codecs.join(w, tl.load(master + offset, mask=mask, other=OTHER))
    elif MASTER == "dithered":
        return (w.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif MASTER == "dense" or MASTER == "tensor":
        # A weight that is not the rounded master was written by somebody else, and counts.
        value = tl.load(master + offset, mask=mask, other=OTHER).to(tl.float32)
        if MASTER == "tensor":
            value = value * tl.load(scale)
        live = w.to(tl.float32)
        return tl.where(round_to(value, weight.dtype.element_ty) == live, value, live)
    else:
        return w.to(tl.float32)


@triton.jit
def store_master(weight, master, w, offset, mask, random, new_scale, MASTER: tl.constexpr):
    """Store a weight and its master."""
    if MASTER == "split":
        high, low = state_codecs.split(w, random, master.dtype.element_ty == tl.int16)
        tl.store(weight + offset, high, mask=mask)
        tl.store(master + offset, low, mask=mask)
    elif MASTER == "dithered":
        tl.store(weight + offset, state_codecs.dither(w, random >> 16), mask=mask)
    else:
        if MASTER == "dense":
            tl.store(master + offset, w, mask=mask)
        elif MASTER == "tensor":
            y = tl.where(new_scale == new_scale, w * tl.div_rn(1.0, new_scale), 0.0)
            code = state_codecs.cut(y, 0, 0x8000, 0x7FFF, random >> 19, "whole")
            code = code.to(tl.int16).to(tl.float16, bitcast=True)
            tl.store(master + offset, code, mask=mask)
            w = code.to(tl.float32) * new_scale
        store_rounded(weight + offset, w, mask)


@triton.jit
def load_moment(
    codes, scale, block, inside, offset, mask, packed, packed_mask,
    KIND: tl.constexpr, OTHER: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    if KIND == "ue3m1":
        byte = tl.load(codes + packed, mask=packed_mask, other=OTHER)
        block_scale = tl.load(scale + block, mask=inside, other=OTHER)
        return state_codecs.decode_blocks(
            state_codecs.unpack_codes(byte, BLOCKS), block_scale, KIND
        )
    else:
        x = tl.load(codes + offset, mask=mask, other=OTHER)
        if KIND == "dense":
            return x.to(tl.float32)
        elif KIND == "dithered":
            return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        elif KIND != "tensor":
            return state_codecs.decode_blocks(
                x, tl.load(scale + block, mask=inside, other=OTHER), KIND
            )
        elif codes.dtype.element_ty == tl.uint8:
            return state_codecs.values_of(x, 7, 0x3F803F80) * (tl.load(scale) * 256.0)
        else:
            return x.to(tl.float32) * tl.load(scale)


@triton.jit
def store_moment(
    codes, scale, x, block, inside, offset, mask, packed, packed_mask, random, new_scale,
    KIND: tl.constexpr, FAST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Encode and store a moment; for a squared format `x` is the root."""
    TYPE: tl.constexpr = codes.dtype.element_ty
    if KIND == "dense":
        store_rounded(codes + offset, x, mask)
    elif KIND == "dithered":
        tl.store(
            codes + offset, state_codecs.dither(x, state_codecs.noise_of_v(random, 16)), mask=mask
        )
    elif KIND == "tensor":
        y = tl.where(new_scale == new_scale, x * tl.div_rn(1.0, new_scale), 0.0)
        if TYPE == tl.uint8:
            code = state_codecs.cut(y * 2.0**-8, 7, 0x80, 0x7E, random, "half")
            tl.store(codes + offset, code.to(tl.uint8), mask=mask)
        else:  # float16: a second moment, which never becomes zero
            y = tl.where(x > 0, tl.maximum(y, 2.0**-24), y)
            code = state_codecs.cut(
                y, 0, 0, 0x7FFF, state_codecs.noise_of_v(random, 13), "whole"
            ).to(tl.int16)
            tl.store(codes + offset, code.to(TYPE, bitcast=True), mask=mask)
    else:
        code, block_scale = state_codecs.encode_state(x, random, KIND, FAST, True)
        tl.store(scale + block, block_scale, mask=inside)
        if KIND == "ue3m1":
            tl.store(codes + packed, state_codecs.pack_codes(code, BLOCKS), mask=packed_mask)
        else:
            tl.store(codes + offset, code, mask=mask)


@triton.jit
def offer_maximum(amax, x, mask):
    """Raise a device integer to the bits of the largest magnitude; most programs find it raised already."""
    bits = tl.where(mask, bits_of_magnitude(x), 0)
    largest = tl.max(tl.max(bits, 1), 0)
    tl.atomic_max(amax, largest, mask=largest > tl.load(amax))
