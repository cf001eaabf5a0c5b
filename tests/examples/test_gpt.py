"""The demo's model: causal, position-aware by distance, and made of plain modules only."""

import pytest
import torch
from gpt import GPT, GPTConfig, generate, rotary_table, rotate
from torch import nn

SMALL = GPTConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, seq_len=24)


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


def test_earlier_tokens_do_reach_later_logits(model):
    tokens = random_tokens(1, 24)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 256
    assert not torch.allclose(model(tokens)[:, -1], model(changed)[:, -1], atol=1e-5)


def test_loss_is_the_cross_entropy_of_the_logits(model):
    tokens, targets = random_tokens(2, 24), random_tokens(2, 24)
    expected = -model(tokens).log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets), expected)


def test_untrained_loss_is_near_that_of_a_uniform_guess(model):
    loss = model(random_tokens(4, 24), random_tokens(4, 24))
    assert 5.0 < loss.item() < 7.0  # ln 320 = 5.77


def test_every_parameter_belongs_to_a_plain_module_and_gets_a_gradient(model):
    plain = (nn.Linear, nn.Embedding, nn.RMSNorm)
    owners = {id(p): type(m) for m in model.modules() for p in m.parameters(recurse=False)}
    model(random_tokens(2, 24), random_tokens(2, 24)).backward()
    for name, parameter in model.named_parameters():
        assert owners[id(parameter)] in plain, name
        assert parameter.grad.any(), name


def test_shared_key_value_heads_equal_repeated_ones(model):
    attention = model.blocks[0].attention
    full = GPT(GPTConfig(dim=32, layers=2, heads=4, kv_heads=4, ffn=48, seq_len=24))
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
    turned_query, turned_key = rotate(query, rotation), rotate(key, rotation)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    scores = turned_query @ turned_key.T  # [16, 16]
    for distance in range(16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0.01


def test_generation_repeats_for_a_seed_and_passes_the_window(model):
    prompt = random_tokens(5)
    first, second = (
        generate(model, prompt, 30, torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert first.shape == (35,)
    assert torch.equal(first[:5], prompt)
    assert torch.equal(first, second)


def test_top_1_generation_takes_the_likeliest_token(model):
    prompt = random_tokens(5)
    tokens = generate(model, prompt, 1, torch.Generator(), top_k=1)
    assert tokens[-1] == model(prompt[None])[0, -1].argmax()


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({"dim": 36, "heads": 4}, "multiple of 8"),
        ({"dim": 32, "heads": 4, "kv_heads": 3}, "divisor of heads"),
    ],
)
def test_impossible_sizes_are_refused_with_a_remedy(sizes, remedy):
    with pytest.raises(ValueError, match=remedy):
        GPTConfig(**sizes)


def test_too_long_a_window_is_refused(model):
    with pytest.raises(ValueError, match=r"got 25 tokens.*seq_len=24"):
        model(random_tokens(1, 25))
