"""Rows on their way to experts and back: the reference against indexing, the Triton kernels against the reference."""

import pytest
import torch
from helpers import DTYPES, assert_same_bits

from fp8stack.formats import E4M3, E5M2
from fp8stack.kernels import rows as triton
from fp8stack.kernels.reference import rows as reference

SHAPES = [(1, 16, 16), (70, 48, 128), (33, 144, 64), (5, 1056, 80), (4, 64, 0)]  # rows, cols, taken


def codes_and_index(rows, cols, taken, fmt=E4M3):
    """Return codes of all 256 kinds, and an index of which some name no row."""
    codes = torch.randint(256, (rows, cols), dtype=torch.uint8).view(fmt.dtype)
    return codes, torch.randint(-1, rows, (taken,), dtype=torch.int32)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_taken_rows_are_those_of_the_index(shape, fmt):
    codes, index = codes_and_index(*shape, fmt)
    plain, turned = reference.take_rows(codes, index)
    assert plain.dtype is turned.dtype is fmt.dtype
    plain = plain.view(torch.uint8)
    for row, given in zip(index.tolist(), plain, strict=True):
        assert torch.equal(given, codes[row].view(torch.uint8) if row >= 0 else given * 0)
    assert torch.equal(turned.view(torch.uint8), plain.t())


@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_takes_the_same_rows(shape, layouts, kernel_device):
    codes, index = codes_and_index(*shape)
    expected = reference.take_rows(codes, index, *layouts)
    given = triton.take_rows(codes.to(kernel_device), index.to(kernel_device), *layouts)
    assert_same_bits(list(given), list(expected))


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
