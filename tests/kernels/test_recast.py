"""Casts with the scale of the cast before: when it is kept, what it costs, and Triton against the reference."""

import pytest
import torch
from helpers import INF, INPUTS, NAN, OCP, assert_same_bits

from fp8stack.formats import E4M3, E5M2, LEAST_SCALE
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
    assert_same_bits(results[2], scalar(LEAST_SCALE if 0 < bad < 1 else bad * 0))
    assert results[0].view(torch.uint8).amax() == (0x70 if bad == 2.0**-120 else 0)
    x = torch.randn(140, 300)
    assert_same_bits(recast(x.to(device), E4M3, results[2]), reference_cast.cast(x, E4M3))


@pytest.mark.parametrize(
    ("fmt", "amax"), zip([E4M3, E5M2] * 2, [1.0, 0.0, NAN, INF], strict=True), ids=str
)
def test_an_exact_recast_is_a_cast_whatever_the_scale(fmt, amax, kernel_device):
    x = torch.randn(70, 40) * min(amax, 1.0)  # two tiles
    x[3, 5] = amax
    expected = reference_cast.cast(x, fmt)
    for factor in (1.0, 1.01, 0.5, 0.0, NAN, INF):
        previous = expected[2] * factor
        for kernels, device in ((reference_cast, "cpu"), (triton_cast, kernel_device)):
            results = kernels.recast(x.to(device), fmt, previous.to(device), exact=True)
            assert_same_bits(results, expected)


@pytest.mark.parametrize("shape", [(20, 40), (70, 40)], ids=["one tile", "several"])
def test_the_scale_is_written_for_the_next_cast_where_that_is_wanted(shape, kernel_device):
    x = torch.randn(shape)
    own = own_scale(x, E4M3)
    for kernels, device in ((reference_cast, "cpu"), (triton_cast, kernel_device)):
        for factor in (1.0, 0.98, 2.0, 0.96, NAN):
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


# --- Triton against the reference


def test_a_program_looks_after_many_tiles(kernel_device, monkeypatch):
    """Of each tile in turn the largest value is what makes the scale misfit."""
    monkeypatch.setattr(triton_cast, "SLOTS", 2)
    monkeypatch.setattr(triton_cast, "PROGRAMS", 2)
    x = torch.randn(150, 300)
    previous = own_scale(x, E4M3)
    here = previous.to(kernel_device)
    for place in ((0, 0), (0, 299), (75, 150), (149, 0), (149, 299)):
        y = x.clone()
        y[place] = -9.0
        results = triton_recast(y.to(kernel_device), E4M3, here)
        assert_same_bits(results, reference_cast.recast(y, E4M3, previous))
        assert float(results[2]) == pytest.approx(9 / 448)
    assert_same_bits(here, previous)


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
