"""Norm, largest magnitude and scaling of many gradients at once: against float64, and against the reference."""

import math

import pytest
import torch
from helpers import INF, NAN, assert_same_bits

from fp8stack.formats import E4M3, FLOATS
from fp8stack.kernels import norm as triton_norm
from fp8stack.kernels import step as triton_step
from fp8stack.kernels.pointer_table import deal, upload_rows
from fp8stack.kernels.reference import norm as reference
from fp8stack.kernels.reference.quantize import dequantize_blocks, quantize_blocks

FP8 = E4M3.dtype
DTYPES = pytest.mark.parametrize("dtype", [FP8, *FLOATS], ids=["fp8", "fp32", "bf16", "fp16"])
FLAT = [(4, 256), (128,), (0, 128), (17, 384), (3, 2, 64)]
ODD = [(3, 200), (7,), (), (5, 129), (0, 4), (4, 0)]
SPANS = [(1030, 64), (3, 33)]  # the first takes two programs


@pytest.fixture(autouse=True)
def _few_iterations(monkeypatch):
    """The interpreter takes its time by the operation, however many elements there are: two tiles a program there."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton_norm, "TILE", 512)


def gradients(shapes, dtype, size=1.0, draw=torch.randn):
    """Return (gradient, scale or None) of each shape."""
    values = [draw(s) * size for s in shapes]
    return [quantize_blocks(x, E4M3) if dtype is FP8 else (x.to(dtype), None) for x in values]


def exact_values(grads):
    """Return all elements in float64."""
    decoded = [g if s is None else dequantize_blocks(g, s, E4M3) for g, s in grads]
    return torch.cat([x.double().flatten() for x in decoded])


class Table:
    """The gradients of one dtype on `device`, and what the kernels take for them."""

    def __init__(self, grads, device, layout=None):
        self.grads = [[None if t is None else t.clone().to(device) for t in g] for g in grads]
        rows = [triton_step.table_row(g.shape, grad=g, grad_block_scale=s) for g, s in self.grads]
        self.owner = deal(rows, triton_norm.SPAN, "first_span", torch.device(device))
        self.rows = upload_rows(rows, self.owner.device)
        self.dtype, self.device = grads[0][0].dtype, device
        layouts = {triton_step.row_layout(g.shape, [g]) for g, _ in self.grads if g.numel()}
        self.layout = layout or ("flat" if layouts == {"flat"} else "any")

    def largest(self, start=0.0):
        out = torch.tensor(start, device=self.device)
        triton_norm.largest(self.rows, self.owner, self.dtype, out)
        return out.cpu()

    def norm(self, partial=None):
        if partial is None:
            partial = torch.full((len(self.owner),), NAN, dtype=torch.float64, device=self.device)
        launches = [(self.dtype, self.layout, self.rows, self.owner)]
        return total(launches, partial)


def total(launches, partial):
    out = torch.tensor(-1.0, device=partial.device)
    triton_norm.total(launches, partial, out)
    return out.cpu()


def norm_by_reference(grads):
    return torch.stack([reference.sum_of_squares(*g) for g in grads]).sum().sqrt().float()


# --- norm


@DTYPES
@pytest.mark.parametrize("shapes", [FLAT, ODD, SPANS], ids=["flat", "odd", "spans"])
def test_norm_is_that_of_all_elements(dtype, shapes, kernel_device):
    grads = gradients(shapes, dtype)
    exact = exact_values(grads).norm().item()
    assert Table(grads, kernel_device).norm().item() == pytest.approx(exact, rel=1e-6)
    assert norm_by_reference(grads).item() == pytest.approx(exact, rel=1e-6)


@DTYPES
def test_partial_sums_are_those_of_each_tensor(dtype, kernel_device):
    table = Table(
        gradients([(1030, 64), (4, 256), (0, 128), (9, 128)], dtype), kernel_device, "any"
    )
    partial = torch.full((4,), NAN, dtype=torch.float64, device=kernel_device)
    table.norm(partial)
    assert table.owner.tolist() == [0, 0, 1, 3]
    for row, (g, s) in enumerate(table.grads):
        expected = reference.sum_of_squares(g.cpu(), None if s is None else s.cpu())
        total = partial[table.owner == row].sum().item()
        assert total == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [FP8, torch.float32, torch.bfloat16], ids=["fp8", "fp32", "bf16"])
@pytest.mark.parametrize("size", [1e-30, 1e30, 1e36], ids="{:.0e}".format)
@pytest.mark.parametrize("shapes", [FLAT, ODD], ids=["flat", "odd"])
def test_norm_neither_overflows_nor_underflows(dtype, size, shapes, kernel_device):
    """Squares of 1e30 and 1e-30 are beyond float32; so are sums of both in one block."""
    grads = gradients(shapes, dtype, size)
    exact = exact_values(grads).norm().item()
    assert exact > 0
    assert Table(grads, kernel_device).norm().item() == pytest.approx(exact, rel=1e-6)
    assert norm_by_reference(grads).item() == pytest.approx(exact, rel=1e-6)
    mixed = gradients(
        shapes, dtype, draw=lambda s: torch.randn(s) * 10.0 ** torch.randint(-30, 31, s)
    )
    exact = exact_values(mixed).norm().item()
    assert Table(mixed, kernel_device).norm().item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [FP8, torch.float32, torch.bfloat16], ids=["fp8", "fp32", "bf16"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_norm_of_a_gradient_that_is_not_finite_is_not_finite(dtype, bad, kernel_device):
    for position in (0, 130, 599):
        values = [torch.randn(4, 256), torch.randn(3, 200)]
        values[1].view(-1)[position] = bad
        grads = [quantize_blocks(x, E4M3) if dtype is FP8 else (x.to(dtype), None) for x in values]
        assert not Table(grads, kernel_device).norm().isfinite()
        assert not norm_by_reference(grads).isfinite()


@DTYPES
def test_norm_of_zeros_is_zero(dtype, kernel_device):
    grads = gradients(ODD, dtype, 0.0)
    assert_same_bits(Table(grads, kernel_device).norm(), torch.tensor(0.0))
    assert_same_bits(norm_by_reference(grads), torch.tensor(0.0))


def test_a_gradient_that_was_multiplied_by_a_negative_number(kernel_device):
    grads = gradients(FLAT, FP8)
    table, negative = (Table(g, kernel_device) for g in (grads, [(g, -s) for g, s in grads]))
    assert_same_bits(negative.norm(), table.norm())
    assert_same_bits(negative.largest(), table.largest())


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 5000])
def test_root_of_any_number_of_partial_sums(count, kernel_device):
    partial = torch.rand(count, dtype=torch.float64) * 1e60
    expected = math.sqrt(math.fsum(partial.tolist()))
    assert total([], partial.to(kernel_device)).item() == pytest.approx(expected, rel=1e-7)
    partial[count // 2] = NAN
    assert total([], partial.to(kernel_device)).isnan()


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-10, 1e25, 1e34], ids="{:.0e}".format)
def test_norms_of_many_gradients_are_in_their_order(size, kernel_device):
    """In a table, gradients of a layout stand together. On a GPU the first one has more sums than lanes."""
    many = (70_000, 128) if kernel_device == "cuda" else (2100, 128)  # programs: 69 or 3
    grads = gradients([*ODD, many, *FLAT, *SPANS], FP8, size)
    here = [[t.to(kernel_device) for t in g] for g in grads]
    at = [(codes.shape, (codes.data_ptr(), scale.data_ptr())) for codes, scale in here]
    norms = triton_norm.norms(at, here[0][0].device)
    assert len(norms) == len(grads)
    for norm, grad in zip(norms, grads, strict=True):
        assert norm.shape == ()
        expected = exact_values([grad]).norm().item()
        assert norm.item() == pytest.approx(expected, rel=1e-6)
    for first, last in ((0, 1), (4, 6)):  # one alone, and empty ones alone
        assert_same_bits(triton_norm.norms(at[first:last], here[0][0].device), norms[first:last])


# --- largest magnitude


@DTYPES
@pytest.mark.parametrize("shapes", [FLAT, ODD, SPANS], ids=["flat", "odd", "spans"])
def test_largest_is_that_of_all_elements(dtype, shapes, kernel_device):
    grads = gradients(shapes, dtype)
    expected = torch.stack([reference.largest(*g) for g in grads]).max()
    table = Table(grads, kernel_device)
    assert_same_bits(table.largest(), expected)
    assert expected.item() == pytest.approx(exact_values(grads).abs().max().item(), rel=1e-6)
    assert table.largest(start=1e20) == torch.tensor(1e20)  # of other dtypes, for one


@DTYPES
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_largest_finds_what_is_not_finite_anywhere(dtype, bad, kernel_device):
    """NaN counts as larger than infinity, so neither hides the other."""
    for shape, position in (((1030, 64), 0), ((1030, 64), 65_919), ((3, 33), 98)):
        values = [torch.randn(4, 256), torch.randn(shape)]
        values[1].view(-1)[position] = bad
        grads = [quantize_blocks(x, E4M3) if dtype is FP8 else (x.to(dtype), None) for x in values]
        largest = Table(grads, kernel_device).largest()
        expected = torch.stack([reference.largest(*g) for g in grads]).amax()
        assert_same_bits(largest, expected)
        assert not largest.isfinite()


# --- sizes for a GPU only


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 4100), (70001, 129)], ids=str)
def test_large_gradients(dtype, shape):
    grads = gradients([(5, 130), shape, (4, 256)], dtype)
    table = Table(grads, "cuda")
    exact = exact_values(grads)
    assert table.norm().item() == pytest.approx(exact.norm().item(), rel=1e-6)
    assert_same_bits(table.norm(), table.norm())
    assert_same_bits(table.largest(), torch.stack([reference.largest(*g) for g in grads]).max())


@pytest.mark.gpu
def test_elements_beyond_two_to_the_31_count(rows_beyond_int32):
    grad = torch.zeros(rows_beyond_int32, 2**14, dtype=torch.bfloat16, device="cuda")
    grad[-1, -1] = 3.0
    grad[0, 0] = 4.0
    table = Table([(torch.zeros(1, 128, dtype=grad.dtype), None)], "cuda")
    rows = [triton_step.table_row(grad.shape, grad=grad)]
    table.owner = deal(rows, triton_norm.SPAN, "first_span", grad.device)
    table.rows = upload_rows(rows, grad.device)
    assert table.norm() == 5
    assert table.largest() == 4
