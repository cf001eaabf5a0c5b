"""What is cast and when: weights in every forward, inputs once for all layers that read them; and what is kept."""

import copy

import pytest
import torch
from helpers import assert_same_bits, through_file
from layers import (
    COPIES,
    KINDS,
    QKV,
    RECIPE,
    Checkpointed,
    SwiGLU,
    after,
    begun,
    count_casts,
    linear,
    make,
    native,
    results,
    saved_by,
    scale_parameters,
)  # fmt: skip
from torch import nn
from torch._subclasses import FakeTensorMode

from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.kernels.reference import cast as reference
from fp8stack.nn import casts, fuse, load_scaling_state, notes, scaling_state

LAYERS = pytest.mark.parametrize(
    ("kind", "recipe"),
    [("layer", "current"), ("layer", "delayed"), ("layer", "blockwise"), ("fused", "current"), ("fused", "delayed")],
)  # fmt: skip


def assert_fresh(layer, x):
    """Fail unless the layer computes with the weight that it has now."""
    assert_same_bits(results(layer, x), results(copy.deepcopy(layer), x))


# --- every forward multiplies the weight that is there


def write_without_a_trace(model):
    """As extensions, zeroth-order training and moving averages do: no version counts, no hook is called."""
    for p in model.parameters():
        p.data.view(-1)[0] += 9


def replace_data(model):
    for p in model.parameters():
        p.data = p.data * 3


CHANGES = {
    "step": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1).step(),
    "load": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "write": write_without_a_trace, "replace": replace_data,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@KINDS
def test_every_forward_multiplies_the_weight_that_is_there(kind, recipe, change, rows, device):
    model = make(kind, device, recipe)
    x = torch.randn(16, 32, device=device)
    before = results(model, x)
    for pause in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        change(model)
        with pause():
            y = model(x).clone()
        assert not torch.equal(y, before[0])
        if recipe != "delayed":  # whose weight may have the scale of before
            assert_same_bits(y, copy.deepcopy(model)(x).detach())
            assert_fresh(model, x)
        before = results(model, x)


def test_further_micro_batches_guess_the_scale_and_give_the_same_bits(monkeypatch, device):
    """A wrong guess, after a write that no version tells of, is found by the cast itself."""
    guessed, recast_with = [], ops.recast_with

    def count(*arguments, exact=False):
        guessed.append(exact)
        return recast_with(*arguments, exact=exact)

    monkeypatch.setattr(ops, "recast_with", count)
    model = linear(64, 32, False, device)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    for write, expected in (
        (lambda w: None, []),
        (lambda w: None, [True]),
        (lambda w: w.data.mul_(3), [True]),
        (lambda w: w.detach().mul_(3), []),
    ):
        write(model.weight)
        guessed.clear()
        y = model(x)
        assert guessed == expected
        assert_same_bits(y.detach(), copy.deepcopy(model)(x.detach().clone()).detach())
    monkeypatch.setattr(notes, "capturing", lambda x: True)  # another graph's scale may be freed
    guessed.clear()
    for _ in range(3):
        model(x)
    assert guessed == []


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@RECIPE
def test_fake_tensors_leave_nothing(recipe, rows, monkeypatch):
    """They tell memory and shapes, and have no bytes that a kernel could read, in forward or backward."""
    layer = linear(fp8_recipe=recipe)
    x = torch.randn(16, 32)
    before = layer(x)  # the next cast of the weight would guess its scale
    with FakeTensorMode(allow_non_fake_inputs=True), monkeypatch.context() as patch:
        patch.setattr(
            ops, "implementation", lambda reference, gpu: pytest.fail(f"{reference} runs")
        )
        layer(torch.randn(16, 32, requires_grad=True)).sum().backward()
    layer.zero_grad()
    after = layer(x)
    if recipe != "delayed":  # whose scale is another now
        assert_same_bits(after, before)


def test_the_parameters_of_bare_products_are_not_taken_for_each_other(monkeypatch, device):
    """They share a `Products`; a guess that is always wrong would write all codes twice."""
    model = make("bare", device)
    monkeypatch.setattr(ops, "recast_with", lambda *_, **__: pytest.fail("a scale was guessed"))
    for _ in range(2):
        model(torch.randn(16, 32, device=device))


def test_nothing_is_kept_from_one_captured_graph_to_the_next(monkeypatch, device):
    """Memory of the first may be gone when the second is replayed; and inputs change between replays."""
    layer = linear(device=device)
    x = torch.randn(16, 32, device=device, requires_grad=True) * 1
    seen = count_casts(monkeypatch)
    layer(x)
    monkeypatch.setattr(notes, "capturing", lambda x: True)
    monkeypatch.setattr(ops, "recast_with", lambda *_, **__: pytest.fail("a scale was guessed"))
    layer(x)
    assert seen == [(16, 32), (32, 32)] * 2
    layer(x)  # in a graph as outside, an input is cast once
    assert seen == [*[(16, 32), (32, 32)] * 2, (32, 32)]


# --- when weights are cast, and what is kept of them


@RECIPE
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_weight_is_cast_in_forward_and_where_nothing_is_kept_in_backward(
    recipe, reentrant, rows, device, monkeypatch
):
    layer = linear(48, 16, device=device, fp8_recipe=recipe)
    run = layer if reentrant is None else Checkpointed(layer, reentrant)
    again = reentrant is not None  # the forward runs in backward, too
    seen = count_casts(monkeypatch)
    for _ in range(3):
        y = run(torch.randn(32, 48, device=device, requires_grad=True))
        assert seen.count((16, 48)) == 1
        y.sum().backward()
        assert seen.count((16, 48)) == 1 + again + (not rows)
        # Without gradients, a cast by rows is all there is of an input.
        untransposed = recipe == "tokenwise" and reentrant is True
        assert len(seen) == 3 + 2 * again + (not rows) - untransposed
        seen.clear()


@LAYERS
@pytest.mark.parametrize("size", [(32, 48), (40, 130)], ids=str)
def test_where_backward_s_codes_are_made_changes_no_bit(recipe, size, kind, device, monkeypatch):
    given, layers = [], {"layer": nn.Linear, "fused": SwiGLU}
    for few in (0, casts.FEW_ROWS):
        monkeypatch.setattr(casts, "FEW_ROWS", few)
        torch.manual_seed(1)
        model = native(nn.Sequential(layers[kind](*size)), device, fp8_recipe=recipe)
        assert len(fuse(model)) == (kind == "fused")
        found = []
        for i in range(3):
            x = torch.randn(5, 7, size[0], device=device) * 2.0**i
            found += results(model, x, torch.randn_like(model(x)))
            scale_parameters(0.9, model)
        given.append(found)
    assert_same_bits(*given)


@LAYERS
def test_saves_the_transposed_codes_of_the_input_and_one_layout_of_a_few_rows_weight(
    recipe, kind, rows
):
    """One byte an element of the input, and nothing of it besides; of the weight one where the rows are few."""
    model = make(kind, recipe=recipe)
    saved = saved_by(model, torch.randn(384, 32, requires_grad=True))
    weights = {id(p) for p in model.parameters() if p.dim() > 1}
    own = [t for t in saved if id(t) not in weights]
    assert weights <= {id(t) for t in saved}
    codes = [t for t in own if t.element_size() == 1]
    if recipe == "blockwise":  # padded to squares
        expected = 384 * 128 + bool(rows) * 128 * 128
    else:
        expected = 384 * 32 + bool(rows) * sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert sum(t.nbytes for t in codes) == expected
    rest = sum(t.nbytes for t in own if t.element_size() > 1)
    assert rest <= 64 + 2 * 4 * 384 * 48 * (kind == "fused")  # gate and up


@RECIPE
def test_without_a_backward_one_layout_is_made_and_nothing_is_saved(recipe, device, monkeypatch):
    layer = linear(48, 16, device=device, fp8_recipe=recipe)
    x = torch.randn(32, 48, device=device, requires_grad=True)
    made = []
    for name in ("cast", "recast"):
        function = getattr(ops, name)

        def watching(w, fmt, *args, function=function, **kwargs):
            found = function(w, fmt, *args, **kwargs)
            made.append([t.numel() for t in found[:2]])
            return found

        monkeypatch.setattr(ops, name, watching)
    with torch.no_grad():
        layer(x)
    weights = [sizes for sizes in made if 48 * 16 in sizes]
    assert all(sizes == [48 * 16, 0] for sizes in weights)
    for pause in (torch.no_grad, torch.inference_mode):
        with pause():
            assert saved_by(layer, x) == []


def test_layers_that_share_a_weight(device):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    model = native(model, device, fp8_recipe="delayed")
    x = torch.randn(16, 32, device=device)
    first = results(model, x)
    assert model[0].products.w_state is model[2].products.w_state
    assert model[3].products.w_state is not model[0].products.w_state
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(results(model, x)[0], first[0])
    twin = copy.deepcopy(model)
    assert twin[0].products.w_state is twin[2].products.w_state is not model[0].products.w_state


# --- weights of delayed scaling, whose scales are kept while they fit


@pytest.fixture
def warm(device):
    """A layer of delayed scaling and an input that it has multiplied once."""
    layer = linear(device=device, fp8_recipe="delayed")
    x = torch.randn(16, 32, device=device)
    results(layer, x)
    return layer, x


def scale_of(layer):
    """Return the scale that the weight was cast with last."""
    return float(layer.products.w_state.tensor[0])


def own_scale(layer):
    return float(ops.cast(layer.weight.detach(), E4M3)[2])


@pytest.mark.parametrize("turned", [False, True], ids=["x @ w.t()", "x @ w"])
def test_a_weight_keeps_its_scale_until_it_misfits(turned, rows, warm, device):
    layer, x = warm
    products = layer.products
    products.turned = turned  # as if the weight, a square, were [in, out]
    scale = own_scale(layer)
    assert scale_of(layer) == scale
    steps = (
        (1.02, True), (1.02, False), (0.7, True), (0.75, True), (0.9, False), (100.0, False), (1e-3, False),
    )  # fmt: skip
    for factor, kept in steps:
        scale_parameters(factor, layer)
        y = results(layer, x)[0]
        scale = scale if kept else own_scale(layer)
        assert scale_of(layer) == scale
        both = reference.recast(layer.weight.detach().cpu(), E4M3, torch.tensor(scale))[:2]
        codes, codes_t = (c.to(device) for c in (both[::-1] if turned else both))
        options = products.options(True, x.dtype)
        made = casts.cast_weight(layer.weight, options, True, 16)
        later = casts.weight_for_backward(layer.weight, made.codes_t, made.scale, options)
        assert_same_bits([made.codes, later[0]], [codes, codes_t])
        assert float(later[1]) == scale
        exact = x @ layer.weight + layer.bias if turned else nn.Linear.forward(layer, x)
        assert (y - exact).norm() < 0.041 * exact.norm()  # as in test_recipes.py


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_begins_with_its_own_scale(how, warm):
    layer, x = warm
    before = scale_of(layer)
    scale_parameters(0.9, layer)
    results(layer, x)
    assert scale_of(layer) == before
    other = COPIES[how](layer)
    results(other, x)
    assert scale_of(other) == own_scale(other) < before
    scale_parameters(0.9, other)
    results(other, x)
    assert scale_of(other) > own_scale(other)  # and keeps it


@pytest.mark.parametrize("change", ["parameter", "assign", "load", "functional", "scales"])
def test_the_scale_keeps_its_place_which_cuda_graphs_hold(change, warm):
    """Whatever is in the place of the weight: a scale serves any that it fits."""
    layer, x = warm
    scale, place = scale_of(layer), layer.products.w_state.tensor
    others = {k: 0.9 * v.detach() for k, v in layer.state_dict().items()}
    if change == "parameter":
        layer.weight = nn.Parameter(others["weight"])
    elif change == "functional":
        torch.func.functional_call(layer, others, x)
        scale_parameters(0.9, layer)
    elif change == "scales":
        load_scaling_state(layer, {**scaling_state(layer), ".w": torch.tensor(scale * 0.9)})
        scale_parameters(0.8, layer)
        scale = float(torch.tensor(scale) * torch.tensor(0.9))
    else:
        layer.load_state_dict(others, assign=change == "assign")
    results(layer, x)
    assert scale_of(layer) == pytest.approx(scale, rel=1e-6) != own_scale(layer)
    assert layer.products.w_state.tensor is place
    load_scaling_state(layer, {k: v for k, v in scaling_state(layer).items() if k != ".w"})
    results(layer, x)
    assert scale_of(layer) == own_scale(layer)
    assert layer.products.w_state.tensor is place


def test_evaluation_and_inference_take_the_weight_s_own_scale_and_leave_no_trace(warm):
    layer, x = warm
    scale_parameters(0.8, layer)
    trained, scale = results(layer, x), scale_of(layer)
    layer.eval()
    expected = copy.deepcopy(layer)(x)
    assert_same_bits(layer(x), expected)
    assert not torch.equal(expected, trained[0])
    layer.train()
    with torch.inference_mode():
        assert_same_bits(layer(x), expected)
    assert_same_bits(layer(x), trained[0])
    scale_parameters(0.8, layer)
    results(layer, x)
    assert scale_of(layer) == scale


@pytest.mark.gpu
def test_a_weight_on_another_gpu_or_stream_begins_with_its_own_scale():
    layer, x = linear(fp8_recipe="delayed"), torch.randn(16, 32)
    results(layer, x)
    for to in (lambda: layer.cuda(), lambda: layer.cpu()):
        to()
        scale_parameters(0.9, layer)
        results(layer, x.to(layer.weight.device))
        assert scale_of(layer) == own_scale(layer)
    layer.cuda()
    x = x.cuda()
    results(layer, x)
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        for first in (True, False):
            scale_parameters(0.9, layer)
            torch.cuda.synchronize()
            expected = nn.Linear.forward(copy.deepcopy(layer), x)
            with torch.cuda.stream(stream):
                before = scale_of(layer)
                y = results(layer, x)[0]
            torch.cuda.synchronize()
            assert (scale_of(layer) == before) or not first
            assert (y - expected).norm() < 0.05 * expected.norm()


# --- inputs


@RECIPE
def test_an_input_of_three_layers_is_cast_once(recipe, rows, device, monkeypatch):
    model = native(QKV(), device, fp8_recipe=recipe)
    alone = copy.deepcopy(model)
    seen = count_casts(monkeypatch)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    y = model(x * 1)
    assert seen == [(16, 32), *[(32, 32)] * 3]
    y.sum().backward()
    assert len(seen) == 4 + (3 if rows else 6)  # the gradient of each, and its weight
    if recipe != "delayed":  # whose three layers would have three histories
        parts = [layer(x.detach().clone()) for layer in (alone.q, alone.k, alone.v)]
        assert_same_bits(parts[0] + parts[1] * parts[2], y)


def test_what_users_write_to_without_a_trace_is_cast_by_each_layer(device, monkeypatch):
    """Leaves: through .data, NumPy, collectives; and without gradients any tensor, a static buffer perhaps."""
    layer = linear(48, 16, device=device)
    seen = count_casts(monkeypatch)
    leaf = torch.randn(32, 48, device=device, requires_grad=True)
    before = layer(leaf)
    leaf.data.copy_(torch.randn(32, 48))
    assert not torch.equal(layer(leaf), before)
    assert seen.count((32, 48)) == 2
    with torch.no_grad():
        x = leaf * 1
        before = layer(x)
        x.data.copy_(torch.randn(32, 48))
        assert not torch.equal(layer(x), before)
    inner = leaf * 1
    layer(inner)
    with torch.no_grad():  # the other layout is not wanted
        assert_same_bits(layer(inner), layer(inner.detach()))


def test_an_input_changed_in_place_is_cast_again(device):
    layer = linear(device=device)
    x = torch.randn(16, 32, device=device, requires_grad=True) * 1
    first = layer(x)
    with torch.no_grad():
        x.mul_(2)
    assert_same_bits(layer(x), layer(x.detach().clone()))
    assert not torch.equal(layer(x), first)


def test_a_new_input_at_the_address_of_the_last_is_cast(device):
    layer, leaf = linear(device=device), torch.zeros(16, 32, device=device, requires_grad=True)
    addresses = set()
    for i in range(20):
        x = leaf + i
        addresses.add(x.data_ptr())
        expected = layer(torch.full((16, 32), float(i), device=device))
        assert_same_bits(layer(x), expected)
        del x, expected
    assert len(addresses) < 20  # else this shows nothing


@pytest.mark.parametrize(
    "options",
    [{"fp8_format": "e5m2"}, {"fp8_recipe": "blockwise"}, {}],
    ids=["e5m2", "blockwise", "evaluation"],
)
def test_layers_that_cast_otherwise_do_not_share_codes(options, device):
    first, second = linear(device=device), linear(device=device, **options).train(bool(options))
    second.products.inputs = first.products.inputs  # as two layers of a model
    x = torch.randn(16, 32, device=device, requires_grad=True) * 1
    expected = second(x.detach().clone())
    first(x)
    assert_same_bits(second(x), expected)


def test_models_do_not_share_codes(device, monkeypatch):
    layers = [linear(48, 16, device=device) for _ in range(2)]
    seen = count_casts(monkeypatch)
    x = torch.randn(32, 48, device=device, requires_grad=True) * 1
    for _ in range(2):
        for layer in layers:
            layer(x)
    assert seen.count((32, 48)) == 4  # the mark of the one replaces that of the other


@pytest.mark.parametrize("how", COPIES)
def test_the_layers_of_a_copy_share_what_they_know_among_themselves(how, device):
    model = native(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), device)
    model(torch.randn(16, 32, device=device))
    ours, theirs = ([layer.products for layer in m] for m in (model, COPIES[how](model)))
    assert theirs[0].inputs is theirs[1].inputs is not ours[0].inputs
    assert ours[0].last_weight is not None
    assert theirs[0].last_weight is None  # whose scale may be on another device


def test_an_activation_may_be_saved_and_copied(device):
    """The mark on it is in no file, and no codes are those of a copy."""
    layer = linear(device=device)
    x = torch.randn(16, 32, device=device, requires_grad=True) * 1
    layer(x)
    for other in (through_file(x), copy.copy(x), copy.deepcopy(x.detach())):
        other = other * 1 if other.is_leaf else other
        with torch.no_grad():
            other.mul_(3)
        assert_same_bits(layer(other), layer(other.detach().clone()))


def test_a_training_pass_after_an_evaluation_of_the_same_input_is_remembered():
    layer = begun(linear(fp8_recipe="delayed")).eval()
    x = torch.randn(16, 32, requires_grad=True) * 1
    layer(x)
    layer.train()
    layer(x)
    assert layer.products.x_state.tensor[3] == x.detach().abs().max()


@pytest.mark.gpu
def test_codes_are_not_shared_with_another_stream():
    """Which has not waited for them."""
    layer = linear(512, 512, device="cuda").eval()
    x = torch.randn(512, 512, device="cuda", requires_grad=True) * 1
    expected = layer(x.detach().clone())
    assert_same_bits(after(lambda: layer(x), lambda: layer(x)), expected)
