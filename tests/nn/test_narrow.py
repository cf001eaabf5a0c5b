"""Layers left in bfloat16 share the cast of their input, with autocast's own numbers."""

import io

import pytest
import torch
from helpers import assert_same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8stack import initialize
from fp8stack.nn import narrow
from fp8stack.nn.notes import noted
from fp8stack.nn.select import NEVER

READERS = 3


class Readers(nn.Module):
    """A norm, and layers that read its output; too small for FP8."""

    def __init__(self, readers=READERS, same=True):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.layers = nn.ModuleList(nn.Linear(32, 32 if same else 16) for _ in range(readers))

    def forward(self, x):
        h = self.norm(x)
        return sum((i + 1) * layer(h).float().tanh() for i, layer in enumerate(self.layers))


def step(model, x, run=None, dtype=torch.bfloat16):
    """Return the output, the gradient of the input, and those of the parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype):
        y = (run or model)(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture
def pair(device):
    """Return a model, the same at O0 with layers that stay in bfloat16, and an input."""

    def make(**options):
        torch.manual_seed(0)
        plain = Readers(**options).to(device)
        torch.manual_seed(0)
        ours, _ = initialize(Readers(**options).to(device), None, "O0", select="all", fuse=False)
        for layer in ours.layers:
            layer.products.least_rows = NEVER
        return plain, ours, torch.randn(5, 32, device=device)

    return make


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_those_of_autocast(readers, dtype, pair):
    plain, ours, x = pair(readers=readers)
    expected = step(plain, x, dtype=dtype)
    for _ in range(readers + 1):  # one more reader is known in each
        for one, same in zip(step(ours, x, dtype=dtype), expected, strict=True):
            if readers <= 4:
                assert_same_bits(one, same)
            else:  # the copies of each group are added up first
                torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-5)


def test_layers_read_one_copy(pair):
    _, ours, x = pair()
    read = []
    for layer in ours.layers:
        layer.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    for _ in range(READERS):
        step(ours, x)
    read.clear()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        step(ours, x)
    memory = {t.data_ptr() for t in saved if t.dtype is torch.bfloat16 and t.shape == x.shape}
    assert len({id(t) for t in read}) == 1
    assert noted(read[0], "narrow")[1] == []
    assert len(memory) == 1


def test_a_layer_that_is_not_called_gives_no_gradient(pair):
    plain, ours, x = pair()
    for _ in range(READERS):
        step(ours, x)
    for model in (plain, ours):
        model.layers[2].forward = lambda h: h  # reads in float32
    for one, same in zip(step(ours, x)[:2], step(plain, x)[:2], strict=True):
        torch.testing.assert_close(one, same, rtol=1e-6, atol=1e-6)  # another order of additions


def test_an_input_that_changed_is_cast_again(pair):
    plain, ours, x = pair()

    def forward(model, x):
        h = model.norm(x)
        first = model.layers[0](h)
        h.mul_(2)
        return first.float() + model.layers[1](h).float()

    for model in (ours, ours):
        found = step(model, x, lambda x: forward(ours, x))
    for one, same in zip(found[:2], step(plain, x, lambda x: forward(plain, x))[:2], strict=True):
        assert_same_bits(one, same)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_has_the_same_numbers(reentrant, pair):
    plain, ours, x = pair()
    expected = step(plain, x)
    for _ in range(READERS):
        found = step(ours, x, lambda x: checkpoint(ours, x, use_reentrant=reentrant))
        for one, same in zip(found, expected, strict=True):
            assert_same_bits(one, same)


def test_a_recomputation_is_no_further_reader(pair):
    """Whose copy would stay with the input, that checkpoints keep, from forward to backward."""
    _, ours, x = pair()
    for _ in range(READERS):
        h = x.clone().requires_grad_() * 1
        with torch.autocast(x.device.type, torch.bfloat16):
            y = checkpoint(lambda h: sum(layer(h) for layer in ours.layers), h, use_reentrant=False)
        first, copies = noted(h, "narrow")
        y.float().square().sum().backward()
    assert copies == []
    assert first.counted == READERS


def test_derivatives_that_functions_in_python_do_not_have(pair):
    """Of forward mode, and of many gradients at once."""
    plain, ours, x = pair()
    for _ in range(READERS):
        step(ours, x)
    found = []
    for model in (plain, ours):
        h = model.norm(x).detach().requires_grad_() * 1

        def run(h, model=model):
            with torch.autocast(x.device.type, torch.bfloat16):
                return sum(layer(h).float() for layer in model.layers)

        with torch.autograd.forward_ad.dual_level():
            dual = run(torch.autograd.forward_ad.make_dual(h, torch.ones_like(h)))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        y = run(h)
        many = torch.autograd.grad(
            y, h, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True
        )
        found.append([tangent, *many])
    for one, same in zip(*found, strict=True):
        assert_same_bits(one, same)


def test_second_derivatives_are_those_of_autocast(pair):
    plain, ours, x = pair()
    step(ours, x), step(ours, x)
    penalties = []
    for model in (plain, ours):
        given = x.clone().requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16):
            y = model(given)
        (dx,) = torch.autograd.grad(y.sum(), given, create_graph=True)
        penalties.append(torch.autograd.grad(dx.square().sum(), given)[0])
    torch.testing.assert_close(*penalties)


def test_hooks_of_the_input_see_its_whole_gradient(pair):
    plain, ours, x = pair()
    for _ in range(READERS):
        step(ours, x)
    seen = []
    for model in (plain, ours):
        model.norm.register_forward_hook(lambda m, _, h: h.register_hook(seen.append) and None)
        step(model, x)
    assert_same_bits(*seen)


def test_an_input_can_be_saved(pair):
    _, ours, x = pair()
    step(ours, x)
    h = ours.norm(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        ours.layers[0](h)
    file = io.BytesIO()
    torch.save(h, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_bits(loaded, h)
    assert noted(loaded, "narrow") is None


def test_what_needs_no_cast_is_left_alone(pair, monkeypatch):
    products, leaf = pair()[1].layers[0].products, torch.ones(2, requires_grad=True)
    products.counted, inner = READERS, leaf * 1
    with torch.no_grad():
        assert narrow.narrowed(inner, products) is inner
    monkeypatch.setattr(narrow, "output_dtype", lambda x: torch.float32)
    assert all(narrow.narrowed(x, products) is x for x in (leaf, inner))


def test_a_layer_that_is_always_alone_is_not_looked_at_again(pair):
    _, ours, x = pair(readers=1)
    alone = [(step(ours, x), ours.layers[0].products.alone)[1] for _ in range(4)]
    assert alone == [0, 1, 2, 2]
