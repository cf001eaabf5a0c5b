"""Casts between float32 and the four one-byte formats, checked code by code against the definition of each format."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_same_bits, grid, nearest

from fp8stack.formats import E4M3, E5M2, FORMATS, UE3M5
from fp8stack.kernels.reference.fp8 import cast, count_saturated, decode, encode, sqrt_rn

NAN, INF = math.nan, math.inf
ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
SIGNED = pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f.signed], ids=[f.name for f in FORMATS.values() if f.signed]
)  # fmt: skip
OCP = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def value_of(code, name):
    """Return what one code means, bit field by bit field, as the tables of the formats define it."""
    exponent_bits, mantissa_bits, signed = {
        "e4m3": (4, 3, True), "e5m2": (5, 2, True), "s1e3m4": (3, 4, True), "ue3m5": (3, 5, False)
    }[name]  # fmt: skip
    bias = {"e4m3": 7, "e5m2": 15, "s1e3m4": 3, "ue3m5": 3}[name]
    sign = -1.0 if signed and code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    fraction = (code % 2**mantissa_bits) / 2**mantissa_bits
    if name == "e4m3" and code & 0x7F == 0x7F:
        return NAN
    if name == "e5m2" and exponent == 31:
        return NAN if fraction else sign * INF
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def all_codes(device="cpu"):
    return torch.arange(256, device=device).to(torch.uint8)


@ALL
def test_each_code_decodes_to_its_definition(fmt, device):
    values = decode(all_codes(device), fmt).cpu()
    expected = torch.tensor([value_of(code, fmt.name) for code in range(256)])
    number = ~expected.isnan()
    assert torch.equal(values.isnan(), ~number)
    assert_same_bits(values[number], expected[number])


@ALL
def test_constants_of_a_format_follow_from_its_codes(fmt):
    values = decode(all_codes(), fmt)
    finite = values[values.isfinite()].double()
    assert finite.max() == fmt.max
    assert finite[finite > 0].min() == fmt.min_positive
    assert fmt.min_normal == fmt.min_positive * 2**fmt.mantissa_bits
    assert torch.equal(finite[finite >= 0].unique(), grid(fmt))
    assert bool((finite < 0).any()) == fmt.signed


@ALL
def test_each_finite_code_survives_decode_and_encode(fmt, device):
    codes = all_codes(device)
    codes = codes[decode(codes, fmt).isfinite()]
    assert_same_bits(encode(decode(codes, fmt), fmt), codes)


@OCP
def test_infinities_stay_and_every_nan_gets_the_one_code(fmt):
    codes = all_codes()
    codes = codes[~decode(codes, fmt).isfinite()]
    again = encode(decode(codes, fmt), fmt)
    infinite = decode(codes, fmt).isinf()
    assert_same_bits(again[infinite], codes[infinite])
    assert (again[~infinite] == 0x7F).all()
    assert len(codes) == {"e4m3": 2, "e5m2": 8}[fmt.name]


@ALL
def test_grid_midpoints_and_their_neighbours_round_to_nearest_even(fmt, device, special_values):
    x = special_values(fmt)
    assert_same_bits(decode(encode(x.to(device), fmt), fmt).cpu(), nearest(x, fmt).float())


@ALL
def test_midpoints_between_codes_go_to_the_even_code(fmt):
    values = grid(fmt)
    middle = ((values[1:] + values[:-1]) / 2).float()
    above, below = (torch.nextafter(middle, torch.tensor(end)) for end in (INF, 0.0))
    lower = torch.arange(len(middle))
    assert torch.equal(encode(middle, fmt).long(), lower + lower % 2)
    assert torch.equal(encode(above, fmt).long(), lower + 1)
    assert torch.equal(encode(below, fmt).long(), lower)


@ALL
def test_random_float32_of_every_exponent_rounds_to_nearest(fmt, device, random_bits):
    x = random_bits(200_000)
    near = torch.randn(200_000) * torch.exp2(torch.empty(200_000).uniform_(-24, 17))
    x = torch.cat([x, near])
    x = x if fmt.signed else x.abs()
    assert_same_bits(decode(encode(x.to(device), fmt), fmt).cpu(), nearest(x, fmt).float())


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_all_16_bit_floats_round_to_nearest(fmt, dtype):
    x = torch.arange(65536).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    x = x if fmt.signed else x.abs()
    assert_same_bits(decode(encode(x, fmt), fmt), nearest(x, fmt).float())


@ALL
def test_overflow_saturates(fmt):
    top_step = float(grid(fmt)[-1] - grid(fmt)[-2])
    over = torch.tensor([fmt.max, fmt.max + top_step / 2, fmt.max + top_step, 2 * fmt.max, 1e30])
    over = torch.cat([over, torch.nextafter(over, torch.tensor(INF))])
    signs = (1.0, -1.0) if fmt.signed else (1.0,)
    for sign in signs:
        assert (decode(encode(sign * over, fmt), fmt) == sign * fmt.max).all()


@ALL
def test_zero_and_what_rounds_to_zero(fmt):
    half = torch.tensor(fmt.min_positive / 2)
    small = torch.stack([torch.tensor(0.0), torch.tensor(2.0**-149), torch.tensor(1e-40), half])
    assert encode(small, fmt).tolist() == [0, 0, 0, 0]
    assert encode(torch.nextafter(half, torch.tensor(1.0)), fmt) == 1
    negative_zero = 0x80 if fmt.signed else 0
    assert encode(torch.tensor(-0.0), fmt) == negative_zero
    if fmt.signed:
        assert encode(-small, fmt).tolist() == [0x80] * 4


@OCP
def test_nan_and_infinity_are_kept_where_the_format_has_them(fmt, device):
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    nans = bits.view(torch.float32).to(device)
    assert decode(encode(nans, fmt), fmt).isnan().all()
    assert cast(nans, fmt).float().isnan().all()
    infinities = torch.tensor([INF, -INF], device=device)
    for values in (decode(encode(infinities, fmt), fmt), cast(infinities, fmt).float()):
        if fmt is E5M2:
            assert_same_bits(values, infinities)
        else:
            assert values.isnan().all()


@OCP
def test_encode_and_torch_cast_give_the_same_codes(fmt, device, special_values, random_bits):
    x = torch.cat([special_values(fmt), random_bits(200_000), torch.tensor([NAN, -NAN])])
    x = x.to(device)
    assert cast(x, fmt).dtype is fmt.dtype
    assert_same_bits(cast(x, fmt).view(torch.uint8), encode(x, fmt))


@OCP
def test_encode_and_torch_cast_give_the_same_codes_for_infinity(fmt, device):
    x = torch.tensor([INF, -INF], device=device)
    assert_same_bits(cast(x, fmt).view(torch.uint8), encode(x, fmt))


@ALL
def test_encoding_is_monotonic(fmt, random_bits, special_values):
    x = torch.cat([random_bits(50_000), special_values(fmt), torch.randn(50_000)])
    x = (x if fmt.signed else x.abs()).sort().values
    values = decode(encode(x, fmt), fmt)
    assert (values.diff() >= 0).all()
    assert len(values.unique()) == len(grid(fmt)) * (2 if fmt.signed else 1) - fmt.signed


@SIGNED
def test_negation_flips_the_sign_bit_only(fmt, random_bits, special_values):
    x = torch.cat([random_bits(50_000), special_values(fmt)])
    assert_same_bits(encode(-x, fmt), encode(x, fmt) ^ 0x80)


@ALL
def test_shape_is_kept_and_strides_do_not_matter(fmt):
    x = torch.randn(6, 5, 4).abs()
    for view in (x, x.transpose(0, 2), x[::2, 1:], x[0, 0, 0], x[:0]):
        codes = encode(view, fmt)
        assert codes.shape == view.shape
        assert torch.equal(codes, encode(view.contiguous(), fmt))
        assert torch.equal(decode(codes, fmt), nearest(view.contiguous(), fmt).float())


@ALL
def test_saturation_is_counted_from_half_a_step_above_the_largest_value(fmt):
    values = grid(fmt)
    limit = torch.tensor(float(fmt.max + (values[-1] - values[-2]) / 2))
    below = torch.nextafter(limit, torch.tensor(0.0))
    signs = (1, -1) if fmt.signed else (1,)
    for sign in signs:
        assert count_saturated(sign * limit, fmt) == 1
        assert count_saturated(sign * below, fmt) == 0
        assert count_saturated(sign * torch.tensor([fmt.max, limit, 1e30, 0.0, below]), fmt) == 2
    assert count_saturated(torch.tensor([INF, -INF, NAN]), fmt) == 0
    assert count_saturated(torch.empty(0), fmt) == 0
    assert count_saturated(limit, fmt).dtype is torch.int64


def test_square_root_is_correctly_rounded(random_bits, device):
    """x lies between the squares of the midpoints from the result to its neighbours; those are exact in double."""
    x = random_bits(400_000).abs()
    x = torch.cat([x, torch.rand(400_000) * 4, torch.tensor([2.0**-149, 2.0**-126, 1.0, 3.4e38])])
    root = sqrt_rn(x.to(device)).cpu()
    lower, upper = (torch.nextafter(root, torch.tensor(end)) for end in (0.0, INF))
    middle_below, middle_above = ((root.double() + r.double()) / 2 for r in (lower, upper))
    assert (middle_below.square() <= x.double()).all()
    assert (x.double() <= middle_above.square()).all()
    expected = np.sqrt(x.numpy().astype(np.float64)).astype(np.float32)
    assert_same_bits(root, torch.from_numpy(expected))


def test_square_root_of_special_values():
    assert_same_bits(sqrt_rn(torch.tensor([0.0, -0.0, INF])), torch.tensor([0.0, -0.0, INF]))
    assert sqrt_rn(torch.tensor([NAN, -1.0, -INF])).isnan().all()


def test_square_root_of_the_squares_of_codes_is_exact():
    """ue3m5 is decoded by squaring: coding the root of the square must give the code back."""
    values = decode(all_codes(), UE3M5)
    assert_same_bits(sqrt_rn(values * values), values)
