"""What holds for FP8 layers of every kind: copies, recomputation, evaluation, frozen parameters, graphs, restore."""

import copy
import gc

import pytest
import torch
from helpers import assert_same_bits
from layers import (
    COPIES,
    KINDS,
    MODULES,
    REENTRANT,
    Checkpointed,
    captured,
    make,
    native,
    results,
    saved_by,
    scale_parameters,
)  # fmt: skip
from torch import nn

import fp8stack
from fp8stack.nn import fuse, scaling_state
from fp8stack.nn.attention import fp8_products


@pytest.fixture
def x(device):
    return torch.randn(16, 32, device=device)


@KINDS
def test_copies_compute_the_same_and_live_their_own_life(kind, recipe, x, device):
    model = make(kind, device, recipe)
    expected = results(model, x)
    for other in (copied(model) for copied in COPIES.values()):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        given = results(other, x)
        if recipe == "delayed":  # whose copies learn their scales anew
            assert (given[0] - expected[0]).norm() < 0.05 * expected[0].norm()
        else:
            assert_same_bits(given, expected)
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert not torch.equal(results(other, x)[0], given[0])
    assert_same_bits(results(model, x), expected)


@KINDS
@REENTRANT
def test_recomputation_gives_the_same_bits_and_is_not_remembered(
    kind, recipe, reentrant, rows, x, device
):
    """Delayed scales have moved on by then, and gradients must still be those of the forward pass."""
    given = []
    for again in (False, True):
        torch.manual_seed(3)
        model = make(kind, device, recipe, **{"amax_history_len": 2} if recipe == "delayed" else {})
        like, found = model(x).detach(), []
        run = Checkpointed(model, reentrant) if again else model
        for factor in (1.0, 3.0, 0.01, 1.0):
            found += results(run, factor * x, factor * like)
            scale_parameters(0.9, model)
        if kind != "attention" or not reentrant:  # its first pass is evaluation without gradients
            found += results(run.eval(), 2 * x)
        given.append([*found, *scaling_state(model).values()])
    assert_same_bits(*given)


@KINDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gives_the_same_and_leaves_nothing(kind, recipe, mode, x, device):
    model = make(kind, device, recipe)
    with mode():
        first, inside = model.eval()(x), x + 1
        assert saved_by(model, x) == []
    with torch.no_grad():
        model(inside)
    trained = results(model.train(), x)
    if kind != "attention":  # which is torch's own there
        assert_same_bits(first, trained[0])
    state = scaling_state(model)
    model.eval()
    with mode():
        assert_same_bits(model(x.clone()), first)
    assert_same_bits(results(model, x), trained)
    results(model, 1000 * x)
    assert_same_bits(scaling_state(model).values(), state.values())


@KINDS
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(kind, recipe, x, device):
    model = make(kind, device, recipe)
    y, dx, *expected = results(model, x)
    for frozen in (*model.parameters(), None):
        for needed in (True, False):
            model.requires_grad_(True).zero_grad()
            if frozen is not None:
                frozen.requires_grad_(False)
            leaf = x.clone().requires_grad_(needed)
            y = model(leaf)
            if y.requires_grad:
                y.backward(torch.ones_like(y))
            assert leaf.grad is None or torch.equal(leaf.grad, dx)
            assert (leaf.grad is None) == (not needed)
            for p, gradient in zip(model.parameters(), expected, strict=True):
                assert p.grad is None if p is frozen else torch.equal(p.grad, gradient)
    assert not model.requires_grad_(False)(x).requires_grad


@KINDS
def test_no_tokens_give_no_tokens_and_leave_no_trace(kind, recipe, x, device):
    model = make(kind, device, recipe)
    y = results(model, x)[0]
    state = scaling_state(model)
    for shape in ((0,), (2, 0)):
        out, dx, *gradients = results(model, torch.empty(*shape, 32, device=device))
        assert (out.shape, dx.shape) == ((*shape, y.shape[-1]), (*shape, 32))
        assert not any(gradient.any() for gradient in gradients)
    assert_same_bits(scaling_state(model).values(), state.values())


@KINDS
def test_backward_through_a_weight_that_changed_since_is_torchs_error(
    kind, recipe, rows, x, device
):
    """If the input needs a gradient: without one, torch's own Linear does not read the weight in backward either."""
    model, x = make(kind, device, recipe), x.requires_grad_()
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    for changed in (*weights, *[x] * (kind == "norm")):  # a norm saves its input
        y = model(x)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            y.sum().backward()


@KINDS
def test_a_second_backward_needs_the_graph_and_gives_the_same(kind, recipe, rows, x, device):
    model = make(kind, device, recipe)
    y = model(x.requires_grad_()).sum()
    y.backward(retain_graph=True)
    first = [2 * p.grad for p in (x, *model.parameters())]
    y.backward()
    assert_same_bits([p.grad for p in (x, *model.parameters())], first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@KINDS
def test_backward_may_outlive_the_model(kind, recipe, x, device):
    """Whose states it updates, though nothing else knows them any more."""
    model = make(kind, device, recipe)
    _, expected, *_ = results(copy.deepcopy(model), x)
    y = model(x.requires_grad_())
    del model
    gc.collect()
    y.sum().backward()
    assert_same_bits(x.grad, expected)


@KINDS
def test_restore_gives_the_modules_that_were_with_the_same_parameters(kind, recipe, x, device):
    model = nn.Sequential(*MODULES[kind]()).to(device)
    expected = results(model, x)

    def seen():
        modules = [(type(m), set(vars(m))) for m in model.modules()]
        return modules, [id(p) for p in model.parameters()], list(model.state_dict())

    before = seen()
    native(model, device, fp8_recipe=recipe, matmuls=kind == "bare")
    fuse(model)
    given = results(model, x)
    assert not torch.equal(given[0], expected[0])
    assert all(isinstance(m, was) for m, (was, _) in zip(model.modules(), before[0], strict=True))
    assert seen()[1:] == before[1:]
    fp8stack.restore(model)
    assert seen() == before
    assert_same_bits(results(model, x), expected)


@KINDS
@pytest.mark.gpu
def test_a_captured_step_reads_the_weights_and_inputs_of_each_replay(kind, recipe):
    ours, theirs = (make(kind, "cuda", recipe) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    x = torch.ones(16, 32, device="cuda")

    def step(model):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return y, *(p.grad for p in model.parameters())

    graph, given = captured(lambda: step(ours))
    for _ in range(3):
        step(theirs)
    for i in range(4):
        x.copy_(torch.randn(16, 32) * 2.0**i)
        scale_parameters(0.9, ours, theirs)
        graph.replay()
        if recipe == "delayed":  # in a graph weights have their own scales
            for _, products, _ in fp8_products(theirs).values():
                products.w_state.tensor.zero_()
        assert_same_bits(given, step(theirs))
