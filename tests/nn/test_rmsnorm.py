"""Fused RMSNorms: which modules are taken, what they compute, the note that they leave for the cast behind them."""

import copy
import weakref
from functools import partial

import pytest
import torch
from helpers import INPUTS, assert_same_bits
from layers import after, changed, native, results, saved_by
from torch import nn
from torch.nn import functional as F

from fp8stack.kernels import ops
from fp8stack.kernels.reference.rmsnorm import MOST_COLS
from fp8stack.nn.mixin import Fused, take_off
from fp8stack.nn.notes import noted
from fp8stack.nn.rmsnorm import FusedRMSNorm, fuse_norms

unfuse = partial(take_off, mixin=Fused)


class LlamaRMSNorm(nn.Module):
    """As in transformers: the normed input is rounded before it is multiplied."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class MetaRMSNorm(nn.Module):
    """As in Meta's Llama, and it might have a bias."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_parameter("bias", None)

    def forward(self, x):
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        y = normed.type_as(x) * self.weight
        return y if self.bias is None else y + self.bias


class GemmaRMSNorm(nn.Module):
    """As in transformers: it multiplies by 1 + w, in float32."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (output * (1.0 + self.weight.float())).type_as(x)


def torchs(dim):
    return nn.RMSNorm(dim, eps=1e-5)


NORMS = {"torch": torchs, "llama": LlamaRMSNorm, "meta": MetaRMSNorm, "gemma": GemmaRMSNorm}
NORM = pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)


class Layers(nn.Module):
    """Two layers that read the output of a norm."""

    def __init__(self, dim=32):
        super().__init__()
        self.norm = LlamaRMSNorm(dim)
        self.one, self.two = (nn.Linear(dim, 48, bias=False) for _ in range(2))

    def forward(self, x):
        h = self.norm(x)
        return self.one(h) * self.two(h)


def layers(device, dim=32, dtype=torch.float32, **options):
    """Return them in FP8, the norm fused."""
    model = native(randomized(Layers(dim)).to(dtype), device, **options)
    assert fuse_norms(model) == ["norm"]
    return model


def randomized(module, device="cpu"):
    """Return the module on a device, its parameters drawn anew."""
    for p in module.parameters():
        nn.init.normal_(p)
    return module.to(device)


def fused(module, device="cpu"):
    """Return the same, a norm, fused."""
    module = randomized(module, device)
    assert fuse_norms(module) == [""]
    return module


@pytest.fixture
def norm(device):
    return fused(LlamaRMSNorm(32), device)


def amaxes(monkeypatch):
    """Return a list that each cast of an input of 3 dimensions adds what it was told of its amax to."""
    seen, cast = [], ops.cast

    def watching(x, fmt, codes=True, transposed=True, amax=None, *rest):
        if x.dim() == 3:
            seen.append(amax)
        return cast(x, fmt, codes, transposed, amax, *rest)

    monkeypatch.setattr(ops, "cast", watching)
    return seen


# --- which modules


@NORM
def test_norms_are_found_by_their_class_and_by_what_they_compute(make, device):
    model = nn.Sequential(nn.Linear(32, 32), make(32), nn.ModuleList([make(64)])).to(device)
    keys, plain = list(model.state_dict()), type(model[1])
    assert fuse_norms(model) == ["1", "2.0"]
    assert fuse_norms(model) == []  # once
    assert isinstance(model[1], plain)
    assert isinstance(model[1], FusedRMSNorm)
    assert type(model[1]) is type(model[2][0])
    assert type(model[1]).__name__ == f"Fused{plain.__name__}"
    assert list(model.state_dict()) == keys
    unfuse(model)
    assert type(model[1]) is type(model[2][0]) is plain


class OtherRMSNorm(LlamaRMSNorm):
    """Computes something else; `function` gets the module, what a LlamaRMSNorm computes, and x."""

    def __init__(self, function, dim=32):
        super().__init__(dim)
        self.function = function

    def forward(self, x):
        return self.function(self, super().forward, x)


def root(norm, x, dims=-1):
    return torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + norm.variance_epsilon)


def channels_first(norm, _, x):
    return norm.weight.view(-1, *(1,) * (x.dim() - 2)) * x * root(norm, x, 1)


OTHERS = {
    "two plus the weight": lambda n, own, x: x * root(n, x) * (2 + n.weight),
    "the mean subtracted": lambda n, own, x: own(x - x.mean(-1, keepdim=True)),
    "another eps": lambda n, own, x: F.rms_norm(x, n.weight.shape, n.weight, 2 * n.variance_epsilon),
    "eps outside of the root": lambda n, own, x: n.weight * x / (x.pow(2).mean(-1, True).sqrt() + n.variance_epsilon),
    "the 2-norm": lambda n, own, x: n.weight * F.normalize(x, dim=-1),
    "its input clipped": lambda n, own, x: own(x.clamp(-1, 1)),
    "dropout": lambda n, own, x: F.dropout(own(x), 0.1, n.training),
    "two results": lambda n, own, x: (own(x), x),
    "a result of another dtype": lambda n, own, x: own(x).double(),
    "float32 of what it may be cast to": lambda n, own, x: own(x.float()),
    "everything but the batch": lambda n, own, x: n.weight * x * root(n, x, tuple(range(1, x.dim()))),
    "channels first": channels_first,
}  # fmt: skip


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * F.silu(gate))


class T5LayerNorm(LlamaRMSNorm):
    """An RMSNorm by what it computes, not by its name."""


class Rescaling(LlamaRMSNorm):
    """One whose name says nothing of a norm: its forward is not tried."""


class OwnTensor(torch.Tensor):
    pass


def with_weight(weight):
    return changed(LlamaRMSNorm(32), lambda n: setattr(n, "weight", nn.Parameter(weight)))


REFUSED = {
    **{case: lambda function=function: OtherRMSNorm(function) for case, function in OTHERS.items()},
    "a gate": lambda: GatedRMSNorm(32),
    "float32 of bfloat16": lambda: OtherRMSNorm(OTHERS["float32 of what it may be cast to"]).bfloat16(),
    "float32 of float16": lambda: OtherRMSNorm(OTHERS["float32 of what it may be cast to"]).half(),
    "channels first, two of them": lambda: OtherRMSNorm(channels_first, 2),
    "channels first, three of them": lambda: OtherRMSNorm(channels_first, 3),
    "a bias": lambda: changed(LlamaRMSNorm(32), lambda n: n.register_parameter("bias", nn.Parameter(torch.zeros(32)))),
    "a buffer": lambda: changed(LlamaRMSNorm(32), lambda n: n.register_buffer("seen", torch.zeros(()))),
    "a module inside": lambda: changed(LlamaRMSNorm(32), lambda n: n.add_module("inner", nn.Identity())),
    "another name": lambda: Rescaling(32),
    "eps of the dtype": lambda: nn.RMSNorm(32),
    "no weight": lambda: nn.RMSNorm(32, 1e-5, elementwise_affine=False),
    "two dimensions": lambda: nn.RMSNorm((4, 8), 1e-5),
    "a row that is broadcast": lambda: with_weight(torch.ones(1, 32)),
    "rows too long": lambda: LlamaRMSNorm(MOST_COLS + 1),
    "float64": lambda: LlamaRMSNorm(32).double(),
    "a tensor of its own class": lambda: with_weight(torch.ones(32).as_subclass(OwnTensor)),
    "a forward put in its place": lambda: changed(LlamaRMSNorm(32), lambda n: setattr(n, "forward", n.forward)),
    "LayerNorm": lambda: nn.LayerNorm(32, bias=False),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_modules_are_left_as_they_are(case):
    module = REFUSED[case]()
    cls = type(module)
    assert fuse_norms(nn.Sequential(module)) == []
    assert type(module) is cls


def test_the_longest_rows_transformers_own_and_whatever_computes_the_same_are_taken():
    assert fuse_norms(LlamaRMSNorm(MOST_COLS)) == [""]
    assert fuse_norms(OtherRMSNorm(lambda norm, own, x: own(x))) == [""]
    assert fuse_norms(T5LayerNorm(32)) == [""]
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    assert fuse_norms(llama.LlamaRMSNorm(64)) == [""]


def test_looking_at_a_module_changes_neither_it_nor_random_numbers(device):
    norms = [LlamaRMSNorm(32), OtherRMSNorm(OTHERS["dropout"])]
    norms = [randomized(norm, device).eval() for norm in norms]
    weights = [norm.weight for norm in norms]
    values = [w.detach().clone() for w in weights]
    generators = [torch.default_generator]
    generators += torch.cuda.default_generators if device == "cuda" else ()
    states = [g.get_state() for g in generators]
    assert fuse_norms(nn.ModuleList(norms)) == ["0"]
    for norm, weight, value in zip(norms, weights, values, strict=True):
        assert norm.weight is weight
        assert not norm.training
        assert_same_bits(weight, value)
    for generator, state in zip(generators, states, strict=True):
        assert torch.equal(generator.get_state(), state)


# --- what they compute


@NORM
@INPUTS
@pytest.mark.parametrize("shape", [(3, 7, 32), (5, 130), (40,)], ids=str)
def test_results_and_gradients_are_those_of_the_formula(make, dtype, shape, device):
    norm = fused(make(shape[-1]), device).to(dtype)
    x, gradient = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    exact = changed(copy.deepcopy(norm), unfuse)
    close = torch.finfo(dtype).eps
    expected = results(exact.double(), x.double(), gradient.double())
    for value, true in zip(results(norm, x, gradient), expected, strict=True):
        assert value.dtype is dtype
        assert value.shape == true.shape
        # LlamaRMSNorm computes in float32 whatever its input is
        assert (value.double() - true).norm() <= (close + 1e-6) * true.norm()


def test_what_the_kernels_do_not_do_the_own_forward_does(norm, device, monkeypatch):
    plain = changed(copy.deepcopy(norm), unfuse)
    x = torch.randn(5, 32, device=device)
    seen, rmsnorm = [], ops.rmsnorm
    monkeypatch.setattr(ops, "rmsnorm", lambda *args: seen.append(1) or rmsnorm(*args))
    for given in (x.bfloat16(), x.double(), x.as_subclass(OwnTensor)):
        assert_same_bits(norm(given), plain(given))
    double, elsewhere, own = (copy.deepcopy(norm) for _ in range(3))
    assert_same_bits(double.double()(x.double()), copy.deepcopy(plain).double()(x.double()))
    assert elsewhere.to("meta")(x.to("meta")).is_meta
    with pytest.raises(RuntimeError, match="device"):
        elsewhere(x)
    own.weight = nn.Parameter(norm.weight.detach().as_subclass(OwnTensor))
    assert isinstance(own(x), OwnTensor)
    half, plain_half = copy.deepcopy(norm).bfloat16(), copy.deepcopy(plain).bfloat16()
    with torch.autocast(device, torch.bfloat16):
        assert_same_bits(half(x.bfloat16()), plain_half(x.bfloat16()))
    per_row = torch.func.vmap(torch.func.grad(lambda row: norm(row).sum()))(x)
    assert_same_bits(per_row, torch.func.vmap(torch.func.grad(lambda row: plain(row).sum()))(x))
    with pytest.raises(RuntimeError, match="must match the size"):
        norm(x[:, :31])
    assert norm(x[:, :1]).shape == (5, 32)  # which broadcasts
    norm.variance_epsilon = torch.tensor(1e-6)
    norm(x)
    assert seen == []
    norm.variance_epsilon = plain.variance_epsilon = 1.0  # which is read at every call
    assert torch.allclose(norm(x), plain(x), rtol=1e-5, atol=0)
    assert seen == [1]


@NORM
def test_autocast_leaves_norms_of_float32_to_the_kernels(make, device, monkeypatch):
    """As the float32 residual stream and norms of a model are, whose Linear layers autocast casts."""
    norm = fused(make(32), device)
    plain = changed(copy.deepcopy(norm), unfuse)
    seen, rmsnorm = [], ops.rmsnorm
    monkeypatch.setattr(ops, "rmsnorm", lambda *args: seen.append(1) or rmsnorm(*args))
    x, gradient = torch.randn(2, 5, 32, device=device)
    with torch.autocast(device, torch.bfloat16):
        found = results(norm, x, gradient)
        assert seen == [1]
        for value, expected in zip(found, results(plain, x, gradient), strict=True):
            assert value.dtype is torch.float32
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_frozen_weight_is_not_asked_for(norm, device, monkeypatch):
    norm.weight.requires_grad_(False)
    asked, backward = [], ops.rmsnorm_backward
    monkeypatch.setattr(
        ops, "rmsnorm_backward", lambda *args: asked.append(args[-1]) or backward(*args)
    )
    norm(torch.randn(5, 32, device=device, requires_grad=True)).sum().backward()
    assert asked == [False]


def test_views(norm, device):
    x = torch.randn(32, 40, device=device).t()
    assert_same_bits(results(norm, x), results(norm, x.contiguous()))


def test_saves_its_input_and_one_number_a_row(device):
    norm = fused(LlamaRMSNorm(64), device).bfloat16()
    x = torch.randn(256, 64, device=device).bfloat16().requires_grad_()
    own = [t for t in saved_by(norm, x) if t is not x and t is not norm.weight]
    assert [t.nbytes for t in own] == [4 * 256]


@NORM
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["sum", "squares"])
def test_second_derivatives_are_those_of_the_formula(make, frozen, loss, device):
    """As a gradient penalty wants them. The gradient of a sum is a constant, which needs none itself."""
    norm = fused(make(32), device).requires_grad_(not frozen)
    exact = changed(copy.deepcopy(norm).double(), unfuse)
    x = torch.randn(5, 32, device=device)
    given = []
    for module, leaf in ((norm, x.clone()), (exact, x.double())):
        (dx,) = torch.autograd.grad(loss(module(leaf.requires_grad_())), leaf, create_graph=True)
        dx.square().sum().backward()
        given.append([leaf.grad] if frozen else [leaf.grad, module.weight.grad])
    for value, true in zip(*given, strict=True):
        assert (value.double() - true).norm() <= 1e-5 * true.norm()


class WithoutGradient(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, dy: None)


def test_an_output_may_get_no_gradient(norm, device):
    x = torch.randn(5, 32, device=device, requires_grad=True)
    WithoutGradient.apply(norm(x)).sum().backward()
    assert x.grad is norm.weight.grad is None


def test_the_input_may_have_its_name_and_other_arguments_are_refused(norm, device):
    x = torch.randn(5, 32, device=device)
    assert torch.allclose(norm(hidden_states=x), norm(x), rtol=1e-5, atol=0)
    for arguments, named in (((), {}), ((x, x), {}), ((x,), {"gate": x})):
        with pytest.raises(TypeError, match=r"LlamaRMSNorm.forward\(\)"):
            norm(*arguments, **named)


# --- the note


@pytest.mark.parametrize("fmt", ["hybrid", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_cast_behind_a_norm_is_told_the_magnitudes_and_gives_the_same_bits(
    fmt, dtype, device, monkeypatch
):
    model = layers(device, dtype=dtype, fp8_format=fmt)
    x, gradient = torch.randn(3, 16, 32, device=device), torch.randn(3, 16, 48, device=device)
    seen = amaxes(monkeypatch)
    given = results(model, x.to(dtype), gradient.to(dtype))
    assert len(seen) == (2 if fmt == "e5m2" else 1) + 2  # the gradients of both layers follow
    for amax in seen[:-2]:
        assert amax.dtype is torch.int32
    assert seen[-2:] == [None, None]
    seen.clear()
    monkeypatch.setattr("fp8stack.nn.rmsnorm.note", lambda *_: None)
    expected = results(model, x.to(dtype), gradient.to(dtype))
    assert set(seen) == {None}
    assert_same_bits(given, expected)


def test_the_note_serves_evaluation_too(device, monkeypatch):
    model, x = layers(device).eval(), torch.randn(3, 16, 32, device=device)
    expected = results(model, x)[0]
    seen = amaxes(monkeypatch)
    with torch.no_grad():
        assert_same_bits(model(x), expected)
    assert [amax is not None for amax in seen] == [True, True]  # each layer casts, as before
    seen.clear()
    with torch.inference_mode():
        assert_same_bits(model(x), expected)
    assert seen == [None, None]  # no version tells of changes


def double(h):
    with torch.no_grad():
        h.mul_(2)
    return h


CHANGED = {
    "another tensor": lambda h: 2 * h, "an alias": lambda h: h.view(h.shape), "a part": lambda h: h[:2],
    "changed in place": double, "changed in place as the last one": lambda h: h.mul_(2),
}  # fmt: skip


@pytest.mark.parametrize("other", CHANGED)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
def test_the_note_is_for_that_very_tensor_as_it_was(other, grad, device, monkeypatch):
    model, x = layers(device), torch.randn(3, 16, 32, device=device)
    seen = amaxes(monkeypatch)
    with torch.set_grad_enabled(grad):
        h = CHANGED[other](model.norm(x))
        y = model.one(h)
        assert seen == [None]
        assert_same_bits(y, model.one(h.detach().clone()))
        model.one(model.norm(x))
        assert seen[-1] is not None


def test_the_note_is_gone_when_the_tensor_is(norm, device):
    h, other = (norm(torch.randn(5, 32, device=device)) for _ in range(2))
    parts = weakref.ref(noted(h, "parts"))
    del h
    assert parts() is None
    assert noted(other, "parts") is not None


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_layers_of_other_recipes_do_without_the_note(recipe, device):
    model = layers(device, fp8_recipe=recipe)
    plain = changed(copy.deepcopy(model), unfuse)
    x = torch.randn(3, 16, 32, device=device)
    for one, same in zip(results(model, x), results(plain, x), strict=True):
        assert (one - same).norm() <= 1e-2 * same.norm()


@pytest.mark.gpu
def test_the_note_is_not_for_another_stream():
    """Which has not waited for the norm."""
    model, x = layers("cuda", 512).eval(), torch.randn(3, 512, 512, device="cuda")
    with torch.no_grad():
        h = model.norm(x)
        expected = model.one(h)
        magnitudes = noted(h, "parts")
        parts = magnitudes.clone()
        magnitudes.zero_()
        assert_same_bits(after(lambda: magnitudes.copy_(parts), lambda: model.one(h)), expected)


@pytest.mark.gpu
def test_a_graph_does_not_take_magnitudes_that_were_found_before_it():
    model = layers("cuda", 64)
    with torch.no_grad():
        model.one(torch.randn(3, 32, 64, device="cuda"))  # compiles what the graph will hold
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            h = model.norm(torch.randn(3, 32, 64, device="cuda"))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = model.one(h)
            h.copy_(100 * torch.randn(3, 32, 64, device="cuda"))
            graph.replay()
            expected = model.one(h)
        stream.synchronize()
    assert_same_bits(y, expected)
