"""A model and its optimizer are freed once nobody holds them, whatever was done with them, and not before."""

import copy
import gc
import weakref

import pytest
import torch
from helpers import assert_same_bits, batch, build, through_file, train
from layers import CASTS, RECIPES
from torch import nn

import fp8stack
from fp8stack.capability import native_recipe
from fp8stack.monitor import Monitor
from fp8stack.nn import casts
from fp8stack.optim import SGD, AdamW

pytestmark = pytest.mark.usefixtures("frozen")  # every test collects
RELEASED = {"compute": "native", "step_in_backward": True}


class Failed(Exception):
    pass


def fail(*_):
    raise Failed


FAILING = {
    "forward": lambda model, _: model.up.register_forward_hook(fail),
    "backward of a layer": lambda model, _: model.up.register_full_backward_hook(fail),
    "hook of a parameter": lambda m, _: m.up.weight.register_post_accumulate_grad_hook(fail),
    "step": lambda _, optimizer: optimizer.register_step_pre_hook(fail),
}


def watch(model, optimizer):
    """Return weak references, by name, to all that takes up memory."""
    seen = {"model": model, "optimizer": optimizer, **dict(model.named_parameters())}
    seen |= {name: module for name, module in model.named_modules() if name}
    for i, entry in enumerate(optimizer.state.values()):
        seen |= {f"{key} {i}": value for key, value in entry.items()}
    return {name: weakref.ref(value) for name, value in seen.items()}


def assert_freed(references, device="cpu"):
    # torch keeps what was left to do of a backward that failed, on the CPU until the next one
    torch.ones(1, device=device, requires_grad=True).backward()
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("O0", {}), ("O1", {}), ("O1", {"step_in_backward": True}), ("O2", {}), ("O2", {"states": "4bit"}),
        ("O2", {"fp8_recipe": "delayed"}), ("O2", {"step_in_backward": True, "matmuls": True}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["watched", "restored", "hooked"])
def test_levels_are_freed(level, options, end, device):
    def use():
        model, optimizer = build(level, device, compute="native", **options)
        fp8stack.nn.fuse(model)
        if end == "watched":
            Monitor(model, optimizer, every=1)
        if end == "hooked":  # as by what keeps a moving average of the weights
            optimizer.register_step_post_hook(lambda *_: model.eval())
        train(model, optimizer, 2, device=device)
        references = watch(model, optimizer)
        if end == "restored":
            references |= {f"restored {k}": v for k, v in watch(*fp8stack.restore(model)).items()}
        return references

    assert_freed(use(), device)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_compiled_model_is_freed(recipe, device):
    """What torch.compile keeps of it is gone after `torch.compiler.reset()`."""

    def use():
        model, optimizer = build("O2", device, compute="native", fp8_recipe=recipe)
        model.compile(backend="inductor" if device == "cuda" else "aot_eager")
        train(model, optimizer, 2, device=device)
        return watch(model, optimizer)

    references = use()
    torch.compiler.reset()
    assert_freed(references, device)


@pytest.mark.parametrize("options", [{}, RELEASED], ids=["O2", "step in backward"])
@pytest.mark.parametrize("where", FAILING)
def test_a_step_that_failed_leaves_nothing(where, options, device):
    def use():
        model, optimizer = build("O2", device, **options)
        train(model, optimizer, 1, device=device)
        FAILING[where](model, optimizer)
        with pytest.raises(Failed):
            train(model, optimizer, 1, start=1, device=device)
        return watch(model, optimizer)

    assert_freed(use(), device)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_an_optimizer_that_steps_in_backward_on_its_own_is_freed(kind):
    def use():
        model, optimizer = build(optimizer=kind)
        optimizer.step_in_backward()
        train(model, optimizer, 2)
        return watch(model, optimizer)

    assert_freed(use())


def test_the_model_keeps_what_steps_it():
    """Who holds the model alone trains on, and gets the optimizer back."""
    kept, _ = build("O2", **RELEASED)
    model, optimizer = build("O2", **RELEASED)
    gc.collect()
    for each in (kept, model):
        each(*batch(0)).backward()
    assert [p.grad for p in kept.parameters()] == [None] * 7
    assert_same_bits(kept.parameters(), model.parameters())
    assert type(fp8stack.restore(kept)[1]) is type(fp8stack.restore(model, optimizer)[1])


def test_the_optimizer_keeps_parameters_stepping():
    """The model was a container that is gone; its layers go on."""
    layers = nn.Linear(128, 128), nn.Linear(128, 128)
    parameters = [p for layer in layers for p in layer.parameters()]
    _, optimizer = fp8stack.initialize(
        nn.Sequential(*layers), torch.optim.AdamW(parameters, lr=1e-3), "O2", step_in_backward=True
    )
    gc.collect()
    before = layers[0].weight.detach().clone()
    layers[1](layers[0](torch.ones(16, 128))).sum().backward()
    optimizer.step()
    assert layers[0].weight.grad is None
    assert layers[0].weight.ne(before).any()


def test_gradients_stay_where_the_optimizer_that_stepped_them_is_gone():
    model, optimizer = build(optimizer=AdamW)
    optimizer.step_in_backward()
    other = copy.deepcopy(model)
    model(*batch(0)).backward()
    assert model.up.weight.grad is None
    del optimizer
    gc.collect()
    for each in (model, other):
        each(*batch(1)).backward()
        assert all(p.grad is not None for p in each.parameters())


def test_parameters_that_are_stepped_in_backward_are_saved_as_plain_ones():
    model, optimizer = build(optimizer=AdamW)
    optimizer.step_in_backward()
    saved = through_file(model.state_dict(keep_vars=True))
    assert_same_bits(saved["up.weight"], model.up.weight)


# --- FP8 codes, which live from forward to backward at most


def read_by_up(device):
    """Return a model, an activation that its layer `up` read, the output, and a weak reference to the codes between."""
    model, _ = build("O0", device, compute="native")
    x = torch.randn(16, 128, device=device, requires_grad=True) * 1
    y = model.up(x)
    return model, x, y, weakref.ref(model.up.products.inputs.last[2].codes)


def test_codes_of_an_input_go_with_it(device):
    model, x, y, codes = read_by_up(device)
    assert codes() is not None
    del x
    assert codes() is None
    assert model.up.products.inputs.last is None
    y.sum().backward()


def test_codes_of_an_input_that_others_keep_go_when_the_next_is_cast(device):
    """As where a layer that is not FP8 saves the same input for its backward."""
    model, x, y, codes = read_by_up(device)
    kept = x.sin()
    del x
    assert codes() is not None  # the graph of sin has the input
    z = model.down(y * 1)
    assert codes() is None
    (z.sum() + kept.sum()).backward()


def test_codes_of_an_input_that_others_keep_go_when_backward_begins(device):
    _model, x, y, codes = read_by_up(device)
    seen = []
    x.register_hook(lambda _: seen.append(codes()))  # behind the layer's backward
    y.sum().backward()
    assert seen == [None]
    assert codes() is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("few", [0, casts.FEW_ROWS], ids=["many rows", "few rows"])
def test_no_codes_are_left_after_a_step(recipe, few, device, monkeypatch):
    """Neither of weights nor of anything else: FP8 tensors are all gone."""
    if not native_recipe(recipe, device):
        pytest.skip("this GPU has no such recipe")
    monkeypatch.setattr(casts, "FEW_ROWS", few)
    model, optimizer = build("O0", device, compute="native", fp8_recipe=recipe)
    fp8stack.nn.fuse(model)
    made = []
    for name in CASTS:
        function = getattr(casts.ops, name)

        def watching(*args, function=function, **kwargs):
            found = function(*args, **kwargs)
            made.extend(weakref.ref(t) for t in found if t.element_size() == 1 and t.numel())
            return found

        monkeypatch.setattr(casts.ops, name, watching)
    train(model, optimizer, 2, device=device)
    assert len(made) > 10
    assert [one() for one in made if one() is not None] == []
