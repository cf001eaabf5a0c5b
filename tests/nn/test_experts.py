"""transformers' experts in FP8: numbers against its own grouped products, routes, and what is left to it."""

import copy
import functools

import pytest
import torch
from helpers import assert_same_bits
from layers import experts_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.nn import grouped

transformers = pytest.importorskip("transformers")
HIDDEN, INNER, NUMBER, COUNT, TOKENS = 64, 48, 6, 2, 70
KINDS = {
    "Qwen3Moe": "silu", "Mixtral": "silu", "DeepseekV3": "silu", "GptOss": "",
}  # and the activation  # fmt: skip


def build(kind, device="cpu", dtype=torch.float32):
    """Return a model of the experts of a family, alone."""
    made = experts_of(kind, HIDDEN, INNER, NUMBER)
    return nn.Sequential(made).to(device, dtype)


def draw(device="cpu", dtype=torch.float32, tokens=TOKENS):
    """Return tokens, and the experts of each with their weights; the last expert gets none."""
    scores = torch.rand(tokens, NUMBER)
    scores[:, -1] = 0
    weights, index = scores.topk(COUNT)
    return [t.to(device) for t in (torch.randn(tokens, HIDDEN).to(dtype), index, weights.to(dtype))]


def results(module, x, index, weights, gradient):
    """Return the output and all gradients."""
    module.zero_grad()
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    y = module(x, index, weights)
    y.backward(gradient)
    return [y.detach(), x.grad, weights.grad, *(p.grad.clone() for p in module.parameters())]


def native(module, **options):
    """Return the module with its products in FP8, or skip the test where this GPU has no such products."""
    stack = next(p for p in module.parameters() if p.dim() == 3)
    if reason := grouped.obstacle(stack):
        pytest.skip(reason)
    fp8stack.initialize(module, None, "O0", compute="native", select="all", **options)
    return module[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_transformers_but_for_rounding(kind, dtype, device):
    module = build(kind, device, dtype)
    plain, given = copy.deepcopy(module[0]), draw(device, dtype)
    gradient = torch.randn(TOKENS, HIDDEN).to(device, dtype)
    ours = native(module)
    assert ours.tried[1] == KINDS[kind]
    expected = results(plain, *given, gradient)
    found = results(ours, *given, gradient)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a - b).norm() <= 0.09 * b.norm()
    stacks = [p.grad for p in ours.parameters() if p.dim() == 3]
    assert not any(gradient[-1].any() for gradient in stacks)  # of the expert without tokens


@pytest.mark.parametrize(("act", "found"), [("gelu", "gelu"), ("relu", "relu"), ("tanh", "")])
def test_a_gate_is_known_by_what_it_computes(act, found):
    module, given = build("Qwen3Moe"), draw()
    module[0].act_fn = transformers.activations.ACT2FN[act]
    expected = copy.deepcopy(module[0])(*given)
    ours = native(module)
    assert ours.tried[1] == found
    assert (ours(*given) - expected).norm() <= 0.07 * expected.norm()


class Swish(nn.Module):
    """SiLU with a trained slope, which begins as SiLU does."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def test_an_activation_that_may_change_is_called():
    calls, given = [], draw()
    module = build("Qwen3Moe")
    module[0].act_fn = Swish()
    ours = native(module)
    ours(*given).sum().backward()
    assert ours.act_fn.beta.grad.abs() > 0
    ours = native(build("Qwen3Moe"))
    before = ours(*given)
    ours.act_fn.register_forward_hook(lambda *_: calls.append(1))
    assert (ours(*given) - before).norm() <= 0.05 * before.norm()
    assert calls == [1]
    ours.act_fn = nn.ReLU()
    assert (ours(*given) - before).norm() > 0.1 * before.norm()


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_arguments_may_have_names(kind):
    ours, (x, index, weights) = native(build(kind)), draw()
    names = ours.argument_names[1:]
    named = dict(zip(names, (index, weights), strict=True))
    assert_same_bits(ours(x, **named), ours(x, index, weights))
    ours.half()
    with pytest.raises(
        fp8stack.errors.ModelError, match=r"experts 0 store .*float16.*float32 tokens"
    ):
        ours(x[None], index, weights)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_no_tokens_give_no_tokens_and_zero_gradients(kind, device):
    ours, (x, index, weights) = native(build(kind, device)), draw(device)
    found = results(ours, x[:0], index[:0], weights[:0], x[:0])
    assert found[0].shape == (0, HIDDEN)
    for p, gradient in zip(ours.parameters(), found[3:], strict=True):
        assert gradient.shape == p.shape
        assert not gradient.any()


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_a_batch_of_padding_changes_no_bit(kind, device):
    """Rows are padded to what suffices always, so another order of the experts pads otherwise."""
    ours, (x, index, weights) = native(build(kind, device)), draw(device)
    y = ours(x, index, weights)
    assert_same_bits(ours(x, index.flip(1), weights.flip(1)), y)  # two summands: either order
    order = torch.randperm(TOKENS, device=device)
    assert_same_bits(ours(x[order], index[order], weights[order]), y[order])


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_checkpointing_and_graphs_change_no_bit(kind, device):
    ours, given = native(build(kind, device)), draw(device)
    gradient = torch.randn(TOKENS, HIDDEN, device=device)
    expected = results(ours, *given, gradient)
    again = functools.partial(checkpoint, ours, use_reentrant=False)
    graph = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for run in (again, graph):
        ours.zero_grad()
        x, weights = (t.clone().requires_grad_() for t in (given[0], given[2]))
        y = run(x, given[1], weights)
        y.backward(gradient)
        found = [y.detach(), x.grad, weights.grad, *(p.grad for p in ours.parameters())]
        assert_same_bits(found, expected)


def test_autocast_gives_its_dtype_inside_and_the_tokens_outside(device):
    ours, (x, index, weights) = native(build("Qwen3Moe", device)), draw(device)
    expected = ours(x, index, weights)
    with torch.autocast(device, torch.bfloat16):
        y = ours(x, index, weights)
    assert y.dtype is torch.float32
    assert 0 < (y - expected).norm() <= 0.04 * expected.norm()


def test_pairs_of_other_ranks_add_nothing(device):
    ours, (x, index, weights) = native(build("Qwen3Moe", device)), draw(device)
    elsewhere, none = index.clone(), weights.clone()
    elsewhere[:, 1], none[:, 1] = NUMBER, 0
    gradient = torch.randn(TOKENS, HIDDEN, device=device)
    found = results(ours, x, elsewhere, weights, gradient)
    expected = results(ours, x, index, none, gradient)
    assert_same_bits(found[0], expected[0])
    assert not found[2][:, 1].any()


@pytest.mark.parametrize(
    ("config", "told"),
    [("sonicmoe", "has products of its own"), ("deepgemm", '"grouped_mm" is taken')],
)
def test_another_implementation_is_left_alone_with_the_reason(config, told):
    module = build("Qwen3Moe")
    module[0].config._experts_implementation = config
    with pytest.warns(fp8stack.errors.Fp8StackWarning, match=told):
        fp8stack.initialize(module, None, "O0")
    assert type(module[0]).__name__ == "Qwen3MoeExperts"
    report = fp8stack.get_report(module)
    assert report.share == 0
    assert told in report.outside["0.gate_up_proj"]


def test_an_implementation_chosen_later_is_the_users(monkeypatch):
    ours, given = native(build("Qwen3Moe")), draw()
    registry = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    registry.register("doubled", lambda self, x, index, weights: 2 * x)
    ours.config._experts_implementation = "doubled"
    assert_same_bits(ours(*given), 2 * given[0])
    registry._global_mapping.pop("doubled", None)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", None])
def test_transformers_other_ways_to_compute_the_same_are_taken(implementation):
    module = build("Qwen3Moe")
    module[0].config._experts_implementation = implementation
    given = draw()
    ours = native(module)
    y = ours(*given)
    ours.config._experts_implementation = "grouped_mm"
    assert_same_bits(ours(*given), y)


def test_sizes_that_do_not_fit_are_named():
    module = build("Qwen3Moe")
    module[0].down_proj = nn.Parameter(torch.randn(NUMBER, HIDDEN, 40))
    with pytest.warns(fp8stack.errors.Fp8StackWarning, match="multiples of 16"):
        fp8stack.initialize(module, None, "O0")


@pytest.mark.parametrize("kind", KINDS)
def test_stacks_are_stored_in_bfloat16_and_copies_have_all_bits(kind):
    module = build(kind)
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    _, optimizer = fp8stack.initialize(module, optimizer, "O2", select="all")
    stacks = [name for name, p in module.named_parameters() if p.dim() == 3]
    assert sorted(fp8stack.get_report(module).stored) == sorted(stacks)
    x, index, weights = draw()
    module[0](x, index, weights).square().mean().backward()
    optimizer.step()
    masters = fp8stack.checkpoint.master_state_dict(module, optimizer)
    copied = copy.deepcopy(module)
    for name in stacks:
        assert module.get_parameter(name).dtype is torch.bfloat16
        assert_same_bits(copied.get_parameter(name).detach(), masters[name])
        assert not torch.equal(masters[name], before[name])
    fp8stack.restore(module, optimizer)
    assert_same_bits(module.state_dict(), masters)
