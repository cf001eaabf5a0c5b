"""Experts' activation joined to its casts: the reference against float64, the Triton kernels against the reference.

The exponential is the device's, as in `test_activation.py`.
"""

import pytest
import torch
from helpers import assert_nearly_the_same, assert_same_bits, every_two, quantize_tensor

from fp8stack.formats import E4M3
from fp8stack.kernels import expert_activation as triton
from fp8stack.kernels.reference import expert_activation as reference
from fp8stack.kernels.reference.activation import ACTIVATIONS

SHAPES = [(64, 16), (64, 64), (128, 80), (192, 128)]
KINDS = pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])


def draw(rows, cols, dtype=torch.float32):
    """Return gate and up, the weights of pairs, which pair is in each row, and a gradient."""
    gate_up, pairs = 3 * torch.randn(rows, 2 * cols), torch.randperm(rows).int()
    pairs = torch.where(torch.rand(rows) > 0.2, pairs, -1)
    weights = torch.rand(rows).to(dtype)
    return gate_up.to(dtype), weights, pairs, (1e-3 * torch.randn(rows, cols)).to(dtype)


def both_ways(kernels, gate_up, weights, pairs, dh, activation):
    codes, scale = kernels.expert_activation(gate_up, weights, pairs, activation)
    backward = kernels.expert_activation_backward(dh, gate_up, weights, pairs, scale, activation)
    return codes, scale, *backward


@KINDS
def test_reference_casts_what_autograd_computes(activation):
    gate_up, weights, pairs, dh = draw(64, 48)
    by_row = torch.where(pairs < 0, 0, weights[pairs.clamp(min=0)])
    x, w = (t.double().requires_grad_() for t in (gate_up, by_row))
    gate, up = x.chunk(2, 1)
    h = ACTIVATIONS[activation](gate) * up * w[:, None]
    h.backward(dh.double())
    codes, scale, d_codes, d_codes_t, d_scale, h_codes_t, d_weights = both_ways(
        reference, gate_up, weights, pairs, dh, activation
    )
    for given, own, exact in ((codes, scale, h.detach()), (d_codes, d_scale, x.grad)):
        right, right_scale = quantize_tensor(exact.float(), E4M3)
        assert torch.allclose(own, right_scale, rtol=1e-5)
        error = (given.double() * own.double() - exact).norm() / exact.norm()
        least = (right.double() * right_scale.double() - exact).norm() / exact.norm()
        assert error <= 1.001 * least
    assert_same_bits(d_codes_t, d_codes.t().contiguous())
    assert_same_bits(h_codes_t, codes.t().contiguous())
    torch.testing.assert_close(d_weights.double(), w.grad, rtol=1e-4, atol=1e-7)


@every_two(
    2, shape=SHAPES, dtype=[torch.float32, torch.bfloat16], activation=["silu", "gelu", "gelu_tanh", "relu"]
)  # fmt: skip
def test_kernels_do_what_the_reference_does(shape, dtype, activation, kernel_device):
    given = draw(*shape, dtype)
    expected = both_ways(reference, *given, activation)
    found = both_ways(triton, *(t.to(kernel_device) for t in given), activation)
    codes, scale, d_codes, d_codes_t, d_scale, h_codes_t, d_weights = found
    # with the reference's scale, so that backward's codes of h are compared too
    pairs = [(codes, scale), (d_codes, d_scale)], [expected[:2], (expected[2], expected[4])]
    for one, other in zip(*pairs, strict=True):
        assert_nearly_the_same([*one], [*other], E4M3)
    assert_same_bits(d_codes_t.cpu(), d_codes.cpu().t().contiguous())
    assert_same_bits(h_codes_t.cpu(), codes.cpu().t().contiguous())
    torch.testing.assert_close(d_weights.cpu(), expected[-1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_makes_the_scale_nan(value, kernel_device):
    gate_up, weights, pairs, dh = (t.to(kernel_device) for t in draw(64, 32))
    gate_up[3, 40], pairs[3] = value, 5
    for kernels in (reference, triton):
        found = both_ways(kernels, gate_up, weights, pairs, dh, "silu")
        assert found[1].isnan()
        assert found[4].isnan()
