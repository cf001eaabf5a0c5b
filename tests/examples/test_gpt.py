"""The models: causal, position-aware, of plain modules only; GPT-2's and Llama's sizes and arithmetic."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt import GPT, SIZES, ModelConfig

import fp8stack
from fp8stack.nn.mlp import fuse

ROOT = Path(__file__).parents[2]
SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, seq_len=24)


def random_tokens(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_a_small_model_is_causal_and_its_loss_the_cross_entropy():
    model, tokens, targets = GPT(SMALL), random_tokens(2, 24), random_tokens(2, 24).flip(0)
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 15:], after[:, 15:], atol=1e-3)
    expected = -before.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets), expected)
    generated = model.generate(tokens[0], 1, torch.Generator(), top_k=1)
    assert generated[-1] == before[0, -1].argmax()


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
    names = (
        ("wte", "embedding"), ("wpe", "position"), ("ln_f", "norm"), ("h.", "blocks."), ("ln_1", "attention_norm"),
        ("ln_2", "feed_forward_norm"), ("attn.c_proj", "attention.output"), ("mlp.c_fc", "feed_forward.up_proj"),
        ("mlp.c_proj", "feed_forward.down_proj"),
    )  # fmt: skip
    state = {}
    for name, value in renamed(theirs.transformer.state_dict(), names).items():
        # its layers are Conv1D, with weights the other way round
        value = value.t() if value.ndim == 2 and name.startswith("blocks") else value
        if "attn.c_attn" in name:
            for layer, part in zip(("query", "key", "value"), value.chunk(3), strict=True):
                state[name.replace("attn.c_attn", f"attention.{layer}")] = part
        else:
            state[name] = value
    state["head.weight"] = state["embedding.weight"]
    assert_alike(GPT(small("gpt2")), state, theirs)


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
    assert_alike(GPT(small("llama-1b")), renamed(theirs.state_dict(), names), theirs)


def renamed(state, names):
    """Return a state_dict with parts of its names replaced."""
    found = {}
    for name, value in state.items():
        for there, here in names:
            name = name.replace(there, here)
        found[name] = value.float()
    return found


def assert_alike(ours, state, theirs):
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


@pytest.mark.parametrize("size", ["demo", "gpt2"])
def test_math_attention_checkpointing_and_fuse_loss_change_no_gradient(size):
    config = small(size)
    tokens, results = torch.randint(96, (2, 24)), []
    for changes in ({}, {"attention": "math"}, {"checkpointing": True}, {"fuse_loss": True}):
        torch.manual_seed(0)
        model = GPT(replace(config, **changes))
        loss = model(tokens, tokens.flip(0))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for expected, math, checkpointed, fused in zip(*results, strict=True):
        for found in (math, fused):  # with sums in another order
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(checkpointed, expected)


def losses_of(model, optimizer, device="cpu"):
    """Return the first and the last loss of 25 steps on one batch."""
    tokens, losses = torch.randint(96, (4, 17), device=device), []
    for _ in range(25):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("size", ["demo", "gpt2", "llama-8b"])
def test_models_learn_at_o2_and_their_mlps_can_be_fused(size):
    model = GPT(replace(small(size), dim=64, ffn=128, heads=4, kv_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", compute="native")
    assert "blocks.0.feed_forward" in fuse(model)
    first, last = losses_of(model, optimizer)
    assert last < first - 1


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["gpt2", "llama-8b"])
def test_te_blocks_learn(size):
    if not fp8stack.capability.transformer_engine("cuda"):
        pytest.skip("needs TransformerEngine")
    config = replace(small(size), dim=256, ffn=512, heads=4, layers=2, seq_len=64, blocks="te")
    short = torch.randint(96, (1, 5), device="cuda")  # no size for an FP8 GEMM
    for fp8 in (None, fp8stack.levels.recipe_for("O0")):
        torch.manual_seed(0)
        model = GPT(replace(config, fp8=fp8)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            first, last = losses_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "cuda")
            assert model(short, short).isfinite()
        assert last < first - 1
