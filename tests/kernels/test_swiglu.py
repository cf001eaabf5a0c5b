"""SwiGLU joined to its casts: the reference against float64, the Triton kernels against the reference.

The exponential is the device's: a scale may differ by one part in 2^17, and few elements by a code, or by more codes
where the derivative of silu is next to zero, as what is left there is what rounding left.
"""

import pytest
import torch
from helpers import assert_same_bits, grid

from fp8stack.formats import E4M3, E5M2
from fp8stack.kernels import ops
from fp8stack.kernels import swiglu as triton
from fp8stack.kernels.reference import swiglu as reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter

OCP = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INPUTS = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
SHAPES = [(1, 1), (1, 130), (130, 1), (64, 128), (65, 257), (17, 33)]


def draw(shape, dtype=torch.float32, spread=3.0):
    """Return gate, up and a gradient whose sizes differ by powers of ten."""
    return [(torch.randn(shape) * size).to(dtype) for size in (spread, 1.0, 1e-3)]


def order(codes, fmt):
    """Return the place of each code among the values of its format, an integer; NaN's is beyond them."""
    raw = codes.cpu().view(torch.uint8).int()
    return torch.where(raw >= 128, -(raw & 127), raw)


def assert_nearly_the_same(results, expected, fmt):
    """Compare codes, transposed codes and scale of each operand: no code differs by more than one, and few do."""
    assert len(results) == len(expected)
    for i in range(0, len(results), 3):
        codes, codes_t, scale = (t.cpu() for t in results[i : i + 3])
        same, _, same_scale = expected[i : i + 3]
        assert torch.allclose(scale, same_scale, rtol=2**-17, atol=0, equal_nan=True)
        assert codes.shape == same.shape
        assert codes.dtype is fmt.dtype
        difference = (order(codes, fmt) - order(same, fmt)).abs()
        distance = (codes.float() - same.float()).abs()
        assert ((difference <= 1) | (distance <= 2**-18 * fmt.max)).all()
        assert (difference > 0).sum() <= max(2, difference.numel() // 500)
        assert_same_bits(codes_t.view(torch.uint8), codes.view(torch.uint8).t().contiguous())


# --- what they are


@OCP
def test_values_are_those_of_the_formula_rounded_once(fmt, device):
    gate, up, dh = draw((40, 72))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    h = torch.nn.functional.silu(leaves[0]) * leaves[1]
    h.backward(dh.double())
    on_device = [t.to(device) for t in (dh, gate, up)]
    given = [*ops.swiglu_cast(*on_device[1:], fmt), *ops.swiglu_backward_cast(*on_device, fmt)]
    given = [t.cpu() for t in given]
    for i, exact in enumerate((h.detach(), leaves[0].grad, leaves[1].grad)):
        codes, codes_t, scale = given[3 * i : 3 * i + 3]
        assert codes.shape == (48, 80)
        assert_same_bits(codes_t.view(torch.uint8), codes.view(torch.uint8).t().contiguous())
        assert float(scale) == pytest.approx(float(exact.abs().max()) / fmt.max, rel=1e-6)
        values = codes.double() * scale.double()
        assert values[40:].eq(0).all()
        assert values[:, 72:].eq(0).all()
        half_step = (exact.abs() * 2.0 ** -(fmt.mantissa_bits + 1)).clamp(
            min=float(scale) * float(grid(fmt)[1]) / 2
        )
        assert ((values[:40, :72] - exact).abs() <= half_step * (1 + 1e-4)).all()


def test_large_gates_neither_overflow_nor_turn_to_nan(device):
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, 1.0]]).to(device)
    up = torch.ones_like(gate)
    codes, _, scale = ops.swiglu_cast(gate, up, E4M3)
    assert float(scale) == pytest.approx(1e30 / 448)
    assert (codes.float()[0, :8] * scale).tolist() == pytest.approx([0] * 6 + [1e30, 0], rel=1e-6)
    results = ops.swiglu_backward_cast(up, gate, up, E4M3)
    assert results[0].float()[0, :8].isfinite().all()
    slope = (results[0].float() * results[2])[0, :8].tolist()
    assert slope == pytest.approx([0, 0, 0, 0.5, 1, 1, 1, 0.928], rel=0.07, abs=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_makes_the_scale_nan(bad, device):
    for spoiled in range(3):
        gate, up, dh = (t.to(device) for t in draw((20, 40)))
        (gate, up, dh)[spoiled][7, 11] = bad
        if spoiled < 2:
            assert ops.swiglu_cast(gate, up, E4M3)[2].isnan()
        scales = ops.swiglu_backward_cast(dh, gate, up, E5M2)[2::3]
        assert any(s.isnan() for s in scales)


def test_empty_and_zero(device):
    for results in (
        ops.swiglu_cast(*torch.empty(2, 0, 40, device=device), E4M3),
        ops.swiglu_backward_cast(*torch.empty(3, 0, 40, device=device), E4M3),
    ):
        for codes, codes_t, scale in zip(*[iter(results)] * 3, strict=True):
            assert (codes.shape, codes_t.shape, float(scale)) == ((0, 48), (48, 0), 0)
    for t in ops.swiglu_backward_cast(*torch.zeros(3, 20, 40, device=device), E4M3):
        assert t.float().eq(0).all()


# --- Triton against the reference


@OCP
@INPUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_directions_are_nearly_the_references(fmt, dtype, shape, kernel_device):
    gate, up, dh = draw(shape, dtype)
    here = [t.to(kernel_device) for t in (dh, gate, up)]
    assert_nearly_the_same(
        triton.swiglu_cast(*here[1:], fmt), reference.swiglu_cast(gate, up, fmt), fmt
    )
    expected = reference.swiglu_backward_cast(dh, gate, up, fmt)
    assert_nearly_the_same(triton.swiglu_backward_cast(*here, fmt), expected, fmt)


def test_views_are_read_in_their_own_order(kernel_device):
    gate, up, dh = draw((130, 40))
    here = [t.to(kernel_device).t() for t in (dh, gate, up)]
    expected = reference.swiglu_backward_cast(dh.t(), gate.t(), up.t(), E4M3)
    assert_nearly_the_same(triton.swiglu_backward_cast(*here, E4M3), expected, E4M3)
    whole = torch.randn(40, 261)  # gate and up as halves of one product, misaligned
    parts = whole[:, :130], whole[:, 131:]
    both = whole.to(kernel_device)
    results = triton.swiglu_cast(both[:, :130], both[:, 131:], E4M3)
    assert_nearly_the_same(results, reference.swiglu_cast(*parts, E4M3), E4M3)


def test_tensors_that_begin_at_any_byte(kernel_device):
    """The same shapes aligned, then not: a launch remembered for the one must not serve the other."""
    base = torch.randn(3, 64 * 128 + 4).to(kernel_device)
    for offset in (0, 1, 0, 3):
        parts = [row[offset : offset + 64 * 128].view(64, 128) for row in base]
        expected = reference.swiglu_backward_cast(*(t.cpu() for t in parts), E4M3)
        assert_nearly_the_same(triton.swiglu_backward_cast(*parts, E4M3), expected, E4M3)
        expected = reference.swiglu_cast(*(t.cpu() for t in parts[1:]), E4M3)
        assert_nearly_the_same(triton.swiglu_cast(*parts[1:], E4M3), expected, E4M3)


@pytest.mark.gpu
@INPUTS
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 4100), (70001, 129)], ids=str)
def test_large_matrices_are_nearly_the_references(dtype, shape):
    gate, up, dh = draw(shape, dtype)
    here = [t.cuda() for t in (dh, gate, up)]
    expected = reference.swiglu_cast(gate, up, E4M3)
    assert_nearly_the_same(triton.swiglu_cast(*here[1:], E4M3), expected, E4M3)
    expected = reference.swiglu_backward_cast(dh, gate, up, E5M2)
    assert_nearly_the_same(triton.swiglu_backward_cast(*here, E5M2), expected, E5M2)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [2**14, 2**14 + 1], ids=["even", "odd"])
def test_elements_beyond_two_to_the_31_are_as_the_first_ones(cols, rows_beyond_int32):
    x = torch.randn(64, cols, device="cuda").bfloat16()
    full = x.repeat(rows_beyond_int32 // 64 + 1, 1)[:rows_beyond_int32]
    first = rows_beyond_int32 // 64 * 64
    rest = rows_beyond_int32 - first
    codes, codes_t, _ = triton.swiglu_cast(full, full, E4M3)
    assert_same_bits(codes[first : first + rest], codes[:rest])
    assert_same_bits(codes_t[:, first : first + rest], codes_t[:, :rest])
    assert codes[:64].float().ne(0).any()
