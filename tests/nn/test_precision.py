"""Which products of a layer are in bfloat16: by wgrad, head, first_last and precision_for."""

import copy
import re
import warnings
from collections import OrderedDict

import pytest
import torch
from helpers import assert_same_bits
from layers import COPIES, conv1d
from torch import nn

import fp8stack
from fp8stack.comm.fsdp import _weights
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.levels import PRECISIONS, recipe_for
from fp8stack.nn.convert import choose_layers
from fp8stack.nn.linear import Bf16Layer, Fp8Layer, bf16_matmul
from fp8stack.nn.mlp import fuse

PRODUCTS = ("forward", "dgrad", "wgrad")


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.q_proj, self.k_proj, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return x + self.down(torch.tanh(self.q_proj(x)) * self.k_proj(x))


class Model(nn.Module):
    def __init__(self, blocks=5, width=64):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.end = nn.Linear(width, width)

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return self.end(x)


def started(level="O0", model=None, **options):
    torch.manual_seed(0)
    model = model or Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return fp8stack.initialize(
        model, optimizer, level, compute="native", select="all", strict=True, **options
    )


def gradients(layer, x, gradient):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(gradient)
    return {"forward": y, "dgrad": x.grad, "wgrad": layer.weight.grad, "bias": layer.bias.grad}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("turned", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("recipe", ["current", "tokenwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_product_is_bfloat16_s_or_fp8_s_bit_for_bit(precision, turned, recipe, dtype, device):
    plain = nn.Sequential(conv1d(144, 208) if turned else nn.Linear(144, 208)).to(device, dtype)
    x = torch.randn(3, 20, 144, device=device, dtype=dtype)
    gradient = torch.randn(3, 20, 208, device=device, dtype=dtype)
    made = []
    for how in ("fp8", precision):
        model = copy.deepcopy(plain)
        scales = "blockwise" if (how, precision) == ("fp8", "forward-bf16") else recipe
        options = {"fp8_recipe": scales, "precision_for": {"0": how}, "select": "all"}
        fp8stack.initialize(model, None, "O0", compute="native", **options)
        made.append(gradients(model[0], x, gradient))
    in_fp8, found = made
    w = plain[0].weight.detach().t() if turned else plain[0].weight.detach()  # [out, in]
    rows, grads = x.view(-1, 144), gradient.view(-1, 208)
    dw = bf16_matmul(grads.t(), rows.t(), None, "")
    in_bf16 = {
        "forward": bf16_matmul(x, w, plain[0].bias.detach(), ""),
        "dgrad": bf16_matmul(gradient, w.t(), None, ""),
        "wgrad": bf16_matmul(rows.t(), grads.t(), None, "") if turned else dw,
    }
    asked = PRECISIONS[precision].split()
    for name in PRODUCTS:
        assert_same_bits(found[name], (in_bf16 if name in asked else in_fp8)[name], name)
        assert (in_bf16[name] - in_fp8[name]).abs().max() > 0
    if precision != "bf16":
        assert_same_bits(found["bias"], in_fp8["bias"])


def test_later_options_win_and_the_card_says_which():
    named = {"*_proj": "forward-bf16", "*.k_proj": "fp8", "layers.0.down": "backward-bf16"}
    model, _ = started(wgrad="bf16", first_last=1, precision_for=named)
    found = {n: m.products.in_bf16 for n, m in model.named_modules() if isinstance(m, Fp8Layer)}
    in_bf16 = [n for n, m in model.named_modules() if isinstance(m, Bf16Layer)]
    assert in_bf16 == ["layers.4.down"]
    assert found["layers.0.down"] == "dgrad wgrad"
    assert found["layers.2.down"] == found["end"] == "wgrad"
    assert {found[f"layers.{i}.q_proj"] for i in range(5)} == {"forward wgrad"}
    assert {found[f"layers.{i}.k_proj"] for i in range(5)} == {""}
    report = str(fp8stack.get_report(model))
    assert "5 × forward and wgrad in bf16: layers.0.q_proj, ..." in report
    assert "4 × wgrad in bf16: layers.1.down, ..." in report
    whole = {"layers.4.down.weight": "first_last=1 leaves its block in bfloat16"}
    assert fp8stack.get_report(model).outside == whole
    assert "dgrad wgrad" in repr(model.layers[0].down)


def test_ends_are_found_in_each_outermost_list():
    model = nn.ModuleDict({"encoder": Model(4), "decoder": Model(3)})
    fp8stack.initialize(model, None, "O0", first_last=1, select="all")
    fp8 = {n for n, m in model.named_modules() if isinstance(m, Fp8Layer)}
    blocks = {".".join(n.split(".")[:3]) for n in fp8 if "layers" in n}
    assert blocks == {"encoder.layers.1", "encoder.layers.2", "decoder.layers.1"}
    assert {"encoder.end", "decoder.end"} < fp8


def test_attention_has_products_of_its_own():
    model, x = nn.Sequential(nn.MultiheadAttention(64, 4)), torch.randn(40, 64)
    gradient, found = torch.randn(40, 64), {}
    for how in PRECISIONS:
        twin, given = copy.deepcopy(model), x.clone().requires_grad_()
        fp8stack.initialize(twin, None, "O0", select="all", precision_for={"*": how})
        y = twin[0](given, given, given)[0]
        y.backward(gradient)
        found[how] = y, given.grad, twin[0].in_proj_weight.grad
    for how, same, results in (  # output, gradients of input and weight
        ("forward-bf16", "bf16", (True, False, False)),
        ("backward-bf16", "fp8", (True, False, False)),
        ("wgrad-bf16", "fp8", (True, True, False)),
        ("bf16", "fp8", (False, False, False)),
    ):
        for a, b, alike in zip(found[how], found[same], results, strict=True):
            assert torch.equal(a, b) == alike, (how, same)


@pytest.mark.parametrize("options", [{"wgrad": "bf16"}, {"precision_for": {"*ts": "forward-bf16"}}])
def test_what_does_not_reach_experts_is_said(options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 96, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    with pytest.warns(Fp8StackWarning, match="experts make no single products in bfloat16: model"):
        fp8stack.initialize(model, None, "O0", select="all", **options)
    assert not any("experts" in name for name in fp8stack.get_report(model).in_bf16)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(96, 96) / 10)

    def forward(self, x):
        return x @ self.w


def test_bare_parameters_follow_wgrad_and_say_what_does_not_reach_them():
    x, found = torch.randn(64, 96), []
    for wgrad in ("fp8", "bf16"):
        torch.manual_seed(0)
        model = nn.Sequential(Bare())
        fp8stack.initialize(model, None, "O0", wgrad=wgrad)
        y = model(x)
        y.square().sum().backward()
        found.append((y, model[0].w.grad))
    assert_same_bits(found[0][0], found[1][0])
    g = 2 * found[1][0].detach()
    assert_same_bits(found[1][1], bf16_matmul(x.t(), g.t(), None, ""))
    assert (found[0][1] - found[1][1]).abs().max() > 0
    with pytest.warns(Fp8StackWarning, match="products by bare parameters of Bare are in FP8"):
        fp8stack.initialize(nn.Sequential(Bare()), None, "O0", precision_for={"0": "bf16"})


def test_float16_s_autocast_does_not_end_weight_gradients_at_its_range(device):
    """A product in bfloat16 goes to the weight's float32, not by way of float16."""
    model = nn.Sequential(nn.Linear(32, 16)).to(device)
    fp8stack.initialize(model, None, "O0", select="all", precision_for={"0": "wgrad-bf16"})
    x = torch.full((64, 32), 200.0, device=device)
    with torch.autocast(device, torch.float16):
        y = model(x)
        y.backward(torch.full_like(y, 10.0))
    assert_same_bits(model[0].weight.grad, torch.full_like(model[0].weight, 64 * 2000.0))


def test_histories_learn_where_no_gradient_is_cast():
    model, optimizer = started(fp8_recipe="delayed", precision_for={"end": "backward-bf16"})
    for _ in range(3):
        model(torch.randn(2, 32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.end.products.x_state.casts == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"first_last": 2}, "first_last=2 has no effect: the model has no nn.ModuleList of blocks"),
        (
            {"precision_for": {"frst": "bf16"}},
            "matches no module. Did you mean .first",
        ),
        ({"precision_for": {"words": "bf16"}}, r"'words'\] is 'bf16': no effect"),
        ({"precision_for": {"first": "bf16", "*": "fp8"}}, r"'first'\] is 'bf16': no effect"),
        ({"head": "bf16", "precision_for": {"lm_head": "fp8"}}, ""),
        ({"head": "bf16", "skip": ["lm_head"]}, ""),
        ({"precision_for": {"first": "bf16", "[fl]*": "bf16"}}, ""),
    ],
)
def test_what_has_no_effect_is_said(options, told):
    layers = {
        "words": nn.Embedding(96, 64),
        "first": nn.Linear(64, 64),
        "lm_head": nn.Linear(64, 96),
    }
    with warnings.catch_warnings(record=True) as found:
        fp8stack.initialize(nn.Sequential(OrderedDict(layers)), None, "O0", **options)
    assert [bool(re.search(told, str(w.message))) for w in found] == [True] * bool(told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"precision_for": {"*": "fp16"}}, "precision must be one of"),
        ({"precision_for": ["*"]}, "give a dict of patterns"),
        ({"precision_for": 3}, "give a dict of patterns"),
        ({"precision_for": {"": "bf16"}}, "give a dict of patterns"),
        ({"first_last": -1}, "first_last=-1 must be an integer"),
        ({"wgrad": "bf16", "compute": "te"}, "TransformerEngine makes all products of a layer"),
    ],
)
def test_what_is_wrong_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        recipe_for("O0", **options)


def test_transformer_engine_leaves_layers_whole():
    recipe = recipe_for("O0", precision_for={"*q_proj": "forward-bf16", "*.k_proj": "fp8"})
    layers = choose_layers(Model(1), recipe, {}, set(), compute="te")
    assert layers.in_bf16 == {"layers.0.q_proj": "forward dgrad wgrad"}
    assert [name for name, _, _ in layers.gemm] == ["layers.0.k_proj", "layers.0.down", "end"]
    layers = choose_layers(Model(1), recipe_for("O0", wgrad="bf16"), {}, set(), compute="te")
    assert layers.in_bf16 == {}
    assert 'wgrad="bf16" has no effect' in layers.idle[0]


def test_ranks_send_in_fp8_what_only_fp8_products_read():
    precisions = {"*q_proj": "forward-bf16", "*k_proj": "wgrad-bf16", "*down": "backward-bf16"}
    model, _ = started(model=Model(1), precision_for=precisions)
    assert _weights(model) == {model.layers[0].k_proj.weight, model.end.weight}
    assert not model.layers[0].down.products.reads_codes_only


def test_mlps_with_products_in_bfloat16_are_not_fused():
    mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    for wgrad, fused in (("fp8", ["0"]), ("bf16", [])):
        model = nn.Sequential(copy.deepcopy(mlp))
        fp8stack.initialize(model, None, "O0", select="all", wgrad=wgrad)
        assert fuse(model) == fused


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("recipe", ["tokenwise", "delayed"])
def test_training_checkpoints_copies_and_graphs_go_on(level, recipe):
    """A copy and a graph give the same bits; leaving the level gives plain layers."""
    options = {"fp8_recipe": recipe, "precision_for": {"*q_proj": "forward-bf16"}, "wgrad": "bf16"}
    model, optimizer = started(level, Model(1), **options)
    x = torch.randn(2, 32, 64)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    y = model(x)
    for copied in COPIES.values():
        twin = copied(model)
        assert twin.layers[0].q_proj.products.in_bf16 == "forward wgrad"
        # copies learn their scales anew, and hold weights with the bits of masters
        if (level, recipe) == ("O0", "tokenwise"):
            assert_same_bits(twin(x), y)
    torch._dynamo.reset()
    assert_same_bits(torch.compile(model, backend="aot_eager", fullgraph=True)(x), y)
    model, _ = fp8stack.restore(model, optimizer)
    assert {type(m) for m in model.modules()} == {Model, nn.ModuleList, Block, nn.Linear}
