"""Delayed scaling: the history against a model of it in Python, and the Triton kernels against the reference."""

import copy
import math
import pickle

import pytest
import torch
from helpers import DTYPES, INF, NAN, OCP, assert_same_bits, every_two

from fp8stack.formats import E4M3, E5M2
from fp8stack.kernels import cast_delayed as triton
from fp8stack.kernels import ops
from fp8stack.kernels.reference import cast_delayed as reference
from fp8stack.kernels.reference.delayed_state import HEADER, SEEDED, STATES, DelayedState

MARGINS = pytest.mark.parametrize(
    ("fmt", "margin"), [(E4M3, 0), (E5M2, 1), (E4M3, 2)], ids=["e4m3-0", "e5m2-1", "e4m3-2"]
)
ALGORITHMS = pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
FACTORS = [
    1, 2, 30, 1e6, NAN, 0.0, 3, 0.1, 0.01, INF, 1e-6, 1e-30, 1, 1, -INF, 5, 1e30, 1, 1, 1, 1, 0.0, 7, 7,
]  # fmt: skip


def inputs(shape=(20, 130), dtype=torch.float32):
    """Yield matrices that grow, shrink, vanish and are not finite: more than a state is young for."""
    assert len(FACTORS) > SEEDED + 4
    for factor in FACTORS:
        x = torch.randn(shape) * (factor if math.isfinite(factor) else 1)
        if not math.isfinite(factor):
            x[-1, -1] = factor
        yield x.clamp(-6e4, 6e4).to(dtype) if dtype is torch.float16 else x.to(dtype)


def clean(x):
    """Return `x` without subnormals, which the interpreter loads as other numbers where they are bfloat16."""
    return torch.where(x.abs() < 2.0**-126, 0, x) if x.dtype is torch.bfloat16 else x


def assert_casts_as_reference(x, here, fmt, states, update=True, again=False, what=""):
    """Cast with both, the kernels what is `here`; compare codes, scales and the states themselves."""
    ours, theirs = states
    results = triton.cast_delayed(here, fmt, ours.handle, update, again)
    assert_same_bits(results, reference.cast_delayed(x, fmt, theirs.handle, update, again), what)
    if x.numel():
        assert_same_bits(ours.tensor, theirs.tensor, f"state {what}")


# --- what the history does


@MARGINS
@ALGORITHMS
def test_the_scale_comes_from_the_amax_of_the_last_casts(fmt, margin, most_recent, device):
    """A model with a list: what is not finite and what is zero leaves no trace."""
    state = DelayedState(3, margin, most_recent)
    past = []
    for x in inputs():
        amax = float(x.abs().amax())
        own = amax if not past else past[-1] if most_recent else max(past[-3:])
        codes, codes_t, scale = (
            t.cpu() for t in ops.cast_delayed(x.to(device), fmt, state.handle, True, False)
        )
        assert_same_bits(scale, torch.tensor(own) * 2.0**margin / torch.tensor(fmt.max))
        codes_of_x, values = codes.float()[:20, :130], (x / scale).clamp(-fmt.max, fmt.max)
        half_step = (values.abs() * 2.0 ** -(fmt.mantissa_bits + 1)).clamp(min=fmt.min_positive / 2)
        finite = x.isfinite()
        assert ((codes_of_x - values).abs() <= half_step * 1.0001)[finite].all()
        assert torch.equal(codes_of_x.isnan(), ~finite)
        assert codes.view(torch.uint8)[20:].eq(0).all()
        assert codes.view(torch.uint8)[:, 130:].eq(0).all()
        assert_same_bits(codes_t.view(torch.uint8), codes.view(torch.uint8).t().contiguous())
        last = float(scale)
        if (0 < amax < INF and amax * 2.0**margin / fmt.max >= 2.0**-126) or 0 < amax < INF:
            past.append(amax)
        assert float(state.tensor[1]) == pytest.approx(last, nan_ok=True)
    seen = sorted(float(a) for a in state.tensor[HEADER:])
    assert seen == pytest.approx(sorted(past[-3:]))


def test_without_update_nothing_is_remembered_and_again_repeats_the_last_scale(device):
    state = DelayedState(4)
    x = torch.randn(20, 40, device=device)
    first = ops.cast_delayed(x, E4M3, state.handle, True, False)
    ops.cast_delayed(8 * x, E4M3, state.handle, True, False)
    second = ops.cast_delayed(x, E4M3, state.handle, True, False)
    before = state.tensor.clone()
    for update_less in (False, True):
        repeated = ops.cast_delayed(x, E4M3, state.handle, False, update_less)
        assert_same_bits(state.tensor, before)
    assert_same_bits(repeated, second)
    assert float(second[2]) == pytest.approx(8 * float(first[2]))


def test_a_state_is_found_by_its_handle_and_copies_begin_anew(device):
    state = DelayedState(4, 1, True)
    ops.cast_delayed(torch.randn(4, 4, device=device), E4M3, state.handle, True, False)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert STATES[other.handle] is other
        assert other.handle != state.handle
        assert (other.history, other.margin, other.most_recent) == (4, 1, True)
        assert other.tensor is None
    handle = state.handle
    del state, other
    assert handle not in STATES


# --- Triton against the reference


@MARGINS
@ALGORITHMS
def test_a_history_goes_on_as_in_the_reference(fmt, margin, most_recent, kernel_device):
    """Codes, scales and the state itself after every cast; some update, some do not, some repeat the last scale."""
    states = ours, _ = [DelayedState(3, margin, most_recent) for _ in range(2)]
    for i, x in enumerate(inputs((20, 120))):  # a tile
        for how in ((i % 5 != 3, False), (False, True))[: 1 + (i % 3 == 0)]:
            assert_casts_as_reference(x, x.to(kernel_device), fmt, states, *how, f"cast {i}")
            assert ours.parts_on(ours.tensor.device).eq(0).all()


SHAPES = [(1, 1), (1, 130), (130, 1), (64, 128), (65, 130), (2, 3, 40), (0, 4), (70,)]


@every_two(2, fmt=(E4M3, E5M2), dtype=DTYPES.values(), shape=SHAPES)
def test_matrices_cast_as_in_the_reference(fmt, dtype, shape, kernel_device, rough):
    """Values of all exponents saturate, vanish, and are not finite."""
    states = DelayedState(5), DelayedState(5)
    for factor in (1.0, 0.5, None, 1.0):
        if factor is None:
            x = clean(rough(shape, dtype, 6e4 if dtype is torch.float16 else 1e30))
        else:
            x = (torch.randn(shape) * factor).to(dtype)
        assert_casts_as_reference(x, x.to(kernel_device), fmt, states)


def test_views_cast_as_in_the_reference(kernel_device):
    base = torch.randn(40 * 130 + 4)
    states = DelayedState(5), DelayedState(5)
    for i in range(6):
        x = base[i % 3 : i % 3 + 40 * 130].view(40, 130)
        on_device = base.to(kernel_device)[i % 3 : i % 3 + 40 * 130].view(40, 130)
        if i > 3:
            x, on_device = x.t(), on_device.t()
        assert_casts_as_reference(x, on_device, E4M3, states)


def test_an_operand_that_is_zero_while_its_state_is_young_loses_one_cast_only(kernel_device):
    state = DelayedState(4)
    for _ in range(SEEDED + 1):
        scale = triton.cast_delayed(
            torch.zeros(4, 4).to(kernel_device), E4M3, state.handle, True, False
        )[2]
        assert scale == 0
    x = torch.randn(4, 4).to(kernel_device)
    triton.cast_delayed(x, E4M3, state.handle, True, False)
    assert float(triton.cast_delayed(x, E4M3, state.handle, True, False)[2]) == pytest.approx(
        float(x.abs().amax()) / 448
    )


@pytest.mark.gpu
@OCP
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 4100), (70001, 129)], ids=str)
def test_large_matrices_cast_as_in_the_reference(fmt, shape):
    states = DelayedState(1024, 1), DelayedState(1024, 1)
    for factor in (1, 3, 0.1):
        x = (torch.randn(shape) * factor).bfloat16()
        x[-1, -1] = 100 * factor
        assert_casts_as_reference(x, x.cuda(), fmt, states)
