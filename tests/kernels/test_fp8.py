"""Casts between float32 and the formats of one byte or less, checked code by code against each one's definition."""

import copy
import pickle

import pytest
import torch
from helpers import INF, NAN, OCP, assert_same_bits, grid, nearest

from fp8stack.formats import E4M3_ROOT, FORMATS
from fp8stack.kernels.reference.fp8 import decode, encode, noise, sqrt_rn

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def each(is_meant):
    """Parametrize by the formats of which `is_meant` is true."""
    formats = [f for f in FORMATS.values() if is_meant(f)]
    return pytest.mark.parametrize("fmt", formats, ids=[f.name for f in formats])


OWN = each(lambda fmt: fmt.dtype is torch.uint8)
STATES = each(lambda fmt: fmt.name != "e5m2")


def value_of(code, name):
    """Return what one code means, bit field by bit field, as the tables of the formats define it."""
    exponent_bits, mantissa_bits, bias, signed = {
        "e4m3": (4, 3, 7, True), "e5m2": (5, 2, 15, True), "e4m3_root": (4, 3, 7, True),
        "s1e3m4": (3, 4, 3, True), "ue3m5": (3, 5, 3, False),
        "ue3m1": (3, 1, 3, False),
    }[name]  # fmt: skip
    negative = signed and code >> (exponent_bits + mantissa_bits)
    sign = -1.0 if negative else 1.0
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    fraction = (code % 2**mantissa_bits) / 2**mantissa_bits
    if name.startswith("e4m3") and code & 0x7F == 0x7F:
        return NAN
    if name == "e5m2" and exponent == 31:
        return NAN if fraction else sign * INF
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def all_codes(fmt, device="cpu"):
    """Return every code that `fmt` uses: a root has no sign."""
    return torch.arange(128 if fmt is E4M3_ROOT else 1 << fmt.bits, device=device).to(torch.uint8)


def sign_bit(fmt):
    return 1 << (fmt.bits - 1) if fmt.signed else 0


@ALL
def test_each_code_decodes_to_its_definition(fmt, device):
    codes = torch.arange(1 << fmt.bits, device=device).to(torch.uint8)
    values = decode(codes, fmt).cpu()
    expected = torch.tensor([value_of(code, fmt.name) for code in range(len(codes))])
    number = ~expected.isnan()
    assert torch.equal(values.isnan(), ~number)
    assert_same_bits(values[number], expected[number])


@ALL
def test_constants_of_a_format_follow_from_its_codes(fmt):
    values = decode(all_codes(fmt), fmt)
    finite = values[values.isfinite()].double()
    assert finite.max() == fmt.max
    assert finite[finite > 0].min() == fmt.min_positive
    assert 2.0**fmt.min_exponent == fmt.min_positive * 2**fmt.mantissa_bits
    assert torch.equal(finite[finite >= 0].unique(), grid(fmt))
    assert bool((finite < 0).any()) == fmt.signed


@ALL
def test_each_finite_code_survives_decode_and_encode(fmt, device):
    codes = all_codes(fmt, device)
    codes = codes[decode(codes, fmt).isfinite()]
    assert_same_bits(encode(decode(codes, fmt), fmt), codes)


@ALL
def test_grid_midpoints_and_their_neighbours_round_to_nearest(fmt, device, special_values):
    x = special_values(fmt)
    assert_same_bits(decode(encode(x.to(device), fmt), fmt).cpu(), nearest(x, fmt).float())


@ALL
def test_midpoints_between_codes_go_to_the_even_code_or_away_from_zero(fmt):
    values = grid(fmt)
    middle = ((values[1:] + values[:-1]) / 2).float()
    above, below = (torch.nextafter(middle, torch.tensor(end)) for end in (INF, 0.0))
    lower = torch.arange(len(middle))
    even = fmt.dtype is not torch.uint8
    assert torch.equal(encode(middle, fmt).long(), lower + (lower % 2 if even else 1))
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


@OCP
def test_nan_is_kept_and_infinity_saturates(fmt, device):
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    nans = bits.view(torch.float32).to(device)
    assert decode(encode(nans, fmt), fmt).isnan().all()
    values = decode(encode(torch.tensor([INF, -INF], device=device), fmt), fmt)
    assert values.tolist() == [fmt.max, -fmt.max]


@OWN
def test_code_of_nan_is_the_largest_or_zero_of_a_second_moment(fmt):
    """A block that holds a NaN says so in its scale; its codes must still be codes."""
    assert encode(torch.tensor([NAN, -NAN]), fmt).tolist() == [0 if fmt.squared else 127] * 2
    assert decode(encode(torch.tensor([INF]), fmt), fmt) == fmt.max


# --- stochastic rounding


def random_words(shape, seed, phase=0):
    return noise(torch.Size(shape), *torch.tensor([seed, phase], dtype=torch.int32))


def position(x, fmt):
    """Return how many codes of `fmt` (a real number, float64) lie below |x|, which it covers."""
    values = grid(fmt)
    lower = (torch.searchsorted(values, x.double().abs(), right=True) - 1).clamp(
        max=len(values) - 2
    )
    return lower + (x.double().abs() - values[lower]) / (values[lower + 1] - values[lower])


@STATES
def test_noise_rounds_to_one_of_the_codes_on_either_side(fmt, special_values):
    x = torch.cat([torch.rand(4000) * fmt.max, special_values(fmt)])
    x = x.abs()[x.abs() <= fmt.max]
    exact = position(x, fmt)
    for seed in range(20):
        code = encode(x, fmt, random_words(x.shape, seed)).double()
        assert ((code == exact.floor()) | (code == exact.ceil())).all()
        if fmt.signed:
            negative = encode(-x, fmt, random_words(x.shape, seed))
            assert torch.equal(negative.double(), code + sign_bit(fmt))


@STATES
def test_a_value_goes_up_for_its_fraction_of_all_noise(fmt, special_values):
    """With 2^14 equally spaced values of noise the share of codes that go up is the fraction to 2^-11; 2^-6 for m.

    An error of 2^-9 is too much: a value that is decoded and encoded again lies a hair above or below its code, and
    would leave it once in 512 steps, as fast as a second moment with beta2 = 0.999 decays.
    """
    x = torch.cat([torch.rand(150) * fmt.max, special_values(fmt)])
    x = x.abs()[x.abs() <= fmt.max]
    words = torch.arange(64) if fmt.signed else (torch.arange(2**14) << 9) + 2**8
    codes = encode(x[:, None].expand(-1, len(words)), fmt, words.expand(len(x), -1))
    assert (codes.double().mean(1) - position(x, fmt)).abs().max() < (
        0.016 if fmt.signed else 2.0**-11
    )


@pytest.mark.parametrize("bits", [(7, 16), (0, 6), (24, 8), (16, 16)], ids=str)
def test_noise_is_uniform_and_independent_of_seeds_and_other_sixteens(bits):
    """For all the bits that are used somewhere: for v, m, masters of 24 bits and weights of 16."""
    shift, width = bits
    n, seeds = 50_000, [0, 1, 2, 3, 12345, -(2**31), 2**31 - 1]
    words = torch.stack([random_words((16 * n,), s, 0x1ABCDEF0) for s in seeds]).view(
        len(seeds), n, 16
    )
    around = ((words >> shift) % 2**width).sort(-1).values.diff() / 2**width
    assert (around - 1 / 16).abs().max() < 2 / 64  # sixteen neighbours stand around the circle
    draws = words[..., 5]
    uniform = (((draws >> shift) & (2**width - 1)).double() + 0.5) / 2**width - 0.5
    assert (uniform.mean(1).abs() < 5 * 12**-0.5 / n**0.5).all()
    assert (uniform.square().mean(1) * 12 - 1).abs().max() < 0.03
    normal = uniform / uniform.norm(dim=1, keepdim=True)
    correlation = normal @ normal.T - torch.eye(len(seeds))
    assert correlation.abs().max() < 5 / n**0.5
    for lag in (1, 2, 8):
        assert (normal[:, lag:] * normal[:, :-lag]).sum(1).abs().max() < 5 / n**0.5


# --- both


@ALL
def test_shape_is_kept_and_strides_do_not_matter(fmt):
    x = torch.randn(6, 5, 4).abs()
    for view in (x, x.transpose(0, 2), x[::2, 1:], x[0, 0, 0], x[:0]):
        codes = encode(view, fmt)
        assert codes.shape == view.shape
        assert torch.equal(codes, encode(view.contiguous(), fmt))
        assert torch.equal(decode(codes, fmt), nearest(view.contiguous(), fmt).float())


def test_square_root_is_correctly_rounded(random_bits, device):
    """x lies between the squares of the midpoints from the result to its neighbours; those are exact in double."""
    x = random_bits(400_000).abs()
    x = torch.cat([x, torch.rand(400_000) * 4, torch.tensor([2.0**-149, 2.0**-126, 1.0, 3.4e38])])
    root = sqrt_rn(x.to(device)).cpu()
    lower, upper = (torch.nextafter(root, torch.tensor(end)) for end in (0.0, INF))
    middle_below, middle_above = ((root.double() + r.double()) / 2 for r in (lower, upper))
    assert (middle_below.square() <= x.double()).all()
    assert (x.double() <= middle_above.square()).all()


def test_square_root_of_special_values():
    assert_same_bits(sqrt_rn(torch.tensor([0.0, -0.0, INF])), torch.tensor([0.0, -0.0, INF]))
    assert sqrt_rn(torch.tensor([NAN, -1.0, -INF])).isnan().all()


@ALL
def test_copies_of_a_format_are_the_format(fmt):
    """Formats are compared by identity; a copied model has those of its original."""
    assert copy.deepcopy(fmt) is fmt
    assert pickle.loads(pickle.dumps(fmt)) is fmt
