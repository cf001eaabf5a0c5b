"""Rows on their way to experts and back: the reference against indexing, the Triton kernels against the reference."""

import itertools

import pytest
import torch
from helpers import DTYPES, assert_same_bits

from fp8stack.formats import E4M3, E5M2
from fp8stack.kernels import rows as triton
from fp8stack.kernels.reference import rows as reference

SHAPES = [(1, 16, 16), (70, 48, 128), (33, 144, 64), (5, 1056, 80), (4, 64, 0)]  # rows, cols, taken


ROUTES = pytest.mark.parametrize(
    ("tokens", "count", "experts"), [(70, 2, 6), (1, 1, 1), (16, 1, 3), (300, 8, 40), (2500, 2, 4)]
)


def draw_experts(tokens, count, experts):
    """Return the experts of each token, of which the last gets none and one more is elsewhere."""
    index = torch.rand(tokens, experts + 1).topk(count)[1]
    index[0, 0] = -1
    return torch.where(index == experts - 1, 0, index) if experts > 2 else index


@ROUTES
def test_a_route_has_each_pair_once(tokens, count, experts):
    index = draw_experts(tokens, count, experts)
    ends, pairs, places = reference.route(index, experts)
    assert ends.dtype is pairs.dtype is places.dtype is torch.int32
    assert len(pairs) == ends[-1] == reference.rows_needed(tokens * count, experts)
    starts = [0, *ends.tolist()]
    assert all(end % 16 == 0 for end in starts)
    assert (pairs >= 0).sum() == ((index >= 0) & (index < experts)).sum()
    for pair, (expert, place) in enumerate(
        zip(index.flatten().tolist(), places.flatten(), strict=True)
    ):
        assert (place >= 0) == (0 <= expert < experts)
        if 0 <= expert < experts:
            assert pairs[place] == pair
            assert starts[expert] <= place < starts[expert + 1]
    held = [[p for p in pairs[a:b].tolist() if p >= 0] for a, b in itertools.pairwise(starts)]
    assert held == [sorted(own) for own in held]


@ROUTES
def test_kernels_route_with_the_same_bits(tokens, count, experts, kernel_device):
    index = draw_experts(tokens, count, experts)
    assert_same_bits(
        triton.route(index.to(kernel_device), experts), reference.route(index, experts)
    )


def codes_and_index(rows, cols, taken, fmt=E4M3):
    """Return codes of all 256 kinds, and an index of which some name no row."""
    codes = torch.randint(256, (rows, cols), dtype=torch.uint8).view(fmt.dtype)
    return codes, torch.randint(-1, rows, (taken,), dtype=torch.int32)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_taken_rows_are_those_of_the_index(shape, fmt):
    codes, index = codes_and_index(*shape, fmt)
    plain, turned = reference.take_rows(codes, index, 1)
    assert plain.dtype is turned.dtype is fmt.dtype
    plain = plain.view(torch.uint8)
    for row, given in zip(index.tolist(), plain, strict=True):
        assert torch.equal(given, codes[row].view(torch.uint8) if row >= 0 else given * 0)
    assert torch.equal(turned.view(torch.uint8), plain.t())


@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_takes_the_same_rows(shape, layouts, kernel_device):
    codes, index = codes_and_index(*shape)
    expected = reference.take_rows(codes, index, 1, *layouts)
    codes, index = codes.to(kernel_device), index.to(kernel_device)
    assert_same_bits(triton.take_rows(codes, index, 1, *layouts), expected)
    many = torch.where(index < 0, index, 3 * index + 2)  # the third pair of each row
    assert_same_bits(triton.take_rows(codes, many, 3, *layouts), expected)


def test_sums_are_those_of_float32():
    x, places = torch.randn(50, 40).bfloat16(), torch.randint(-1, 50, (30, 4), dtype=torch.int32)
    exact = torch.cat([x, x.new_zeros(1, 40)]).double()[places.long()].sum(1)
    assert (reference.sum_rows(x, places) - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (50, 40, 30, 3), (9, 1030, 7, 8), (64, 2064, 5, 2)], ids=str
)
def test_kernel_adds_up_the_same_bits(shape, dtype, kernel_device):
    rows, cols, tokens, count = shape
    x, places = torch.randn(rows, cols).to(dtype), torch.randint(-1, rows, (tokens, count))
    x[0, 0], places = torch.inf, places.int()
    given = triton.sum_rows(x.to(kernel_device), places.to(kernel_device))
    expected = reference.sum_rows(x, places)
    if dtype is torch.bfloat16 and kernel_device == "cpu":  # the interpreter cuts it off
        torch.testing.assert_close(given, expected, rtol=2**-7, atol=0, equal_nan=True)
    else:
        assert_same_bits(given, expected)
