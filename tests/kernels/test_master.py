"""The 24-bit master, a bfloat16 weight and a byte: every upper half of a float32 with the lower halves that matter."""

import pytest
import torch
from helpers import assert_same_bits

from fp8stack.kernels.reference.master import join, split

LOW_HALVES = [
    0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x00FF, 0x0100, 0x1234,
    0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x8000, 0x8001, 0x807F, 0x8080, 0x80FF, 0xFF7F, 0xFF80, 0xFFFF,
]  # fmt: skip
TIES = range(
    0x7F80, 0x8001
)  # lower halves that round to half a bfloat16 step, and half a step itself


def from_bits(bits):
    return torch.as_tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def every_upper_half(low):
    """Return the 65536 float32 with lower half `low`: all signs, exponents and upper mantissas, NaN included."""
    return from_bits((torch.arange(65536) << 16) + low)


def rounded_to_24_bits(x):
    """Return finite `x` (float32) rounded to a multiple of 2^8 of its last place, halves away from zero, in float64."""
    _, exponent = torch.frexp(x)
    step = torch.exp2(
        exponent.clamp(min=-125).double() - 16
    )  # 2^8 ulp; subnormals have the ulp of 2^-126
    steps = x.double() / step
    return (steps.abs() + 0.5).floor() * steps.sign() * step


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_master_is_float32_rounded_to_24_bits(low):
    x = every_upper_half(low)
    x = x[x.isfinite()]
    weight, remainder = split(x)
    assert weight.dtype is torch.bfloat16
    assert remainder.dtype is torch.int8
    master, expected = join(weight, remainder), rounded_to_24_bits(x)
    overflow = expected.abs() > torch.finfo(torch.float32).max
    assert torch.equal(master[~overflow].double(), expected[~overflow])
    assert master[overflow].isinf().all()
    assert torch.equal(torch.signbit(master), torch.signbit(x))


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_relative_error_is_at_most_two_to_the_minus_16(low):
    x = every_upper_half(low)
    x = x[(x.abs() >= 2.0**-126) & (x.abs() <= from_bits(0x7F7FFF7F))]
    assert len(torch.frexp(x).exponent.unique()) == 254
    error = (join(*split(x)).double() - x.double()).abs()
    assert (error <= x.double().abs() * 2.0**-16).all()


def test_subnormals_are_off_by_at_most_half_a_step():
    x = from_bits(torch.cat([torch.arange(0, 0x800000, 37), torch.arange(0, 0x800000, 37) + 2**31]))
    error = (join(*split(x)).double() - x.double()).abs()
    assert error.max() <= 0x80 * 2.0**-149


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_weight_is_the_bfloat16_rounding_except_at_ties(low):
    x = every_upper_half(low)
    x = x[~x.isnan()]
    weight, nearest = split(x)[0], x.bfloat16()
    if low not in TIES:
        assert_same_bits(weight, nearest)
        return
    finite = x.isfinite()
    away = from_bits((x[finite].view(torch.int32).long() & ~0xFFFF) + 0x10000).bfloat16()
    assert_same_bits(weight[finite], away)
    assert (weight[finite] != nearest[finite]).any()


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_nan_stays_nan_and_infinity_stays_infinity(low):
    x = every_upper_half(low)
    special = ~x.isfinite()
    weight, remainder = split(x)
    master = join(weight, remainder)
    assert torch.equal(master.isnan(), x.isnan())
    assert torch.equal(weight.isnan(), x.isnan())
    assert remainder[special].eq(0).all()
    infinite = x.isinf()
    assert_same_bits(master[infinite], x[infinite])
    assert torch.equal(torch.signbit(master[special]), torch.signbit(x[special]))


@pytest.mark.parametrize(
    "bits", [0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], ids=hex
)
def test_nan_with_any_payload_stays_nan(bits):
    weight, remainder = split(from_bits([bits]))
    assert weight.isnan().all()
    assert remainder.tolist() == [0]
    assert join(weight, remainder).isnan().all()


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_splitting_a_master_again_changes_nothing(low):
    weight, remainder = split(every_upper_half(low))
    again_weight, again_remainder = split(join(weight, remainder))
    assert_same_bits(again_weight, weight)
    assert_same_bits(again_remainder, remainder)


def test_every_remainder_comes_back_with_its_weight():
    weights = torch.cat([torch.randn(64) * size for size in (1e-30, 1.0, 1e30)]).bfloat16()
    weight = weights.repeat_interleave(256)
    remainder = torch.arange(-128, 128).to(torch.int8).repeat(len(weights))
    again = split(join(weight, remainder))
    assert_same_bits(again[0], weight)
    assert_same_bits(again[1], remainder)


def test_bfloat16_value_has_remainder_zero():
    x = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()]
    weight, remainder = split(x.float())
    assert_same_bits(weight, x)
    assert remainder.eq(0).all()


def test_largest_values_round_as_a_24_bit_float_does():
    """The last 24-bit value survives beside a weight of infinity; what lies half a step above it is infinity."""
    largest, half_step_above = 0x7F7FFF00, 0x7F7FFF80
    x = from_bits([largest, half_step_above - 1, half_step_above, 0x7F7FFFFF])
    for sign in (1, -1):
        weight, remainder = split(sign * x)
        assert weight.isinf().all()
        master = join(weight, remainder)
        expected = from_bits([largest, largest, 0x7F800000, 0x7F800000])
        assert_same_bits(master, sign * expected)


def test_shape_is_kept_and_strides_do_not_matter():
    x = torch.randn(6, 5, 4)
    for view in (x, x.transpose(0, 2), x[::2, 1:], x[0, 0, 0], x[:0]):
        parts, expected = split(view), split(view.contiguous())
        for part, same in zip(parts, expected, strict=True):
            assert part.shape == view.shape
            assert torch.equal(part, same)
        assert join(*parts).shape == view.shape


def test_any_remainder_beside_any_weight_rounds_back_to_that_weight():
    """A weight that was written leaves an old remainder: the pair must stay within half a step of the weight.

    All 65536 bfloat16 by all 256 remainders. NaN must stay NaN; zero and infinity must not become NaN.
    """
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = weights.float()
    finite = exact.isfinite()
    upward = torch.nextafter(weights.abs(), torch.full_like(weights, torch.inf)).float()
    step = torch.where(
        upward.isfinite(), upward - exact.abs(), 2.0**120
    )  # above the largest, as below
    for remainder in range(-128, 128):
        joined = join(weights, torch.full(weights.shape, remainder, dtype=torch.int8))
        assert torch.equal(joined.isnan(), exact.isnan())
        assert ((joined - exact).abs() <= step / 2)[finite].all()
        assert (joined[exact.isinf()].abs() > 3.38e38).all()
        if remainder < 0:
            assert_same_bits(joined[exact == 0], exact[exact == 0])
