"""`fp8stack.tune`: costs are measured, times are known numbers here, and the options give what was chosen."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same_bits, refused_in_a_line
from layers import conv1d, experts_of
from torch import nn

import fp8stack
from fp8stack import capability, tuning
from fp8stack.__main__ import main
from fp8stack.capability import Answer
from fp8stack.cli import machine
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.levels import PRECISIONS
from fp8stack.tuning import Tuned, TunedLayer, search, tune

BF16 = PRECISIONS["bf16"]
MS = {"": 1.0, "forward": 2.0, "wgrad": 3.0, "forward wgrad": 3.5, BF16: 4.0}


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
    weight, first = (
        model.get_submodule(name).weight,
        model.get_submodule(name.replace("down", "up")),
    )
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
    return found | dict.fromkeys(report.skipped, PRECISIONS["bf16"])


# --- the choice


def layer(name, cost, fp8, forward=None, bf16=4.0):
    ms = {"fp8": fp8, "bf16": bf16} | ({} if forward is None else {"forward-bf16": forward})
    return TunedLayer(name, cost=cost, calls=1, ms=ms, precision="bf16")


def test_the_choice_from_known_numbers():
    layers = [
        layer("cheap", 0.001, 1.0, 2.0), layer("dear", 0.09, 1.0, 2.0), layer("slow", 0.0, 5.0, 6.0),
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
    assert len({str(sorted(mix.items())) for mix in runs}) == len(runs) <= tuning.ROUNDS
    # costs that add up to more: the least ms for its cost goes first, and the mix is run again
    factor = 2
    assert search(layers, 0.01, measure) == (
        expected | {"backward slow": "bf16"},
        pytest.approx(0.008),
    )
    # to less: there is room
    factor = 0.1
    expected["dear"] = "fp8"
    assert search(layers, 0.095, measure) == (expected, pytest.approx(0.0098))
    # but none that is over the budget alone, whatever it does with others
    assert search(layers, 0.08, measure)[0]["dear"] == "forward-bf16"
    assert search(layers, 1e-9, measure)[0]["cheap"] == "forward-bf16"
    # what is not chosen is over the budget alone
    assert search(layers, 0.01, lambda mix: 0.5)[1] == 0.5


def test_where_no_layer_is_faster_in_fp8_it_is_said():
    slow, dear = layer("slow", 0.0, 5.0), layer("dear", 9.0, 1.0)
    for layers, said in (([slow], True), ([slow, dear], False)):
        told = str(Tuned({}, 0.0, 1.0, True, "KL", "H200", layers))
        assert ("no layer is faster in FP8" in told) is said


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
        "select": "all", "precision_for": {"blocks.1.down": "forward-bf16", "head": "fp8"}
    }  # fmt: skip
    assert len(known_times) == 3 * 3  # of each shape once
    assert json.loads(json.dumps(found.to_dict()))["options"] == found.options
    model.zero_grad()
    given = precisions(model, found.options)
    assert given == {x.name: PRECISIONS[x.precision] for x in found.layers}
    assert given["blocks.1.down"] == "forward"


def test_without_products_of_blocks_none_are_timed(known_times, monkeypatch):
    monkeypatch.setattr(
        capability, "native_recipe", lambda name, _: Answer(name != "blockwise", "no")
    )
    found = tune(Model(), TOKENS, budget=0.01)
    assert {in_bf16 for *_, in_bf16 in known_times} == {"", BF16}
    assert "forward-bf16" not in str(found.options)


def test_options_that_are_given_hold(known_times):
    given = {
        "fp8_recipe": "blockwise", "skip": ["blocks.0"], "first_last": 1, "wgrad": "bf16", "states": "4bit",
        "precision_for": {"blocks.1.up": "fp8"},
    }  # fmt: skip
    model = Model(blocks=4)
    with pytest.warns(Fp8StackWarning, match="what is not to be chosen costs .*budget=1e-09"):
        found = tune(model, (TOKENS,), budget=1e-9, **given)
    assert not found.met
    assert "OVER the budget" in str(found)
    assert {in_bf16 for *_, in_bf16 in known_times} == {"wgrad", "forward wgrad", BF16}
    names = ["blocks.1.down", "blocks.2.up", "blocks.2.down", "head"]
    forward = dict.fromkeys(names, "forward-bf16")
    assert {x.name: x.precision for x in found.layers} == forward | {"blocks.1.up": "as given"}
    del forward["head"]  # where it is the default
    patterns = given["precision_for"] | forward
    assert found.options == given | {"select": "all", "precision_for": patterns}
    off = {f"blocks.{i}.{part}": BF16 for i in (0, 3) for part in ("up", "down")}
    expected = off | dict.fromkeys(names, "forward wgrad") | {"blocks.1.up": ""}
    assert precisions(model, found.options) == expected


def test_costs_of_a_loss(known_times):
    """The change that one layer makes, as counted by hand; with layers of no gain left in bfloat16."""
    model = spoiled(returns="loss")
    found = tune(model, TOKENS, budget=0.01)
    assert found.unit == "absolute change of the loss"
    assert {x.name: x.precision for x in found.layers}["blocks.1.down"] == "forward-bf16"
    assert 0 < found.cost <= 0.01
    again = Model(returns="tuple")
    again.load_state_dict(model.state_dict())
    by_hand = lambda output: nn.functional.cross_entropy(output[0].mT, TOKENS)  # noqa: E731
    assert tune(again, TOKENS, budget=0.01, loss=by_hand).to_dict() == found.to_dict()
    losses = []
    for how in ("fp8", "bf16"):
        layers = {"*": "bf16", "blocks.2.up": how}
        fp8stack.initialize(model.eval(), None, "O0", precision_for=layers)
        losses.append(model(TOKENS).loss.item())
        fp8stack.restore(model)
    costs = {x.name: x.cost for x in found.layers}
    assert costs["blocks.2.up"] == pytest.approx(abs(losses[0] - losses[1]), abs=1e-9)
    assert costs["blocks.2.up"] > 0


class Odd(nn.Module):
    """Attention, noise, a layer that is called twice, one that is not, and products by bare parameters."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.twice, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)
        self.inner = Bare()

    def forward(self, x):
        x = x + self.attention(x, x, x)[0] + 0.1 * torch.rand_like(x)
        return self.inner(self.twice(self.twice(x)))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 128) / 4)

    def forward(self, x):
        return x @ self.w


def test_attention_calls_and_bare_parameters(known_times):
    model, x = Odd(), torch.randn(4, 16, 32)
    found = tune(model, x, budget=10.0)
    layers = {x.name: x for x in found.layers}
    assert layers.keys() == {"attention", "twice", "unused"}
    assert layers["attention"].cost > 0  # which torch's own path in evaluation would not show
    assert layers["twice"].ms == {how: 2 * MS[PRECISIONS[how]] for how in layers["twice"].ms}
    assert [layers[n].precision for n in layers] == ["fp8", "fp8", "as given"]
    assert found.options == {"select": "all"}
    bare = found.cost - sum(x.cost for x in found.layers)
    assert bare > 1e-5
    expected = {
        "select": "all",
        "precision_for": dict.fromkeys(("attention", "twice"), "forward-bf16"),
    }
    found = tune(model, x, budget=1e-7, matmuls=False)
    assert found.options == expected | {"matmuls": False}
    assert found.cost == 0
    with pytest.warns(
        Fp8StackWarning,
        match="what is not to be chosen costs .*budget=1e-07: unused.*matmuls=False",
    ):
        found = tune(model, x, budget=1e-7)
    assert not found.met
    assert "OVER the budget" in str(found)
    assert found.options == expected


class Routed(nn.Module):
    """Experts of transformers, with a router that knows its tokens, and a Conv1D."""

    def __init__(self):
        super().__init__()
        self.first, self.experts = conv1d(32, 32), experts_of("Qwen3Moe", 32, 64, 4)

    def forward(self, x, index):
        return self.experts(self.first(x), index, torch.full(index.shape, 0.5))


def test_experts_are_in_fp8_or_not(known_times):
    model, x, index = Routed(), torch.randn(64, 32), torch.arange(128).view(64, 2) % 4
    found = tune(model, (x, index), budget=1e-9)
    names = {"first": "forward-bf16", "experts": "bf16"}
    assert {x.name: x.precision for x in found.layers} == names
    assert found.options == {"select": "all", "precision_for": names}
    assert len(known_times) == 3 + 2
    (_, given, _), _ = known_times[-1][1]  # a router's choice has values
    assert given.equal(index)
    assert min(x.cost for x in found.layers) > 1e-9
    assert tune(model, (x, index), budget=1.0).options == {"select": "all"}


class TwoHeads(nn.Module):
    """A head that is called, one that is not, and logits by a bare embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(96, 32), nn.Linear(32, 32)
        self.lm_head, self.other_head = nn.Linear(32, 96), nn.Linear(32, 96)

    def forward(self, tokens):
        x = self.mid(self.embed(tokens))
        return self.lm_head(x) + x @ self.embed.weight.t()


def test_what_the_options_give_is_what_was_measured(known_times):
    """Of products too that are not chosen: the head's default reaches further than one layer."""
    torch.manual_seed(0)
    model = TwoHeads().eval()
    found = tune(model, TOKENS, budget=10.0)
    assert found.options == {"select": "all", "precision_for": {"lm_head": "fp8"}}
    logits = []
    for options in (found.options, {"compute": "bf16"}):
        ours, _ = fp8stack.initialize(model, None, "O0", **options)
        logits.append(ours(TOKENS).detach().log_softmax(-1))
        fp8stack.restore(model)
    ours, plain = logits
    cost = (plain.exp() * (plain - ours)).sum(-1).mean().item()
    assert found.cost == pytest.approx(cost, rel=0.05)
    # a head that is given is not chosen
    found = tune(model, TOKENS, budget=10.0, head="forward-bf16")
    assert found.options == {"select": "all", "head": "forward-bf16"}
    assert [x.precision for x in found.layers if "head" in x.name] == ["as given"] * 2


def test_patterns_that_are_given_twice_keep_their_order(known_times):
    given = [("0", "bf16"), ("[01]", "forward-bf16"), ("0", "fp8")]
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    found = tune(model, torch.randn(8, 32), budget=1e-12, precision_for=given)
    assert list(found.options["precision_for"].items()) == [
        ("[01]", "forward-bf16"), ("0", "fp8"), ("2", "forward-bf16")
    ]  # fmt: skip
    assert precisions(model, found.options) == {"0": "", "1": "forward", "2": "forward"}


def test_frozen_attention_is_measured_in_fp8(known_times):
    """Not by torch's own path, which it takes in evaluation without gradients."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    costs = []
    for trained in (True, False):
        encoder = nn.TransformerEncoder(layer, 2).requires_grad_(trained)
        torch.manual_seed(0)
        found = tune(encoder, torch.randn(4, 16, 32), budget=10.0)
        costs.append([x.cost for x in found.layers])
        assert not any(p.requires_grad is not trained for p in encoder.parameters())
    assert costs[0] == costs[1]
    assert len(set(costs[0])) > 1
    given = tune(encoder, torch.randn(4, 16, 32), precision_for={"*.out_proj": "bf16"})
    attention = [x.precision for x in given.layers if x.name.endswith("self_attn")]
    assert attention == ["as given"] * 2


class Counting(nn.Module):
    """Counts calls and writes to what it is given, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x.mul_(2.0)) * self.calls


def test_buffers_and_the_batch_are_as_before(known_times):
    model, x = Counting(), torch.randn(16, 32)
    before = x.clone()
    found = tune(model, x, budget=10.0)
    assert model.calls == 0
    assert x.equal(before)
    assert 0 < found.cost < 0.1
    again = tune(torch.compile(model, backend="eager"), x, budget=10.0)  # by the names inside
    assert again.to_dict() == found.to_dict()


# --- what it refuses


class OneClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(96, 32), nn.Linear(32, 1)

    def forward(self, tokens):
        return self.layer(self.embed(tokens))


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model = Model()
    model.blocks[0].eval()
    state, rng = state_of(model), torch.get_rng_state()
    with pytest.raises(
        UnsupportedDeviceError, match="this model is on cpu, where FP8 products are emulated"
    ):
        tune(model, TOKENS)
    with pytest.raises(IndexError):
        tune(model, TOKENS + 96)
    assert state_of(model) == state
    assert torch.equal(torch.get_rng_state(), rng)


def test_refuses_what_cannot_be_tuned(known_times):
    broken = Model()
    broken.head.weight.detach()[3, 3] = math.nan
    level, _ = fp8stack.initialize(Model(), None, "O0")
    for budget in (0, -1.0, math.nan, math.inf, "0.1"):
        with pytest.raises(ConfigError, match=r"budget=.* must be a finite number > 0"):
            tune(Model(), TOKENS, budget=budget)
    for error, message, model, options in (
        (ConfigError, 'Did you mean "fp8_recipe"', Model(), {"fp8_recip": "current"}),
        (ConfigError, 'frozen="fp8": it would round', Model(), {"frozen": "fp8"}),
        (ModelError, "already converted by fp8stack", level, {}),
        (ModelError, "no layers for FP8: there is nothing to tune. Left out: ", Model(), {"skip": ["*"]}),
        (ModelError, "the batch calls no layer with a name of its own", Model(), {"precision_for": {"*": "fp8"}}),
        (ModelError, "no layers for FP8", nn.LayerNorm(8), {}),
        (ModelError, "the logits of this batch in bfloat16 must be finite", broken, {}),
        (ModelError, "the model returned tuple, which has no logits", Model(returns="tuple"), {}),
        (ModelError, "the model returned Tensor, which has no logits", OneClass(), {}),
        (ModelError, r"loss=\.\.\. returned dict", Model(), {"loss": lambda output: output}),
        (UnsupportedDeviceError, r"bf16 \(asked for\)\. Leave compute out", Model(), {"compute": "bf16"}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            tune(model, TOKENS, **options)


# --- the command


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))\n"
        "def batch():\n    return torch.arange(64).view(4, 16)\n"
    )
    return path


def test_the_command(file, known_times, capsys):
    command = ["tune", f"{file}:model", "--batch", f"{file}:batch", "--fp8-recipe", "current"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"] == {
        "fp8_recipe": "current",
        "select": "all",
        "precision_for": {"1": "fp8"},
    }
    assert found["layers"][0]["ms"] == {"fp8": 1.0, "forward-bf16": 2.0, "bf16": 4.0}
    assert main([*command, "--budget", "1e-9"]) == 0
    shown = capsys.readouterr().out
    assert "options: {'select': 'all', 'fp8_recipe': 'current'}" in shown
    assert "forward-bf16" in shown
    assert "budget=0.0 must be" in refused_in_a_line(capsys, *command, "--budget", 0)


def test_the_command_says_where_times_mean_nothing(file, capsys):
    command = ["tune", f"{file}:model", "--batch", f"{file}:batch"]
    assert "this model is on cpu" in refused_in_a_line(capsys, *command)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["auto", "delayed", "blockwise"])
def test_real_times(recipe):
    """At 8,192 × 8,192 FP8 saves time on a slow host too, at 64 × 64 on none; a bad layer is found all the same."""
    model = nn.Sequential(
        *(nn.Linear(8192, 8192) for _ in range(3)), nn.Linear(8192, 64), nn.Linear(64, 64)
    ).cuda()
    with torch.no_grad():
        model[0].weight[:2], model[0].bias[:2] = 0.0, torch.tensor([1.0625, 1.0])
        model[1].weight[:, 0], model[1].weight[:, 1] = 8192.0, -8704.0
    bits = {n: v.clone() for n, v in model.state_dict().items()}
    found = tune(model, torch.randn(8192, 8192, device="cuda"), budget=1e-3, fp8_recipe=recipe)
    print(found)
    chosen = {x.name: x.precision for x in found.layers}
    assert found.met
    assert chosen["2"] == "fp8"
    assert chosen["4"] == "bf16"
    assert chosen["1"] == "forward-bf16"
    assert all(min(x.ms.values()) > 0 for x in found.layers)
    for name, value in model.state_dict().items():
        assert_same_bits(value, bits[name])
    torch.cuda.synchronize()
    assert precisions(model, found.options)["2"] == ""
