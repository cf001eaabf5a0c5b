"""Which modules are converted and what the card says of the others; classes and forwards that others set."""

import functools

import pytest
import torch
from helpers import assert_same_bits
from layers import RECIPES, Root, native, results
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize

import fp8stack
from fp8stack.errors import Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.nn.bf16_storage import StoredLayer
from fp8stack.nn.linear import Bf16Layer
from fp8stack.nn.mixin import mix, take_off


@pytest.mark.parametrize(
    "options", [{"fp8_recipe": "delayed"}, {"select": "all"}, {"matmuls": True}]
)
def test_options_without_an_effect_are_named(options):
    ((name, value),) = options.items()
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UnsupportedDeviceError, match=f"{name}={value!r} has no effect"):
        fp8stack.initialize(model, None, "O0", strict=True, compute="bf16", **options)


def test_layers_that_the_card_leaves_out_are_no_bare_parameters_either():
    class Scaled(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(Scaled(64, 64))
    fp8stack.initialize(model, None, "O0", compute="native", matmuls=True)
    model(torch.randn(2, 16, 64)).sum().backward()
    report = fp8stack.get_report(model)
    assert list(report.skipped) == ["0"]
    assert report.multiplied == set()


def test_a_module_that_is_changed_twice_gets_its_first_class_back():
    layer = nn.Linear(4, 4)
    before = dict(vars(layer))
    mix(layer, Bf16Layer, layer_name="a", more=1)
    mix(layer, StoredLayer, layer_name="b")
    assert layer.layer_name == "b"
    take_off(layer)
    assert (type(layer), vars(layer)) == (nn.Linear, before)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_size_is_left_out_for_that():
    model = nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 16))
    native(model)
    told = "it has 0 {}_features: there is nothing to multiply"
    skipped = {"0": told.format("out"), "1": told.format("in")}
    assert fp8stack.get_report(model).skipped == skipped


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_card_says_where_bare_parameters_have_another_scaling(recipe):
    said = (
        r"fp8_recipe='delayed' has no effect with products by bare parameters \(matmuls=True\): these use "
        r'"current" scaling, and only Linear layers use yours'
    )
    by_itself, _ = fp8stack.initialize(Root(), None, "O0", fp8_recipe=recipe, strict=True)
    assert ("(current scaling)" in str(fp8stack.get_report(by_itself))) == (recipe == "delayed")
    options = {"compute": "native", "matmuls": True, "fp8_recipe": recipe}
    if recipe == "delayed":
        with pytest.raises(UnsupportedDeviceError, match=said):
            fp8stack.initialize(Root(), None, "O0", strict=True, **options)
        with pytest.warns(Fp8StackWarning, match=said):
            model, _ = fp8stack.initialize(Root(), None, "O0", **options)
    else:
        model, _ = fp8stack.initialize(Root(), None, "O0", strict=True, **options)
    assert ("fallbacks: none" in str(fp8stack.get_report(model))) == (recipe != "delayed")


# --- classes and forwards that others set


@pytest.mark.parametrize("compute", ["native", "bf16"])
def test_a_parametrization_over_a_converted_layer_is_not_destroyed(compute):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(16, 32)
    fp8stack.initialize(model, None, "O0", compute=compute)
    parametrizations.weight_norm(model[1])
    expected = results(model, x)
    with pytest.raises(ModelError, match=r"^1 is a Parametrized.*Linear.*remove_parametrizations"):
        fp8stack.restore(model)
    assert_same_bits(results(model, x), expected)
    parametrize.remove_parametrizations(model[1], "weight")
    fp8stack.restore(model)
    assert [type(m) for m in model] == [nn.Linear] * 2


def test_a_parametrization_over_a_module_of_bare_products_is_not_destroyed():
    model = native(Root(), matmuls=True)
    parametrize.register_parametrization(model, "w", nn.Identity())
    with pytest.raises(ModelError, match=r"^the model is a ParametrizedRoot, .* made over Root,"):
        fp8stack.restore(model)
    parametrize.remove_parametrizations(model, "w")
    fp8stack.restore(model)
    assert type(model) is Root


def test_a_layer_that_was_sharded_is_not_destroyed(mesh):
    model = native(nn.Sequential(nn.Linear(32, 32)))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ModelError, match=r"^0 is a FSDPFp8Linear.*restore before fully_shard"):
        fp8stack.restore(model)
    model(torch.randn(16, 32)).sum().backward()


def wrapped(module):
    """Set a forward on the instance, as accelerate's hooks and others do."""
    module.forward = functools.partial(type(module).forward, module)
    return module


@pytest.mark.parametrize("compute", ["native", "bf16"])
def test_a_layer_with_a_forward_of_its_own_is_left_out_and_named(compute):
    model = nn.Sequential(nn.Linear(32, 32), wrapped(nn.Linear(32, 32)))
    fp8stack.initialize(model, None, "O0", compute=compute)
    report = fp8stack.get_report(model)
    assert report.converted == ["0"]
    assert "forward was set on the instance" in report.skipped["1"]
    assert "1.weight (its forward was set" in " ".join(str(report).split())
    assert type(model[1]) is nn.Linear


def test_a_weight_that_a_wrapper_s_forward_reads_keeps_its_dtype():
    model = nn.Sequential(wrapped(nn.Embedding(64, 128)), wrapped(nn.Linear(128, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    _, optimizer = fp8stack.initialize(model, optimizer, "O2", compute="native")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(torch.arange(64)).sum().backward()
    optimizer.step()


def test_a_module_with_a_forward_of_its_own_is_no_module_of_bare_products():
    model = nn.Sequential(wrapped(Root()), Root())
    native(model, matmuls=True)
    model(torch.randn(16, 64)).sum().backward()
    report = fp8stack.get_report(model)
    assert report.multiplied == {"1.w"}
    assert report.outside["0.w"].startswith("its forward was set on the instance")
