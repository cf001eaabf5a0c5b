"""What is cast and when: weights once for each change of them, inputs once for all layers that read them."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from helpers import assert_same_bits
from layers import QKV, RECIPES, casts_of, count_casts, linear, native, results
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.kernels.reference import cast as reference
from fp8stack.nn import forget_weights, fuse, load_scaling_state, scaling_state
from fp8stack.nn.operands import WeightCache

RECIPE = pytest.mark.parametrize("recipe", RECIPES)
KEEPS = pytest.mark.parametrize("keep", ["fp8+t", "fp8"])
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved hooks"])


def assert_fresh(layer, x):
    """Fail unless the layer computes with the weight that it has now."""
    copy_of = copy.deepcopy(layer)
    for given, expected in zip(results(layer, x), results(copy_of, x), strict=True):
        assert_same_bits(given, expected)


# --- weights


@RECIPE
@KEEPS
def test_a_weight_is_cast_once_for_eight_micro_batches(recipe, keep, device):
    layer = linear(device=device, fp8_recipe=recipe, weight_cache=keep)
    optimizer = torch.optim.AdamW(layer.parameters())
    for step in range(3):
        for _ in range(8):
            layer(torch.randn(16, 32, device=device, requires_grad=True)).sum().backward()
        assert casts_of(layer) == step + 1
        optimizer.step()


@RECIPE
@KEEPS
def test_a_step_frees_the_codes_of_all_weights(recipe, keep, device):
    layers = [linear(device=device, fp8_recipe=recipe, weight_cache=keep) for _ in range(2)]
    optimizer = torch.optim.AdamW(layers[0].parameters())
    for _ in range(2):
        for layer in layers:
            layer(torch.randn(16, 32, device=device, requires_grad=True)).sum().backward()
        codes = [weakref.ref(layer.products.weights._codes.forward) for layer in layers]
        assert all(one() is not None for one in codes)
        optimizer.step()
        assert all(one() is None for one in codes)
    assert not WeightCache.kept


@RECIPE
@KEEPS
@REENTRANT
def test_recomputation_casts_no_weight(recipe, keep, reentrant, device, monkeypatch):
    layer = linear(48, 16, device=device, fp8_recipe=recipe, weight_cache=keep)
    seen = count_casts(monkeypatch)
    for _ in range(8):
        x = torch.randn(32, 48, device=device, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert casts_of(layer) == 1
    assert seen.count((16, 48)) == 1
    # the input, and again in each backward, unless it is the very tensor that was cast last
    inputs = 16 if reentrant else 8
    assert seen.count((32, 48)) == inputs
    assert len(seen) == 1 + inputs + 8


def test_without_a_cache_every_pass_casts(device, monkeypatch):
    layer = linear(48, 16, device=device, weight_cache="off")
    seen = count_casts(monkeypatch)
    for _ in range(8):
        layer(torch.randn(32, 48, device=device, requires_grad=True)).sum().backward()
    assert casts_of(layer) == 8
    assert seen.count((16, 48)) == 16
    assert layer.products.weights._codes is None


class ThroughData(torch.optim.Optimizer):
    """An optimizer as extensions write them: the weight's version counter does not see the change."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)


def change_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def load(layer):
    layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()})


def step_adamw(layer):
    torch.optim.AdamW(layer.parameters(), lr=0.1).step()


def step_through_data(layer):
    ThroughData(layer.parameters()).step()


def replace_data(layer):
    layer.weight.data = layer.weight.data * 3


@RECIPE
@KEEPS
@pytest.mark.parametrize(
    "change", [step_adamw, step_through_data, change_in_place, load, replace_data]
)
def test_a_changed_weight_is_cast_anew(recipe, keep, change, device):
    layer = linear(device=device, fp8_recipe=recipe, weight_cache=keep)
    x = torch.randn(16, 32, device=device)
    before = results(layer, x)
    for _ in range(2):
        change(layer)
        after = results(layer, x)
        assert not torch.equal(after[0], before[0])
        assert not torch.equal(after[1], before[1])
        assert_fresh(layer, x)
        before = after
    assert casts_of(layer) == 5  # assert_fresh's too: by then a gradient came and went


def replace_parameter(layer):
    layer.weight = nn.Parameter(3 * layer.weight.detach())


def load_by_assignment(layer):
    layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}, assign=True)


@RECIPE
@KEEPS
@pytest.mark.parametrize("change", [replace_parameter, load_by_assignment])
def test_another_parameter_in_the_place_of_a_weight_is_used_at_once(recipe, keep, change, device):
    layer = linear(device=device, fp8_recipe=recipe, weight_cache=keep)
    x = torch.randn(16, 32, device=device)
    before = results(layer, x)
    for _ in range(2):
        change(layer)
        after = results(layer, x)
        assert not torch.equal(after[0], before[0])
        assert_fresh(layer, x)
        with torch.no_grad():
            layer.weight.mul_(2)
        before = results(layer, x)
        assert_fresh(layer, x)


def step_by_hand(model):
    """Train without an optimizer: no version counts, no hook is called."""
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.5)
            p.grad = None


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Bare(nn.Module):
    """A product by a stack of experts, which takes a view of the parameter for each."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 64, 64))

    def forward(self, x):
        return (x.repeat(1, 2) @ self.w).sum(0)


def by_hand(kind, device, **options):
    """Return a model of FP8 products of a kind."""
    if kind == "fused":
        model = native(SwiGLU(), device, **options)
        assert fuse(model) == [""]
        return model
    if kind == "bare":
        return native(Bare(), device, matmuls=True, **options)
    return linear(device=device, **options)


KINDS = pytest.mark.parametrize("kind", ["layer", "fused", "bare"])


@KINDS
@KEEPS
def test_training_without_an_optimizer_through_data_is_seen(kind, keep, device):
    model = by_hand(kind, device, weight_cache=keep)
    x = torch.randn(16, 32, device=device)
    before = model(x).detach()
    for look in (False, True, False):
        model(x).square().sum().backward()
        if look:  # before the step, at what it will change
            model(x)
        step_by_hand(model)
        after = model(x).detach()
        assert not torch.equal(after, before)
        assert_same_bits(after, copy.deepcopy(model)(x).detach())
        before = after


@REENTRANT
def test_codes_that_recomputation_made_are_not_those_of_after_a_step_by_hand(reentrant, device):
    layer = linear(48, 16, device=device)
    x = torch.randn(32, 48, device=device, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=reentrant)
    forget_weights(layer)
    y.sum().backward()
    step_by_hand(layer)
    assert_fresh(layer, x)


def test_a_frozen_weight_is_cast_once_whatever_runs_backward(device):
    layer = linear(device=device)
    layer.weight.requires_grad_(False)
    other = linear(device=device)
    for _ in range(4):
        layer(other(torch.randn(16, 32, device=device))).sum().backward()
        step_by_hand(layer)
    assert casts_of(layer) == 1


def test_forwards_without_a_backward_cast_a_weight_once(device):
    layer = linear(device=device)
    for _ in range(4):
        layer(torch.randn(16, 32, device=device))
        layer.zero_grad()
    assert casts_of(layer) == 1


def test_codes_of_a_dry_run_are_not_kept():
    """Fake tensors tell memory and shapes, and have no bytes."""
    layer = linear()
    x = torch.randn(16, 32)
    expected = copy.deepcopy(layer)(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(x)
    assert_same_bits(layer(x), expected)
    assert casts_of(layer) == 2


def test_evaluation_always_casts_anew(device):
    """Moving averages are swapped in through .data, which leaves no trace."""
    layer = linear(device=device)
    x = torch.randn(16, 32, device=device)
    trained, kept = results(layer, x)[0], layer.weight.data.clone()
    layer.eval()
    layer.weight.data.copy_(torch.randn_like(kept))
    swapped = layer(x)
    assert not torch.equal(swapped, trained)
    assert_same_bits(swapped, copy.deepcopy(layer)(x))
    layer.weight.data.copy_(kept)
    assert_same_bits(layer(x), trained)
    layer.train()
    assert_same_bits(layer(x), trained)


def test_layers_that_share_a_weight_share_its_codes(device):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    model = native(model, device)
    x = torch.randn(16, 32, device=device)
    first = results(model, x)
    assert model[0].products.weights is model[2].products.weights
    assert model[3].products.weights is not model[0].products.weights
    assert casts_of(model[0]) == 1
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(results(model, x)[0], first[0])
    assert casts_of(model[0]) == 2


@RECIPE
@pytest.mark.parametrize("size", [(32, 32), (40, 130)], ids=str)
def test_what_is_kept_of_a_weight_changes_no_bit(recipe, size, device):
    given = {}
    for keep in ("fp8+t", "fp8", "off"):
        torch.manual_seed(1)
        layer = linear(*size, device=device, fp8_recipe=recipe, weight_cache=keep)
        inputs = [torch.randn(5, 7, size[0], device=device) * 2.0**i for i in range(3)]
        given[keep] = [t for x in inputs for t in results(layer, x, torch.randn_like(layer(x)))]
    for keep in ("fp8", "off"):
        for one, other in zip(given[keep], given["fp8+t"], strict=True):
            assert_same_bits(one, other, keep)


@RECIPE
def test_copies_compute_the_same_and_live_their_own_life(recipe, device):
    model = native(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), device, fp8_recipe=recipe)
    x = torch.randn(16, 32, device=device)
    expected = results(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        if recipe == "delayed":  # whose copies learn their scales anew
            error = (results(other, x)[0] - expected[0]).norm()
            assert error < 0.05 * expected[0].norm()
        else:
            for given, same in zip(results(other, x), expected, strict=True):
                assert_same_bits(given, same)
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert not torch.equal(results(other, x)[0], expected[0])
    if recipe != "delayed":
        assert_same_bits(results(model, x)[0], expected[0])


# --- weights of delayed scaling, whose scales are kept while they fit


def delayed(device, **options):
    return linear(device=device, fp8_recipe="delayed", **options)


def scale_of(layer):
    """Return the scale of the codes that are kept of the weight."""
    return float(layer.products.weights._codes.scale)


def own_scale(layer):
    return float(ops.cast(layer.weight.detach(), E4M3)[2])


def recast(weight, previous):
    """Return what `ops.recast` does after that scale, on the weight's device."""
    results = reference.recast(weight.detach().cpu(), E4M3, torch.tensor(previous))
    return [result.to(weight.device) for result in results]


def scaled(layer, factor):
    with torch.no_grad():
        layer.weight.mul_(factor)


@KEEPS
def test_a_weight_keeps_its_scale_until_it_misfits(keep, device):
    layer = delayed(device, weight_cache=keep)
    x = torch.randn(16, 32, device=device)
    results(layer, x)
    scale = own_scale(layer)
    assert scale_of(layer) == scale
    for factor, kept in ((1.02, True), (1.02, False), (0.7, True), (0.75, True), (0.9, False)):
        scaled(layer, factor)
        y = results(layer, x)[0]
        scale = scale if kept else own_scale(layer)
        assert scale_of(layer) == scale
        codes, codes_t, _ = recast(layer.weight, scale)
        kept_codes = layer.products.weights._codes
        assert_same_bits(kept_codes.forward, codes)
        assert_same_bits(kept_codes.backward, codes_t if keep == "fp8+t" else codes[:0, :0])
        exact = nn.functional.linear(x, layer.weight, layer.bias)
        assert (y - exact).norm() < 0.041 * exact.norm()  # as in test_recipes.py
    assert casts_of(layer) == 6


def test_a_weight_whose_codes_are_laid_out_for_x_times_w_keeps_its_scale(device):
    weight = nn.Parameter(torch.randn(48, 32, device=device))
    cache = WeightCache(weight, "fp8+t", turned=True, follows=True)
    first, _ = cache.codes(weight, True, True)
    with torch.no_grad():
        weight.mul_(0.8)
    for codes, _ in (cache.codes(weight, True, True), cache.codes(weight, True, False)):
        expected = recast(weight, float(first.scale))
        assert_same_bits(codes.forward, expected[1])
        assert_same_bits(codes.backward, expected[0])
        assert_same_bits(codes.scale, first.scale)
    assert cache.casts == 2


@pytest.mark.parametrize("factor", [1e-3, 0.3, 1.05, 100.0])
def test_weights_of_another_size_are_loaded(factor, device):
    layer = delayed(device)
    x = torch.randn(16, 32, device=device)
    results(layer, x)
    layer.load_state_dict({k: factor * v for k, v in layer.state_dict().items()})
    assert_fresh(layer, x)
    assert scale_of(layer) == own_scale(layer)
    with torch.no_grad():
        layer.weight[3, 5] = torch.nan
    assert results(layer, x)[0].isnan().all()
    layer.load_state_dict({k: v.nan_to_num() for k, v in layer.state_dict().items()})
    assert_fresh(layer, x)


@pytest.mark.parametrize("change", ["deepcopy", "pickle", "save"])
def test_a_copy_begins_with_its_own_scale(change, device):
    layer = delayed(device)
    x = torch.randn(16, 32, device=device)
    results(layer, x)
    before = scale_of(layer)
    scaled(layer, 0.9)
    results(layer, x)
    assert scale_of(layer) == before
    if change == "deepcopy":
        other = copy.deepcopy(layer)
    elif change == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    results(other, x)
    assert scale_of(other) == own_scale(other) < before
    scaled(other, 0.9)
    results(other, x)
    assert scale_of(other) > own_scale(other)  # and keeps it


@pytest.mark.parametrize("change", ["parameter", "assign", "load", "functional", "scales"])
def test_the_scale_keeps_its_place_which_cuda_graphs_hold(change, device):
    """Whatever is in the place of the weight: a scale serves any that it fits."""
    layer = delayed(device)
    x = torch.randn(16, 32, device=device)
    results(layer, x)
    scale, place = scale_of(layer), layer.products.weights.last_scale.tensor
    others = {k: 0.9 * v.detach() for k, v in layer.state_dict().items()}
    if change == "parameter":
        layer.weight = nn.Parameter(others["weight"])
    elif change == "functional":
        torch.func.functional_call(layer, others, x)
        scaled(layer, 0.9)
    elif change == "scales":
        load_scaling_state(layer, {**scaling_state(layer), ".w": torch.tensor(scale * 0.9)})
        scaled(layer, 0.8)
        scale = float(torch.tensor(scale) * torch.tensor(0.9))
    else:
        layer.load_state_dict(others, assign=change == "assign")
    results(layer, x)
    assert scale_of(layer) == pytest.approx(scale, rel=1e-6) != own_scale(layer)
    assert layer.products.weights.last_scale.tensor is place
    assert float(place[0]) == scale_of(layer)
    load_scaling_state(layer, {k: v for k, v in scaling_state(layer).items() if k != ".w"})
    results(layer, x)
    assert scale_of(layer) == own_scale(layer)
    assert layer.products.weights.last_scale.tensor is place


def test_evaluation_and_inference_take_the_weight_s_own_scale_and_leave_no_trace(device):
    layer = delayed(device)
    x = torch.randn(16, 32, device=device)
    results(layer, x)
    scaled(layer, 0.8)
    trained = results(layer, x)
    layer.eval()
    expected = copy.deepcopy(layer)(x)
    before = layer.products.weights._codes
    assert_same_bits(layer(x), expected)
    assert not torch.equal(expected, trained[0])
    layer.train()
    with torch.inference_mode():
        assert_same_bits(layer(x), expected)
    assert layer.products.weights._codes is before
    assert_same_bits(layer(x), trained[0])
    scaled(layer, 0.8)
    results(layer, x)
    assert scale_of(layer) == float(before.scale)


@pytest.mark.parametrize(
    "options",
    [{"weight_cache": "off"}, {"fp8_recipe": "current"}, {"fp8_recipe": "blockwise"}],
    ids=["off", "current", "blockwise"],
)
def test_other_weights_always_have_their_own_scales(options, device, monkeypatch):
    layer = linear(device=device, **{"fp8_recipe": "delayed", **options})
    x = torch.randn(16, 32, device=device)
    results(layer, x)
    monkeypatch.setattr(ops, "recast", None)
    scaled(layer, 0.9)
    assert_fresh(layer, x)


def test_forgotten_codes_come_again(device):
    layer = delayed(device)
    x = torch.randn(16, 32, device=device)
    for factor in (1.0, 0.8):
        scaled(layer, factor)
        before = results(layer, x)
    layer.products.weights.forget()
    for given, same in zip(results(layer, x), before, strict=True):
        assert_same_bits(given, same)
    assert casts_of(layer) == 3


@KEEPS
@REENTRANT
def test_recomputation_repeats_the_codes_of_a_weight_whose_scale_is_kept(keep, reentrant, device):
    given = {}
    for recompute in (False, True):
        torch.manual_seed(3)
        layer = delayed(device, weight_cache=keep)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
        found, kept = [], 0
        for _ in range(6):
            x = torch.randn(16, 32, device=device, requires_grad=True)
            y = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad, layer.weight.grad.clone()]
            kept += scale_of(layer) != own_scale(layer)
            optimizer.step()
            optimizer.zero_grad()
        given[recompute] = found
        assert kept > 2
        assert casts_of(layer) == 6
    for one, other in zip(given[True], given[False], strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
def test_a_weight_on_another_gpu_or_stream_begins_with_its_own_scale():
    layer = delayed("cpu")
    x = torch.randn(16, 32)
    results(layer, x)
    for to in (lambda: layer.cuda(), lambda: layer.cpu()):
        to()
        scaled(layer, 0.9)
        results(layer, x.to(layer.weight.device))
        assert scale_of(layer) == own_scale(layer)
    layer.cuda()
    x = x.cuda()
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        for first in (True, False):
            scaled(layer, 0.9)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                results(layer, x)
            torch.cuda.synchronize()
            assert (scale_of(layer) == own_scale(layer)) is first


# --- inputs


@RECIPE
def test_an_input_of_three_layers_is_cast_once(recipe, device, monkeypatch):
    model = native(QKV(), device, fp8_recipe=recipe)
    alone = copy.deepcopy(model)
    seen = count_casts(monkeypatch)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    y = model(x)
    assert seen == [(16, 32), *[(32, 32)] * 3]
    y.sum().backward()
    assert len(seen) == 4 + 3  # and the gradient of each
    if recipe != "delayed":  # whose three layers would have three histories
        parts = [layer(x.detach().clone()) for layer in (alone.q, alone.k, alone.v)]
        assert_same_bits(parts[0] + parts[1] * parts[2], y)


def test_an_input_changed_in_place_is_cast_again(device):
    layer = linear(device=device)
    x = torch.randn(16, 32, device=device)
    first = layer(x)
    x.mul_(2)
    assert_same_bits(layer(x), layer(x.clone()))
    assert not torch.equal(layer(x), first)


def test_a_new_input_at_the_address_of_the_last_is_cast(device):
    layer = linear(device=device)
    addresses = set()
    for i in range(20):
        x = torch.full((16, 32), float(i), device=device)
        addresses.add(x.data_ptr())
        expected = layer(torch.full((16, 32), float(i), device=device) + 0)
        assert_same_bits(layer(x), expected)
        del x, expected
    assert len(addresses) < 20  # else this shows nothing


def test_without_gradients_every_layer_casts_its_input(device, monkeypatch):
    """A buffer may come again with other contents that no version counter tells of."""
    layer = linear(48, 16, device=device)
    x = torch.randn(32, 48, device=device)
    with torch.no_grad():
        before = layer(x)
        x.data.copy_(torch.randn(32, 48))
        assert not torch.equal(layer(x), before)
    leaf = x.clone().requires_grad_()
    seen = count_casts(monkeypatch)
    with torch.no_grad():
        layer(leaf)
    layer(leaf)
    assert seen.count((32, 48)) == 2  # again, for the layout that backward needs


def test_layers_of_other_formats_do_not_share_codes(device):
    torch.manual_seed(3)
    e4m3 = linear(device=device, fp8_format="e4m3")
    e5m2 = linear(device=device, fp8_format="e5m2")
    x = torch.randn(16, 32, device=device)
    expected = e5m2(x.clone())
    e4m3(x)
    assert_same_bits(e5m2(x), expected)


@pytest.mark.gpu
def test_codes_are_not_shared_with_another_stream():
    """Which has not waited for them. The first stream is held up, so that codes taken from it would be wrong."""
    layer = linear(512, 512, device="cuda").eval()
    other = torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda")
    expected = layer(x.clone())
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    layer(x)
    with torch.cuda.stream(other):
        y = layer(x)
    other.synchronize()
    assert_same_bits(y, expected)
    torch.cuda.synchronize()


# --- backward


@pytest.mark.parametrize(
    ("recipe", "keep"),
    [(r, k) for r in RECIPES for k in ("fp8+t", "fp8", "off") if (r, k) != ("blockwise", "off")],
)
def test_saves_fp8_codes_of_the_input_and_nothing_of_it_besides(recipe, keep):
    """One byte an element, and the weight's codes, which the cache holds anyway (none with "off")."""
    layer = linear(256, 128, bias=False, fp8_recipe=recipe, weight_cache=keep)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(384, 256, requires_grad=True))
    cached = layer.products.weights._codes or ()
    own = [t for t in saved if t is not layer.weight and all(t is not c for c in cached)]
    scales = {"current": 4, "delayed": 4, "blockwise": 4 * 256 * 3}[recipe]
    slack = 256 * 128 // 100  # scales of the weight
    assert sum(t.nbytes for t in own) <= 384 * 256 + scales + slack
    assert any(t is layer.weight for t in saved)
    assert all(t.element_size() == 1 or t.numel() < 1000 for t in own)


@RECIPE
@pytest.mark.parametrize("keep", ["fp8+t", "fp8", "off"])
def test_backward_through_a_weight_that_changed_since_is_torchs_error(recipe, keep, device):
    layer = linear(device=device, fp8_recipe=recipe, weight_cache=keep)
    y = layer(torch.randn(16, 32, device=device, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_backward_needs_the_graph_and_gives_the_same(device):
    layer = linear(device=device)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    y = layer(x).sum()
    y.backward(retain_graph=True)
    first = layer.weight.grad.clone()
    y.backward()
    assert_same_bits(layer.weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
