"""Casts with the scale of the cast before: when it is kept, what it costs, and Triton against the reference."""

import math

import pytest
import torch
from helpers import INF, INPUTS, NAN, OCP, assert_same_bits

from fp8stack.formats import E4M3
from fp8stack.kernels import cast as triton_cast
from fp8stack.kernels import ops
from fp8stack.kernels.reference import cast as reference_cast
from fp8stack.kernels.reference.cast import aligned
from fp8stack.kernels.reference.cast_delayed import encode_saturating
from fp8stack.kernels.reference.delayed_state import DelayedState

SHAPES = [(1, 1), (1, 130), (130, 1), (17, 33), (64, 128), (65, 130), (2, 3, 40), (70,)]
EDGE = 1 + 1 / 32
KEPT = [1.0, 1.99, 0.98, 32 / 33 + 1e-6]  # previous scale / own scale
LEFT = [2.0, 2.01, 0.96, 32 / 33 - 1e-6, 1e20, 1e-20, 0.0, -1.0, NAN, INF, -INF]

triton_recast = triton_cast.recast


def recast(x, *arguments):
    return (triton_recast if x.is_cuda else reference_cast.recast)(x, *arguments)


def scalar(value, device="cpu"):
    return torch.tensor(value, dtype=torch.float32, device=device)


def own_scale(x, fmt):
    return reference_cast.cast(x.cpu(), fmt, False, False)[2]


def assert_cast_with(scale, results, x, fmt):
    """Compare with the codes of each element by itself."""
    codes = encode_saturating(x.cpu().float().reshape(-1, x.shape[-1]), scale, fmt)
    whole = torch.zeros([aligned(n) for n in codes.shape], dtype=torch.uint8)
    whole[: codes.shape[0], : codes.shape[1]] = codes.view(torch.uint8)
    assert_same_bits(results[2], scale)
    assert_same_bits(results[0].view(torch.uint8), whole)
    assert_same_bits(results[1].view(torch.uint8), whole.t().contiguous())


# --- when a scale is kept


@OCP
@INPUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_scale_that_fits_is_kept_and_another_gives_a_cast(fmt, dtype, shape, device):
    x = torch.randn(shape).to(dtype)
    own = own_scale(x, fmt)
    for factor in KEPT:
        previous = own * factor
        results = recast(x.to(device), fmt, previous.to(device))
        assert_cast_with(previous, results, x, fmt)
    for factor in LEFT:
        results = recast(x.to(device), fmt, (own * factor).to(device))
        assert_same_bits(results, reference_cast.cast(x, fmt), f"factor {factor}")


@pytest.mark.parametrize("size", [2.0**-100, 1.0, 2.0**90], ids=["small", "one", "large"])
def test_the_bounds_are_exact(size, kernel_device):
    """A scale is kept where own / previous is in (1/2, 1 + 1/32]."""
    below = torch.nextafter(scalar(1), scalar(0)).item()
    for own, previous, kept in (
        (1, 2, False),
        (1, 2 * below, True),
        (EDGE, 1, True),
        (EDGE, below, False),
        (1 + 1 / 16, 1, False),
    ):
        x = torch.tensor([[size * own * E4M3.max, 0.0]])
        for kernels, device in ((reference_cast, "cpu"), (triton_cast, kernel_device)):
            scale = kernels.recast(x.to(device), E4M3, scalar(size * previous, device))[2]
            assert_same_bits(scale, scalar(size * (previous if kept else own)))


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.0, 2.0**-149, 2.0**-120], ids=str)
@pytest.mark.parametrize("previous", [1.0, 2.0**-126, 2.0**-130, 0.0, NAN, INF], ids=str)
def test_what_is_not_finite_or_has_no_scale_is_as_in_a_cast(bad, previous, device):
    """Anywhere in the matrix; and the next cast is a clean one."""
    x = torch.zeros(140, 300) if abs(bad) < 1 else torch.randn(140, 300)
    x[139, 299] = bad
    results = recast(x.to(device), E4M3, scalar(previous, device))
    assert_same_bits(results, reference_cast.cast(x, E4M3))
    assert results[2].isnan() if not math.isfinite(bad) else results[2].eq(0)
    assert results[0].view(torch.uint8).eq(0).all()
    x = torch.randn(140, 300)
    assert_same_bits(recast(x.to(device), E4M3, results[2]), reference_cast.cast(x, E4M3))


@OCP
@pytest.mark.parametrize("amax", [1.0, 0.0, NAN, INF], ids=str)
def test_an_exact_recast_is_a_cast_whatever_the_scale(fmt, amax, kernel_device):
    x = torch.randn(140, 300) * min(amax, 1.0)
    x[3, 5] = amax
    expected = reference_cast.cast(x, fmt)
    for factor in (1.0, 1.01, 0.5, 0.0, NAN, INF):
        previous = expected[2] * factor
        for kernels, device in ((reference_cast, "cpu"), (triton_cast, kernel_device)):
            results = kernels.recast(x.to(device), fmt, previous.to(device), exact=True)
            assert_same_bits(results, expected)


@OCP
@INPUTS
def test_a_cast_with_the_scale_that_the_last_one_gave_is_the_same(fmt, dtype, device):
    x = torch.randn(140, 300).to(dtype)
    for factor in (*KEPT, *LEFT):
        previous = (own_scale(x, fmt) * factor).to(device)
        first = recast(x.to(device), fmt, previous)
        again = recast(x.to(device), fmt, first[2])
        assert_same_bits(again, first, f"factor {factor}")
        assert again[2].data_ptr() != first[2].data_ptr()  # which backward may still read


def test_a_scale_follows_a_weight_in_steps(device):
    """A model in Python, of a magnitude that drifts and jumps."""
    x = torch.randn(40, 60)
    scale, kept = ops.cast(x.to(device), E4M3)[2], 0
    for i in range(200):
        x = x * (1 + 0.02 * math.sin(i / 9) + (i % 50 == 49) * (3 if i % 100 == 49 else -0.9))
        own, previous = float(own_scale(x, E4M3)), float(scale)
        scale = recast(x.to(device), E4M3, scale)[2]
        fits = 0.5 < own / previous <= EDGE
        kept += fits
        assert float(scale) == (previous if fits else own)
    assert 100 < kept < 197


@pytest.mark.parametrize("shape", [(20, 40), (150, 300)], ids=["one tile", "several"])
def test_the_scale_is_written_for_the_next_cast_where_that_is_wanted(shape, kernel_device):
    x = torch.randn(shape)
    own = own_scale(x, E4M3)
    for kernels, device in ((reference_cast, "cpu"), (triton_cast, kernel_device)):
        for factor in (*KEPT, *LEFT):
            state = DelayedState(2)
            last = state.on(torch.device(device)).copy_(torch.tensor([own * factor, 7, 8, 9, 9]))
            results = kernels.recast(x.to(device), E4M3, state.handle)
            assert_same_bits(
                results, reference_cast.recast(x, E4M3, own * factor), f"factor {factor}"
            )
            assert_same_bits(last[0], results[2])
            assert last[1:].tolist() == [7, 8, 9, 9]
            kernels.recast(x.to(device) * 9, E4M3, last[0])
            assert_same_bits(last[0], results[2])
        kernels.recast(torch.empty(0, 4, device=device), E4M3, state.handle)
        assert_same_bits(last[0], results[2])


def test_a_state_holds_the_scale_of_eager_casts_and_of_operators(device):
    state, x = DelayedState(0), torch.randn(20, 40, device=device)
    own = own_scale(x, E4M3)
    for scale in (own, own, 0.8 * own, 0.8 * own):
        x = x * (scale / own).to(device)
        for cast in (ops.recast, torch.ops.fp8stack.recast):
            fmt = E4M3 if cast is ops.recast else E4M3.name
            results = cast(x, fmt, state.handle, True, True)
            assert_same_bits(results, reference_cast.recast(x.cpu(), E4M3, own))
            assert_same_bits(state.tensor[0], own)
    results = ops.recast(x * 100, E4M3, state.handle, False, True)
    assert_same_bits(state.tensor[0], own_scale(x * 100, E4M3))
    assert results[0].numel() == 0


# --- what it costs


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "outliers"])
@pytest.mark.parametrize("growth", [-0.499, -0.2, 0.0, 0.01, 0.03, 1 / 32 - 1e-6])
def test_no_value_errs_by_more_than_rounding_may(kind, growth, device):
    """Against float64: by 2^-4 of itself, or half a step of the subnormal codes; beyond the largest by half of its."""
    if kind == "heavy":
        x = torch.distributions.StudentT(2.0).sample((384, 512))
    else:
        x = torch.randn(384, 512)
    if kind == "outliers":
        x[:, 5] *= 1e4
    previous = own_scale(x, E4M3)
    x = x * (1 + growth)
    codes, _, scale = (t.cpu() for t in recast(x.to(device), E4M3, previous.to(device)))
    assert_same_bits(scale, previous)
    error = (codes.double() * scale.double() - x.double()).abs()
    step = E4M3.min_positive * scale.double()
    assert (error <= (x.double().abs() / 16).clamp(min=step / 2) * (1 + 1e-6)).all()
    beyond = x.double().abs() > E4M3.max * scale.double()
    assert beyond.any() or growth <= 0
    assert (error[beyond] < 16 * scale.double()).all()
    own = ops.cast(x.to(device), E4M3)
    own_error = (own[0].cpu().double() * float(own[2]) - x.double()).norm()
    if kind == "gaussian":  # of the others, one element may be all of it
        assert error.norm() < 1.05 * own_error


# --- Triton against the reference


def assert_casts_as_reference(x, fmt, previous, device, *layouts):
    """Compare all results. `x` may be a view, which is rebuilt on the device."""
    base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    view = base.as_strided(x.shape, x.stride(), x.storage_offset())
    before = previous.to(device)
    results = triton_recast(view, fmt, before, *layouts)
    expected = reference_cast.recast(x, fmt, previous, *layouts)
    assert_same_bits(results, expected)
    assert_same_bits(before, previous)
    return expected


@OCP
def test_special_values_cast_as_in_the_reference(fmt, kernel_device, special_values):
    """Every code, midpoint and neighbour of one, and what lies beyond the largest."""
    special = special_values(fmt)
    x = special[special.abs() <= fmt.max * EDGE].repeat(2)[:-1]
    results = assert_casts_as_reference(x.reshape(1, -1), fmt, scalar(1.0), kernel_device)
    assert results[2] == 1
    assert x.abs().max() > fmt.max


def test_a_program_looks_after_many_tiles(kernel_device, monkeypatch):
    """Of each tile in turn the largest value is what makes the scale misfit."""
    monkeypatch.setattr(triton_cast, "SLOTS", 2)
    monkeypatch.setattr(triton_cast, "PROGRAMS", 2)
    x = torch.randn(150, 300)
    previous = own_scale(x, E4M3)
    assert_casts_as_reference(x, E4M3, previous, kernel_device)
    for row in (0, 75, 149):
        for col in (0, 150, 299):
            y = x.clone()
            y[row, col] = -9.0
            scale = assert_casts_as_reference(y, E4M3, previous, kernel_device)[2]
            assert float(scale) == pytest.approx(9 / 448)


def test_casts_do_not_share_their_results(kernel_device):
    """Matrices of many tiles and of one, and casts between them, use the same pieces of memory."""
    shapes = [(70, 140), (1, 1), (16, 256), (20, 20)]
    inputs = [torch.randn(shapes[i % 4]) * 2.0 ** (i % 7) for i in range(20)]
    results = []
    for i, x in enumerate(inputs):
        previous = own_scale(x, E4M3) * (1.5 if i % 3 else 3)
        results.append(
            (x, previous, triton_recast(x.to(kernel_device), E4M3, previous.to(kernel_device)))
        )
        triton_cast.cast(x.to(kernel_device), E4M3)
    for x, previous, result in results:
        assert_same_bits(result, reference_cast.recast(x, E4M3, previous))


@pytest.mark.gpu
def test_a_captured_cast_reads_what_its_inputs_are_at_each_replay():
    x, previous = torch.randn(300, 400, device="cuda"), scalar(1.0, "cuda")
    triton_recast(x, E4M3, previous)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = triton_recast(x, E4M3, previous)
    for factor in (0.98, 1.5, 4.0, 0.98, 0.1):
        x.copy_(torch.randn(300, 400))
        previous.copy_(own_scale(x, E4M3) * factor)
        triton_recast(torch.randn(500, 500, device="cuda"), E4M3, previous)  # of eager mode
        graph.replay()
        expected = reference_cast.recast(x.cpu(), E4M3, previous.cpu())
        assert_same_bits(results, expected, f"factor {factor}")
