"""Quantization with a scale per block of 128: against an oracle, and for what users rely on."""

import math

import numpy as np
import pytest
import torch
from helpers import DTYPES, assert_same_bits, every_two, grid, nearest

from fp8stack.formats import (
    BLOCK,
    E4M3,
    E5M2,
    FORMATS,
    LEAST_SCALE,
    NUDGE,
    TINY,
    rows_cols,
    scale_shape,
)
from fp8stack.kernels import ops
from fp8stack.kernels.reference import quantize as reference
from fp8stack.kernels.reference.fp8 import decode, noise
from fp8stack.kernels.reference.quantize import as_blocks, from_blocks, pack, unpack

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
SQUARED = pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f.squared], ids=[f.name for f in FORMATS.values() if f.squared]
)  # fmt: skip
SHAPES = [
    (), (1,), (7,), (128,), (129,), (0,), (0, 4), (4, 0), (3, 5), (4, 128), (5, 200), (2, 3, 64), (17, 256), (2, 0, 3)
]  # fmt: skip


def values_for(fmt, shape, dtype=torch.float32):
    """Return normal values, or their absolute values for the squared formats."""
    x = torch.randn(shape).to(dtype)
    return x.abs() if fmt.squared else x


def quantize_by_hand(x, fmt):
    """Return (codes as uint8, one a byte; scale) of CPU tensor `x`, with numpy's float32 and a search for codes."""
    rows, cols = rows_cols(x.shape)
    table = x.float().reshape(rows, cols).numpy()
    codes = np.zeros((rows, cols), np.uint8)
    scales = np.zeros(scale_shape(x.shape), np.float32)
    largest, sign = np.float32(fmt.max), 1 << (fmt.bits - 1)
    for row in range(rows):
        for block in range(scales.shape[1]):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            values = table[row, part]
            if fmt.squared:
                with np.errstate(invalid="ignore"):
                    values = np.sqrt(values.astype(np.float64)).astype(np.float32)
            amax = np.abs(values).max()
            if not np.isfinite(amax):
                scales[row, block] = np.nan
                continue
            own = fmt.dtype is torch.uint8
            scale = (
                amax * np.float32(1 / fmt.max)
                if own
                else max(amax / largest, np.float32(LEAST_SCALE))
            )
            if scale >= np.float32(TINY) if own else amax > 0:
                scales[row, block] = scale
                inverse = np.float32(1) / scale * np.float32(NUDGE if own else 1)
                scaled = torch.from_numpy(values * inverse)
                steps = torch.searchsorted(grid(fmt), nearest(scaled, fmt).abs()).numpy()
                if fmt.squared:
                    steps[(steps < 1) & (values > 0)] = 1
                codes[row, part] = steps | (np.signbit(values) * sign if fmt.signed else 0)
    return torch.from_numpy(codes).reshape(x.shape), torch.from_numpy(scales)


def one_a_byte(codes, shape, fmt):
    """Return `codes` of a tensor of `shape` as uint8 on the CPU, those of 4 bits taken out of their bytes."""
    raw = codes.view(torch.uint8).cpu()
    return raw if fmt.bits == 8 else unpack(raw, torch.Size(shape))


def spread(scale, shape):
    """Return the scale of each element of a tensor of `shape`, on the CPU."""
    _, cols = rows_cols(shape)
    return scale.cpu().repeat_interleave(BLOCK, 1)[:, :cols].reshape(shape)


def assert_matches_oracle(x, fmt, device):
    """Compare the scales, and the codes of blocks that have one; the others decode to zero or NaN."""
    codes, scale = ops.quantize_blocks(x.to(device), fmt)
    expected_codes, expected_scale = quantize_by_hand(x.contiguous(), fmt)
    assert codes.dtype is fmt.dtype
    assert codes.shape == fmt.codes_shape(x.shape)
    assert codes.is_contiguous()
    assert_same_bits(scale, expected_scale, "scale")
    each = spread(expected_scale, x.shape)
    actual = torch.where(each > 0, one_a_byte(codes, x.shape, fmt), 0)
    assert_same_bits(actual, expected_codes, "codes")
    values = ops.dequantize_blocks(codes, scale, fmt, shape=x.shape).cpu()
    assert torch.equal(values.isnan(), each.isnan())
    assert values[each == 0].eq(0).all()


# --- scales per block


@every_two(3, fmt=FORMATS.values(), shape=SHAPES, dtype=DTYPES.values())
def test_codes_and_scales_are_those_of_the_definition(fmt, shape, dtype, device):
    assert_matches_oracle(values_for(fmt, shape, dtype), fmt, device)


@ALL
def test_values_of_every_exponent_match_the_definition(fmt, device, random_bits):
    """Optimizer formats up to 2^100: beyond 2^114 kernels lose bits of the power of two they fold into the scale."""
    x = random_bits(40 * BLOCK).reshape(8, -1)
    if fmt.dtype is torch.uint8:
        x = x.clamp(-(2.0**100), 2.0**100)
    assert_matches_oracle(x.abs() if fmt.squared else x, fmt, device)


@ALL
def test_views_quantize_like_their_copies(fmt, device):
    x = values_for(fmt, (6, 300, 4)).to(device)
    for view in (x.transpose(0, 2), x[::2], x[:, 5:150], x[1, :, 2], x[0:1].expand(3, 300, 4)):
        copied = ops.quantize_blocks(view.contiguous(), fmt)
        assert_same_bits(ops.quantize_blocks(view, fmt), copied)


@ALL
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_decode_to_code_times_scale(fmt, shape, device):
    codes, scale = quantize_by_hand(values_for(fmt, shape), fmt)
    stored = (pack(codes) if fmt.bits == 4 else codes.view(fmt.dtype)).to(device)
    values = ops.dequantize_blocks(stored, scale.to(device), fmt, shape=torch.Size(shape)).cpu()
    rows, cols = rows_cols(shape)
    assert scale.shape == (rows, math.ceil(cols / BLOCK))
    expected = decode(codes, fmt) * spread(scale, shape)
    assert_same_bits(values, expected * expected if fmt.squared else expected)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_decoding_to_16_bits_rounds_the_float32_value_once(fmt, dtype, device):
    codes, scale = ops.quantize_blocks(values_for(fmt, (5, 200)).to(device), fmt)
    values = ops.dequantize_blocks(codes, scale, fmt, dtype)
    assert_same_bits(values, ops.dequantize_blocks(codes, scale, fmt).to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_come_apart_and_together_again(shape):
    x = torch.randn(shape)
    blocks = as_blocks(x)
    assert blocks.shape == (*scale_shape(x.shape), BLOCK)
    assert blocks.sum() == pytest.approx(float(x.sum()), abs=1e-4)  # the padding is zeros
    assert_same_bits(from_blocks(blocks, x.shape), x)


@SQUARED
def test_negative_second_moment_is_reported_not_hidden(fmt, device):
    x = torch.rand(2, 256, device=device)
    x[0, 3] = -1e-20
    assert ops.quantize_blocks(x, fmt)[1].isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_the_smallest_numbers_are_off_by_half_a_step_of_the_smallest_scale(fmt, device):
    """2^-137 in E4M3, 2^-144 in E5M2; what float32 has between zero and that is zero."""
    step = LEAST_SCALE * fmt.min_positive
    sizes = torch.tensor([LEAST_SCALE * fmt.max, 1e-37, 1e-38, 1e-41, 2.0**-136, step, 2.0**-149])
    x = (sizes[:, None] * torch.linspace(-1, 1, 128)).to(device)
    codes, scale = ops.quantize_blocks(x, fmt)
    assert scale[1:].eq(LEAST_SCALE).all()
    values, exact = ops.dequantize_blocks(codes, scale, fmt).double(), x.double()
    bound = (exact.abs() * 2.0 ** -(fmt.mantissa_bits + 1)).clamp(min=step / 2)
    assert ((values - exact).abs() <= bound * (1 + 2.0**-20)).all()
    assert values[3 if fmt is E5M2 else 4].abs().amax() > 0
    assert ops.quantize_blocks(torch.zeros_like(x), fmt)[1].eq(0).all()


@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f.dtype is torch.uint8 and not f.squared], ids=str
)
def test_a_block_of_a_state_too_small_to_scale_is_a_block_of_zeros(fmt, device):
    """The limit is a scale of 2^-126."""
    smallest = fmt.max * TINY
    kept = torch.full((1, 128), smallest, device=device)
    lost = kept * (1 - 2.0**-22)
    codes, scale = ops.quantize_blocks(torch.cat([kept, lost, -lost, lost / 1000], 1), fmt)
    assert scale.tolist() == [[TINY, 0.0, 0.0, 0.0]]
    values = ops.dequantize_blocks(codes, scale, fmt)
    assert values[0, :128].eq(smallest).all()
    assert values[0, 128:].eq(0).all()


@ALL
def test_blocks_of_any_bits_quantize_as_defined(fmt, device):
    """Few different values a block, among them NaN, infinities, subnormals, zeros of both signs and the largest."""
    special = [0, 2**31, 0x7F800000, 0xFF800000, 0x7F800001, 0x7F7FFFFF, 1, 0x007FFFFF, 0x00800000]
    for _ in range(100):
        near_one = torch.randint(0x3F000000, 0x40000000, (8,))
        pool = torch.cat([torch.tensor(special), torch.randint(0, 2**32, (8,)), near_one])
        pool = pool[torch.randperm(len(pool))[: int(torch.randint(1, 13, ()))]]
        bits = pool[torch.randint(len(pool), (int(torch.randint(1, 301, ())),))]
        x = bits.to(torch.int32).view(torch.float32)
        assert_matches_oracle(x.abs() if fmt.squared else x, fmt, device)


# --- 4 bits


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (0,), (0, 4), (4, 0), (3, 5), (5, 128), (4, 129), (2, 3, 5)], ids=str
)
def test_codes_of_4_bits_come_out_of_their_bytes_again(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    rows, cols = rows_cols(shape)
    packed = pack(codes)
    assert packed.dtype is torch.uint8
    assert packed.shape == (rows, math.ceil(cols / 2))
    assert_same_bits(unpack(packed, torch.Size(shape)), codes)


def test_even_columns_lie_in_the_lower_halves_and_the_last_upper_half_may_be_empty():
    codes = torch.tensor([[1, 2, 3, 4, 5], [15, 0, 8, 7, 9]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0x21, 0x43, 0x05], [0x0F, 0x78, 0x09]]


@pytest.mark.parametrize("shape", [(3, 5), (4, 129), (7,), (2, 3, 43)], ids=str)
def test_packed_codes_with_odd_rows_decode_to_the_shape_asked_for(shape, device):
    for fmt in (f for f in FORMATS.values() if f.bits == 4):
        x = values_for(fmt, shape)
        codes, scale = ops.quantize_blocks(x.to(device), fmt)
        rows, cols = rows_cols(shape)
        assert cols % 2 == 1
        assert codes[:, -1].le(15).all()
        values = ops.dequantize_blocks(codes, scale, fmt, shape=x.shape)
        assert values.shape == x.shape
        padded = ops.dequantize_blocks(codes, scale, fmt)
        assert padded.shape == (rows, cols + 1)
        assert_same_bits(padded[:, :-1].reshape(shape), values)


def test_noise_moves_codes_of_v_by_one_at_most_and_keeps_zero_and_the_largest(device):
    fmt = FORMATS["ue3m1"]
    v = torch.rand(4, 300).square().to(device)
    v[:, ::7] = 0
    near_zero = v.clone()
    near_zero[:, 3] = 1e-12
    exact, scale = (t.cpu() for t in reference.quantize_blocks(near_zero, fmt))
    results = []
    for phase in (1 << 20, 2 << 20):
        words = noise(v.shape, *torch.tensor([1, phase], dtype=torch.int32, device=device))
        codes, same = reference.quantize_blocks(near_zero, fmt, words)
        assert_same_bits(same, scale)
        results.append(one_a_byte(codes, v.shape, fmt).int())
    nearest_codes = one_a_byte(exact, v.shape, fmt).int()
    for codes in results:
        assert (codes - nearest_codes).abs().max() == 1
        assert codes[:, ::7].eq(0).all()
        assert codes[:, 3].eq(1).all()  # lifted, whatever the noise
        assert torch.equal(codes == 0, v.cpu() == 0)
        assert codes[codes > 0].min() == 1
        assert codes[nearest_codes == 15].ge(14).all()
    assert (results[0] != results[1]).float().mean() > 0.1
