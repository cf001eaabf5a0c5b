"""Linear layers that TransformerEngine computes: the numbers, the sizes, what stays of the model, casts and scales.

What needs TransformerEngine is marked and runs on a GPU; what is decided before it is asked runs anywhere.
"""

import copy

import pytest
import torch
from bounds import KINDS, bounds, errors
from helpers import assert_same_bits
from layers import COPIES
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack import capability
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.levels import recipe_for
from fp8stack.nn import te
from fp8stack.nn.te import Engine, TeLinear

_INSTALLED = capability.te_installation()
DEVICE = "cuda"
HOPPER = ["current", "delayed", "blockwise"]


def needs_te(test):
    return pytest.mark.gpu(pytest.mark.skipif(not _INSTALLED, reason=_INSTALLED.reason)(test))


def convert(layer, **options):
    """Make a Linear a TeLinear, as `fp8stack.nn.convert` does."""
    layer.__class__ = TeLinear
    layer.te = Engine(recipe_for("O0", **options), layer.weight)
    return layer


def te_linear(in_features, out_features, bias=True, dtype=torch.bfloat16, device=DEVICE, **options):
    return convert(
        nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), **options
    )


class Mlp(nn.Module):
    """Two layers, optionally recomputed in backward."""

    def __init__(self, width=64, reentrant=None, device=DEVICE):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, device=device, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * width, width, device=device, dtype=torch.bfloat16)
        self.reentrant = reentrant

    def body(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def convert(self, **options):
        for layer in (self.up, self.down):
            convert(layer, **options)
        return self


def relative(found, expected):
    expected = expected.double()
    return float((found.detach().double() - expected).norm() / expected.norm())


def exact(layer, x, gradient):
    """Return (y, dx, dw, db) in float64."""
    x = x.detach().double().requires_grad_()
    w = layer.weight.detach().double().requires_grad_()
    b = None if layer.bias is None else layer.bias.detach().double().requires_grad_()
    y = F.linear(x, w, b)
    y.backward(gradient.double())
    return y, x.grad, w.grad, None if b is None else b.grad


def kernels(action):
    """Return the names of the kernels that `action` launches, in order."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        action()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def products(names):
    """Return the kernels among them that multiply matrices."""
    marks = ("gemm", "nvjet", "cutlass", "xmma")
    return {name for name in names if any(mark in name.lower() for mark in marks)}


# --- without TransformerEngine


def test_is_the_same_module_under_another_class():
    layer = nn.Linear(32, 16)
    keys, parameters = list(layer.state_dict()), list(layer.parameters())
    convert(layer)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))
    assert list(layer.modules()) == [layer]
    assert "te=current" in repr(layer)


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
    (told,) = recwarn
    assert told.category is Fp8StackWarning
    assert "enable_cudnn_sdp(False)" in str(told.message)


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
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("fp8_recipe", HOPPER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_against_float64(fp8_recipe, fp8_format, dtype):
    """Rounding to 4 significant bits (E4M3) is an error of 2.6 % rms an operand, to 3 (E5M2) twice that."""
    layer = te_linear(96, 48, dtype=dtype, fp8_recipe=fp8_recipe, fp8_format=fp8_format)
    for _ in range(2):  # the scales of the first pass, then those that it recorded
        layer.zero_grad()
        x = torch.randn(3, 16, 96, device=DEVICE, dtype=dtype, requires_grad=True)
        gradient = torch.randn(3, 16, 48, device=DEVICE, dtype=dtype)
        y = layer(x)
        y.backward(gradient)
        found = (y, x.grad, layer.weight.grad, layer.bias.grad)
        hybrid = fp8_format == "hybrid" and fp8_recipe != "blockwise"
        bounds = (0.05, 0.08 if hybrid else 0.05, 0.08 if hybrid else 0.05, 0.02)
        for value, expected, bound in zip(found, exact(layer, x, gradient), bounds, strict=True):
            assert value.dtype is dtype
            assert relative(value, expected) < bound


@needs_te
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("fp8_recipe", HOPPER)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_heavy_tails_and_outliers(kind, fp8_recipe, fp8_format):
    """Native layers' bounds and a third: block scales are powers of two there, which leaves fewer bits."""
    layer = te_linear(512, 256, False, torch.float32, fp8_recipe=fp8_recipe, fp8_format=fp8_format)
    found, _ = errors(layer, kind, DEVICE)
    allowed = bounds(fp8_recipe, "hybrid" if fp8_recipe == "blockwise" else fp8_format, kind)
    assert all(e < 4 / 3 * bound for e, bound in zip(found, allowed, strict=True)), found


@needs_te
@pytest.mark.parametrize("fp8_recipe", HOPPER)
@pytest.mark.parametrize("tokens", [0, 1, 8, 15, 17, 40])
def test_any_number_of_tokens(tokens, fp8_recipe):
    """The rows that are added change nothing; 8 and 40 pass TransformerEngine's own check and fail in its backward."""
    layer = te_linear(32, 64, fp8_recipe=fp8_recipe)
    x = torch.randn(tokens, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert y.shape == (tokens, 64)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    for value, expected in zip(
        (y, x.grad, layer.weight.grad), exact(layer, x, gradient), strict=False
    ):
        assert value.shape == expected.shape
        assert tokens == 0 or relative(value, expected) < 0.12  # of few numbers
    if tokens == 0:
        assert (layer.weight.grad == 0).all()


@needs_te
def test_one_dimensional_non_contiguous_and_wrong_inputs():
    layer = te_linear(32, 64)
    x = torch.randn(32, 20, device=DEVICE, dtype=torch.bfloat16)
    assert_same_bits(layer(x.t()), layer(x.t().contiguous()))
    assert layer(x[:, 0]).shape == (64,)
    with pytest.raises(ModelError, match=r"shape \(32, 20\); its last dimension must be 32"):
        layer(x)


@needs_te
@pytest.mark.parametrize("fp8_recipe", HOPPER)
@pytest.mark.parametrize("sizes", [(64, 50257), (50, 48), (33, 7)])
def test_sizes_that_do_not_fit_are_padded(sizes, fp8_recipe):
    layer = te_linear(*sizes, fp8_recipe=fp8_recipe)
    x = torch.randn(2, 9, sizes[0], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(sizes[1], (18,), device=DEVICE)
    y = layer(x)
    assert y.shape == (2, 9, sizes[1])
    F.cross_entropy(y.view(-1, sizes[1]).float(), target).backward()
    assert layer.weight.shape == layer.weight.grad.shape == (sizes[1], sizes[0])
    assert layer.bias.grad.shape == (sizes[1],)
    plain = nn.Linear(*sizes, device=DEVICE, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    assert relative(y, plain(x)) < 0.06
    twin = x.detach().clone().requires_grad_()
    F.cross_entropy(plain(twin).view(-1, sizes[1]).float(), target).backward()
    assert relative(x.grad, twin.grad) < 0.15
    assert relative(layer.weight.grad, plain.weight.grad) < 0.15


@needs_te
@pytest.mark.parametrize("fp8_recipe", HOPPER)
def test_nan_stays_visible(fp8_recipe):
    layer = te_linear(32, 32, fp8_recipe=fp8_recipe)
    x = torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)
    layer(x)
    x[3, 5] = float("nan")
    assert layer(x)[3].isnan().all()


@needs_te
def test_the_output_has_the_dtype_of_the_input_or_of_autocast():
    for stored in (torch.float32, torch.bfloat16):
        layer = te_linear(32, 32, dtype=stored)
        x = torch.randn(16, 32, device=DEVICE, requires_grad=True)
        y = layer(x)
        assert y.dtype is torch.float32
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16
            assert layer(x.bfloat16()).dtype is torch.bfloat16
        y.sum().backward()
        assert layer.weight.grad.dtype is stored
        assert x.grad.dtype is torch.float32
        assert relative(y, F.linear(x, layer.weight.float(), layer.bias.float())) < 0.06


@needs_te
@pytest.mark.parametrize("features", [32, 40])
def test_the_output_may_be_changed_in_place(features):
    layer = te_linear(32, features)
    y = layer(torch.randn(5, 32, device=DEVICE, dtype=torch.bfloat16))
    F.relu_(y.mul_(2)).sum().backward()
    assert layer.weight.grad.isfinite().all()


@needs_te
@pytest.mark.parametrize("fp8_recipe", ["mxfp8", "nvfp4"])
def test_a_recipe_that_the_gpu_lacks_is_refused_with_the_reason(fp8_recipe):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has it")
    with pytest.raises(UnsupportedDeviceError, match=r"10\.0 or higher"):
        fp8stack.initialize(Mlp(), None, "O0", compute="te", fp8_recipe=fp8_recipe)


# --- the model around it


@needs_te
def test_state_dict_ties_frozen_flags_and_hooks_stay():
    torch.manual_seed(0)
    embedding = nn.Embedding(64, 32, device=DEVICE, dtype=torch.bfloat16)
    head = nn.Linear(32, 64, bias=False, device=DEVICE, dtype=torch.bfloat16)
    head.weight = embedding.weight
    frozen = nn.Linear(32, 32, device=DEVICE, dtype=torch.bfloat16)
    frozen.weight.requires_grad_(False)
    model = nn.Sequential(embedding, frozen, head)
    seen = []
    frozen.register_forward_pre_hook(lambda *_: seen.append("before"))
    frozen.register_forward_hook(lambda *_: seen.append("after"))
    frozen.register_full_backward_hook(lambda *_: seen.append("backward"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(frozen)
    convert(head)
    model(torch.arange(20, device=DEVICE)).float().square().sum().backward()
    assert seen == ["before", "after", "backward"]
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])
    assert head.weight is embedding.weight
    assert frozen.weight.grad is None
    assert frozen.bias.grad is not None
    assert (embedding.weight.grad[20:] != 0).any()  # from the head
    assert len(list(model.modules())) == 4
    model.load_state_dict(before, strict=True, assign=True)
    model(torch.arange(20, device=DEVICE)).float().sum().backward()
    assert head.weight.grad is not None  # of the new parameter


@needs_te
@pytest.mark.parametrize("fp8_recipe", HOPPER)
def test_a_deep_copy_computes_the_same_and_is_independent(fp8_recipe):
    layer = te_linear(32, 32, fp8_recipe=fp8_recipe)
    x = torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)
    first = layer(x)
    other = copy.deepcopy(layer)
    assert_same_bits(other(x), first)
    other.weight.data.zero_()
    other.bias.data.zero_()
    assert (other.eval()(x) == 0).all()
    assert_same_bits(layer(x), first)


@needs_te
def test_modules_of_transformer_engine_are_left_alone():
    library = capability.load_te()
    block = library.te.TransformerLayer(
        64, 128, 4, params_dtype=torch.bfloat16, self_attn_mask_type="causal", hidden_dropout=0.0
    )
    model = nn.Sequential(block, nn.Linear(64, 64, device=DEVICE, dtype=torch.bfloat16))
    kinds, keys = [type(m) for m in block.modules()], list(model.state_dict())
    fp8stack.initialize(model, opt_level="O0", compute="te", fp8_recipe="delayed")
    assert type(model[1]) is TeLinear
    assert [type(m) for m in block.modules()] == kinds
    assert list(model.state_dict()) == keys
    x = torch.randn(16, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    with library.te.autocast(
        enabled=True, recipe=library.recipe.DelayedScaling(amax_history_len=4)
    ):
        inner = block(x)
    states = [
        m.fp8_meta["scaling_fwd"]
        for m in block.modules()
        if "scaling_fwd" in getattr(m, "fp8_meta", {})
    ]
    histories = [s.amax_history.clone() for s in states if hasattr(s, "amax_history")]
    assert histories
    output = model[1](inner)
    for state, history in zip(
        [s for s in states if hasattr(s, "amax_history")], histories, strict=True
    ):
        assert_same_bits(state.amax_history, history)
    output.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    fp8stack.restore(model)
    assert type(model[1]) is nn.Linear


# --- recomputation, compilation


@needs_te
@pytest.mark.parametrize("fp8_recipe", HOPPER)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_fp8(fp8_recipe, reentrant):
    """Bit for bit what it is without, and by the same kernels, none of which a bfloat16 model uses."""
    plain = Mlp().convert(fp8_recipe=fp8_recipe)
    again = copy.deepcopy(plain)
    again.reentrant = reentrant
    x = torch.randn(48, 64, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        results, launched = [], []
        for model in (plain, again):
            model.zero_grad()
            given = x.clone().requires_grad_()
            outputs = []

            def step(model=model, given=given, outputs=outputs):
                outputs.append(model(given))
                outputs[0].float().square().sum().backward()

            launched.append(products(kernels(step)))
            results.append([outputs[0], given.grad, *(p.grad for p in model.parameters())])
        assert_same_bits(*results)
        assert launched[0]
        assert launched[0] == launched[1]
    for layer in (plain.up, plain.down):
        layer.__class__ = nn.Linear
    used = products(kernels(lambda: plain(x.clone().requires_grad_()).float().sum().backward()))
    assert used
    assert not used & launched[1]


@needs_te
@pytest.mark.parametrize("fp8_recipe", HOPPER)
def test_a_compiled_model_computes_the_same(fp8_recipe):
    model = Mlp().convert(fp8_recipe=fp8_recipe)
    compiled = torch.compile(copy.deepcopy(model))
    for tokens in (32, 32, 24):
        x = torch.randn(tokens, 64, device=DEVICE, dtype=torch.bfloat16)
        ys = []
        for m in (model, compiled):
            m.zero_grad()
            ys.append(m(x))
            ys[-1].float().square().sum().backward()
        assert relative(ys[1], ys[0]) < 0.05  # gelu is fused there: other roundings before the cast
        for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
            assert relative(b.grad, a.grad) < 0.1


@needs_te
def test_works_in_a_cuda_graph():
    layer = te_linear(32, 32)
    x = torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    layer.weight.data.mul_(2)  # a replay reads the weight as it is then
    graph.replay()
    assert relative(y, F.linear(x, layer.weight, layer.bias)) < 0.06


@needs_te
def test_under_fsdp2_nothing_of_the_whole_weight_is_kept(tmp_path):
    from torch.distributed.fsdp import fully_shard

    layer = te_linear(64, 64)
    plain = nn.Linear(64, 64, device=DEVICE, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    distributed = torch.distributed
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        model = nn.Sequential(layer)
        fully_shard(layer)
        fully_shard(model)
        x = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(2):
            y = model(x)
            y.float().square().sum().backward()
        assert relative(y, plain(x)) < 0.06
        assert layer.weight.grad is not None
    finally:
        distributed.destroy_process_group()


# --- casts and scales


@needs_te
@pytest.mark.parametrize("fp8_recipe", HOPPER)
def test_every_micro_batch_multiplies_the_weight_that_is_there(fp8_recipe):
    layer = te_linear(64, 64, fp8_recipe=fp8_recipe)
    x = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16)
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
    model = nn.Sequential(
        *(te_linear(32, 32, fp8_recipe="delayed", amax_history_len=16) for _ in range(6))
    )
    x = torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(4):
        model(x).float().square().sum().backward()
    for layer in model:
        meta = layer.te._linear.fp8_meta
        assert int((meta["scaling_fwd"].amax_history[:, 0] != 0).sum()) in (4, 5)
        assert int((meta["scaling_bwd"].amax_history[:, 0] != 0).sum()) in (4, 5)


@needs_te
def test_evaluation_leaves_no_trace_in_a_history():
    layer = te_linear(32, 32, fp8_recipe="delayed")
    x = torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)
    layer(x).sum().backward()
    state = layer.te._linear.fp8_meta["scaling_fwd"]
    history, scale = state.amax_history.clone(), state.scale.clone()
    layer.eval()
    layer(1000 * x)
    with torch.no_grad():
        layer(1000 * x)
    assert_same_bits(state.amax_history, history)
    assert_same_bits(state.scale, scale)


@needs_te
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_first_step_of_delayed_scaling_has_scales(scale):
    """At a scale of 1, gradients below 1e-5 vanish in E5M2 and activations above 448 are cut off."""
    layer = te_linear(64, 64, fp8_recipe="delayed", bias=False)
    x = (scale * torch.randn(32, 64, device=DEVICE)).bfloat16().requires_grad_()
    y = layer(x)
    gradient = (scale * torch.randn(32, 64, device=DEVICE)).bfloat16()
    y.backward(gradient)
    for value, expected in zip(
        (y, x.grad, layer.weight.grad), exact(layer, x, gradient), strict=False
    ):
        assert relative(value, expected) < 0.09


@needs_te
def test_most_recent_follows_at_once_and_max_remembers():
    x = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16)
    scales = {}
    for algorithm in ("max", "most_recent"):
        layer = te_linear(64, 64, fp8_recipe="delayed", amax_compute_algo=algorithm)
        for factor in (100, 1, 1):
            layer(factor * x).sum().backward()
        scales[algorithm] = float(layer.te._linear.fp8_meta["scaling_fwd"].scale[0])
    amax = float(x.abs().max())
    assert scales["max"] == pytest.approx(448 / (100 * amax), rel=0.01)
    assert scales["most_recent"] == pytest.approx(448 / amax, rel=0.01)


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
    history = {"fp8_margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent"}
    delayed = te.te_recipe(recipe_for("O0", fp8_recipe="delayed", **history))
    given = delayed.margin, delayed.amax_history_len, delayed.amax_compute_algo
    assert given == tuple(history.values())
    assert delayed.reduce_amax is False
