"""Cases that reviews of the FP8 layers found: what is refused, what is not shared, what outlives a layer."""

import copy
import functools

import pytest
import torch
from helpers import assert_same_bits
from layers import RECIPES, linear, native, results
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import fp8stack
from fp8stack.errors import Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.formats import E4M3
from fp8stack.kernels import cast_delayed as triton_delayed
from fp8stack.kernels.reference import cast_delayed as reference_delayed
from fp8stack.kernels.reference.cast_delayed import DelayedState
from fp8stack.nn.swiglu import fuse


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [17, 31])
def test_an_input_of_the_wrong_size_is_an_error(recipe, size):
    layer = linear(32, 40, fp8_recipe=recipe)
    with pytest.raises((RuntimeError, ValueError)):
        layer(torch.randn(4, size))


@pytest.mark.parametrize("compute", ["native", "bf16"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float64])
def test_an_input_of_another_dtype_is_an_error_that_names_the_layer(dtype, compute):
    model = nn.ModuleDict({"up": nn.Linear(32, 32)})
    fp8stack.initialize(model, None, "O0", compute=compute)
    said = rf"Linear layer up of 32 features got {dtype} input; .*float16.*skip=\[.up.\]"
    for layer in (model["up"], copy.deepcopy(model)["up"]):
        with pytest.raises(ModelError, match=said):
            layer(torch.ones(16, 32).to(dtype))
        with pytest.raises(ModelError, match=r"layer up got .* shape \(4, 31\); .* must be 32"):
            layer(torch.ones(4, 31))


def make_nested(layout):
    return torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(2, 32)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_nested(torch.jagged), r"layer 0 got nested input; .*dense.*skip=\[.0.\]"),
        (lambda: make_nested(torch.strided), "got nested input"),
        (lambda: torch.randn(4, 32).to_sparse(), "got sparse input"),
        (lambda: torch.randn(4, 32).to_sparse_csr(), "got sparse input"),
    ],
    ids=["jagged", "nested", "sparse", "csr"],
)
def test_an_input_that_is_no_plain_tensor_is_an_error_that_names_the_layer(make, said):
    with pytest.raises(ModelError, match=said):
        native(nn.Sequential(nn.Linear(32, 32)))(make())


def test_tensor_parallelism_is_refused_with_what_helps(mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = distribute_tensor(torch.randn(16, 32), mesh, [Replicate()])
    with pytest.raises(ModelError, match=r"layer 0 got sharded \(DTensor\).*skip=\[.0.\]"):
        native(nn.Sequential(nn.Linear(32, 32)))(x)
    model = native(GatedSilu())
    assert fuse(model) == [""]
    with pytest.raises(ModelError, match="layer w1 got sharded"):
        model(x)


class GatedGelu(nn.Module):
    act = staticmethod(F.gelu)

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.w2 = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class GatedSilu(GatedGelu):
    act = staticmethod(F.silu)


@pytest.mark.parametrize("zeroed", ["w2", "w3"])
def test_a_block_whose_output_begins_at_zero_is_not_taken_for_swiglu(zeroed):
    model = nn.Sequential(GatedGelu())
    nn.init.zeros_(getattr(model[0], zeroed).weight)
    assert fuse(native(model)) == []


def test_a_block_with_dropout_is_not_fused_in_evaluation():
    class Dropped(GatedGelu):
        act = staticmethod(F.silu)

        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(super().forward(x))

    assert fuse(native(nn.Sequential(Dropped())).eval()) == []


def test_a_block_with_a_factor_that_begins_at_one_is_not_fused():
    class LayerScaled(GatedGelu):
        act = staticmethod(F.silu)

        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(32))

        def forward(self, x):
            return super().forward(x) * self.gamma

    assert fuse(native(nn.Sequential(LayerScaled()))) == []


def test_a_delayed_layer_may_be_gone_before_backward():
    def loss():
        return linear(fp8_recipe="delayed")(torch.randn(16, 32, requires_grad=True)).sum()

    loss().backward()


def test_blocks_of_zero_tokens():
    layer = linear(fp8_recipe="blockwise")
    y, dx, dw, _ = results(layer, torch.empty(0, 32))
    assert (y.shape, dx.shape) == ((0, 32), (0, 32))
    assert dw.eq(0).all()


def test_the_reference_lays_out_transposed_blocks_as_its_fake_says():
    torch.library.opcheck(
        torch.ops.fp8stack.cast_1x128.default,
        (torch.randn(5, 200), "e4m3"),
        test_utils=["test_faketensor"],
    )


def test_an_amax_too_small_for_a_scale_leaves_the_scale_alone():
    """most_recent (or max, once all of the history is tiny); Triton loses the next cast, the reference does not."""
    states = [DelayedState(4, 0, True) for _ in range(2)]
    for i in range(18):
        x = torch.randn(16, 16) * (1e-44 if i == 16 else 1)
        given = triton_delayed.cast_delayed(x, E4M3, states[0], True, False)
        expected = reference_delayed.cast_delayed(x, E4M3, states[1], True, False)
        assert states[1].tensor[0] > 0
        for one, other in zip(given, expected, strict=True):
            assert_same_bits(one, other)


def test_an_input_that_was_filled_behind_autograds_back_is_cast_again():
    """As recv, all_reduce and broadcast of torch.distributed do: none of them counts a version."""
    layer = linear()
    x = torch.randn(16, 32)
    layer(x)
    x.numpy()[:] = 1
    assert_same_bits(layer(x), layer(torch.ones(16, 32)))


def test_the_wrong_size_through_a_fused_block():
    m = native(nn.Sequential(GatedSilu()))
    assert fuse(m) == ["0"]
    with pytest.raises((RuntimeError, ValueError)):
        m(torch.randn(4, 31))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compute": "bf16", "fp8_recipe": "delayed"}, "fp8_recipe='delayed' has no effect"),
        ({"compute": "bf16", "select": "auto"}, "select='auto' has no effect"),
        ({"compute": "bf16", "matmuls": True}, "matmuls=True has no effect"),
    ],
)
def test_options_without_an_effect_are_named(options, said):
    with pytest.raises(UnsupportedDeviceError, match=said):
        fp8stack.initialize(nn.Sequential(nn.Linear(32, 32)), None, "O0", strict=True, **options)


def test_layers_that_the_card_leaves_out_are_no_bare_parameters_either():
    encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(encoder)
    fp8stack.initialize(model, None, "O0", compute="native", matmuls=True)
    model(torch.randn(2, 16, 64)).sum().backward()
    report = fp8stack.get_report(model)
    assert not {name.removesuffix(".weight") for name in report.multiplied} & report.skipped.keys()


# --- classes and forwards that others set


class Root(nn.Module):
    """Multiplies by a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x) @ self.w


@pytest.mark.parametrize("compute", ["native", "bf16"])
def test_a_parametrization_over_a_converted_layer_is_not_destroyed(compute):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(16, 32)
    fp8stack.initialize(model, None, "O0", compute=compute)
    parametrizations.weight_norm(model[1])
    expected = results(model, x)
    with pytest.raises(ModelError, match=r"^1 is a Parametrized.*Linear.*remove_parametrizations"):
        fp8stack.restore(model)
    for one, same in zip(results(model, x), expected, strict=True):
        assert_same_bits(one, same)
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
    from torch.distributed.fsdp import fully_shard

    model = native(nn.Sequential(nn.Linear(32, 32)))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ModelError, match=r"^0 is a FSDPFp8Linear.*restore before fully_shard"):
        fp8stack.restore(model)
    model(torch.randn(16, 32)).sum().backward()


def test_modules_that_are_fused_and_multiply_by_themselves_are_restored():
    model = native(nn.Sequential(GatedSilu()), matmuls=True)
    assert fuse(model) == ["0"]
    fp8stack.restore(model)
    assert type(model[0]) is GatedSilu


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
    assert "1 (its forward was set" in " ".join(str(report).split())
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
    assert report.left_alone["0 has a forward set on the instance"] == 1
    assert "1 × 0 has a forward set on the instance" in str(report)


# --- sizes, scaling, tensors without rows


@pytest.mark.parametrize("pad", ["auto", "skip"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_size_is_left_out_for_that(pad):
    model = nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 16))
    native(model, pad=pad)
    skipped = fp8stack.get_report(model).skipped
    assert skipped == {
        "0": "it has 0 out_features: there is nothing to multiply",
        "1": "it has 0 in_features: there is nothing to multiply",
    }


def test_blocks_are_aligned_to_128():
    model = nn.Sequential(nn.Linear(128, 208), nn.Linear(208, 256), nn.Linear(256, 128))
    native(model, fp8_recipe="blockwise", pad="skip", matmuls=True)
    report = fp8stack.get_report(model)
    assert report.converted == ["2"]
    assert "out_features 208 is not a multiple of 128" in report.skipped["0"]
    assert "make it 256" in report.skipped["0"]
    bare = native(nn.Sequential(Root()), fp8_recipe="blockwise", pad="skip", matmuls=True)
    bare(torch.randn(16, 64))
    left = fp8stack.get_report(bare).left_alone
    assert left["sizes that are no multiples of 128"] == 2  # w, and what the layer multiplies by


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_card_says_where_bare_parameters_have_another_scaling(recipe):
    said = r"fp8_recipe='delayed' has no effect with matmuls=True: .* use \"current\" scaling"
    options = {"compute": "native", "matmuls": True, "fp8_recipe": recipe}
    if recipe == "delayed":
        with pytest.raises(UnsupportedDeviceError, match=said):
            fp8stack.initialize(Root(), None, "O0", strict=True, **options)
        with pytest.warns(Fp8StackWarning, match=said):
            model, _ = fp8stack.initialize(Root(), None, "O0", **options)
    else:
        model, _ = fp8stack.initialize(Root(), None, "O0", strict=True, **options)
    assert ("fallbacks: none" in str(fp8stack.get_report(model))) == (recipe != "delayed")


@pytest.mark.parametrize("rows", [0, 16])
def test_what_the_reference_returns_shares_no_memory(rows):
    """Operators must not return views of one another; of no elements, contiguous() is one."""
    x, state = torch.randn(rows, 128), DelayedState(4)
    namespace = torch.ops.fp8stack
    for results_ in (
        namespace.cast(x, "e4m3", True, True, None),
        namespace.cast_delayed(x, "e4m3", state.handle, True, False),
        namespace.cast_1x128(x, "e4m3"),
        namespace.cast_128x128(x, "e4m3"),
        namespace.swiglu_backward_cast(x, x, x, torch.ones(()), "e4m3", [], False),
    ):
        matrices = [t for t in results_ if t.dim() == 2 and t.element_size() == 1]
        memory = {t.untyped_storage()._cdata for t in matrices}
        assert len(memory) == len(matrices)
