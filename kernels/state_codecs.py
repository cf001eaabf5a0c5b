"""Device-side codecs of the optimizer's formats, the masters and the noise.

Why: an optimizer step decodes and encodes three numbers an element, and must still be bound by memory. Byte-wise code,
as Triton makes it, takes twice the instructions.

How: the numbers are those of `reference/fp8.py`, `reference/quantize.py` and `reference/master.py`. A code is the top
of a float16 (see there), so the four codes in a register unpack with shifts and masks into two pairs of float16, and
pack the same way after a truncating conversion. Neither needs FP8 hardware. On NVIDIA GPUs that is inline PTX;
elsewhere, and in Triton's interpreter, plain operations give the same bits. The power of two between a format's
exponents and float16's is folded into the scale.

In the PTX, `lop3.b32 d, x, mask, y, 0xEA` is d = (x & mask) | y: the last operand is the truth table of (a & b) | c,
with a = 0xF0, b = 0xCC and c = 0xAA. `prmt.b32 d, x, y, 0x3210` picks bytes: each hexadecimal digit, from the lowest
byte of d on, names a byte of x (0 to 3) or y (4 to 7); with 8 added, it repeats that byte's sign bit eight times.

`FAST` allows the GPU's approximate reciprocal and square root, one or two units in the last place of a float32. Without
it every operation rounds as in the reference: `div_rn` and `sqrt_rn`, since Triton's `/` and `sqrt` are approximate.

Limits: scales above 2^114 lose bits by the folded power of two. No moment of gradients below 2^63 has one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8stack.formats import E4M3, NUDGE

from .fp8 import bits_of_magnitude, decode, encode, scale_and_inverse
from .launch import TRITON

PTX = tl.constexpr(isinstance(decode, triton.JITFunction) and torch.version.hip is None)
# Triton 3.2 crashes on assembly with results of two types.
_TWO_TYPES = tl.constexpr(TRITON >= (3, 3))
E4M3_MAX = tl.constexpr(E4M3.max)
E4M3_MIN = tl.constexpr(E4M3.min_positive)
TINY = tl.constexpr(2.0**-126)
_NUDGE = tl.constexpr(NUDGE)


# --- arithmetic


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """Return 1 / x; `x` is 0 or a normal float32."""
    if FAST and PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def quotient(a, b, FAST: tl.constexpr):
    """Return a / b; `b` is 0 or a normal float32."""
    if FAST and PTX:
        return a * reciprocal(b, True)
    else:
        return tl.div_rn(a, b)


@triton.jit
def root(x, FAST: tl.constexpr):
    """Return the square root, of subnormals too: a second moment that becomes zero makes Adam divide by epsilon."""
    if FAST and PTX:
        return tl.inline_asm_elementwise(
            "sqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt_rn(x)


@triton.jit
def weighted_sum(a, x, b, y, FAST: tl.constexpr):
    """Return a × x + b × y."""
    if FAST and PTX:
        return tl.fma(a, x, b * y)
    else:
        return a * x + b * y


@triton.jit
def noise(index, seed):  # int64 or int32, 32 bits -> uint32
    """Return a hash of each index, Wellons' lowbias32; see `reference/fp8.py` for what becomes of it."""
    # 2^32 / golden ratio, odd: neighbours in a tensor get seeds far from each other
    x = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_of_v(random, BITS: tl.constexpr):
    """Return the 16 bits of noise for v as so many."""
    field = (random >> 7) & 0xFFFF
    return field >> (16 - BITS) if BITS < 16 else field << (BITS - 16)


# --- codes


@triton.jit
def values_of(code, SHIFT: tl.constexpr, MASK: tl.constexpr, SIGNS: tl.constexpr = 0x80008000):
    """Return bytes as the float16 whose top bits they are, below the sign with SIGNS=0; 10 - SHIFT bits of mantissa."""
    # $4 holds codes 0 to 3, a byte each. Shifted left by SHIFT, codes 0 and 2 lie where the exponents and mantissas of
    # two float16 are; shifted right by 8 - SHIFT, codes 1 and 3 do. MASK keeps those fields in both halves, and
    # SIGNS the signs, which are bit 7 of a code: moved up by 8 for codes 0 and 2, in place for 1 and 3.
    if PTX:
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 a, b; .reg .b16 h0, h1, h2, h3;
            shl.b32 a, $4, {SHIFT}; shl.b32 b, $4, 8;
            and.b32 a, a, {MASK}; lop3.b32 a, b, {SIGNS}, a, 0xEA; mov.b32 {{h0, h2}}, a;
            shr.b32 a, $4, {8 - SHIFT};
            and.b32 a, a, {MASK}; lop3.b32 a, $4, {SIGNS}, a, 0xEA; mov.b32 {{h1, h3}}, a;
            cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; cvt.f32.f16 $2, h2; cvt.f32.f16 $3, h3;
            }}""",
            "=f,=f,=f,=f,r", [code], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return decode(code, 10 - SHIFT, -14, SIGNS != 0)


@triton.jit
def decode_blocks(code, scale, FORMAT: tl.constexpr):  # uint8 [blocks, 128], float32 [blocks]
    """Return code × scale. The power of two between a format and float16 goes into the scale, exactly."""
    if FORMAT == "s1e3m4":
        return values_of(code, 6, 0x1FC01FC0) * (scale * 4096.0)[:, None]
    elif FORMAT == "ue3m5":
        return values_of(code, 5, 0x1FE01FE0, 0) * (scale * 4096.0)[:, None]
    elif FORMAT == "ue3m1":
        return decode(code, 1, -14, False) * (scale * 4096.0)[:, None]
    else:  # e4m3, e4m3_root
        return values_of(code, 7, 0x3F803F80) * (scale * 256.0)[:, None]


@triton.jit
def pack_signed(x, random):  # float32 in float16's range, uint32 -> uint8
    """Return the dithered bytes of s1e3m4 for values scaled to float16's exponents."""
    # p holds numbers 0 and 2 as float16, and q numbers 1 and 3. s1e3m4 keeps 4 of float16's 10 bits of mantissa, and
    # noise is added to the 6 others: bits 0 to 5 of a word, which prmt puts into the lower byte of a half. The carry
    # may run into the exponent, as it should; min makes NaN the largest code, so that it cannot run into the sign. Then
    # the 7 bits of p go down by 6 and its sign by 8, into bytes 0 and 2; those of q go up by 2, its sign stays, for
    # bytes 1 and 3.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p, q, a, b, c;
        cvt.rn.f16x2.f32 p, $3, $1; cvt.rn.f16x2.f32 q, $4, $2;
        mov.b32 c, 0x1FC01FC0; min.f16x2 p, p, c; min.f16x2 q, q, c;
        prmt.b32 a, $5, $7, 0x4400; prmt.b32 b, $6, $8, 0x4400;
        and.b32 a, a, 0x003F003F; and.b32 b, b, 0x003F003F;
        add.u32 p, p, a; add.u32 q, q, b;
        shr.b32 a, p, 6; shr.b32 b, p, 8; shl.b32 c, q, 2;
        and.b32 a, a, 0x007F007F;
        lop3.b32 a, b, 0x00800080, a, 0xEA;
        lop3.b32 a, c, 0x7F007F00, a, 0xEA;
        lop3.b32 $0, q, 0x80008000, a, 0xEA;
        }""",
        "=r,f,f,f,f,r,r,r,r", [x, random], dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


_ADD_NOISE = """
max.s32 e, ${x}, 0x38800000; and.b32 e, e, 0x7F800000; lop3.b32 d, ${r}, 0x007FFF80, e, 0xEA;
mov.b32 y{i}, ${x}; mov.b32 f, d; fma.rz.f32 y{i}, f, 0f3D000000, y{i};
mov.b32 f, e; fma.rz.f32 y{i}, f, 0fBD000000, y{i};
"""
_PACK_UNSIGNED = tl.constexpr(
    "{ .reg .b32 p, q, a, b, d, e; .reg .f32 y0, y1, y2, y3, f;"
    + "".join(_ADD_NOISE.format(i=i, x=i + 1, r=i + 5) for i in range(4))
    + """
    cvt.rz.f16x2.f32 p, y2, y0; cvt.rz.f16x2.f32 q, y3, y1;
    mov.b32 e, 0x1FE01FE0; min.f16x2 p, p, e; min.f16x2 q, q, e;
    shr.b32 a, p, 5; shl.b32 b, q, 3;
    and.b32 a, a, 0x00FF00FF;
    lop3.b32 $0, b, 0xFF00FF00, a, 0xEA;
    }"""
)


@triton.jit
def pack_unsigned(x, random):  # float32 in float16's range, not negative; uint32 -> uint8
    """Return the dithered bytes of ue3m5 for values scaled to float16's exponents."""
    # Noise is added to the float32, of which 18 bits will be cut off: e is the power of two below x, 2^-14 at least;
    # x + e (1 + noise) / 32 - e / 32 is rounded toward zero throughout, so nothing but the noise carries over a code.
    # What that makes larger than the largest code is put back (min). Then as in `pack_signed`, with 5 bits of mantissa
    # and no sign: 8 bits down by 5, or up by 3.
    return tl.inline_asm_elementwise(
        _PACK_UNSIGNED, "=r,r,r,r,r,r,r,r,r", [x, random], dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def cut(x, CUT: tl.constexpr, SIGN: tl.constexpr, LAST: tl.constexpr, random, DITHER: tl.constexpr):
    """Return int32 codes of values scaled to float16's exponents: add, cut off `CUT` of float16's bits.

    SIGN is the sign bit, LAST the largest code, NaN's too. DITHER is "" to round to nearest, "half" to add noise for m
    to the nearest float16, "whole" to add the number `random`, below 2^(CUT + 13), to all bits of the float32.
    """
    # Below 2^-14, float16's smallest normal number, the code counts steps of 2^-24 (whole: of 2^-37). Above, it is
    # made of the bits, less 112 in the exponent: the difference of the biases, 127 - 15.
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    if DITHER == "whole":
        whole = tl.where(size < 2.0**-14, (size * 137438953472.0).to(tl.int32), bits - (112 << 23))
        code = (whole + random.to(tl.int32)) >> (CUT + 13)
    elif DITHER == "half":
        half = size.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        code = (half + (random << 26 >> (32 - CUT)).to(tl.int32)) >> CUT
    else:
        half = tl.where(
            size < 2.0**-14, (size * 16777216.0).to(tl.int32), (bits >> 13) - (112 << 10)
        )
        code = (half + (1 << (CUT - 1))) >> CUT
    code = tl.minimum(code, LAST)
    if SIGN:
        negative = (x.to(tl.int32, bitcast=True) < 0) & (x == x)
        code |= tl.where(negative, SIGN, 0)
    return code


@triton.jit
def encode_state(x, random, FORMAT: tl.constexpr, FAST: tl.constexpr, DITHERED: tl.constexpr):
    """Quantize a tile [blocks, 128] of moments, or of roots of second moments; return uint8 codes and scales."""
    OCP: tl.constexpr = FORMAT == "e4m3" or FORMAT == "e4m3_root"
    # "or" and "and" of two each: Triton 3.2 takes no more
    SQUARED: tl.constexpr = (FORMAT == "ue3m5" or FORMAT == "ue3m1") or FORMAT == "e4m3_root"
    if PTX:
        amax = tl.reduce(x if SQUARED else tl.abs(x), 1, _larger)
    else:
        amax = tl.max(bits_of_magnitude(x), 1).to(tl.float32, bitcast=True)
    if OCP:
        scale, inverse = scale_and_inverse(amax.to(tl.int32, bitcast=True), 3)
    else:
        LARGEST: tl.constexpr = 31.0 if FORMAT == "s1e3m4" else 31.5 if FORMAT == "ue3m5" else 24.0
        scale = amax * (1.0 / LARGEST)
        scale = tl.where(scale >= TINY, scale, 0.0)
        finite = amax < float("inf")
        inverse = tl.where((scale > 0) & finite, reciprocal(scale, FAST), 0.0)
        scale = tl.where(finite, scale, float("nan"))
    # between the format's exponents and float16's, where that is the way
    UNIT: tl.constexpr = (
        (2.0**-8 if OCP else 2.0**-12) if DITHERED else (1.0 if OCP else 2.0**-12 * _NUDGE)
    )
    LEAST: tl.constexpr = (
        E4M3_MIN * UNIT if FORMAT == "e4m3_root" else 2.0**-19 if FORMAT == "ue3m5" else 2.0**-15
    )
    y = x * (inverse * UNIT)[:, None]
    if OCP and not DITHERED:
        y = tl.where(inverse[:, None] > 0, y, 0.0)  # infinity × 0 is NaN
    if SQUARED:  # a positive second moment never becomes zero: lift it to the smallest code
        y = tl.maximum(y, tl.where(x > 0, LEAST, 0.0))
    if OCP and not DITHERED:
        code = encode(y, 3, -6, E4M3_MAX)
    elif (PTX and DITHERED) and FORMAT == "s1e3m4":
        code = pack_signed(y, random)
    elif (PTX and DITHERED) and FORMAT == "ue3m5":
        code = pack_unsigned(y, random)
    else:
        CUT: tl.constexpr = 7 if OCP else 6 if FORMAT == "s1e3m4" else 5 if FORMAT == "ue3m5" else 9
        SIGN: tl.constexpr = 0 if SQUARED else 0x80
        LAST: tl.constexpr = 0x7E if OCP else 127 if FORMAT == "s1e3m4" else 255 if CUT == 5 else 15
        DITHER: tl.constexpr = "" if not DITHERED else "whole" if SQUARED else "half"
        if FORMAT == "ue3m1":  # white noise
            random = ((random ^ (random >> 15)) * 0x846CA68B) >> 9
        random = noise_of_v(random, CUT + 13) if SQUARED else random
        code = cut(y, CUT, SIGN, LAST, random, DITHER)
    return code.to(tl.uint8), scale


# --- 4-bit storage


@triton.jit
def unpack_codes(packed, BLOCKS: tl.constexpr):  # uint8 [blocks, 64] -> uint8 [blocks, 128]
    return tl.join(packed & 15, packed >> 4).reshape(BLOCKS, 128)


@triton.jit
def pack_codes(code, BLOCKS: tl.constexpr):  # uint8 [blocks, 128] -> uint8 [blocks, 64]
    low, high = tl.split(code.reshape(BLOCKS, 64, 2))
    return low | (high << 4)


# --- masters


@triton.jit
def join(weight, remainder):  # bits of bfloat16 as int16, int8 or int16 -> float32
    """Return the master of 24 or 32 bits; the weight alone where the sum is NaN."""
    # For each of four: the bfloat16 weight in the upper half (shl, or a mask), plus the remainder. prmt puts its byte
    # in bits 8 to 15, zeros below, and its sign bit in all 16 bits above.
    if PTX and remainder.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a; .reg .f32 f; .reg .pred p;
            prmt.b32 a, $6, 0, 0x8804; shl.b32 $0, $4, 16; add.s32 a, $0, a; mov.b32 f, a;
            setp.nan.f32 p, f, f; selp.b32 $0, $0, a, p;
            prmt.b32 a, $6, 0, 0x9914; and.b32 $1, $4, 0xFFFF0000; add.s32 a, $1, a; mov.b32 f, a;
            setp.nan.f32 p, f, f; selp.b32 $1, $1, a, p;
            prmt.b32 a, $6, 0, 0xAA24; shl.b32 $2, $5, 16; add.s32 a, $2, a; mov.b32 f, a;
            setp.nan.f32 p, f, f; selp.b32 $2, $2, a, p;
            prmt.b32 a, $6, 0, 0xBB34; and.b32 $3, $5, 0xFFFF0000; add.s32 a, $3, a; mov.b32 f, a;
            setp.nan.f32 p, f, f; selp.b32 $3, $3, a, p;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r", [weight, remainder], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = remainder.to(tl.int32)
        if remainder.dtype == tl.int8:
            low = low << 8
        high = weight.to(tl.int32) << 16
        whole = (high + low).to(tl.float32, bitcast=True)
        return tl.where(whole == whole, whole, high.to(tl.float32, bitcast=True))


@triton.jit
def split(x, random, WIDE: tl.constexpr):
    """Return the bits of bfloat16 as int16, and int8 or (WIDE) int16."""
    # To 24 bits: + noise below bit 8, byte 3 of a word. Byte 1 of the sum is the remainder: prmt gathers those of four.
    # Then to 16 bits: + 0x8000, and prmt gathers the upper halves, two bfloat16 to a register.
    if WIDE:
        bits = number_bits(x)
        return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)
    elif PTX and _TWO_TYPES:
        # a NaN that arithmetic makes is 0x7FFFFFFF, which rounding would carry over: min makes it 0x7FC00000
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, e, f, g, h;
            min.s32 a, $3, 0x7FC00000; min.s32 b, $4, 0x7FC00000; min.s32 c, $5, 0x7FC00000; min.s32 d, $6, 0x7FC00000;
            shr.u32 e, $7, 24; shr.u32 f, $8, 24; shr.u32 g, $9, 24; shr.u32 h, $10, 24;
            add.s32 a, a, e; add.s32 b, b, f; add.s32 c, c, g; add.s32 d, d, h;
            prmt.b32 e, a, b, 0x0051; prmt.b32 f, c, d, 0x0051; prmt.b32 $2, e, f, 0x5410;
            add.s32 a, a, 0x8000; add.s32 b, b, 0x8000; add.s32 c, c, 0x8000; add.s32 d, d, 0x8000;
            prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632;
            }""",
            "=&r,=&r,=&r,r,r,r,r,r,r,r,r", [x, random], dtype=(tl.int16, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        rounded = number_bits(x) + (random >> 24).to(tl.int32)
        return ((rounded + 0x8000) >> 16).to(tl.int16), (rounded >> 8).to(tl.int8)


@triton.jit
def number_bits(x):
    """Return the bits of x; every NaN has the one payload that rounding cannot carry over into a number."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def dither(x, random):  # float32, uint32 below 2^16 -> bits of bfloat16 as int16
    return ((number_bits(x) + random.to(tl.int32)) >> 16).to(tl.int16)


@triton.jit
def power_of_two_scale(amax_bits, LARGEST: tl.constexpr):  # int32 bits of a magnitude -> float32
    """Return the smallest power of two s with amax / s <= LARGEST; 1 for zero, NaN for a non-finite one."""
    ratio = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), LARGEST)
    # any bit of the mantissa carries into the exponent, which alone is kept
    up = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = tl.maximum(up, 1 << 23).to(tl.float32, bitcast=True)  # 2^-126 at least
    scale = tl.where(amax_bits > 0, scale, 1.0)
    return tl.where(amax_bits < 0x7F800000, scale, float("nan"))
