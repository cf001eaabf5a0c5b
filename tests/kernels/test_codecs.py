"""The device-side codecs of optimizer states, masters and noise against the reference, code by code.

On a GPU most of them are inline PTX, so these are exhaustive there; in the interpreter plain operations stand in.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from helpers import assert_same_bits, grid

from fp8stack.formats import E5M2, FORMATS, NUDGE
from fp8stack.kernels import state_codecs
from fp8stack.kernels.reference import fp8, master, power_of_two, quantize

STATE_FORMATS = [f for f in FORMATS.values() if f is not E5M2]
ALL = pytest.mark.parametrize("fmt", STATE_FORMATS, ids=[f.name for f in STATE_FORMATS])
LAUNCH = {"num_warps": 2, "enable_fp_fusion": False}  # as a step is launched
DITHERED = pytest.mark.parametrize("dithered", [False, True], ids=["nearest", "dithered"])
FAST = pytest.mark.parametrize(
    "fast", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["exact", "fast"]
)


@triton.jit
def _decode_kernel(codes_ptr, scale_ptr, out_ptr, FORMAT: tl.constexpr):
    block = tl.program_id(0) * 8 + tl.arange(0, 8)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = state_codecs.decode_blocks(tl.load(codes_ptr + at), tl.load(scale_ptr + block), FORMAT)
    tl.store(out_ptr + at, value)


@triton.jit
def _encode_kernel(
    x_ptr,
    random_ptr,
    codes_ptr,
    scale_ptr,
    FORMAT: tl.constexpr,
    FAST: tl.constexpr,
    DITHERED: tl.constexpr,
):
    block = tl.program_id(0) * 8 + tl.arange(0, 8)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    random = tl.load(random_ptr + at).to(tl.uint32, bitcast=True)
    code, scale = state_codecs.encode_state(tl.load(x_ptr + at), random, FORMAT, FAST, DITHERED)
    tl.store(codes_ptr + at, code)
    tl.store(scale_ptr + block, scale)


@triton.jit
def _pack_kernel(codes_ptr, packed_ptr, again_ptr):
    row = tl.arange(0, 8)[:, None]
    packed = state_codecs.pack_codes(tl.load(codes_ptr + row * 128 + tl.arange(0, 128)[None, :]), 8)
    tl.store(packed_ptr + row * 64 + tl.arange(0, 64)[None, :], packed)
    again = state_codecs.unpack_codes(packed, 8)
    tl.store(again_ptr + row * 128 + tl.arange(0, 128)[None, :], again)


@triton.jit
def _join_kernel(weight_ptr, low_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    weight, low = tl.load(weight_ptr + at), tl.load(low_ptr + at)
    tl.store(out_ptr + at, state_codecs.join(weight, low))


@triton.jit
def _split_kernel(x_ptr, random_ptr, high_ptr, low_ptr, WIDE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    random = tl.load(random_ptr + at).to(tl.uint32, bitcast=True)
    high, low = state_codecs.split(tl.load(x_ptr + at), random, WIDE)
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, low)


@triton.jit
def _dither_kernel(x_ptr, index_ptr, seed_ptr, words_ptr, out_ptr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    seed = tl.load(seed_ptr).to(tl.int32, bitcast=True)
    word = state_codecs.noise(tl.load(index_ptr + at), seed)
    tl.store(words_ptr + at, word.to(tl.int64))
    tl.store(out_ptr + at, state_codecs.dither(tl.load(x_ptr + at), word & 0xFFFF))


@triton.jit
def _power_kernel(amax_ptr, scale_ptr, LARGEST: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    bits = tl.load(amax_ptr + at).to(tl.int32, bitcast=True)
    tl.store(scale_ptr + at, state_codecs.power_of_two_scale(bits, LARGEST))


# --- codes


@ALL
def test_every_code_decodes_with_any_scale_as_in_the_reference(fmt, kernel_device):
    """Every code in every lane of a register, with scales down to the smallest, zero and NaN."""
    count = 128 if fmt.name.startswith("e4m3") else 1 << fmt.bits
    codes = torch.randint(count, (48, 128), dtype=torch.uint8)
    if fmt.name.startswith("e4m3"):
        codes[codes == 0x7F] = 3  # NaN: a block that has one says so in its scale
        if fmt.signed:
            codes[1::2] += 128
    scales = [1.0, 2.0**-126, 2.0**-120 * 1.3, 2.0**60, 3e18, 0.0, torch.nan, 1 / 3]
    scale = torch.tensor([*scales, *torch.rand(40).tolist()])
    out = torch.empty(48, 128, device=kernel_device)
    _decode_kernel[(6,)](codes.to(kernel_device), scale.to(kernel_device), out, fmt.name, **LAUNCH)
    assert_same_bits(out, fp8.decode(codes, fmt) * scale[:, None])


def as_int32(words):
    """Return the bits of `words`, int64 in [0, 2^32)."""
    return (words << 32 >> 32).to(torch.int32)


def encode_on_device(x, random, fmt, fast, device):
    """Return codes and scales of `x` [blocks, 128], a multiple of 8 blocks; to nearest where `random` is None."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
    scale = torch.empty(len(x), device=device)
    words = torch.zeros(x.shape, dtype=torch.int64) if random is None else random
    _encode_kernel[(len(x) // 8,)](
        x.to(device),
        as_int32(words).to(device),
        codes,
        scale,
        fmt.name,
        fast,
        random is not None,
        **LAUNCH,
    )
    return codes.cpu(), scale.cpu()


def encode_roots(x, random, fmt):
    """Return what the reference makes of roots `x`: codes one a byte, and scales."""
    if fmt.bits == 4:
        scale, inverse = quantize.scale_and_inverse(x.abs().amax(-1), fmt)
        inverse = inverse * NUDGE if random is None else inverse
        codes = fp8.encode(x * inverse[:, None], fmt, random)
    else:
        codes, scale = quantize.quantize_blocks(x, replace(fmt, squared=False), random)
        codes, scale = codes.view(torch.uint8), scale.flatten()
    if fmt.squared:
        codes = torch.where(x > 0, codes.clamp(min=1), codes)
    return codes, scale


def blocks_of(values, fmt):
    """Return `values` in blocks of 128 that begin with the largest of the format, so that the scale is about 1."""
    rows = -(-len(values) // 127)
    rows += -rows % 8
    padded = torch.zeros(rows * 127)
    padded[: len(values)] = values
    return torch.cat([torch.full((rows, 1), fmt.max), padded.reshape(rows, 127)], 1)


@ALL
@FAST
@DITHERED
def test_grid_midpoints_and_neighbours_encode_as_in_the_reference(
    fmt, fast, dithered, kernel_device, special_values
):
    """A scale of 1 is exact, its reciprocal too, so approximate arithmetic gives the same codes here."""
    values = special_values(fmt)
    values = values[values.abs() <= fmt.max]
    x = blocks_of(torch.cat([values, values.flip(0)]), fmt)
    assert ((fmt.max * torch.tensor(1 / fmt.max)) == 1).all()
    random = fp8.noise(x.shape, *torch.tensor([9, 3], dtype=torch.int32)) if dithered else None
    assert_same_bits(
        encode_on_device(x, random, fmt, fast, kernel_device), encode_roots(x, random, fmt)
    )


@ALL
@DITHERED
def test_values_of_every_exponent_encode_as_in_the_reference(
    fmt, dithered, kernel_device, random_bits
):
    """Up to 2^100 (see test_triton.py), sorted too; zeros and negative zeros, and blocks of either alone."""
    x = random_bits(64 * 128).clamp(-(2.0**100), 2.0**100).reshape(64, 128)
    x[16:32] = x[16:32].flatten().sort().values.reshape(16, 128)
    x[32:48] = torch.randn(16, 128) * torch.logspace(-44, 30, 16)[:, None]
    x[:, ::9] = 0
    x[:, 4::9] = -0.0
    x[7], x[15] = 0, -0.0
    x = x.abs() if fmt.squared else x
    random = fp8.noise(x.shape, *torch.tensor([-5, 7], dtype=torch.int32)) if dithered else None
    assert_same_bits(
        encode_on_device(x, random, fmt, False, kernel_device), encode_roots(x, random, fmt)
    )


@ALL
@FAST
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_block_that_is_not_finite_has_scale_nan(fmt, fast, bad, kernel_device):
    x = torch.rand(8, 128)
    x[2, 0], x[3, 127], x[5, 64] = bad, bad, bad
    codes, scale = encode_on_device(x, torch.zeros(8, 128).long(), fmt, fast, kernel_device)
    assert scale.isnan().nonzero().flatten().tolist() == [2, 3, 5]
    clean = encode_on_device(torch.rand(8, 128), torch.zeros(8, 128).long(), fmt, fast, kernel_device)  # fmt: skip
    assert clean[1].isfinite().all()
    assert codes[~scale.isnan()].ne(0).float().mean() > 0.8


@ALL
def test_dithered_codes_are_the_references_for_every_noise(fmt, kernel_device):
    """Values on a grid of 64 steps between the codes, with noise that covers its range."""
    values = grid(fmt).float()
    between = values[:-1, None] + (values[1:] - values[:-1])[:, None] * torch.arange(64) / 64
    x = blocks_of(between.flatten(), fmt)
    for word in (0, 1, 63, 64, 2**7, 2**22, 2**23 - 1, 2**23, 2**32 - 1):
        random = torch.full(x.shape, word)
        codes, _ = encode_on_device(x, random, fmt, False, kernel_device)
        assert_same_bits(codes, encode_roots(x, random, fmt)[0])
        if fmt.squared:
            assert codes[x > 0].min() == 1
        assert codes[x == 0].eq(0).all()


def test_four_bit_codes_pack_as_in_the_reference(kernel_device):
    codes = torch.randint(0, 16, (8, 128), dtype=torch.uint8)
    packed, again = (torch.empty(8, n, dtype=torch.uint8, device=kernel_device) for n in (64, 128))
    _pack_kernel[(1,)](codes.to(kernel_device), packed, again, **LAUNCH)
    assert_same_bits(packed, quantize.pack(codes))
    assert_same_bits(again, codes)


# --- masters

SIZE = 4096
GPU_LOWS = [
    0x0000, 0x0001, 0x007F, 0x0080, 0x00FF, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x807F, 0x8080, 0xFF7F, 0xFFFF,
]  # fmt: skip
LOWS = [0x0000, 0x7F80, 0x8000, 0xFFFF]
EVERY_LOW = pytest.mark.parametrize(
    "low", [x if x in LOWS else pytest.param(x, marks=pytest.mark.gpu) for x in GPU_LOWS], ids=hex
)
WIDE = pytest.mark.parametrize("wide", [False, True], ids=["24", "32"])


@WIDE
@EVERY_LOW
def test_every_upper_half_splits_as_in_the_reference(low, wide, kernel_device):
    """Of NaN a GPU's arithmetic makes only 0x7FFFFFFF; the interpreter is given all of them."""
    bits = ((torch.arange(65536) << 16) + low).to(torch.int32)
    x = bits.view(torch.float32)
    if kernel_device == "cuda":
        x = torch.where(
            x.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), x
        )
    dtype = torch.int16 if wide else torch.int8
    high = torch.empty(65536, dtype=torch.int16, device=kernel_device)
    rest = torch.empty(65536, dtype=dtype, device=kernel_device)
    on_device = x.view(torch.int32).to(kernel_device).view(torch.float32)
    random = fp8.noise(x.shape, *torch.tensor([low, 5], dtype=torch.int32))
    _split_kernel[(65536 // SIZE,)](
        on_device, as_int32(random).to(kernel_device), high, rest, wide, SIZE, **LAUNCH
    )
    expected = master.split(x, dtype, random)
    assert_same_bits(high.view(torch.bfloat16), expected[0], "weight")
    assert_same_bits(rest.cpu()[~x.isnan()], expected[1][~x.isnan()], "remainder")
    joined = master.join(high.cpu().view(torch.bfloat16), rest.cpu())
    assert torch.equal(joined.isnan(), x.isnan())


@WIDE
@EVERY_LOW
def test_every_weight_joins_any_remainder_as_in_the_reference(low, wide, kernel_device):
    """Those that no split leaves too: a weight that was written keeps its old remainder."""
    weight = torch.arange(65536).to(torch.int16)
    signed = (torch.tensor(low) - (low >> 15 << 16)).to(torch.int16)
    rest = (signed if wide else signed >> 8).to(torch.int16 if wide else torch.int8).expand(65536)
    out = torch.empty(65536, device=kernel_device)
    _join_kernel[(65536 // SIZE,)](
        weight.to(kernel_device), rest.contiguous().to(kernel_device), out, SIZE, **LAUNCH
    )
    expected = master.join(weight.view(torch.bfloat16), rest)
    assert_same_bits(out, expected)


# --- noise and dither


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, -(2**31), 2**31 - 1])
def test_noise_and_dither_are_the_references(seed, kernel_device, random_bits):
    word, phase = torch.tensor([[seed], [0x12345678]], dtype=torch.int32)
    x = torch.cat([random_bits(1536), torch.randn(510), torch.tensor([torch.nan, torch.inf])])
    index = torch.arange(2048)
    words = torch.empty(2048, dtype=torch.int64, device=kernel_device)
    out = torch.empty(2048, dtype=torch.int16, device=kernel_device)
    _dither_kernel[(2,)](
        x.to(kernel_device), (index - index % 16).to(kernel_device),
        word.view(torch.float32).to(kernel_device), words, out, **LAUNCH,
    )  # fmt: skip
    first = fp8.noise(x.shape, word, phase * 0)
    expected = (first - index % 16 * fp8.NEIGHBOUR) % 2**32
    assert torch.equal(fp8.noise(x.shape, word, phase), (first + phase) % 2**32)
    assert torch.equal(words.cpu(), expected)
    assert_same_bits(out.view(torch.bfloat16), master.dither(x, expected & 0xFFFF))


@pytest.mark.parametrize("largest", [448.0, 65504.0], ids=["e4m3", "fp16"])
def test_power_of_two_scale_is_the_references(largest, kernel_device, random_bits):
    exact = largest * torch.exp2(torch.arange(-120.0, 112.0))
    ends = torch.tensor([0.0, torch.inf, torch.nan, 2.0**-149, 2.0**-126, 3.4e38])
    near = [torch.nextafter(exact, torch.tensor(end)) for end in (0.0, torch.inf)]
    amax = torch.cat([exact, *near, ends, random_bits(2048)])[:2048].abs()
    out = torch.empty(2048, device=kernel_device)
    _power_kernel[(2,)](amax.to(kernel_device), out, largest, **LAUNCH)
    expected = torch.stack([power_of_two.power_of_two_scale(x, largest) for x in amax])
    assert_same_bits(out, expected)
