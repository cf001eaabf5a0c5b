"""Cases that reviews of the FP8 layers found: what is refused, what is not shared, what outlives a layer."""

import pytest
import torch
from helpers import assert_same_bits
from layers import RECIPES, linear, native, results
from torch import nn
from torch.nn import functional as F

import fp8stack
from fp8stack.errors import UnsupportedDeviceError
from fp8stack.formats import E4M3
from fp8stack.kernels import cast_delayed as triton_delayed
from fp8stack.kernels.reference import cast_delayed as reference_delayed
from fp8stack.kernels.reference.cast_delayed import DelayedState
from fp8stack.nn import forget_weights
from fp8stack.nn.fused import fuse


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [17, 31])
def test_an_input_of_the_wrong_size_is_an_error(recipe, size):
    layer = linear(32, 40, fp8_recipe=recipe)
    with pytest.raises((RuntimeError, ValueError)):
        layer(torch.randn(4, size))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_an_input_that_is_not_a_real_float_is_an_error(dtype):
    layer = linear(32, 32)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        layer(torch.ones(16, 32).to(dtype))


class GatedGelu(nn.Module):
    act = staticmethod(F.gelu)

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.w2 = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


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


def test_without_a_cache_blocks_keep_nothing_of_the_weight_for_backward():
    layer = linear(256, 128, bias=False, fp8_recipe="blockwise", weight_cache="off")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(384, 256, requires_grad=True))
    assert sum(t.nbytes for t in saved if t is not layer.weight) <= 384 * 256 + 4 * 256 * 3 + 400


def test_a_training_pass_after_an_evaluation_of_the_same_input_is_remembered():
    layer = linear(fp8_recipe="delayed").eval()
    x = torch.randn(16, 32)
    layer(x)
    layer.train()
    layer(x)
    assert float(layer.products.x_state.tensor[3]) == float(x.abs().max())


def test_an_input_that_was_filled_behind_autograds_back_is_cast_again():
    """As recv, all_reduce and broadcast of torch.distributed do: none of them counts a version."""
    layer = linear()
    x = torch.randn(16, 32)
    layer(x)
    x.numpy()[:] = 1
    assert_same_bits(layer(x), layer(torch.ones(16, 32)))


@pytest.mark.parametrize("change", ["copy", "assign"])
def test_a_copy_or_an_assigned_weight_is_cached_like_any_other(change):
    import copy

    layer = linear()
    if change == "copy":
        layer = copy.deepcopy(layer)
    else:
        layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}, assign=True)
    for _ in range(8):
        results(layer, torch.randn(16, 32))
    assert layer.products.weights.casts <= 1


# 14 a layer used twice in one pass, recomputed: the second use's scale serves both


def test_the_wrong_size_through_a_fused_block():
    class Silu(GatedGelu):
        act = staticmethod(F.silu)

    m = native(nn.Sequential(Silu()))
    assert fuse(m) == ["0"]
    with pytest.raises((RuntimeError, ValueError)):
        m(torch.randn(4, 31))


def test_weights_changed_without_a_trace_are_cast_anew_on_request():
    layer = linear()
    x = torch.randn(16, 32)
    layer(x)
    layer.weight.data.copy_(torch.randn(32, 32))
    forget_weights(layer)
    assert_same_bits(layer(x), layer.eval()(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_after_inference_mode(recipe):
    """Nothing made in inference mode may be left for autograd to save."""
    layer, x = linear(fp8_recipe=recipe), torch.randn(16, 32)
    with torch.inference_mode():
        layer(x)
        inside = torch.randn(16, 32)
    with torch.no_grad():
        layer(inside)
    results(layer, x)


def test_evaluation_does_not_count_towards_a_delayed_scale():
    layer = linear(fp8_recipe="delayed").eval()
    with torch.no_grad():
        for _ in range(20):
            layer(torch.randn(16, 32))
    assert layer.products.x_state.casts == 0
    assert layer(torch.randn(16, 32)).abs().max() > 0.1


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
