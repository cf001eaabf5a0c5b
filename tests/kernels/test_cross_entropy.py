"""Cross entropy of rows of logits: the reference against float64, the Triton kernel against the reference."""

import pytest
import torch
from helpers import INF, INPUTS, NAN, assert_same_bits

from fp8stack.kernels import cross_entropy as triton
from fp8stack.kernels import ops
from fp8stack.kernels.reference import cross_entropy as reference

SHAPES = [(1, 1), (3, 2), (5, 130), (4, 4096), (3, 9001), (0, 40)]


def draw(shape, dtype=torch.float32, device="cpu"):
    """Return logits of several sizes, labels, and a factor for each row, some of them 0."""
    x = torch.randn(shape) * 4.0 ** torch.randint(-1, 3, (shape[0], 1))
    labels, scale = torch.randint(shape[1], shape[:1]), torch.rand(shape[0])
    scale[::3] = 0
    return x.to(device, dtype), labels.to(device), scale.to(device)


def exact(x, labels, scale):
    """Return losses and gradients in float64."""
    x = x.cpu().double()
    onehot = torch.nn.functional.one_hot(labels.cpu(), x.shape[1])
    losses = torch.nn.functional.cross_entropy(x, labels.cpu(), reduction="none")
    return losses, (x.softmax(-1) - onehot) * scale.cpu().double()[:, None]


def assert_near(losses, gradient, x, labels, scale):
    """A loss is a difference of numbers as large as logits; p is one of exp(difference); each in float32."""
    wanted, dx = exact(x, labels, scale)
    size = x.cpu().double().abs().amax(-1, keepdim=True)
    step = 2.0**-24 * (size + 16)
    assert losses.dtype is torch.float32
    assert ((losses.cpu().double() - wanted).abs() <= 4 * step[:, 0]).all()
    bound = 8 * step * scale.cpu().double()[:, None] + torch.finfo(x.dtype).eps / 2 * dx.abs()
    bound += torch.finfo(x.dtype).smallest_normal
    assert gradient.dtype is x.dtype
    assert ((gradient.cpu().double() - dx).abs() <= bound).all()


@INPUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient_are_rounded_once(dtype, shape, device):
    x, labels, scale = draw(shape, dtype, device)
    logits = x.clone()
    losses = ops.cross_entropy(logits, labels, scale, True)
    assert_near(losses, logits, x, labels, scale)
    logits = x.clone()
    assert_same_bits(ops.cross_entropy(logits, labels, scale, False), losses)
    assert_same_bits(logits, x)


@INPUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_does_the_same(dtype, shape, kernel_device):
    x, labels, scale = draw(shape, dtype, kernel_device)
    for gradient in (False, True):
        logits = x.clone()
        losses = triton.cross_entropy(logits, labels, scale, gradient)
        if gradient:
            assert_near(losses, logits, x, labels, scale)
        else:
            assert_same_bits(logits, x)


def test_words_that_cannot_be_and_what_is_not_finite(kernel_device):
    """-inf is a word of no probability; NaN and +inf make their own row NaN."""
    x, labels, scale = draw((6, 5000), device=kernel_device)
    labels[:] = 7
    x[0, :4500] = -INF
    labels[0] = 4600
    x[1, 4999], x[2, 3], x[3] = NAN, INF, -INF
    labels[5] = 5000  # no word
    logits, expected = x.clone(), x[:5].cpu()
    losses = triton.cross_entropy(logits, labels, scale + 1, True).cpu()
    wanted = reference.cross_entropy(expected, labels[:5].cpu(), scale[:5].cpu() + 1, True)
    assert losses[5].isnan()
    for i in range(5):
        assert torch.equal(losses[i].isfinite(), wanted[i].isfinite()), i
    assert_same_bits(losses[1:4].isnan(), wanted[1:4].isnan())
    torch.testing.assert_close(losses[[0, 4]], wanted[[0, 4]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[[0, 4]].cpu(), expected[[0, 4]], rtol=1e-4, atol=1e-7)
    assert logits[0, :4500].eq(0).all()
    assert logits[1:3].isnan().any(-1).all()
