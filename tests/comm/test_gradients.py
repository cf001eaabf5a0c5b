"""The hooks that make gradients FP8: attaching, existing gradients, removal."""

import gc
import weakref

import pytest
import torch
from helpers import assert_same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8stack import BlockScaledTensor
from fp8stack.comm import GradientHandle, gradients
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
    layer(x).sum().backward(create_graph=True)
    assert isinstance(layer.weight.grad, BlockScaledTensor)
    assert not layer.weight.grad.scale.requires_grad  # which would hold the graph
    assert_same_bits(layer.weight.grad.parts(), expected)
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


def build_pair(device="cpu"):
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 256, bias=False)).to(
        device
    )
    handle = GradientHandle()
    handle.attach(model.parameters(), {})
    return model, handle


def test_gradients_of_a_backward_that_failed_are_cast_by_no_later_one():
    """They stay as they are, later ones are cast all the same, and nothing keeps the parameters alive."""
    model, _ = build_pair()
    x = torch.randn(4, 256, requires_grad=True)

    def fail(_):
        raise ValueError("as asked")

    hook = x.register_hook(fail)  # the last gradient of the backward
    for _ in range(2):
        with pytest.raises(ValueError, match="as asked"):
            model(x).sum().backward()
        assert type(model[1].weight.grad) is torch.Tensor
    hook.remove()
    model.zero_grad()
    model(x).sum().backward()
    assert {type(p.grad) for p in model.parameters()} == {BlockScaledTensor}
    weak = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weak() is None


def test_hooks_of_users_and_a_backward_inside_a_backward():
    """A hook may free a gradient before its turn; reentrant checkpointing runs backwards inside backwards."""
    model, _ = build_pair()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    x = torch.randn(4, 256, requires_grad=True)
    hidden = checkpoint(model[0], x, use_reentrant=True)
    hidden = checkpoint(model[1], hidden, use_reentrant=True)
    model[1](hidden[:, :128]).sum().backward()
    assert model[0].weight.grad is None
    assert isinstance(model[1].weight.grad, BlockScaledTensor)


def test_few_gradients_wait_with_backwards_inside_a_backward(monkeypatch):
    """Every second layer has a backward of its own, after which the outer one goes on counting."""
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
    size = layers[0].weight.nbytes
    monkeypatch.setattr(gradients, "WAITING", 3 * size)
    GradientHandle().attach(layers.parameters(), {})
    most = []

    def record(_):
        most.append(sum(type(p.grad) is torch.Tensor for p in layers.parameters()))

    for p in layers.parameters():
        p.register_post_accumulate_grad_hook(record)
    x = torch.randn(4, 128, requires_grad=True)
    for i, layer in enumerate(layers):
        x = checkpoint(layer, x, use_reentrant=True) if i % 2 else layer(x)
    x.sum().backward()
    assert max(most) == 3  # two of the outer one, one of an inner one
    assert {type(p.grad) for p in layers.parameters()} == {BlockScaledTensor}


@torch._dynamo.config.patch(compiled_autograd=True)
def test_compiled_autograd_makes_them_fp8():
    model, _ = build_pair()

    @torch.compile(backend="eager")
    def step(x):
        model(x).sum().backward()

    for _ in range(2):
        model.zero_grad()
        step(torch.randn(4, 256))
        assert {type(p.grad) for p in model.parameters()} == {BlockScaledTensor}


@pytest.mark.gpu
def test_gradients_of_two_streams_are_those_of_one():
    """Each layer's forward, and so its backward, runs on a stream of its own."""
    found = []
    for streams in ([torch.cuda.current_stream()] * 2, [torch.cuda.Stream(), torch.cuda.Stream()]):
        torch.manual_seed(0)
        model, _ = build_pair("cuda")
        x = torch.randn(8192, 256, device="cuda")
        for _ in range(3):
            model.zero_grad()
            y = x
            for layer, stream in zip(model, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    y = layer(y)
                torch.cuda.current_stream().wait_stream(stream)
            y.square().sum().backward()
        found.append(
            [part.view(torch.uint8) for p in model.parameters() for part in p.grad.parts()]
        )
    assert_same_bits(*found)
