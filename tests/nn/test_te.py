"""Linear layers that TransformerEngine computes: the numbers, the sizes, what stays of the model, casts and scales.

What needs TransformerEngine is marked and runs on a GPU; what is decided before it is asked runs anywhere.
"""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from bounds import KINDS, bounds, errors
from helpers import assert_same_bits
from layers import COPIES, REENTRANT, Checkpointed, captured, results
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import fp8stack
from fp8stack import capability
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.levels import recipe_for
from fp8stack.nn import te
from fp8stack.nn.te import Engine, TeLinear

_INSTALLED = capability.te_installation()
DEVICE, BF16 = "cuda", torch.bfloat16
HOPPER = pytest.mark.parametrize("fp8_recipe", ["current", "delayed", "blockwise"])


def needs_te(test):
    return pytest.mark.gpu(pytest.mark.skipif(not _INSTALLED, reason=_INSTALLED.reason)(test))


def convert(layer, **options):
    """Make a Linear a TeLinear, as `fp8stack.nn.convert` does."""
    layer.__class__ = TeLinear
    layer.te = Engine(recipe_for("O0", **options), layer.weight)
    return layer


def te_linear(in_features, out_features, bias=True, dtype=BF16, device=DEVICE, **options):
    layer = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
    return convert(layer, **options)


def draw(*shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def mlp(width=64, **options):
    """Return two layers with a GELU between them."""
    sizes = (width, 2 * width), (2 * width, width)
    up, down = (nn.Linear(*size, device=DEVICE, dtype=BF16) for size in sizes)
    return nn.Sequential(convert(up, **options), nn.GELU(), convert(down, **options))


def relative(found, expected):
    expected = expected.double()
    return float((found.detach().double() - expected).norm() / expected.norm())


def plain(layer, dtype=torch.float64):
    """Return the layer as an nn.Linear in `dtype`."""
    twin = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, DEVICE, dtype)
    twin.load_state_dict(layer.state_dict())
    return twin


def assert_close(layer, x, *limits):
    """Fail unless y, dx, dw and db are within these relative distances of those in float64."""
    gradient = draw(*x.shape[:-1], layer.out_features, dtype=x.dtype)
    given = results(layer, x, gradient)
    exact = results(plain(layer), x.double(), gradient.double())
    for value, expected, limit in zip(given, exact, limits, strict=True):
        assert value.shape == expected.shape
        assert value.dtype is x.dtype
        assert expected.numel() == 0 or not expected.any() or relative(value, expected) < limit


def products(model, x, gradient):
    """Return the kernels that multiply matrices in a pass through `model`, and the results."""
    marks = ("gemm", "nvjet", "cutlass", "xmma")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        given = results(model, x, gradient)
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {e.name for e in on_gpu if any(mark in e.name.lower() for mark in marks)}, given


# --- without TransformerEngine


def test_is_the_same_module_under_another_class():
    layer = nn.Linear(32, 16)
    keys, parameters = list(layer.state_dict()), [id(p) for p in layer.parameters()]
    convert(layer)
    assert isinstance(layer, nn.Linear)
    assert (list(layer.state_dict()), [id(p) for p in layer.parameters()]) == (keys, parameters)
    assert list(layer.modules()) == [layer]
    assert "te=auto" in repr(layer)  # `initialize` says what that is


@pytest.mark.parametrize("how", COPIES)
def test_copies_take_the_settings_and_make_the_rest_anew(how):
    layer = te_linear(32, 16, device="cpu", fp8_recipe="delayed", fp8_margin=2)
    other = COPIES[how](layer)
    assert type(other) is TeLinear
    assert other.te is not layer.te
    assert other.te.recipe == layer.te.recipe


def test_input_that_it_cannot_take_is_refused():
    layer = te_linear(32, 16, device="cpu")
    compiled = torch.compile(lambda x: layer(x + 1) * 2, backend="eager")  # leaves the graph there
    for call, dtype, error, said in (
        (layer, torch.int64, ModelError, r"32 features got torch\.int64 input"),
        (layer, torch.complex64, ModelError, "complex64"),
        (layer, torch.float32, UnsupportedDeviceError, "input on cpu.*fp8stack.restore"),
        (compiled, torch.float32, UnsupportedDeviceError, "input on cpu"),
    ):
        with pytest.raises(error, match=said):
            call(torch.ones(4, 32, dtype=dtype))


def test_attention_behind_a_break_is_warned_of_once(recwarn):
    te._warn_of_attention.cache_clear()
    for _ in range(2):
        te._warn_of_attention()
    # whatever else is collected meanwhile, such as files that nobody closed
    (told,) = (str(w.message) for w in recwarn if w.category is Fp8StackWarning)
    assert "enable_cudnn_sdp(False)" in told


@pytest.mark.parametrize(
    "options", [{"fp8_format": "e5m2"}, {"fp8_recipe": "delayed", "fp8_fast_accum": False}], ids=str
)
def test_what_it_has_not_is_refused_with_what_has_it(options):
    with pytest.raises(ConfigError, match='compute="native"'):
        recipe_for("O0", compute="te", **options)


def test_whole_weights_of_fsdp_are_known(mesh):
    layer = te_linear(32, 16, device="cpu", dtype=torch.float32)
    assert not layer.te._comes_and_goes(layer.weight)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert layer.te._comes_and_goes(layer.weight)


# --- numbers


@needs_te
@HOPPER
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_numbers_against_float64(fp8_recipe, fp8_format, dtype):
    """Rounding to 4 significant bits (E4M3) is an error of 2.6 % rms an operand, to 3 (E5M2) twice that."""
    layer = te_linear(96, 48, dtype=dtype, fp8_recipe=fp8_recipe, fp8_format=fp8_format)
    backward = 0.08 if fp8_format == "hybrid" and fp8_recipe != "blockwise" else 0.05
    for _ in range(2):  # the scales of the first pass, then those that it recorded
        assert_close(layer, draw(3, 16, 96, dtype=dtype), 0.05, backward, backward, 0.02)


@needs_te
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@HOPPER
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_heavy_tails_and_outliers(kind, fp8_recipe, fp8_format):
    """Native layers' bounds and a third: block scales are powers of two there, which leaves fewer bits."""
    layer = te_linear(512, 256, False, torch.float32, fp8_recipe=fp8_recipe, fp8_format=fp8_format)
    found, _ = errors(layer, kind, DEVICE)
    allowed = bounds(fp8_recipe, "hybrid" if fp8_recipe == "blockwise" else fp8_format, kind)
    assert all(e < 4 / 3 * bound for e, bound in zip(found, allowed, strict=True)), found


@needs_te
@HOPPER
@pytest.mark.parametrize(
    ("tokens", "size"),
    [(0, (32, 64)), (1, (32, 64)), (8, (32, 64)), (15, (32, 64)), (17, (32, 64)), (40, (32, 64)),
     (18, (64, 50257)), (18, (50, 48)), (18, (33, 7))],
    ids=str,
)  # fmt: skip
def test_any_number_of_tokens_and_sizes_that_do_not_fit(tokens, size, fp8_recipe):
    """The rows that are added change nothing; 8 and 40 pass TransformerEngine's own check and fail in its backward."""
    layer = te_linear(*size, fp8_recipe=fp8_recipe)
    assert_close(layer, draw(tokens, size[0]), *[0.12] * 4)  # of few numbers
    assert tokens > 0 or not layer.weight.grad.any()
    assert layer(draw(2, 9, size[0])).view(-1, size[1]).shape == (18, size[1])


@needs_te
@HOPPER
def test_one_dimensional_non_contiguous_wrong_and_bad_inputs(fp8_recipe):
    layer, x = te_linear(32, 64, fp8_recipe=fp8_recipe), draw(32, 20)
    assert_same_bits(layer(x.t()), layer(x.t().contiguous()))
    assert layer(x[:, 0]).shape == (64,)
    with pytest.raises(ModelError, match=r"shape \(32, 20\); its last dimension must be 32"):
        layer(x)
    x[5, 3] = float("nan")
    assert layer(x.t())[3].isnan().all()


@needs_te
@pytest.mark.parametrize("stored", [torch.float32, BF16])
def test_the_output_has_the_dtype_of_the_input_or_of_autocast(stored):
    layer, x = te_linear(32, 32, dtype=stored), torch.randn(16, 32, device=DEVICE)
    with torch.autocast("cuda", BF16):
        assert layer(x).dtype is layer(x.bfloat16()).dtype is BF16
    y, dx, dw, _ = results(layer, x)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.float32, stored)
    assert relative(y, plain(layer)(x.double())) < 0.06


@needs_te
@pytest.mark.parametrize("features", [32, 40])
def test_the_output_may_be_changed_in_place(features):
    layer = te_linear(32, features)
    y = layer(draw(5, 32))
    F.relu_(y.mul_(2)).sum().backward()
    assert layer.weight.grad.isfinite().all()


@needs_te
@pytest.mark.parametrize("fp8_recipe", ["mxfp8", "nvfp4"])
def test_a_recipe_that_the_gpu_lacks_is_refused_with_the_reason(fp8_recipe):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has it")
    model, options = nn.Sequential(nn.Linear(32, 32)).cuda(), {"fp8_recipe": fp8_recipe}
    with pytest.raises(UnsupportedDeviceError, match=r"10\.0 or higher"):
        fp8stack.initialize(model, None, "O0", compute="te", **options)


# --- the model around it


@needs_te
def test_ties_and_frozen_flags_stay_and_weights_may_be_replaced():
    embedding = nn.Embedding(64, 32, device=DEVICE, dtype=BF16)
    frozen, head = te_linear(32, 32), te_linear(32, 64, bias=False)
    head.weight = embedding.weight
    frozen.weight.requires_grad_(False)
    model, tokens = nn.Sequential(embedding, frozen, head), torch.arange(20, device=DEVICE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(tokens).float().square().sum().backward()
    assert list(model.state_dict()) == list(before)
    assert_same_bits(model.state_dict().values(), before.values())
    assert frozen.weight.grad is None
    assert frozen.bias.grad is not None
    assert (embedding.weight.grad[20:] != 0).any()  # from the head
    model.load_state_dict(before, strict=True, assign=True)
    model(tokens).float().sum().backward()
    assert head.weight.grad is not None  # of the new parameter


@needs_te
@HOPPER
def test_a_deep_copy_computes_the_same_and_is_independent(fp8_recipe):
    layer, x = te_linear(32, 32, fp8_recipe=fp8_recipe), draw(16, 32)
    first, other = layer(x), copy.deepcopy(layer)
    assert_same_bits(other(x), first)
    for p in other.parameters():
        p.data.zero_()
    assert (other.eval()(x) == 0).all()
    assert_same_bits(layer(x), first)


@needs_te
def test_modules_of_transformer_engine_are_left_alone():
    library = capability.load_te()
    options = {"self_attn_mask_type": "causal", "hidden_dropout": 0.0, "params_dtype": BF16}
    block = library.te.TransformerLayer(64, 128, 4, **options)
    model = nn.Sequential(block, nn.Linear(64, 64, device=DEVICE, dtype=BF16))
    kinds, keys = [type(m) for m in block.modules()], list(model.state_dict())
    fp8stack.initialize(model, opt_level="O0", compute="te", fp8_recipe="delayed")
    assert type(model[1]) is TeLinear
    assert [type(m) for m in block.modules()] == kinds
    assert list(model.state_dict()) == keys
    recipe = library.recipe.DelayedScaling(amax_history_len=4)
    with library.te.autocast(enabled=True, recipe=recipe):
        inner = block(draw(16, 2, 64))
    metas = [getattr(m, "fp8_meta", {}).get("scaling_fwd") for m in block.modules()]
    states = [state for state in metas if hasattr(state, "amax_history")]
    histories = [state.amax_history.clone() for state in states]
    assert histories
    output = model[1](inner)
    assert_same_bits([state.amax_history for state in states], histories)
    output.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    fp8stack.restore(model)
    assert type(model[1]) is nn.Linear


# --- recomputation, compilation


@needs_te
@HOPPER
@REENTRANT
def test_recomputation_is_fp8(fp8_recipe, reentrant):
    """Bit for bit what it is without, and by the same kernels, none of which a bfloat16 model uses."""
    once = mlp(fp8_recipe=fp8_recipe)
    again = Checkpointed(copy.deepcopy(once), reentrant)
    x, gradient = draw(48, 64), draw(48, 64)
    for _ in range(3):
        launched, given = products(once, x, gradient)
        assert launched
        relaunched, same = products(again, x, gradient)
        assert relaunched == launched
        assert_same_bits(same, given)
    for layer in (once[0], once[2]):
        layer.__class__ = nn.Linear
    used, _ = products(once, x, gradient)
    assert used
    assert not used & launched


@needs_te
@HOPPER
def test_a_compiled_model_computes_the_same(fp8_recipe):
    model = mlp(fp8_recipe=fp8_recipe)
    compiled = torch.compile(copy.deepcopy(model))
    for tokens in (32, 32, 24):
        x, gradient = draw(tokens, 64), draw(tokens, 64)
        y, *gradients = results(model, x, gradient)
        other, *others = results(compiled, x, gradient)
        assert relative(other, y) < 0.05  # gelu is fused there: other roundings before the cast
        for a, b in zip(gradients, others, strict=True):
            assert relative(b, a) < 0.1


@needs_te
def test_works_in_a_cuda_graph():
    layer, x = te_linear(32, 32), draw(16, 32)
    graph, y = captured(lambda: layer(x))
    layer.weight.data.mul_(2)  # a replay reads the weight as it is then
    graph.replay()
    assert relative(y, F.linear(x, layer.weight, layer.bias)) < 0.06


@needs_te
def test_under_fsdp2_nothing_of_the_whole_weight_is_kept(tmp_path):
    layer, x = te_linear(64, 64), draw(32, 64)
    expected = plain(layer)(x.double())
    distributed = torch.distributed
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Sequential(fully_shard(layer)))
        for _ in range(2):
            y = model(x)
            y.float().square().sum().backward()
        assert relative(y, expected) < 0.06
        assert layer.weight.grad is not None
    finally:
        distributed.destroy_process_group()


# --- casts and scales


@needs_te
@HOPPER
def test_every_micro_batch_multiplies_the_weight_that_is_there(fp8_recipe):
    layer = te_linear(64, 64, fp8_recipe=fp8_recipe)
    x = draw(32, 64)
    for _ in range(3):
        layer(x).float().square().mean().backward()
        layer.weight.data.neg_()  # leaves no trace, and a gradient waits for a step; delayed scales still fit
        assert relative(layer(x), F.linear(x, layer.weight, layer.bias)) < 0.06
        for training in (False, True):
            layer.train(training)
            with torch.no_grad():
                assert relative(layer(x), F.linear(x, layer.weight, layer.bias)) < 0.06


@needs_te
def test_histories_move_once_a_step_however_many_layers_there_are():
    options = {"fp8_recipe": "delayed", "amax_history_len": 16}
    model = nn.Sequential(*(te_linear(32, 32, **options) for _ in range(6)))
    for _ in range(4):
        results(model, draw(16, 32))
    for layer in model:
        for way in ("scaling_fwd", "scaling_bwd"):
            history = layer.te._linear.fp8_meta[way].amax_history
            assert int((history[:, 0] != 0).sum()) in (4, 5)


@needs_te
def test_evaluation_leaves_no_trace_in_a_history():
    layer, x = te_linear(32, 32, fp8_recipe="delayed"), draw(16, 32)
    layer(x).sum().backward()
    state = layer.te._linear.fp8_meta["scaling_fwd"]
    history, scale = state.amax_history.clone(), state.scale.clone()
    layer.eval()
    layer(1000 * x)
    with torch.no_grad():
        layer(1000 * x)
    assert_same_bits([state.amax_history, state.scale], [history, scale])


@needs_te
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_first_step_of_delayed_scaling_has_scales(scale):
    """At a scale of 1, gradients below 1e-5 vanish in E5M2 and activations above 448 are cut off."""
    layer = te_linear(64, 64, fp8_recipe="delayed", bias=False)
    x, gradient = (scale * draw(32, 64) for _ in range(2))
    exact = results(plain(layer), x.double(), gradient.double())
    for value, expected in zip(results(layer, x, gradient), exact, strict=True):
        assert relative(value, expected) < 0.09


@needs_te
def test_most_recent_follows_at_once_and_max_remembers():
    x, scales = draw(32, 64), {}
    for algorithm in ("max", "most_recent"):
        layer = te_linear(64, 64, fp8_recipe="delayed", amax_compute_algo=algorithm)
        for factor in (100, 1, 1):
            layer(factor * x).sum().backward()
        scales[algorithm] = float(layer.te._linear.fp8_meta["scaling_fwd"].scale[0])
    amax = float(x.abs().max())
    assert scales["max"] == pytest.approx(448 / (100 * amax), rel=0.01)
    assert scales["most_recent"] == pytest.approx(448 / amax, rel=0.01)


def test_without_a_choice_scales_are_current(monkeypatch):
    current = dataclasses.make_dataclass("Float8CurrentScaling", ["fp8_format", "fp8_gemm_fprop"])
    names = {"Format": SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"), "MMParams": dict}
    library = SimpleNamespace(recipe=SimpleNamespace(Float8CurrentScaling=current, **names))
    monkeypatch.setattr(te, "load_te", lambda: library)
    found = te.te_recipe.__wrapped__(recipe_for("O0"))
    assert found == current("hybrid", {"use_split_accumulator": True})


@needs_te
def test_the_recipe_is_explicit(monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    settings = recipe_for("O0", fp8_format="e4m3")
    recipe = te.te_recipe(settings)
    assert recipe is te.te_recipe(settings)
    assert recipe.backward_override is None
    assert recipe.fp8_gemm_fprop.use_split_accumulator
    fast = te.te_recipe(recipe_for("O0", fp8_fast_accum=True))
    assert not fast.fp8_gemm_fprop.use_split_accumulator
    assert fast.fp8_gemm_dgrad.use_split_accumulator
    history = {"amax_history_len": 16, "amax_compute_algo": "most_recent"}
    recipe = te.te_recipe(recipe_for("O0", fp8_recipe="delayed", fp8_margin=2, **history))
    assert {name: getattr(recipe, name) for name in history} == history
    assert (recipe.margin, recipe.reduce_amax) == (2, False)
