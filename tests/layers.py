"""Native FP8 layers for tests: models at O0, their results and gradients, the casts that they make."""

import copy
import io
import pickle

import pytest
import torch
from helpers import quantize_tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.capability import native_recipe
from fp8stack.kernels import ops
from fp8stack.nn.experts import is_experts
from fp8stack.nn.mlp import fuse

RECIPES = ("current", "tokenwise", "delayed", "blockwise")
CASTS = (
    "cast", "recast", "recast_with", "cast_1x128", "cast_128x128", "cast_delayed", "activation_cast",
    "activation_cast_rows",
)  # fmt: skip


def through_save(module):
    """Return a module that went through torch's file."""
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": through_save,
}
RECIPE = pytest.mark.parametrize("recipe", RECIPES)
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved hooks"])


def changed(module, change):
    """Return the module after `change(module)`."""
    change(module)
    return module


def rounded(x, fmt, axis=None):
    """Return float64 x after quantization with one scale, or one for each part along `axis`."""
    if axis is not None:
        return torch.stack([rounded(part, fmt) for part in x.unbind(axis)], axis)
    codes, scale = quantize_tensor(x.detach().cpu().float(), fmt)
    return codes.double() * scale.double()


def saved_by(function, *arguments):
    """Return what autograd saves of a call."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(*arguments)
    return saved


def scale_parameters(factor, *models):
    """Multiply all parameters, with a trace."""
    with torch.no_grad():
        for p in (p for model in models for p in model.parameters()):
            p.mul_(factor)


def native(model, device="cpu", **overrides):
    """Return the model at O0 with native layers, or skip the test where this GPU has no such recipe.

    Tests of fused modules fuse them themselves, on a CPU too.
    """
    if device == "cuda":
        answer = native_recipe(overrides.get("fp8_recipe", "current"), device)
        if not answer:
            pytest.skip(answer.reason)
    options = {"opt_level": "O0", "compute": "native", "fuse": False, "fp8_recipe": "current"}
    options |= overrides
    return fp8stack.initialize(model.to(device), **options)[0]


def linear(in_features=32, out_features=32, bias=True, device="cpu", **overrides):
    """Return one native layer; the same weights for the same seed."""
    return native(nn.Sequential(nn.Linear(in_features, out_features, bias)), device, **overrides)[0]


def begun(model, features=32):
    """Return the model after a pass of zeros: histories of delayed scaling begin after a backward, and take no zero."""
    device = next(model.parameters()).device
    y = model(torch.zeros(16, features, device=device, requires_grad=True))
    y.backward(torch.zeros_like(y))
    model.zero_grad()
    return model


def results(model, x, gradient=None):
    """Return the output and the gradients of the input and of all parameters, which are zeroed before."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    y = model(x)
    y.backward(torch.ones_like(y) if gradient is None else gradient)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def count_casts(monkeypatch):
    """Return a list that the shape of every matrix joins when it is cast in eager mode."""
    seen = []

    def counting(function):
        def run(x, *args, **kwargs):
            seen.append(tuple(x.shape))
            return function(x, *args, **kwargs)

        return run

    for name in CASTS:
        monkeypatch.setattr(ops, name, counting(getattr(ops, name)))
    return seen


def record_sums(monkeypatch):
    """Return a list that is told of every later product whether it may be summed fast."""
    told, multiply = [], ops.matmul_rows
    monkeypatch.setattr(ops, "matmul_rows", lambda *args: told.append(args[5]) or multiply(*args))
    return told


class SwiGLU(nn.Module):
    """A feed-forward block that `fuse` takes."""

    def __init__(self, features=32, inner=48):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(features, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, features, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def fused(block, device="cpu", **options):
    """Return a model of one block that is fused."""
    model = native(nn.Sequential(block), device, **options)
    assert fuse(model) == ["0"]
    return model


class Bare(nn.Module):
    """Products by parameters and by views of one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))
        self.w = nn.Parameter(torch.randn(2, 64, 64))

    def forward(self, x):
        x = torch.cat([x, x], -1) @ self.a @ self.b
        return x @ self.w[0] + x @ self.w[1].mT


class Root(nn.Module):
    """A layer, and a product by a parameter of the module's own."""

    def __init__(self):
        super().__init__()
        self.layer, self.w = nn.Linear(64, 128), nn.Parameter(torch.randn(128, 64))

    def forward(self, x):
        return torch.relu(self.layer(x)) @ self.w


def experts_of(family, features, inner, number, count=2):
    """Return experts of one of transformers' families, with weights of the size that training gives them."""
    import transformers

    sizes = {
        "hidden_size": features, "moe_intermediate_size": inner, "intermediate_size": inner, "num_experts": number,
        "num_local_experts": number, "n_routed_experts": number, "num_hidden_layers": 1, "vocab_size": 96,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": count,
        "first_k_dense_replace": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    made = next(m for m in model.modules() if is_experts(m))
    for p in made.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return made


def conv1d(in_features, out_features):
    """Return a layer of transformers, which is imported where it is needed, as that takes seconds."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D(out_features, in_features)


class Gelu(nn.Module):
    """A feed-forward block of transformers' layers that `fuse` takes."""

    def __init__(self, features=32, inner=48):
        super().__init__()
        self.c_fc, self.c_proj = conv1d(features, inner), conv1d(inner, features)

    def forward(self, x):
        return self.c_proj(nn.functional.gelu(self.c_fc(x), approximate="tanh"))


class SelfAttention(nn.Module):
    """torch's attention of a sequence, or of a batch of them, to itself."""

    def __init__(self, features=32):
        super().__init__()
        self.attention = nn.MultiheadAttention(features, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


MODULES = {
    "layer": lambda: [nn.Linear(32, 48)], "conv1d": lambda: [conv1d(32, 48)], "attention": lambda: [SelfAttention()],
    "gelu": lambda: [Gelu()], "fused": lambda: [SwiGLU()], "norm": lambda: [nn.RMSNorm(32, 1e-5), nn.Linear(32, 48)],
    "bare": lambda: [Bare()],
}  # fmt: skip
KINDS = pytest.mark.parametrize(
    ("kind", "recipe"),
    [("layer", "current"), ("layer", "delayed"), ("layer", "blockwise"), ("fused", "current"), ("fused", "delayed"),
     ("layer", "tokenwise"), ("fused", "tokenwise"), ("norm", "tokenwise"),
     ("norm", "current"), ("bare", "current"), ("conv1d", "current"), ("conv1d", "delayed"), ("conv1d", "blockwise"),
     ("gelu", "current"), ("gelu", "delayed"), ("attention", "current"), ("attention", "delayed"),
     ("attention", "blockwise")],
)  # fmt: skip


def make(kind, device="cpu", recipe="current", **options):
    """Return a model of FP8 products of a kind, of 32 features, whose first module is fused if it can be."""
    options |= {"fp8_recipe": recipe, "matmuls": kind == "bare"}
    model = native(nn.Sequential(*MODULES[kind]()), device, **options)
    assert fuse(model) == (["0"] if kind in ("fused", "gelu", "norm") else [])
    return model


def captured(function):
    """Return a CUDA graph of `function`, run three times before, and what it returned."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        return graph, function()


def after(first, second):
    """Return what `second` gives on a stream that does not wait for `first`, whose own is held up before it."""
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    first()
    with torch.cuda.stream(other):
        result = second()
    other.synchronize()
    result = result.clone()
    torch.cuda.synchronize()
    return result


class QKV(nn.Module):
    """Three layers that read one input."""

    def __init__(self, features=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(features, features, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) * self.v(x)


class Checkpointed(nn.Module):
    """A module that backward runs again."""

    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)
