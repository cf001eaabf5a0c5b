"""`fp8stack.tune`: costs are measured, times are known numbers here, and the options give what was chosen."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same_bits
from torch import nn

import fp8stack
from fp8stack import tuning
from fp8stack.__main__ import main
from fp8stack.cli import machine
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.levels import PRECISIONS
from fp8stack.nn.convert import choose_layers
from fp8stack.tuning import TunedLayer, search, tune

MS = {"": 1.0, "forward": 2.0, "forward dgrad wgrad": 4.0}


@pytest.fixture
def known_times(monkeypatch):
    """Let each layer take MS; return the calls."""
    calls = []

    def layer_ms(layer, call, in_bf16):
        calls.append((layer, call, in_bf16))
        return MS[in_bf16]

    monkeypatch.setattr(tuning, "layer_ms", layer_ms)
    return calls


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 48), nn.Linear(48, 32), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(self.up(x).relu()))


class Model(nn.Module):
    """A language model that multiplies its blocks' inputs; returns logits as transformers' do, or a loss."""

    def __init__(self, blocks=3, returns="logits"):
        super().__init__()
        self.embed, self.returns = nn.Embedding(96, 32), returns
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(32, 96)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if self.returns == "loss":
            return SimpleNamespace(loss=nn.functional.cross_entropy(logits.mT, tokens))
        return {"tensor": logits, "logits": {"logits": logits}, "tuple": (logits,)}[self.returns]


TOKENS = torch.arange(192).view(4, 48) * 7 % 96


def spoiled(name="blocks.1.down", **options):
    """Return a model with a layer whose weight has outliers that cancel in bfloat16, and not in E4M3."""
    model = Model(**options)
    weight, first = model.get_submodule(name).weight, model.get_submodule(name.replace("down", "up"))
    with torch.no_grad():
        weight[:, 0], weight[:, 1] = 8192.0, -8704.0
        first.weight[:2] = 0.0
        first.bias[:2] = torch.tensor([1.0625, 1.0])
    return model


def state_of(model):
    return {
        name: (type(m), m.training, {**vars(m)}.keys(), [len(v) for k, v in vars(m).items() if "hooks" in k])
        for name, m in model.named_modules()
    }  # fmt: skip


def precisions(model, options):
    """Return what layers multiply in bfloat16 at O2 with these options."""
    optimizer = torch.optim.AdamW(model.parameters())
    fp8stack.initialize(model, optimizer, "O2", **options)
    report = fp8stack.get_report(model)
    found = {n: report.in_bf16.get(n, "") for n in report.converted}
    return found | {n: PRECISIONS["bf16"] for n in report.skipped}


# --- the choice


def layer(name, cost, fp8, forward=None, bf16=4.0):
    ms = {"fp8": fp8, "bf16": bf16} | ({} if forward is None else {"forward-bf16": forward})
    return TunedLayer(name, cost=cost, calls=1, ms=ms)


def test_the_choice_from_known_numbers():
    layers = [
        layer("cheap", 0.001, 1.0, 2.0), layer("dear", 0.9, 1.0, 2.0), layer("slow", 0.0, 5.0, 6.0),
        layer("backward slow", 0.004, 3.0, 5.0), layer("experts", 0.003, 2.0), layer("broken", math.inf, 1.0, 3.0),
        layer("best so", 0.0, 2.5, 2.0),
    ]  # fmt: skip
    costs = {x.name: x.cost for x in layers}
    runs = []

    def measure(mix):
        runs.append(mix)
        return factor * sum(costs[n] for n, how in mix.items() if how == "fp8")

    expected = {
        "cheap": "fp8", "dear": "forward-bf16", "slow": "bf16", "backward slow": "fp8", "experts": "fp8",
        "broken": "forward-bf16", "best so": "forward-bf16",
    }  # fmt: skip
    factor = 1
    assert search(layers, 0.01, measure) == (expected, pytest.approx(0.008))
    assert len({str(sorted(mix.items())) for mix in runs}) == len(runs) <= 3
    # costs that add up to more: the least ms for its cost goes first, and the mix is run again
    factor = 2
    assert search(layers, 0.01, measure) == (expected | {"backward slow": "bf16"}, pytest.approx(0.008))
    # to less: there is room
    factor = 0.1
    expected["dear"] = "fp8"
    assert search(layers, 0.1, measure) == (expected, pytest.approx(0.0908))
    assert search(layers, 1e-9, measure)[0]["cheap"] == "forward-bf16"
    # what is not chosen is over the budget alone
    assert search(layers, 0.01, lambda mix: 0.5)[1] == 0.5


@pytest.mark.parametrize("blocks", [3, 12])
def test_a_bad_layer_is_found_and_the_options_give_what_was_measured(known_times, blocks):
    model = spoiled(blocks=blocks)
    bits = {n: v.clone() for n, v in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.blocks[0].eval()
    state = state_of(model)
    generator = torch.get_rng_state()
    found = tune(model, {"tokens": TOKENS}, budget=1e-3)
    assert state_of(model) == state
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in model.state_dict().items():
        assert_same_bits(value, bits[name])
    assert all((p.grad == 1).all() for p in model.parameters())
    assert found.met
    assert 0 < found.cost <= 1e-3
    costs = {x.name: x.cost for x in found.layers}
    assert max(costs, key=costs.get) == "blocks.1.down"
    assert costs["blocks.1.down"] > 1e-2 > 3 * sorted(costs.values())[-2]
    assert found.options == {
        "select": "all", "head": "fp8", "precision_for": {"blocks.1.down": "forward-bf16"}
    }  # fmt: skip
    assert len(known_times) == 3 * 3  # of each shape once
    assert json.loads(json.dumps(found.to_dict()))["options"] == found.options
    model.zero_grad()
    given = precisions(model, found.options)
    assert given == {x.name: PRECISIONS[x.precision] for x in found.layers}
    assert given["blocks.1.down"] == "forward"
