"""`head=`: how the layer that makes logits is found, and how it multiplies."""

import copy

import pytest
import torch
from helpers import assert_same_bits
from torch import nn
from torch.nn import functional as F

import fp8stack
from fp8stack import capability
from fp8stack.capability import Answer
from fp8stack.comm.fsdp import _weights
from fp8stack.errors import Fp8StackWarning
from fp8stack.nn import scaling_state
from fp8stack.nn.convert import choose_layers
from fp8stack.nn.heads import find_heads
from fp8stack.nn.linear import Bf16Layer, Fp8Layer
from fp8stack.nn.mlp import fuse

WORDS, WIDTH = 320, 64


class Model(nn.Module):
    """Predicts the next token; its head is a layer of any name, the embedding's, or a product by hand."""

    def __init__(self, name="lm_head", tied=False, by_hand=False, bias=False, outputs=WORDS):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(WIDTH, WIDTH)
        # as many outputs as there are places, and as words
        blocks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS), nn.Linear(WORDS, WIDTH)
        self.blocks, self.name, self.by_hand = nn.ModuleList(blocks), name, by_hand
        if not by_hand:
            setattr(self, name, nn.Linear(WIDTH, outputs, bias))
        if tied:
            getattr(self, name).weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = torch.tanh(block(x))
        y = x @ self.embed.weight.t() if self.by_hand else self.get_submodule(self.name)(x)
        return F.cross_entropy(y[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def initialized(level="O0", head="bf16", recipe="current", **model):
    torch.manual_seed(0)
    made = Model(**model)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    return fp8stack.initialize(made, optimizer, level, head=head, fp8_recipe=recipe, strict=True)


def train(model, optimizer, steps=5):
    losses = []
    for _ in range(steps):
        loss = model(torch.arange(64).view(2, 32) % 37)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "anything"}, True),  # the only layer outside blocks with as many outputs
        ({"name": "anything", "tied": True}, True),
        ({"name": "anything", "outputs": WORDS + 64}, False),
        ({"name": "lm_head", "outputs": WORDS + 64}, True),  # a vocabulary is padded
        ({"name": "output"}, True),
        ({"name": "head", "outputs": 10}, False),  # classes
    ],
)
def test_a_head_is_found_by_tie_by_size_and_by_name(given, found):
    model = Model(**given)
    head = model.get_submodule(given["name"])
    assert find_heads(model) == ({head} if found else set())


def test_what_is_near_a_head_is_none():
    """Types of tokens, labels, classes of pictures, and a second layer as wide as the vocabulary."""
    for name, made in (
        ("types", {"types": nn.Embedding(2, WIDTH), "head": nn.Linear(WIDTH, 2)}),
        ("classes", {"classes": nn.Embedding(40, WIDTH), "decoder": nn.Linear(WIDTH, 784)}),
        ("pictures", {"stem": nn.Conv2d(3, WIDTH, 4), "head": nn.Linear(WIDTH, 10)}),
    ):
        model = nn.Module()
        for key, module in made.items():
            model.add_module(key, module)
        assert not find_heads(model), name
    model = Model(tied=True)
    model.widened = nn.Linear(WIDTH, WORDS)
    assert model.widened not in find_heads(model)


def test_heads_are_found_in_a_dict_behind_adapters_and_beside_computed_weights():
    model = nn.ModuleDict({"wte": nn.Embedding(WORDS, WIDTH), "ff_out": nn.Linear(WIDTH, WORDS)})
    assert model["ff_out"] in find_heads(nn.Sequential(model))
    kept = nn.ModuleDict({"default": nn.Linear(WIDTH, WORDS)})
    wrapped = Model(outputs=WORDS + 16)
    wrapped.lm_head = nn.ModuleDict({"original_module": wrapped.lm_head, "modules_to_save": kept})
    assert find_heads(wrapped) == {wrapped.lm_head["original_module"], kept["default"]}
    computed = Model()
    nn.utils.parametrizations.weight_norm(computed.embed)
    assert computed.lm_head in find_heads(computed)


def test_a_head_that_is_not_found_is_a_fallback():
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2 * WORDS))
    with pytest.warns(Fp8StackWarning, match='head="bf16" has no effect: no layer is known'):
        fp8stack.initialize(model, None, "O0", head="bf16")
    with pytest.warns(Fp8StackWarning, match="option of FP8 products"):
        fp8stack.initialize(Model(), None, "O0", head="bf16", compute="bf16")


def test_weights_of_heads_are_not_sent_in_fp8():
    for head, sent in (("fp8", True), ("forward-bf16", False)):
        model, _ = initialized(head=head)
        assert (model.lm_head.weight in _weights(model)) == sent
        assert model.blocks[0].weight in _weights(model)


def test_logits_stay_bfloat16_s_in_a_fused_mlp():
    head = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WORDS))
    model = nn.ModuleDict({"embed": nn.Embedding(WORDS, WIDTH), "head": head})
    fp8stack.initialize(model, None, "O0", head="forward-bf16")
    x = torch.randn(96, WIDTH, requires_grad=True)
    expected = head(x)
    fuse(model)
    assert_same_bits(head(x), expected)


def test_heads_of_transformers_are_found():
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": 96, "hidden_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 96}
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 192, "vocab_size": 96}
    for kind, config in (
        ("LlamaForCausalLM", transformers.LlamaConfig(**sizes)),
        ("BertForMaskedLM", transformers.BertConfig(**sizes)),
        ("T5ForConditionalGeneration", transformers.T5Config(**t5)),
        ("GPT2LMHeadModel", transformers.GPT2Config(**gpt2)),  # more places than words
        ("ViTForImageClassification", transformers.ViTConfig(hidden_size=64, num_hidden_layers=1)),
    ):
        with torch.device("meta"):
            model = getattr(transformers, kind)(config)
        assert find_heads(model) == ({model.get_output_embeddings()} - {None}), kind


@pytest.mark.parametrize(
    ("level", "recipe", "given"),
    [
        ("O0", "current", {"bias": True}),
        ("O0", "delayed", {"by_hand": True}),
        ("O0", "blockwise", {}),
        ("O2", "current", {"by_hand": True}),
        ("O2", "delayed", {"tied": True}),
        ("O2", "blockwise", {"tied": True}),
    ],
)
def test_every_head_trains_alike(level, recipe, given):
    runs = {
        h: train(*initialized(level, h, recipe, **given)) for h in ("fp8", "forward-bf16", "bf16")
    }
    for head, losses in runs.items():
        assert losses == pytest.approx(runs["bf16"], rel=0.01), head
        assert losses[-1] < losses[0]
    assert runs["forward-bf16"] != runs["fp8"]
    assert runs["forward-bf16"] != runs["bf16"]
    # before the first step weights are the same, and so are logits
    assert runs["forward-bf16"][0] == pytest.approx(runs["bf16"][0], rel=1e-4)


def test_a_head_in_bfloat16_is_said_stored_and_restored():
    model, optimizer = initialized("O2")
    report = fp8stack.get_report(model)
    assert isinstance(model.lm_head, Bf16Layer)
    assert report.fallbacks == []
    assert "lm_head.weight (it makes the logits, which are left in bfloat16)" in str(report)
    assert "logits in bf16, and their gradients: lm_head" in str(report)
    assert "lm_head.weight" in report.stored
    assert 0.5 < report.share < 1
    state = {
        k: v.clone() for k, v in fp8stack.checkpoint.master_state_dict(model, optimizer).items()
    }
    model, _ = fp8stack.restore(model, optimizer)
    assert type(model.lm_head) is nn.Linear
    for key, value in model.state_dict().items():
        assert_same_bits(value, state[key])


@pytest.mark.parametrize("recipe", ["current", "tokenwise", "delayed"])
def test_gradients_of_logits_have_block_scales_whatever_the_recipe(recipe):
    model, optimizer = initialized(head="forward-bf16", recipe=recipe)
    train(model, optimizer, 2)
    assert isinstance(model.lm_head, Fp8Layer)
    assert "e4m3, blockwise, in bf16: forward" in repr(model.lm_head)
    assert not any(name.startswith("lm_head") for name in scaling_state(model))


def test_gradients_of_logits_go_on_summing_to_zero():
    """So nothing pushes hidden states along what words have in common, as one scale a tensor does."""
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(512, 1024), torch.randint(1024, (512,))
    gradient = logits.softmax(-1) - F.one_hot(labels, 1024)
    plain, errors = nn.Sequential(nn.Embedding(1024, 128), nn.Linear(128, 1024, False)), []
    nn.init.ones_(
        plain[1].weight
    )  # which E4M3 holds: an input's gradient is the sum of a row's codes
    for head in ("forward-bf16", "fp8"):
        model, x = copy.deepcopy(plain), torch.randn(512, 128, requires_grad=True)
        fp8stack.initialize(model, None, "O0", head=head, fp8_recipe="current", select="all")
        model[1](x).backward(gradient)
        errors.append(x.grad[:, 0].square().mean().sqrt().item())
    assert errors[0] < 0.005
    assert errors[1] > 0.02


@pytest.mark.parametrize(
    "options",
    [{}, {"head": "fp8"}, {"head": "forward-bf16"}, {"precision_for": {"0": "forward-bf16"}}],
)
def test_without_products_of_blocks_a_layer_is_in_bfloat16_as_a_whole(
    options, monkeypatch, recwarn
):
    monkeypatch.setattr(
        capability, "native_recipe", lambda name, _: Answer(name != "blockwise", "no")
    )
    model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(WORDS, 32), nn.Linear(32, WORDS))
    fp8stack.initialize(model, None, "O0", select="all", **options)
    report = fp8stack.get_report(model)
    told = "forward-bf16" in str(options)
    assert report.fallbacks == ['"forward-bf16" is "bf16" here: no'] * told
    assert isinstance(model[0], Bf16Layer if "precision_for" in options else Fp8Layer)
    assert isinstance(model[2], Fp8Layer if options.get("head") == "fp8" else Bf16Layer)


def test_by_hand_the_record_says_which_products_are_left():
    model, optimizer = initialized(by_hand=True)
    train(model, optimizer, 1)
    report = fp8stack.get_report(model)
    assert "embed.weight" not in report.multiplied
    assert any("makes the logits" in reason for reason in report.left_alone)
    model, optimizer = initialized(by_hand=True, head="forward-bf16")
    train(model, optimizer, 1)
    assert "embed.weight" in fp8stack.get_report(model).multiplied


def test_transformer_engine_leaves_heads_in_bfloat16():
    model, recipe = Model(), fp8stack.levels.recipe_for("O0", head="forward-bf16")
    layers = choose_layers(model, recipe, {}, set(), compute="te")
    assert layers.heads == ["lm_head"]
    assert "lm_head" not in [name for name, _, _ in layers.gemm]


def test_a_head_compiles():
    torch._dynamo.reset()
    made = [initialized("O0", "forward-bf16")[0] for _ in range(2)]
    made[1].compile(backend="aot_eager", fullgraph=True)
    tokens, found = torch.arange(64).view(2, 32) % 37, []
    for model in made:
        loss = model(tokens)
        loss.backward()
        found.append((loss, model.lm_head.weight.grad))
    assert_same_bits(found[0][0], found[1][0])
    assert_same_bits(found[0][1], found[1][1])
