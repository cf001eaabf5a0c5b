"""The hooks that make gradients FP8: attaching, existing gradients, removal."""

import torch
from helpers import assert_same_bits
from torch import nn

from fp8stack import BlockScaledTensor
from fp8stack.comm import GradientHandle
from fp8stack.formats import E4M3
from fp8stack.kernels.reference.quantize import quantize_blocks


def test_a_fresh_gradient_becomes_its_blocks_at_once():
    layer = nn.Linear(256, 64, bias=False)
    x = torch.randn(8, 256)
    layer(x).sum().backward()
    expected = quantize_blocks(layer.weight.grad, E4M3)
    layer.zero_grad()
    handle = GradientHandle()
    handle.attach([layer.weight], {layer.weight: "weight"})
    layer(x).sum().backward()
    assert isinstance(layer.weight.grad, BlockScaledTensor)
    for part, value in zip(layer.weight.grad.parts(), expected, strict=True):
        assert_same_bits(part.view(torch.uint8), value.view(torch.uint8))
    handle.remove()
    assert type(layer.weight.grad) is torch.Tensor
    layer.zero_grad()
    layer(x).sum().backward()
    assert type(layer.weight.grad) is torch.Tensor


def test_gradients_that_exist_are_taken_along_and_frozen_parameters_left():
    layer = nn.Linear(256, 64)
    layer.weight.grad = torch.randn(64, 256)
    layer.bias.requires_grad_(False)
    handle = GradientHandle()
    handle.attach(layer.parameters(), {})
    handle.attach(layer.parameters(), {})  # twice is once
    assert isinstance(layer.weight.grad, BlockScaledTensor)
    assert len(layer.weight._post_accumulate_grad_hooks) == 1
    assert not layer.bias._post_accumulate_grad_hooks
