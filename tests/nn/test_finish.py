"""`fp8stack.finish`: what multiplies in FP8 does so in bfloat16 from now on, and nothing else changes."""

import warnings

import pytest
import torch
from helpers import assert_same_bits
from layers import COPIES, KINDS, RECIPE, conv1d, experts_of, make, results
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8stack
from fp8stack.monitor import Monitor
from fp8stack.nn import grouped_matmul
from fp8stack.nn.linear import bf16_matmul
from fp8stack.nn.mixin import mix
from fp8stack.nn.te import Engine, TeLayer


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 40))


def initialized(level="O2", **options):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return fp8stack.initialize(model, optimizer, level, **options)


def train(model, optimizer, steps=3):
    tokens, losses = torch.arange(64).view(2, 32) % 37, []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def expected_of(kind, recipe, model, x):
    """Return what bfloat16 makes of x by the weights of a model: output, and gradients where those are compared."""
    if kind == "norm":  # which stays fused
        return [bf16_matmul(model[0](x), model[1].weight, model[1].bias, "")]
    if kind == "bare":
        (a, b, w), y = model.parameters(), torch.cat([x, x], -1)
        for p in (a, b):
            y = bf16_matmul(y, p.t(), None, "")
        return [bf16_matmul(y, w[0].t(), None, "") + bf16_matmul(y, w[1], None, "")]
    plain, _ = fp8stack.restore(make(kind, recipe=recipe))
    plain.load_state_dict(model.state_dict())
    return results(fp8stack.initialize(plain, None, "O0", compute="bf16")[0], x)


@KINDS
def test_products_are_bfloat16_s_bit_for_bit(kind, recipe):
    """Those of compute="bf16", of copies too. A fused MLP is left to its own forward."""
    x = torch.randn((3, 16, 32) if kind == "attention" else (48, 32))
    model = make(kind, recipe=recipe)
    before, earlier = results(model, x)[0], COPIES["pickle"](model)
    assert fp8stack.finish(model)
    assert not fp8stack.finish(model)
    found = results(model, x)
    assert not torch.equal(found[0], before)
    for a, b in zip(found, expected_of(kind, recipe, model, x), strict=False):
        assert_same_bits(a, b)
    for copied in (COPIES["deepcopy"](model), COPIES["pickle"](model)):
        assert not fp8stack.finish(copied)
        assert_same_bits(copied(x), found[0])
    assert fp8stack.finish(earlier)
    assert_same_bits(earlier(x), found[0])


@RECIPE
def test_only_products_change(recipe):
    """The optimizer goes on with the states, masters and formats that it has, and a checkpoint resumes the run."""
    model, optimizer = initialized(fp8_recipe=recipe)
    train(model, optimizer)
    weights, states = model.state_dict(), optimizer.state_dict()
    assert fp8stack.finish(model)
    for a, b in zip(weights.values(), model.state_dict().values(), strict=True):
        assert_same_bits(a, b)
    losses = []
    for options in ({}, {"fp8_recipe": recipe}, {"compute": "bf16"}):
        if options:  # a new process, which loads
            again, stepped = initialized(**options)
            again.load_state_dict(weights)
            stepped.load_state_dict(states)
            assert fp8stack.finish(again) == ("compute" not in options)
        else:
            weights = {name: value.clone() for name, value in weights.items()}
            states = COPIES["pickle"](states)
            again, stepped = model, optimizer
        losses.append((train(again, stepped), again.state_dict()))
    for found, after in losses[1:]:
        assert found == losses[0][0]
        for a, b in zip(after.values(), losses[0][1].values(), strict=True):
            assert_same_bits(a, b)
    assert {type(model.get_submodule(n)).__name__ for n in "13"} == {"Fp8Linear"}


@pytest.fixture
def said(caplog, monkeypatch):
    """What is logged."""
    monkeypatch.setenv("FP8STACK_QUIET", "0")
    caplog.set_level("INFO", "fp8stack")
    return caplog


def test_the_card_says_so_once_and_restore_undoes_it(said):
    model, optimizer = initialized()
    wrapped = nn.Sequential(model)  # as DDP and torch.compile hold it
    said.clear()
    assert fp8stack.finish(wrapped)
    assert not fp8stack.finish(wrapped)
    assert said.messages == ["fp8stack: products are in bfloat16 from now on (finish)"]
    card = str(fp8stack.get_report(model))
    assert "GEMM bf16 ·" in card
    assert "compute bf16 (finished)" in card
    assert "bf16 multiplies 100 %" in card
    model, optimizer = fp8stack.restore(model, optimizer)
    assert type(model[1]) is nn.Linear
    model, optimizer = fp8stack.initialize(model, optimizer, "O2")
    assert "fp8=hybrid, tokenwise" in repr(model)


def test_without_fp8_there_is_nothing_to_finish(said):
    model, _ = initialized(compute="bf16")
    said.clear()
    assert not fp8stack.finish(model)
    assert not fp8stack.finish(mlp())
    assert said.messages == []


def test_frozen_weights_in_fp8_are_read_as_their_values():
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    fp8stack.initialize(model, None, "O0", frozen="fp8")
    x, layer = torch.randn(16, 64), model[0]
    fp8stack.finish(model)
    assert_same_bits(layer(x), bf16_matmul(x, layer.weight.dequantize(), layer.bias, ""))
    model(x).sum().backward()


def test_a_compiled_model_is_compiled_anew():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, _ = initialized("O0")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    tokens = torch.arange(64) % 37
    first = compiled(tokens)
    fp8stack.finish(compiled)
    for _ in range(2):
        found = compiled(tokens)
        assert_same_bits(found, model(tokens))
    assert not torch.equal(found, first)
    assert counter.frame_count == 2


def test_a_monitor_has_nothing_to_tell():
    model, optimizer = initialized()
    monitor = Monitor(model, optimizer, every=1)
    train(model, optimizer, 1)
    fp8stack.finish(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)
    monitor.remove()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_transformers_own_again(dtype, autocast):
    """Stacks that a level stores in bfloat16 take float32 tokens without autocast, too."""
    pytest.importorskip("transformers")
    experts = experts_of("Qwen3Moe", 64, 32, 4).to(dtype)
    experts.config._experts_implementation = "grouped_mm"
    x, top = torch.randn(16, 64), torch.randint(4, (16, 2))
    weights = torch.rand(16, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = experts(x.to(dtype), top, weights.to(dtype))
        model, _ = fp8stack.initialize(nn.Sequential(experts), None, "O0")
        assert fp8stack.finish(model)
        found = model[0](x.to(dtype), top, weights.to(dtype))
        assert_same_bits(found, expected)
        if dtype is torch.bfloat16:
            found = model[0](x, top, weights)
            assert found.dtype is torch.float32
            torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 64, 64).bfloat16())

    def forward(self, x, offs):
        return nn.functional.grouped_mm(x, self.w, offs=offs)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch has no grouped_mm")
def test_grouped_products_are_torch_s_again():
    model, x = Grouped(), torch.randn(32, 64).bfloat16()
    offs = torch.tensor([16, 32], dtype=torch.int32)
    expected = model(x, offs)
    fp8stack.initialize(model, None, "O0", matmuls=True)
    assert_same_bits(model(x, offs), grouped_matmul(x, model.w, offs))
    fp8stack.finish(model)
    assert_same_bits(model(x, offs), expected)
    assert fp8stack.get_report(model).left_alone == {"fp8stack.finish was called": 1}


def test_layers_of_transformer_engine_multiply_without_it():
    """Nothing of the library is called, so that it need not be there."""
    for layer in (nn.Linear(32, 48), conv1d(32, 48)):
        x, weight = (
            torch.randn(16, 32),
            layer.weight if type(layer) is nn.Linear else layer.weight.t(),
        )
        expected = bf16_matmul(x, weight, layer.bias, "")
        mix(layer, TeLayer, te=Engine(fp8stack.levels.recipe_for("O0")))
        assert fp8stack.finish(layer)
        for again in (layer, COPIES["deepcopy"](layer)):
            assert_same_bits(again(x), expected)
