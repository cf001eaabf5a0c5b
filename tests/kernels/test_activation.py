"""Activations joined to their casts: the reference against float64, the Triton kernels against the reference.

The exponential is the device's: a scale may differ by one part in 2^17, and few elements by a code, or by more codes
where a derivative is next to zero, as what is left there is what rounding left.
"""

import pytest
import torch
from helpers import DTYPES, INPUTS, OCP, assert_nearly_the_same, assert_same_bits, every_two, grid

from fp8stack.formats import E4M3, E5M2
from fp8stack.kernels import activation as triton
from fp8stack.kernels import cast_rows, ops
from fp8stack.kernels.reference import activation as reference
from fp8stack.kernels.reference import cast_rows as reference_rows
from fp8stack.kernels.reference.delayed_state import SEEDED, DelayedState

SWIGLU = "silu", True
KINDS = [
    SWIGLU, ("gelu", False), ("gelu_tanh", True), ("gelu_tanh", False), ("relu", False), ("silu", False),
]  # fmt: skip
KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0] + " gated" * kind[1])
SHAPES = [(1, 1), (1, 130), (130, 1), (64, 128), (65, 70), (17, 33)]


def draw(shape, dtype=torch.float32, spread=3.0):
    """Return gate, up and a gradient whose sizes differ by powers of ten."""
    return [(torch.randn(shape) * size).to(dtype) for size in (spread, 1.0, 1e-3)]


def both_ways(kernels, dh, gate, up, fmt, forward=(), backward=(), kind=SWIGLU):
    """Return what forward gives in E4M3, and with its scale what backward casts to `fmt` and adds up."""
    activation, gated = kind
    up = up if gated else None
    codes, scale = kernels.activation_cast(gate, up, activation, E4M3, *forward)
    update = backward or ((), False)
    results = kernels.activation_backward_cast(dh, gate, up, scale, activation, fmt, *update, True)
    casts = 7 if gated else 4
    assert len(results) == casts + 1 + gated
    return [codes, scale], results[:casts], results[casts:]


def assert_both_ways(dh, gate, up, fmt, device, scalings=((), ()), on="cpu", kind=SWIGLU):
    """Compare both directions with the reference's, and the activation's two casts with one another."""
    here, there = ([t.to(place) for t in (dh, gate, up)] for place in (device, on))
    forward, results, sums = both_ways(triton, *here, fmt, *scalings[0], kind=kind)
    same, expected, exact = both_ways(reference, *there, fmt, *scalings[1], kind=kind)
    assert_nearly_the_same(forward, same, E4M3)
    assert_nearly_the_same(results, expected, fmt)
    for given, total in zip(sums, exact, strict=True):
        assert torch.allclose(given.to(total.device), total, 1e-4, 1e-6 * len(dh) ** 0.5)
    turned = forward[0].view(torch.uint8).t().contiguous()
    assert_nearly_the_same([results[-1]], [turned.view(E4M3.dtype)], E4M3)


# --- what they are


@OCP
@KIND
def test_values_are_those_of_the_formula_rounded_once(fmt, kind, device):
    gate, up, dh = draw((40, 72))
    leaves = [t.double().requires_grad_() for t in ((gate, up) if kind[1] else (gate,))]
    h = reference.ACTIVATIONS[kind[0]](leaves[0])
    h = h * leaves[1] if kind[1] else h
    h.backward(dh.double())
    on_device = [t.to(device) for t in (dh, gate, up)]
    codes, scale = ops.activation_cast(
        on_device[1], on_device[2] if kind[1] else None, kind[0], fmt
    )
    _, (*grads, h_t), sums = both_ways(ops, *on_device, fmt, kind=kind)
    for total, leaf in zip(sums, leaves, strict=True):
        assert torch.allclose(total.cpu().double(), leaf.grad.sum(0), 1e-4, 1e-6)
    if fmt is E4M3:
        assert_same_bits(h_t.view(torch.uint8), codes.view(torch.uint8).t().contiguous())
    given = [t.cpu() for t in (codes, codes.t().contiguous(), scale, *grads)]
    for i, exact in enumerate((h.detach(), *(leaf.grad for leaf in leaves))):
        codes, codes_t, scale = given[3 * i : 3 * i + 3]
        assert codes.shape == (64, 80)
        assert_same_bits(codes_t.view(torch.uint8), codes.view(torch.uint8).t().contiguous())
        assert float(scale) == pytest.approx(float(exact.abs().max()) / fmt.max, rel=1e-6)
        values = codes.double() * scale.double()
        assert values[40:].eq(0).all()
        assert values[:, 72:].eq(0).all()
        half_step = (exact.abs() * 2.0 ** -(fmt.mantissa_bits + 1)).clamp(
            min=float(scale) * float(grid(fmt)[1]) / 2
        )
        cancelled = 2**-19 * exact.abs().max()  # where GELU's terms all but cancel in float32
        assert ((values[:40, :72] - exact).abs() <= half_step * (1 + 1e-4) + cancelled).all()


ROWS = [(1, 130), (64, 128), (65, 70), (5, 8200), (0, 4)]


@every_two(3, kind=KINDS, dtype=DTYPES.values(), shape=ROWS)
def test_by_rows_each_row_has_the_values_and_a_scale_of_its_own(
    kind, dtype, shape, kernel_device, small_tiles
):
    gate, up, _ = draw(shape, dtype)
    up = up if kind[1] else None
    here = [None if t is None else t.to(kernel_device) for t in (gate, up)]
    codes, scale = cast_rows.activation_cast_rows(*here, kind[0], E4M3)
    expected = reference_rows.activation_cast_rows(gate, up, kind[0], E4M3)
    assert codes.shape == expected[0].shape
    assert torch.allclose(scale.cpu(), expected[1], 2**-17, 0.0)
    for i in range(shape[0]):
        row = gate[i : i + 1], None if up is None else up[i : i + 1]
        alone = reference.activation_cast(*row, kind[0], E4M3)
        assert_same_bits(expected[0][i : i + 1], alone[0][:1])
        assert_same_bits(expected[1][i], alone[1])
        assert_nearly_the_same([codes[i : i + 1], scale[i]], [alone[0][:1], alone[1]], E4M3)


@pytest.mark.parametrize(
    ("activation", "one"), [("silu", 0.928), ("gelu", 1.083), ("gelu_tanh", 1.083), ("relu", 1)]
)
def test_large_gates_neither_overflow_nor_turn_to_nan(activation, one, device):
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, 1.0]]).to(device)
    up = torch.ones_like(gate)
    codes, scale = ops.activation_cast(gate, up, activation, E4M3)
    assert float(scale) == pytest.approx(1e30 / 448)
    assert (codes.float()[0, :8] * scale).tolist() == pytest.approx([0] * 6 + [1e30, 0], rel=1e-6)
    results = ops.activation_backward_cast(up, gate, up, scale, activation, E4M3)
    assert results[0].float()[0, :8].isfinite().all()
    slope = (results[0].float() * results[2])[0, :8].tolist()
    at_zero = 0 if activation == "relu" else 0.5
    assert slope == pytest.approx([0, 0, 0, at_zero, 1, 1, 1, one], rel=0.07, abs=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_makes_the_scale_nan(bad, device):
    for spoiled in range(3):
        gate, up, dh = (t.to(device) for t in draw((20, 40)))
        (gate, up, dh)[spoiled][7, 11] = bad
        scale = ops.activation_cast(gate, up, "silu", E4M3)[1]
        assert scale.isnan() == (spoiled < 2)
        scales = ops.activation_backward_cast(dh, gate, up, scale, "silu", E5M2)[2::3]
        assert any(s.isnan() for s in scales)


def test_empty_and_zero(device):
    nothing = torch.empty(3, 0, 40, device=device)
    state = DelayedState(4)
    for scaling in ((), ([state.handle], True)):
        codes, scale = ops.activation_cast(*nothing[:2], "silu", E4M3, *scaling)
        assert (codes.shape, float(scale)) == ((0, 48), 0)
    _, (*results, h_t), sums = both_ways(ops, *nothing, E4M3)
    assert all(total.eq(0).all() for total in sums)
    assert h_t.shape == (48, 0)
    for codes, codes_t, scale in zip(*[iter(results)] * 3, strict=True):
        assert (codes.shape, codes_t.shape, float(scale)) == ((0, 48), (48, 0), 0)
    zeros = torch.zeros(3, 20, 40, device=device)
    for t in both_ways(ops, *zeros, E4M3)[1]:
        assert t.float().eq(0).all()


def test_states_give_the_scales_of_the_casts_before(device):
    """The first cast has its own amax, each later one that of the cast before it, beyond which it saturates."""
    gate, up, dh = (t.to(device) for t in draw((40, 72)))
    states = [DelayedState(4) for _ in range(3)]
    of, *of_g = (s.handle for s in states)
    alone = ops.activation_cast(gate, up, "silu", E4M3)
    *grads, _ = ops.activation_backward_cast(dh, gate, up, alone[1], "silu", E5M2)
    for factor, used in ((1, 1), (2, 1), (4, 2)):
        codes, scale = ops.activation_cast(gate, factor * up, "silu", E4M3, [of], True)
        results = ops.activation_backward_cast(
            factor * dh, gate, up, scale, "silu", E5M2, of_g, True
        )
        assert_same_bits(scale.cpu(), used * alone[1].cpu())
        assert_same_bits(results[2].cpu(), used * grads[2].cpu())
        assert_same_bits(results[5].cpu(), used * grads[5].cpu())
        assert codes.float().abs().max() == 448
    for state, one in zip(states, (alone[1], grads[2], grads[5]), strict=True):
        assert_same_bits(state.tensor[0].cpu(), 4 * one.cpu())
    again = ops.activation_cast(gate, 4 * up, "silu", E4M3, [of], False, True)
    assert_same_bits(again[0].view(torch.uint8), codes.view(torch.uint8))


# --- Triton against the reference


OF = [(s, SWIGLU) for s in SHAPES] + [((65, 70), kind) for kind in KINDS[1:]]


@every_two(2, fmt=[E4M3, E5M2], dtype=DTYPES.values(), of=OF)
def test_both_directions_are_nearly_the_references(fmt, dtype, of, kernel_device):
    shape, kind = of
    gate, up, dh = draw(shape, dtype)
    assert_both_ways(dh, gate, up, fmt, kernel_device, kind=kind)


@pytest.mark.parametrize(
    ("fmt", "margin", "shape"),
    [(E4M3, 0, (1, 1)), (E5M2, 1, (64, 128)), (E4M3, 0, (65, 70)), (E5M2, 1, (3, 5))],
    ids=str,
)
def test_a_history_of_scales_goes_on_as_the_references(fmt, margin, shape, kernel_device):
    ours, theirs = ([DelayedState(3, margin) for _ in range(3)] for _ in range(2))
    for i in range(SEEDED + 4):
        if 2 < i < SEEDED - 1:
            for state in (*ours, *theirs):
                state.casts += 1  # as if cast: the kernels are slow here
            continue
        gate, up, dh = (t * 2.0 ** (i % 3 - 1) for t in draw(shape))
        again = i == 1
        handles = [[state.handle for state in states] for states in (ours, theirs)]
        scalings = [(((h,), not again, again), ((a, b), not again)) for h, a, b in handles]
        assert_both_ways(dh, gate, up, fmt, kernel_device, scalings)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one.tensor.cpu(), other.tensor, rtol=2**-17, atol=0)
            assert one.parts_on(one.tensor.device).eq(0).all()


def test_views_are_read_in_their_own_order(kernel_device):
    gate, up, dh = draw((130, 40))
    here = [t.to(kernel_device).t() for t in (dh, gate, up)]
    assert_both_ways(dh.t(), gate.t(), up.t(), E4M3, kernel_device)
    expected = both_ways(reference, dh.t(), gate.t(), up.t(), E4M3)[1]
    assert_nearly_the_same(both_ways(triton, *here, E4M3)[1], expected, E4M3)
    whole = torch.randn(40, 261)  # gate and up as halves of one product, misaligned
    parts = whole[:, :130], whole[:, 131:]
    both = whole.to(kernel_device)
    results = triton.activation_cast(both[:, :130], both[:, 131:], "silu", E4M3)
    assert_nearly_the_same(results, reference.activation_cast(*parts, "silu", E4M3), E4M3)


@pytest.mark.gpu
@INPUTS
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 4100), (70001, 129)], ids=str)
def test_large_matrices_are_nearly_the_references(dtype, shape):
    gate, up, dh = draw(shape, dtype)
    for kind in (SWIGLU, ("gelu", False)):
        assert_both_ways(dh, gate, up, E5M2, "cuda", on="cuda", kind=kind)
    states = [DelayedState(3) for _ in range(6)]
    handles = [state.handle for state in states]
    for _ in range(3):
        of = [(((h,), True), ((a, b), True)) for h, a, b in (handles[:3], handles[3:])]
        assert_both_ways(dh, gate, up, E5M2, "cuda", of, "cuda")
