"""The recipes of native layers: error bounds against float64, delayed scaling's state, padding, odd inputs."""

import pytest
import torch
from bounds import BOUNDS, KINDS, NARROW, bounds, errors
from helpers import assert_same_bits
from layers import RECIPE, begun, conv1d, linear, native, results
from torch import nn

import fp8stack
from fp8stack.formats import E4M3, E5M2
from fp8stack.kernels import cast_delayed as triton_delayed
from fp8stack.kernels import ops
from fp8stack.kernels.reference import cast_delayed as reference_delayed
from fp8stack.kernels.reference.delayed_state import HEADER, DelayedState

NAN, INF = float("nan"), float("inf")

# --- numbers


@pytest.mark.parametrize(("recipe", "fmt"), BOUNDS, ids=map("-".join, BOUNDS))
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_within_the_bounds_of_their_formats(recipe, fmt, kind, device):
    layer = linear(512, 256, False, device, fp8_recipe=recipe, fp8_format=fmt)
    found, _ = errors(layer, kind, device)
    allowed = bounds(recipe, fmt, kind)
    assert all(error < bound for error, bound in zip(found, allowed, strict=True)), found
    if kind == "gaussian":  # the bounds are no idle ones
        assert all(error > bound / 1.3 for error, bound in zip(found, allowed, strict=True)), found


def test_blocks_keep_what_outliers_push_out_of_range(device):
    """A scale per block serves the columns beside an outlier, in the output and in their weights' gradients."""
    found = {}
    for recipe in ("current", "blockwise"):
        torch.manual_seed(5)
        layer = linear(512, 256, False, device, fp8_recipe=recipe, fp8_format="e4m3")
        found[recipe] = errors(layer, "outliers", device, outlier=1e5)
    (y, _, _), columns = found["blockwise"]
    (plain_y, _, _), plain_columns = found["current"]
    assert (
        y < 0.6 * plain_y
    )  # which is lost but for the outlier; blocks lose what shares one with it
    assert plain_columns > 5 * columns
    assert columns < NARROW


@pytest.mark.parametrize("kind", [nn.Linear, conv1d], ids=["linear", "conv1d"])
def test_a_weights_gradient_is_a_product_by_the_input_in_squares(kind, device):
    """In forward and in the input's gradient it is the weight that has squares."""
    layer = native(nn.Sequential(kind(256, 384)), device, fp8_recipe="blockwise")
    x, g = (torch.randn(640, n, device=device) for n in (256, 384))
    turned = kind is conv1d
    _, dx, dw, _ = results(layer, x, g)
    w = ops.cast_128x128(layer[0].weight.detach(), E4M3)[0 if turned else 2 :][:2]
    of_g, of_x = ops.cast_1x128(g, E4M3), ops.cast_128x128(x, E4M3)
    assert_same_bits(dx, ops.matmul_blocks(*of_g[:2], *w, torch.float32))
    pair = (*of_x[2:], *of_g[2:]) if turned else (*of_g[2:], *of_x[2:])
    assert_same_bits(dw, ops.matmul_blocks(*pair, torch.float32))


@RECIPE
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_what_is_not_finite_is_seen_in_outputs_and_gradients(recipe, bad, device):
    """In its own row at least; everywhere, where one scale serves the tensor."""
    layer = begun(linear(130, 40, device=device, fp8_recipe=recipe), 130)
    x = torch.randn(20, 130, device=device)
    clean = results(layer, x)
    x[3, 5] = bad
    gradient = torch.ones(20, 40, device=device)
    y, _, dw, _ = results(layer, x, gradient)
    assert not y[3].isfinite().any()
    assert not dw[:, 5].isfinite().any()
    if recipe != "current":
        others = torch.arange(20, device=device) != 3
        assert y[others].isfinite().all()
    gradient[7, 2] = bad
    _, dx, dw, db = results(layer, torch.randn(20, 130, device=device), gradient)
    assert not dx[7].isfinite().any()
    assert not dw[2].isfinite().any()
    assert not db[2].isfinite()
    again = results(layer, torch.randn(20, 130, device=device))  # and leaves no trace
    assert all(t.isfinite().all() for t in (*again, *clean))


# --- delayed scaling


def history(state):
    """Return the amaxes in a history, sorted."""
    return sorted(a for a in state.tensor[HEADER:].tolist() if a)


def test_a_training_pass_is_remembered_once(device):
    """And an evaluation not at all: test_all_kinds.py."""
    layer = begun(linear(device=device, fp8_recipe="delayed", amax_history_len=16))
    of_x, of_g = layer.products.x_state, layer.products.g_state
    amaxes = []
    for factor in (1, 4, 2):
        x = factor * torch.randn(16, 32, device=device)
        amaxes.append(float(x.abs().max()))
        results(layer, x, torch.full((16, 32), float(factor), device=device))
        assert history(of_x) == pytest.approx(sorted(amaxes))
    assert history(of_g) == [1, 2, 4]


@pytest.mark.parametrize("margin", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_margin_and_algorithm_set_the_scale(margin, algorithm, device):
    layer = linear(
        device=device, fp8_recipe="delayed", fp8_margin=margin, amax_compute_algo=algorithm
    )
    x = torch.randn(16, 32, device=device)
    for factor in (1, 8, 2):
        y = results(layer, factor * x)[0]
        assert y.isfinite().all()
    amax = float(x.abs().max()) * (8 if algorithm == "max" else 2)
    of_x, of_g = layer.products.x_state, layer.products.g_state
    assert float(of_x.tensor[0]) == pytest.approx(amax * 2**margin / E4M3.max)
    assert float(of_g.tensor[0]) == pytest.approx(2**margin / E5M2.max)


def test_values_beyond_the_scale_saturate_until_the_next_pass(device):
    layer = begun(linear(bias=False, device=device, fp8_recipe="delayed", fp8_margin=1))
    x = torch.randn(16, 32, device=device)
    exact = (x @ layer.weight.t()).detach()
    errors = [
        float((layer(factor * x).detach() / factor - exact).norm() / exact.norm())
        for factor in (1, 2, 8, 8)
    ]
    assert errors[0] < 0.06
    assert errors[1] < 0.06  # what the margin is for
    assert errors[2] > 0.1
    assert errors[3] < 0.06


def test_a_history_forgets_after_its_length(device):
    layer = begun(linear(device=device, fp8_recipe="delayed", amax_history_len=2))
    x = torch.randn(16, 32, device=device)
    for factor, seen in ((100, 100), (1, 100), (1, 1)):
        results(layer, factor * x)
        amax = float(layer.products.x_state.tensor[0]) * E4M3.max
        assert amax == pytest.approx(seen * float(x.abs().max()))


# --- sizes and inputs


@pytest.mark.parametrize("tokens", [1, 13, 16, 33])
def test_blocks_are_padded_too(tokens, device):
    layer, x = linear(130, 257, device=device, fp8_recipe="blockwise"), torch.randn(tokens, 130)
    y, dx, dw, _ = results(layer, x.to(device))
    assert (y.shape, dx.shape, dw.shape) == ((tokens, 257), (tokens, 130), (257, 130))
    exact = nn.functional.linear(x.to(device), layer.weight, layer.bias)
    assert (y - exact).norm() < 1.2 * NARROW * exact.norm()  # of few numbers
    assert dw.any()


def test_a_model_without_linear_layers_is_left_as_it_is(device):
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.LayerNorm(30))
    native(model, device)
    assert fp8stack.get_report(model).converted == []
    assert [type(m) for m in model] == [nn.Conv1d, nn.LayerNorm]
    assert fp8stack.restore(model)[0] is model


@pytest.mark.parametrize("squares_t", [False, True])
def test_the_reference_lays_out_transposed_blocks_as_its_fake_says(squares_t):
    torch.library.opcheck(
        torch.ops.fp8stack.cast_1x128.default,
        (torch.randn(5, 200), "e4m3", True, True, squares_t),
        test_utils=["test_faketensor"],
    )


def test_an_amax_too_small_for_a_scale_leaves_the_scale_alone():
    """most_recent (or max, once all of the history is tiny); Triton loses the next cast, the reference does not."""
    states = [DelayedState(4, 0, True) for _ in range(2)]
    for i in range(18):
        x = torch.randn(16, 16) * (1e-44 if i == 16 else 1)
        given = triton_delayed.cast_delayed(x, E4M3, states[0].handle, True, False)
        expected = reference_delayed.cast_delayed(x, E4M3, states[1].handle, True, False)
        assert states[1].tensor[0] > 0
        assert_same_bits(given, expected)


@pytest.mark.parametrize("rows", [0, 16])
def test_what_the_reference_returns_shares_no_memory(rows):
    """Operators must not return views of one another; of no elements, contiguous() is one."""
    x, state = torch.randn(rows, 128), DelayedState(4)
    namespace = torch.ops.fp8stack
    for results_ in (
        namespace.cast(x, "e4m3", True, True, None),
        namespace.cast_delayed(x, "e4m3", state.handle, True, False),
        namespace.cast_1x128(x, "e4m3"),
        namespace.cast_1x128(x, "e4m3", True, True, True),
        namespace.cast_128x128(x, "e4m3"),
        namespace.activation_backward_cast(x, x, x, torch.ones(()), "silu", "e4m3", [], False),
    ):
        matrices = [t for t in results_ if t.dim() == 2 and t.element_size() == 1]
        memory = {t.untyped_storage()._cdata for t in matrices}
        assert len(memory) == len(matrices)
