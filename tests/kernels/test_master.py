"""Masters in 24, 32 and 16 bits: every upper half of a float32 with the lower halves that matter."""

import pytest
import torch
from helpers import assert_same_bits

from fp8stack.kernels.reference.master import dither, join, split

LOW_HALVES = [
    0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x00FF, 0x0100, 0x1234,
    0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x8000, 0x8001, 0x807F, 0x8080, 0x80FF, 0xFF7F, 0xFF80, 0xFFFF,
]  # fmt: skip
BOTH = pytest.mark.parametrize("dtype", [torch.int8, torch.int16], ids=["24", "32"])
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


@pytest.mark.parametrize(
    "bits", [0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], ids=hex
)
@BOTH
def test_nan_with_any_payload_becomes_the_one(bits, dtype):
    """Rounding up could carry a payload over into infinity, or into the sign."""
    weight, remainder = split(from_bits([bits]), dtype)
    assert weight.view(torch.int16).tolist() == [0x7FC0]
    assert remainder.tolist() == [0]
    assert join(weight, remainder).view(torch.int32).tolist() == [0x7FC00000]
    assert dither(from_bits([bits]), torch.tensor([0xFFFF])).view(torch.int16).tolist() == [0x7FC0]


@BOTH
@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_splitting_a_master_again_changes_nothing(low, dtype):
    weight, remainder = split(every_upper_half(low), dtype)
    again_weight, again_remainder = split(join(weight, remainder), dtype)
    assert_same_bits(again_weight, weight)
    assert_same_bits(again_remainder, remainder)


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


@BOTH
def test_shape_is_kept_and_strides_do_not_matter(dtype):
    x = torch.randn(6, 5, 4)
    for view in (x, x.transpose(0, 2), x[::2, 1:], x[0, 0, 0], x[:0]):
        parts, expected = split(view, dtype), split(view.contiguous(), dtype)
        for part, same in zip(parts, expected, strict=True):
            assert part.shape == view.shape
            assert torch.equal(part, same)
        assert join(*parts).shape == view.shape


@BOTH
def test_any_remainder_beside_any_weight_rounds_back_to_that_weight(dtype):
    """A weight that was written leaves an old remainder: the pair must stay within half a step of the weight.

    All 65536 bfloat16 by remainders of every upper byte. NaN must stay NaN; zero and infinity must not become NaN.
    """
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = weights.float()
    finite = exact.isfinite()
    upward = torch.nextafter(weights.abs(), torch.full_like(weights, torch.inf)).float()
    step = torch.where(
        upward.isfinite(), upward - exact.abs(), 2.0**120
    )  # above the largest, as below
    byte = torch.arange(-128, 128)
    for remainder in (byte if dtype is torch.int8 else byte * 256 + 77).tolist():
        joined = join(weights, torch.full(weights.shape, remainder, dtype=dtype))
        assert torch.equal(joined.isnan(), exact.isnan())
        assert ((joined - exact).abs() <= step / 2)[finite].all()
        assert (joined[exact.isinf()].abs() > 3.38e38).all()
        if remainder < 0:
            assert_same_bits(joined[exact == 0], exact[exact == 0])


# --- 32 bits


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_master_of_32_bits_is_the_float32_itself(low):
    x = every_upper_half(low)
    weight, remainder = split(x, torch.int16)
    assert remainder.dtype is torch.int16
    number = ~x.isnan()
    assert torch.equal(
        join(weight, remainder)[number].view(torch.int32), x[number].view(torch.int32)
    )
    assert torch.equal(weight.isnan(), ~number)
    if low != 0x8000:  # a tie goes away from zero
        assert_same_bits(weight[number], x[number].bfloat16())


# --- stochastic rounding to bfloat16


def test_dithered_value_is_one_of_the_two_bfloat16_around_it():
    x = torch.cat([every_upper_half(low) for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)])
    x = x[x.isfinite()]
    below = from_bits(x.view(torch.int32).long() & ~0xFFFF)  # toward zero
    above = from_bits((x.view(torch.int32).long() & ~0xFFFF) + 0x10000)
    exact = x == below
    for random in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        rounded = dither(x, torch.full(x.shape, random)).float()
        assert ((rounded == below) | (rounded == above)).all()
        assert_same_bits(rounded[exact], x[exact])
        assert torch.equal(torch.signbit(rounded), torch.signbit(x))
    assert_same_bits(dither(x, torch.zeros(len(x), dtype=torch.int64)).float(), below)
    infinities = from_bits([0x7F800000, 0xFF800000])
    assert_same_bits(dither(infinities, torch.tensor([0xFFFF] * 2)).float(), infinities)


def test_dither_goes_up_for_its_fraction_of_all_noise():
    """Of the 65536 values of the noise exactly as many go up as the lower half says: the mean is exact."""
    every = torch.arange(65536)
    for low in LOW_HALVES:
        for high in (0x3F80, 0xBF9C, 0x0001, 0x7F7E):
            x = from_bits([(high << 16) + low]).expand(65536)
            up = dither(x, every).view(torch.int16).int() & 0xFFFF != high
            assert up.sum() == low
