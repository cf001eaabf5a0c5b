"""RMSNorm: the reference against float64, the Triton kernels against the reference, and the cast that its parts serve.

Sums are in another order in each, so that results may lie one rounding apart.
"""

import pytest
import torch
from helpers import INF, INPUTS, NAN, assert_same_bits

from fp8stack.formats import E4M3
from fp8stack.kernels import cast as triton_cast
from fp8stack.kernels import ops
from fp8stack.kernels import rmsnorm as triton
from fp8stack.kernels.reference import cast as reference_cast
from fp8stack.kernels.reference import rmsnorm as reference

SHAPES = [
    (1, 1), (1, 130), (130, 1), (17, 33), (64, 128), (65, 257), (2, 3, 40), (70,), (5, 4096), (0, 40),
]  # fmt: skip
EPS = 1e-5


def draw(shape, dtype=torch.float32):
    """Return x, rows of which differ by powers of two, a weight and a gradient."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1))
    return [t.to(dtype) for t in (x, torch.randn(shape[-1]), torch.randn(shape))]


def magnitude(parts):
    """Return the largest magnitude that parts tell of, after looking at what they are."""
    assert parts.dtype is torch.int32
    assert parts.dim() == 1
    assert len(parts) in [2**i for i in range(11)]
    assert (parts >= 0).all()
    return parts.max().cpu().view(torch.float32)


def largest(y):
    return torch.cat([y.cpu().float().abs().flatten(), torch.zeros(1)]).amax()


def assert_rounded_once(result, exact, size=None):
    """Fail if an element is further from the exact one than rounding takes it, and sums in float32 of that `size`."""
    info = torch.finfo(result.dtype)
    allowed = exact.abs() * (info.eps / 2 + 1e-6) + info.smallest_normal * info.eps
    if size is not None:
        allowed = allowed + 1e-6 * size
    assert ((result.cpu().double() - exact).abs() <= allowed).all()


def assert_nearly_the_same(result, expected, size=None):
    """As `assert_rounded_once`, of two results, which may round to two neighbours, though rarely."""
    assert result.dtype is expected.dtype
    assert result.shape == expected.shape
    result, wanted = result.cpu().double(), expected.double()
    slack = wanted.abs() * 1e-6 + (0 if size is None else 1e-6 * size)
    info = torch.finfo(expected.dtype)
    step = wanted.abs() * info.eps + info.smallest_normal * info.eps
    apart = (result - wanted).abs()
    assert (apart <= slack + step).all()
    assert (apart > slack).sum() <= max(2, apart.numel() // 100)


def exact_results(x, weight, dy, eps):
    """Return y, dx and dweight in float64, by autograd, and the sizes of what is added up in the last two."""
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    rstd = (leaves[0].square().mean(-1, keepdim=True) + eps).rsqrt()
    y = leaves[0] * rstd * leaves[1]
    y.backward(dy.double())
    wide = dy.double() * weight.double()
    normed = x.double() * rstd.detach()
    dx_size = rstd.detach() * (wide.abs() + normed.abs() * (wide * normed).abs().mean(-1, True))
    dw_size = (dy.double() * normed).abs().reshape(-1, x.shape[-1]).sum(0)
    return y.detach(), leaves[0].grad, leaves[1].grad, dx_size, dw_size


# --- what it is


@INPUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_values_are_those_of_the_formula_rounded_once(dtype, shape, eps, device):
    x, weight, dy = draw(shape, dtype)
    y, dx, dweight, dx_size, dw_size = exact_results(x, weight, dy, eps)
    here = [t.to(device) for t in (dy, x, weight)]
    given, rstd, parts = ops.rmsnorm(*here[1:], eps)
    assert_rounded_once(given, y)
    assert_same_bits(magnitude(parts), largest(given))
    assert rstd.dtype is torch.float32
    norms = (x.double().square().mean(-1) + eps).rsqrt().flatten()
    assert torch.allclose(rstd.cpu().double(), norms, rtol=1e-6, atol=0)
    given_dx, given_dweight = ops.rmsnorm_backward(*here, rstd)
    assert given_dx.dtype is given_dweight.dtype is given.dtype is dtype
    assert_rounded_once(given_dx, dx, dx_size)
    assert_rounded_once(given_dweight, dweight, dw_size)


def test_the_gradient_of_the_weight_may_be_left_out(device):
    x, weight, dy = (t.to(device) for t in draw((20, 40)))
    rstd = ops.rmsnorm(x, weight, EPS)[1]
    dx, dweight = ops.rmsnorm_backward(dy, x, weight, rstd, False)
    assert dweight is None
    assert_same_bits(dx, ops.rmsnorm_backward(dy, x, weight, rstd)[0])


def test_rows_of_zeros_without_eps_are_nan_and_no_others(device):
    """What fills a tile of the kernel up is no such row."""
    x, weight, _ = (t.to(device) for t in draw((5, 40)))
    assert magnitude(ops.rmsnorm(x, weight, 0.0)[2]).isfinite()
    x[3] = 0
    y, _, parts = ops.rmsnorm(x, weight, 0.0)
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4]].isfinite().all()
    assert magnitude(parts).isnan()
    assert ops.rmsnorm(x, weight, EPS)[0][3].eq(0).all()


# --- Triton against the reference


def assert_as_in_the_reference(x, weight, dy, eps=EPS):
    """Compare all results of the kernels on these, and of the reference on copies."""
    here = dy, x, weight
    dy, x, weight = (t.cpu() for t in here)
    y, rstd, parts = triton.rmsnorm(*here[1:], eps)
    expected, same_rstd, same_parts = reference.rmsnorm(x, weight, eps)
    assert_nearly_the_same(y, expected)
    assert torch.allclose(rstd.cpu(), same_rstd, rtol=1e-6, atol=0)
    assert_same_bits(magnitude(parts), largest(y))
    assert magnitude(parts) == pytest.approx(float(magnitude(same_parts)), rel=2**-7)
    if len(rstd):
        _, _, _, dx_size, dw_size = exact_results(x, weight, dy, eps)
    else:
        dx_size, dw_size = dy.double(), torch.zeros(x.shape[-1]).double()
    results = triton.rmsnorm_backward(*here, rstd)
    same = reference.rmsnorm_backward(dy, x, weight, rstd.cpu())
    assert_nearly_the_same(results[0], same[0], dx_size)
    assert_nearly_the_same(results[1], same[1], dw_size)


@INPUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_directions_are_nearly_the_references(dtype, shape, kernel_device):
    assert_as_in_the_reference(*(t.to(kernel_device) for t in draw(shape, dtype)))


@pytest.mark.parametrize("shape", [(37, 100), (64, 128), (11, 513)], ids=str)
def test_programs_that_go_on_to_further_rows(shape, kernel_device, monkeypatch):
    """Few programs with small tiles: several rounds, the last of which finds no rows left."""
    for name, size in {"PARTS": 4, "PROGRAMS": 3, "TILE": 256}.items():
        monkeypatch.setattr(triton, name, size)
    monkeypatch.setattr(triton, "_tiling", triton._tiling.__wrapped__)
    x, weight, dy = (t.to(kernel_device) for t in draw(shape))
    assert len(triton.rmsnorm(x, weight, EPS)[2]) == 4
    assert_as_in_the_reference(x, weight, dy)


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@INPUTS
def test_what_is_not_finite_is_where_it_is_in_the_reference(bad, dtype, kernel_device):
    for spoiled in range(3):
        x, weight, dy = draw((20, 40), dtype)
        (x[7], weight, dy[7])[spoiled][11] = bad
        here = [t.to(kernel_device) for t in (dy, x, weight)]
        y, rstd, parts = triton.rmsnorm(*here[1:], EPS)
        expected = reference.rmsnorm(x, weight, EPS)
        assert torch.equal(y.cpu().isfinite(), expected[0].isfinite())
        assert torch.equal(y.cpu().isnan(), expected[0].isnan())
        assert_same_bits(magnitude(parts), largest(y))
        assert magnitude(parts).isfinite() == magnitude(expected[2]).isfinite() == (spoiled == 2)
        given = triton.rmsnorm_backward(*here, rstd)
        same = reference.rmsnorm_backward(dy, x, weight, rstd.cpu())
        finite = [t.isfinite() for t in same]
        assert all(torch.equal(t.cpu().isfinite(), f) for t, f in zip(given, finite, strict=True))
        assert [bool(f.all()) for f in finite] == [False, spoiled == 1]  # dweight needs no weight


@INPUTS
def test_what_overflows_when_it_is_rounded_is_infinite_in_the_parts(dtype, kernel_device):
    x = torch.zeros(4, 64, dtype=dtype)
    x[2, 5] = 1.0
    weight = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)  # times 2.9
    y, _, parts = triton.rmsnorm(x.to(kernel_device), weight.to(kernel_device), 0.1)
    assert y[2, 5].isinf()
    assert magnitude(parts).isinf()


def test_views_are_read_in_their_own_order(kernel_device):
    x, dy = (torch.randn(40, 261, device=kernel_device) for _ in range(2))
    for view in (
        lambda t: t.t(),
        lambda t: t[:, 1:131],
        lambda t: t[::3, ::2],
        lambda t: t[5:6].expand(9, 261),
    ):
        weight = torch.randn(2 * view(x).shape[1], device=kernel_device)[::2]
        assert_as_in_the_reference(view(x), weight, view(dy))
        y = triton.rmsnorm(view(x), weight, EPS)[0]
        assert y.is_contiguous()


def test_gradients_have_the_same_bits_every_time(kernel_device):
    x, weight, dy = (t.to(kernel_device) for t in draw((600, 200), torch.bfloat16))
    rstd = triton.rmsnorm(x, weight, EPS)[1]
    first = triton.rmsnorm_backward(dy, x, weight, rstd)
    assert_same_bits(triton.rmsnorm_backward(dy, x, weight, rstd), first)


# --- the cast behind it


@pytest.mark.parametrize("worst", [3.0, INF, NAN, -INF, 2.0**-140], ids=str)
@pytest.mark.parametrize("count", [1, 2, 64, 1024])
def test_the_largest_part_counts_wherever_it_is(worst, count, kernel_device):
    x = torch.randn(40, 130)
    for place in {0, count // 2, count - 1}:
        magnitudes = torch.zeros(count)
        magnitudes[place] = worst
        parts = magnitudes.view(torch.int32) & 0x7FFFFFFF
        expected = reference_cast.cast(x, E4M3, amax=torch.tensor(abs(worst)))
        given = triton_cast.cast(x.to(kernel_device), E4M3, True, True, parts.to(kernel_device))
        for results in (given, reference_cast.cast(x, E4M3, amax=parts)):
            assert_same_bits(results, expected)


# --- sizes for a GPU only


@pytest.mark.gpu
@INPUTS
@pytest.mark.parametrize(
    "shape", [(8192, 4096), (4096, 4100), (70001, 129), (2**18, 128), (300, 8192), (300, 8191), (2**20, 3)], ids=str
)  # fmt: skip
def test_large_matrices_are_nearly_the_references(dtype, shape):
    x, weight, dy = (t.cuda() for t in draw(shape, dtype))
    assert_as_in_the_reference(x, weight, dy)
    y, _, parts = triton.rmsnorm(x, weight, EPS)
    assert_same_bits(ops.cast(y, E4M3, amax=parts), ops.cast(y, E4M3))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [2**13, 2**13 - 1], ids=["even", "odd"])
def test_elements_beyond_two_to_the_31_are_as_the_first_ones(cols, rows_beyond_int32):
    """Half the fixture's columns take twice its rows to get there, odd ones a few more."""
    rows = 2 * rows_beyond_int32 + 32
    x, dy = (torch.randn(64, cols, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(cols, device="cuda").bfloat16()
    full, dfull = (t.repeat(rows // 64 + 1, 1)[:rows] for t in (x, dy))
    assert full.numel() > 2**31
    first = rows // 64 * 64
    y, rstd, _ = triton.rmsnorm(full, weight, EPS)
    same, same_rstd, _ = triton.rmsnorm(x, weight, EPS)
    assert_same_bits(y[first:], same[: rows - first])
    assert_same_bits(rstd[first:], same_rstd[: rows - first])
    del y
    dx, dweight = triton.rmsnorm_backward(dfull, full, weight, rstd)
    same_dx, once = triton.rmsnorm_backward(dy, x, weight, same_rstd)
    assert_same_bits(dx[first:], same_dx[: rows - first])
    assert (dweight / (rows / 64) - once).float().norm() < 0.02 * once.float().norm()
