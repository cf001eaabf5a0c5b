"""Device-side casts between float32 and the FP8 formats E4M3 and E5M2. No other file of this project casts to FP8; the
optimizer's own formats are in `state_codecs.py`.

Why: the same bits have to come out of an A100, an H200, Triton's interpreter and `reference/fp8.py`. Hardware casts do
not give them: sm_80 has none, sm_89 rounds twice on the way from float32, and the interpreter does not round to nearest
even.

How: `encode` rounds on the grid of the target, in float32 and integers. With e = the exponent of x, or that of the
smallest normal number if x is below it, the grid around x has step 2^(e - M) for M mantissa bits. Adding magic =
2^(e + 23 - M) pushes everything finer than that step out of a float32's 24 bits, so the addition itself rounds to
nearest even, and bits(x + magic) - bits(magic) counts the steps:

    code = bits(x + magic) - bits(magic) + (e - min_exponent) * 2^M

Decoding goes through
float16, whose exponent and mantissa fields line up with a shifted code: one shift, one exact conversion, one
multiplication by a power of two. Where a kernel has no instructions to spare, `encode_ocp` and `decode_e4m3` use the
casts of sm_90, which round as we do: they were compared on every float32 (`tests/kernels/test_hardware_cast.py`).

Divisions are written `tl.div_rn` everywhere: Triton's `/` is an approximate division, which may differ from the
reference in the last bit.

Limits: `encode` takes finite values; NaN codes are not decoded. A block that is not finite has scale NaN, and what its
codes say does not matter.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

# what pointers are cast to
BYTES, INTS, FLOATS = (tl.constexpr(tl.pointer_type(t)) for t in (tl.uint8, tl.int32, tl.float32))


@triton.jit
def encode(x, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, MAX: tl.constexpr):
    """Round finite float32 to the nearest code, ties to even, saturating; return int32 in [0, 255].

    MANTISSA counts bits, MIN_EXPONENT is the smallest normal number's, MAX the largest finite value.
    """
    lowest: tl.constexpr = (MIN_EXPONENT + 127) << 23  # bits of the smallest normal number
    magnitude = tl.minimum(tl.abs(x), MAX)
    # the exponent field of the value, or of the smallest normal number for what is subnormal in the format
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True), lowest) & 0x7F800000
    # 2^(23 - MANTISSA) times that power of two: added to it, a float32 has no bits left below the format's last one,
    # so the addition itself rounds to nearest even
    magic = exponent + ((23 - MANTISSA) << 23)
    rounded = magnitude + magic.to(tl.float32, bitcast=True)
    # steps of the grid above zero, within this power of two; then 2^MANTISSA codes for each power of two below it
    code = rounded.to(tl.int32, bitcast=True) - magic
    code += (exponent - lowest) >> (23 - MANTISSA)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)  # float32's sign bit, as the code's


# As inline PTX, not `.to(tl.float8e4nv)`: Triton 3.6 misplaces half of a tile that is stored both as it lies and
# transposed where its elements came as float32 and went through its float8 types.
# An instruction casts two numbers, of which its second operand lands in the lower byte. The register that Triton asks
# for holds four codes. The halves are joined by arithmetic, not by `mov.b32 $0, {low, high}`: where both are made of
# the same registers, as are zeros behind the mask of a single column, ptxas 12.8 (Triton 3.6) leaves the upper half
# unwritten.
_PTX = """{{
.reg .b16 low, high;
.reg .b32 lower, upper;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
cvt.u32.u16 lower, low;
cvt.u32.u16 upper, high;
shl.b32 upper, upper, 16;
or.b32 $0, lower, upper;
}}"""
_TO_E4M3, _TO_E5M2 = (tl.constexpr(_PTX.format(name)) for name in ("e4m3", "e5m2"))


@triton.jit
def encode_ocp(x, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Round float32, not NaN, to the nearest uint8 code of an OCP format, ties to even, saturating.

    MANTISSA is 3 for E4M3 and 2 for E5M2; HARDWARE is what `casts_in_hardware` says. Likewise below.
    """
    if HARDWARE:
        asm: tl.constexpr = _TO_E4M3 if MANTISSA == 3 else _TO_E5M2
        return tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [x], tl.uint8, True, 4)
    elif MANTISSA == 3:
        return encode(x, 3, -6, 448.0).to(tl.uint8)
    else:
        return encode(x, 2, -14, 57344.0).to(tl.uint8)


# $4 holds four codes. The GPU casts two of them at a time, to float16, which is exact.
_FROM_E4M3 = tl.constexpr("""{
.reg .b16 low, high, h0, h1, h2, h3;
.reg .b32 some, others;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 some, low;
cvt.rn.f16x2.e4m3x2 others, high;
mov.b32 {h0, h1}, some;
mov.b32 {h2, h3}, others;
cvt.f32.f16 $0, h0;
cvt.f32.f16 $1, h1;
cvt.f32.f16 $2, h2;
cvt.f32.f16 $3, h3;
}""")


@triton.jit
def decode_e4m3(code, HARDWARE: tl.constexpr):
    """Return the float32 value of a uint8 code of E4M3, not a NaN's, exactly."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_FROM_E4M3, "=r,=r,=r,=r,r", [code], tl.float32, True, 4)
    else:
        return decode(code, 3, -6, True)


@cache
def casts_in_hardware(device: torch.device) -> bool:
    """Return whether the GPU's own casts to and from E4M3 are the reference's."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def decode(code, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, SIGNED: tl.constexpr):
    """Return the float32 value of a uint8 code, not a NaN's, exactly."""
    c = code.to(tl.int16)
    half = (c & 0x7F if SIGNED else c) << (10 - MANTISSA)  # float16 has 10 bits of mantissa
    if SIGNED:
        half |= (c & 0x80) << 8  # bit 7 to bit 15
    unit: tl.constexpr = 2.0 ** (MIN_EXPONENT + 14)  # float16's smallest normal number is 2^-14
    return half.to(tl.float16, bitcast=True).to(tl.float32) * unit


@triton.jit
def scale_and_inverse(magnitude_bits, MANTISSA: tl.constexpr):
    """Return (amax / the largest code of an OCP format, its reciprocal), of the largest `bits_of_magnitude`.

    They are 0 for a block of zeros, NaN and 0 for one that is not finite.
    """
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    scale = tl.div_rn(magnitude_bits.to(tl.float32, bitcast=True), LARGEST)
    # The inverse of one below 2^-127 would be infinite. Compared as bits: as a number, Triton 3.6 takes it for float64.
    scale_bits = tl.maximum(scale.to(tl.int32, bitcast=True), 0x00400000)
    scale = tl.where(magnitude_bits > 0, scale_bits.to(tl.float32, bitcast=True), 0.0)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
    finite = magnitude_bits < 0x7F800000  # the bits of infinity
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, 0.0)


@triton.jit
def bits_of_magnitude(x):  # int32
    """Return the bits of |x|, which order float32 as integers: NaN > infinity > finite."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def reciprocal(scale):  # float32
    """Return 1 / scale, 0 where that is 0 or NaN."""
    return tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def encode_scaled(x, inverse, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Return uint8 codes of x × inverse; zeros where the inverse is 0, that of what has no scale."""
    return encode_ocp(tl.where(inverse > 0, x * inverse, 0.0), MANTISSA, HARDWARE)


@triton.jit
def encode_blocks(x, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantize a tile of float32 [blocks, 128]; return uint8 codes and a scale for each row of it."""
    scale, inverse = scale_and_inverse(tl.max(bits_of_magnitude(x), axis=1), MANTISSA)
    return encode_scaled(x, inverse[:, None], MANTISSA, HARDWARE), scale


INTERPRETED = tl.constexpr(not isinstance(encode, triton.JITFunction))


@triton.jit
def round_to(x, DTYPE: tl.constexpr):  # float32
    """Round float32 to the nearest `DTYPE`. To bfloat16 by hand in Triton's interpreter, which truncates there."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # half a step less one bit, and one more where the kept part is odd: ties go to even
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def store_rounded(pointer, x, mask):
    """Store float32 rounded to the nearest of what `pointer` points to."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    tl.store(pointer, round_to(x, TYPE).to(TYPE), mask=mask)


@triton.jit
def block_offsets(n_blocks, blocks_per_row, cols, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """Return this program's BLOCKS blocks (int64), which exist, and where their elements lie, as `element_offsets`."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    offset, mask = element_offsets(block, inside, blocks_per_row, cols, EVEN)
    return block, inside, offset, mask


@triton.jit
def element_offsets(
    block, inside, blocks_per_row, cols, EVEN: tl.constexpr, FLAT: tl.constexpr = False
):
    """Return where the elements of int64 blocks lie: int64 offsets and a bool mask [BLOCKS, 128].

    EVEN: cols is a multiple of 128, and blocks lie end to end. FLAT: there is one row, and they do so too.
    """
    lane = tl.arange(0, 128)
    if EVEN or FLAT:
        offset = block[:, None] * 128 + lane[None, :]
        mask = inside[:, None] & ((lane[None, :] >= 0) if EVEN else (offset < cols))
    else:
        col = (block % blocks_per_row)[:, None] * 128 + lane[None, :]
        offset = (block // blocks_per_row)[:, None] * cols + col
        mask = inside[:, None] & (col < cols)
    return offset, mask
