"""The models: causal, position-aware, of plain modules only; GPT-2's and Llama's sizes and arithmetic."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt import GPT, SIZES, ModelConfig
from gpt.blocks import rotary_table, rotate

import fp8stack
from fp8stack.nn.swiglu import fuse

ROOT = Path(__file__).parents[2]
SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, seq_len=24)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL)


def random_tokens(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_later_tokens_do_not_reach_earlier_logits(model):
    tokens = random_tokens(2, 24)
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 15:], after[:, 15:], atol=1e-3)


def test_loss_is_the_cross_entropy_of_the_logits(model):
    tokens, targets = random_tokens(2, 24), random_tokens(2, 24)
    expected = -model(tokens).log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets), expected)


def test_shared_key_value_heads_equal_repeated_ones(model):
    attention = model.blocks[0].attention
    full = GPT(ModelConfig(dim=32, layers=2, heads=4, kv_heads=4, ffn=48, seq_len=24))
    twin = full.blocks[0].attention
    state = attention.state_dict()
    for name in ("key.weight", "value.weight"):
        heads = state[name].unflatten(0, (2, 8))
        state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    twin.load_state_dict(state)
    x, rotation = torch.randn(2, 24, 32), (model.cos, model.sin)
    torch.testing.assert_close(attention(x, rotation), twin(x, rotation))


def test_rotation_keeps_lengths_and_sees_distances_only():
    rotation = rotary_table(length=16, head_dim=8, base=10_000.0)
    query, key = (torch.randn(8).expand(16, 8) for _ in range(2))
    turned_query, turned_key = (rotate(x[:, None], rotation)[:, 0] for x in (query, key))
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    scores = turned_query @ turned_key.T  # [16, 16]
    for distance in range(16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0.01


def test_top_1_generation_takes_the_likeliest_token(model):
    prompt = random_tokens(5)
    tokens = model.generate(prompt, 1, torch.Generator(), top_k=1)
    assert tokens[-1] == model(prompt[None])[0, -1].argmax()


# --- GPT-2 and Llama


@pytest.mark.parametrize(
    ("size", "published"),  # with the vocabularies they were published with
    [
        ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200),
        ("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248),
    ],
)  # fmt: skip
def test_sizes_have_the_published_number_of_parameters(size, published):
    vocab = 50_257 if size.startswith("gpt2") else 128_256
    with torch.device("meta"):
        model = GPT(replace(SIZES[size], vocab=vocab))
    assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert SIZES[size].vocab % 64 == 0


def small(size):
    sizes = {"vocab": 96, "dim": 32, "layers": 2, "heads": 4, "ffn": 48, "seq_len": 24}
    return replace(SIZES[size], **sizes, kv_heads=2 if size.startswith("llama") else 4)


@pytest.fixture
def transformers(monkeypatch):
    """The library. It looks for a package named kernels, and must not find the folder at the root."""
    elsewhere = [path for path in sys.path if Path(path).resolve() != ROOT]
    monkeypatch.setattr(sys, "path", elsewhere)
    return pytest.importorskip("transformers")


def test_a_small_gpt2_computes_what_transformers_does(transformers):
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=24, n_embd=32, n_layer=2, n_head=4, n_inner=48
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    state = {name: value.float() for name, value in theirs.transformer.state_dict().items()}
    named = {"embedding.weight": state["wte.weight"], "position.weight": state["wpe.weight"]}
    named |= {f"norm.{kind}": state[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for index in range(2):
        for kind in ("weight", "bias"):
            here, there = f"blocks.{index}", f"h.{index}"
            named[f"{here}.attention_norm.{kind}"] = state[f"{there}.ln_1.{kind}"]
            named[f"{here}.feed_forward_norm.{kind}"] = state[f"{there}.ln_2.{kind}"]
            fused = state[f"{there}.attn.c_attn.{kind}"].chunk(3, dim=-1)
            layers = dict(zip(("query", "key", "value"), fused, strict=True))
            layers["output"] = state[f"{there}.attn.c_proj.{kind}"]
            named |= {f"{here}.attention.{n}.{kind}": value.t() for n, value in layers.items()}
            named[f"{here}.feed_forward.up_proj.{kind}"] = state[f"{there}.mlp.c_fc.{kind}"].t()
            named[f"{here}.feed_forward.down_proj.{kind}"] = state[f"{there}.mlp.c_proj.{kind}"].t()
    named["head.weight"] = named["embedding.weight"]
    ours = GPT(small("gpt2"))
    ours.load_state_dict(named)
    tokens = torch.randint(96, (2, 24))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_small_llama_computes_what_transformers_does(transformers):
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 500_000.0, "rope_type": "default"},
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = (
        ("model.", ""), ("embed_tokens", "embedding"), ("layers", "blocks"), ("lm_head", "head"),
        ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "feed_forward_norm"),
        ("self_attn.q_proj", "attention.query"), ("self_attn.k_proj", "attention.key"),
        ("self_attn.v_proj", "attention.value"), ("self_attn.o_proj", "attention.output"), ("mlp.", "feed_forward."),
    )  # fmt: skip
    state = {}
    for name, value in theirs.state_dict().items():
        for there, here in names:
            name = name.replace(there, here)
        state[name] = value
    ours = GPT(small("llama-1b"))
    ours.load_state_dict(state)
    tokens = torch.randint(96, (2, 24))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_gpt2_s_first_values_are_small_and_smaller_where_a_block_writes():
    model = GPT(replace(SIZES["gpt2"], layers=2, vocab=512))
    assert model.head.weight is model.embedding.weight
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
            continue
        writes = name.endswith(("attention.output.weight", "down_proj.weight"))
        expected = 0.02 / 2 if writes else 0.02  # 2 layers write 4 times
        assert parameter.std().item() == pytest.approx(expected, rel=0.02), name


@pytest.mark.parametrize("size", ["demo", "gpt2", "llama-8b"])
def test_math_attention_and_checkpointing_change_no_gradient(size):
    config = small(size)
    tokens, results = torch.randint(96, (2, 24)), []
    for changes in ({}, {"attention": "math"}, {"checkpointing": True}):
        torch.manual_seed(0)
        model = GPT(replace(config, **changes))
        loss = model(tokens, tokens.flip(0))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for expected, math, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(math, expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(checkpointed, expected)


@pytest.mark.parametrize("size", ["demo", "gpt2", "llama-8b"])
def test_models_learn_at_o2_and_their_swiglus_can_be_fused(size):
    model = GPT(replace(small(size), dim=64, ffn=128, heads=4, kv_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", compute="native")
    assert ("blocks.0.feed_forward" in fuse(model)) == (size != "gpt2")
    tokens = torch.randint(96, (4, 24))
    losses = []
    for _ in range(25):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["gpt2", "llama-8b"])
def test_te_blocks_compute_what_plain_ones_do(size):
    if not fp8stack.capability.transformer_engine("cuda"):
        pytest.skip("needs TransformerEngine")
    config = replace(small(size), dim=256, ffn=512, heads=4, layers=2, seq_len=64)
    plain = GPT(config).cuda()
    recipe = fp8stack.levels.recipe_for("O0")
    tokens = torch.randint(96, (2, 64), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        expected = plain(tokens, tokens)
        for fp8, tolerance in ((None, 0.005), (recipe, 0.05)):
            model = GPT(replace(config, blocks="te", fp8=fp8)).cuda()
            copy_to_te(plain, model)
            loss = model(tokens, tokens)
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
            assert all(p.grad.isfinite().all() for p in model.parameters())
            short = tokens[:1, :5]  # no size for an FP8 GEMM, as in generation
            model(short, short).backward()
            loss = model(short, short).item()
            assert loss == pytest.approx(plain(short, short).item(), rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["demo", "gpt2", "llama-8b"])
def test_flash_attention_computes_what_sdpa_does(size):
    pytest.importorskip("flash_attn")
    tokens, losses = torch.randint(96, (2, 24), device="cuda"), []
    for attention in ("sdpa", "flash"):
        torch.manual_seed(0)
        model = GPT(replace(small(size), dim=256, attention=attention)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(model(tokens, tokens).item())
    assert losses[0] == pytest.approx(losses[1], rel=0.005)
    with pytest.raises(TypeError, match="takes bfloat16 or float16"):
        model(tokens)


@torch.no_grad()
def copy_to_te(plain, model):
    for name in ("embedding", "position", "norm", "head"):
        if hasattr(plain, name):
            getattr(model, name).load_state_dict(getattr(plain, name).state_dict())
    for old, new in zip(plain.blocks, model.blocks, strict=True):
        attention, mlp = old.attention, old.feed_forward
        gate = [mlp.gate_proj] if hasattr(mlp, "gate_proj") else []
        values = {}
        for kind in ("weight", "bias") if old.attention.query.bias is not None else ("weight",):
            joint = [
                getattr(layer, kind) for layer in (attention.query, attention.key, attention.value)
            ]
            values[f"attention_in.{kind}"] = torch.cat(joint)
            values[f"attention_in.layer_norm_{kind}"] = getattr(old.attention_norm, kind)
            values[f"output.{kind}"] = getattr(attention.output, kind)
            up = [getattr(layer, kind) for layer in (*gate, mlp.up_proj)]
            values[f"feed_forward.fc1_{kind}"] = torch.cat(up)
            values[f"feed_forward.fc2_{kind}"] = getattr(mlp.down_proj, kind)
            values[f"feed_forward.layer_norm_{kind}"] = getattr(old.feed_forward_norm, kind)
        parameters = dict(new.named_parameters())
        assert parameters.keys() == values.keys()
        for name, value in values.items():
            parameters[name].copy_(value)
