"""Products by bare parameters: every spelling against float64, what is left to torch, and the life of the model."""

import copy
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, every_two
from layers import COPIES, REENTRANT, Checkpointed, Root, native, results, rounded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.formats import E4M3, E5M2
from fp8stack.levels import recipe_for
from fp8stack.nn.convert import skipped_modules
from fp8stack.nn.coverage import bare_modules
from fp8stack.nn.forward_code import owners_read
from fp8stack.nn.matmuls import MultipliesParameters, _Mode, apply_matmuls
from fp8stack.nn.mixin import take_off


class Bare(nn.Module):
    """Multiplies by a parameter of its own, as `function` says."""

    def __init__(self, function, *shape, device="cpu", dtype=torch.float32):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(shape, device=device).to(dtype))

    def forward(self, x):
        return self.function(x, self.w)


def fp8(model, **overrides):
    """Let the model's products run in FP8; return the record of them."""
    recipe = recipe_for(
        "O0",
        **{"matmuls": True, "select": "all", "head": "fp8", "fp8_recipe": "current", **overrides},
    )
    skipped = skipped_modules(model, recipe)[0]
    chosen = [m for m, why in bare_modules(model, recipe, skipped).items() if not why]
    return apply_matmuls(model, recipe, chosen, skipped)


def assert_close(given, exact, what):
    """Fail unless the difference is what rounding to float32 and the accumulation of a product leave."""
    # Hopper's fast accumulation adds 2^-13 of the largest partial sum
    step = 2**-12 if given.is_cuda else torch.finfo(torch.float32).eps
    error = (given.detach().double().cpu() - exact).abs().max()
    assert error <= 8 * step * exact.abs().max(), what


# --- numbers


@dataclass
class Case:
    """A spelling: the function, the shapes, and the axes along which each expert has its own scale."""

    function: Any
    x: tuple[int, ...]
    w: tuple[int, ...]
    x_axis: int | None = None
    y_axis: int | None = None

    @property
    def w_axis(self):
        return 0 if len(self.w) > 2 and self.y_axis is not None else None


def einsum(formula):
    return lambda x, w: torch.einsum(formula, x, w)


CASES = {
    "x@w": Case(lambda x, w: x @ w, (5, 16, 96), (96, 48)),
    "vector@w": Case(lambda x, w: x @ w, (96,), (96, 48)),
    "w@x": Case(lambda x, w: w @ x, (96, 20), (48, 96)),
    "w@vector": Case(lambda x, w: w @ x, (96,), (48, 96)),
    "w@batch": Case(lambda x, w: w @ x, (3, 96, 20), (48, 96)),
    "rmatmul": Case(lambda x, w: w.__rmatmul__(x), (20, 96), (96, 48)),
    "torch.matmul": Case(lambda x, w: torch.matmul(x, other=w), (2, 3, 16, 96), (96, 48)),
    "Tensor.matmul": Case(lambda x, w: x.matmul(w), (33, 96), (96, 48)),
    "linalg": Case(lambda x, w: torch.linalg.matmul(x, w), (33, 96), (96, 48)),
    "torch.mm": Case(lambda x, w: torch.mm(x, w), (33, 96), (96, 48)),
    "Tensor.mm": Case(lambda x, w: x.mm(mat2=w), (33, 96), (96, 48)),
    "mm left": Case(lambda x, w: torch.mm(w, x), (96, 17), (48, 96)),
    "linear": Case(lambda x, w: F.linear(x, w), (5, 16, 96), (48, 96)),
    "linear keywords": Case(lambda x, w: F.linear(input=x, weight=w), (33, 96), (48, 96)),
    "padded": Case(lambda x, w: x @ w, (5, 90), (90, 57)),
    "w.t()": Case(lambda x, w: x @ w.t(), (33, 96), (48, 96)),
    "w.T": Case(lambda x, w: torch.matmul(x, w.T), (33, 96), (48, 96)),
    "w.mT": Case(lambda x, w: x @ w.mT, (33, 96), (48, 96)),
    "transpose": Case(lambda x, w: x @ w.transpose(-1, -2), (33, 96), (48, 96)),
    "linear w.t()": Case(lambda x, w: F.linear(x, w.t()), (33, 96), (96, 48)),
    "w.view": Case(lambda x, w: x @ w.view(96, 48), (33, 96), (96, 4, 12)),
    "w.unsqueeze": Case(lambda x, w: x @ w[:, None].squeeze(1), (33, 96), (96, 48)),
    "einsum": Case(einsum("bti,io->bto"), (5, 16, 96), (96, 48)),
    "einsum spaces": Case(einsum("t i, o i -> t o"), (33, 96), (48, 96)),
    "einsum dots": Case(einsum("...i,oi->...o"), (5, 16, 96), (48, 96)),
    "einsum dots only": Case(einsum("...i,oi->...o"), (96,), (48, 96)),
    "einsum list": Case(lambda x, w: torch.einsum("ti,io->to", [x, w]), (33, 96), (96, 48)),
    "einsum left": Case(lambda x, w: torch.einsum("oi,bit->bot", w, x), (3, 96, 17), (48, 96)),
    "einsum heads out": Case(einsum("btd,dhk->bthk"), (2, 16, 96), (96, 4, 12)),
    "einsum heads turned": Case(einsum("btd,dhk->bhtk"), (2, 16, 96), (96, 4, 12)),
    "einsum heads in": Case(einsum("bthk,hkd->btd"), (2, 16, 4, 24), (4, 24, 48)),
    "einsum heads in turned": Case(einsum("bhtk,dhk->btd"), (2, 4, 16, 24), (48, 4, 24)),
    "bmm": Case(torch.bmm, (4, 20, 96), (4, 96, 48), 0, 0),
    "Tensor.bmm": Case(lambda x, w: x.bmm(w), (4, 20, 96), (4, 96, 48), 0, 0),
    "bmm left": Case(lambda x, w: torch.bmm(w, x), (4, 96, 17), (4, 48, 96), 0, 0),
    "bmm w.mT": Case(lambda x, w: torch.bmm(x, w.mT), (4, 20, 96), (4, 48, 96), 0, 0),
    "stack": Case(lambda x, w: x @ w, (4, 20, 96), (4, 96, 48), 0, 0),
    "stack of batches": Case(lambda x, w: x @ w, (3, 4, 20, 96), (4, 96, 48), 1, 1),
    "stack, one x": Case(lambda x, w: x @ w, (20, 96), (4, 96, 48), None, 0),
    "stack, one x for all": Case(lambda x, w: x @ w, (3, 1, 20, 96), (4, 96, 48), None, 1),
    "baddbmm": Case(lambda x, w: torch.baddbmm(x.new_zeros(48), x, w), (4, 20, 96), (4, 96, 48), 0, 0),
    "baddbmm names": Case(
        lambda x, w: torch.baddbmm(x.new_zeros(()), batch1=x, batch2=w), (4, 20, 96), (4, 96, 48), 0, 0
    ),
    "tensordot": Case(lambda x, w: torch.tensordot(x, w, 1), (5, 16, 96), (96, 48)),
    "tensordot lists": Case(lambda x, w: torch.tensordot(x, w, ([-1], [1])), (5, 16, 96), (48, 96)),
    "tensordot left": Case(lambda x, w: torch.tensordot(w, x, ([1], [0])), (96, 17), (48, 96)),
    "tensordot heads": Case(lambda x, w: torch.tensordot(x, w, 2), (2, 16, 4, 24), (4, 24, 48)),
    "einsum stack": Case(einsum("ecd,edf->ecf"), (4, 20, 96), (4, 96, 48), 0, 0),
    "einsum stack turned": Case(einsum("ecd,efd->ecf"), (4, 20, 96), (4, 48, 96), 0, 0),
    "einsum stack of batches": Case(einsum("becd,edf->becf"), (3, 4, 20, 96), (4, 96, 48), 1, 1),
    "einsum stack inside": Case(einsum("bted,edf->btef"), (3, 20, 4, 96), (4, 96, 48), 2, 2),
    "einsum stack heads": Case(einsum("ecd,edhk->echk"), (4, 20, 96), (4, 96, 4, 12), 0, 0),
    "slices": Case(
        lambda x, w: torch.stack([x[i] @ w[i] for i in range(4)]), (4, 20, 96), (4, 96, 48), 0, 0
    ),
    "slices turned": Case(
        lambda x, w: torch.stack([F.linear(x[i], e) for i, e in enumerate(w)]),
        (4, 20, 96), (4, 48, 96), 0, 0,
    ),
    "slices w[i].t()": Case(
        lambda x, w: torch.stack([x[i] @ w[i].t() for i in range(4)]), (4, 20, 96), (4, 48, 96), 0, 0
    ),
}  # fmt: skip


# the same calls with other shapes, names or formulas, which a graph takes no other way
COMPILED_AS_OTHERS = {"vector@w", "w@vector", "w@batch", "padded", "w.T", "w.mT", "linear w.t()", "linear keywords",
    "w.unsqueeze", "einsum spaces", "einsum dots only", "einsum heads out", "einsum heads in", "Tensor.bmm", "bmm w.mT",
    "stack of batches", "einsum stack turned", "einsum stack inside", "slices w[i].t()", "torch.mm", "linalg",
    "Tensor.mm", "einsum left", "einsum stack of batches", "bmm left", "slices turned"}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_and_gradients_are_those_of_the_rounded_operands(name, device):
    """FP8 rounding is the only error, and gradients arrive where autograd sends them."""
    case = CASES[name]
    model = Bare(case.function, *case.w, device=device)
    x = torch.randn(case.x, device=device)
    expected = model(x)
    bare = fp8(model)
    gradient = torch.randn_like(expected)
    y, dx, dw = results(model, x, gradient)
    assert bare.used == {"w"}
    assert not bare.left
    assert y.shape == expected.shape
    assert y.is_contiguous() or not expected.is_contiguous()  # a script may view() it
    x8 = rounded(x, E4M3, case.x_axis).requires_grad_()
    w8 = rounded(model.w, E4M3, case.w_axis).requires_grad_()
    exact = case.function(x8, w8)
    exact.backward(rounded(gradient, E5M2, case.y_axis))
    assert_close(y, exact.detach(), "y")
    assert_close(dx, x8.grad, "dx")
    assert_close(dw, w8.grad, "dw")
    if device == "cpu" and name not in COMPILED_AS_OTHERS:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same_bits(results(compiled, x, gradient), [y, dx, dw])


@every_two(2, name=CASES, dtype=[torch.bfloat16, torch.float16], autocast=[False, True])
def test_dtypes_are_torchs(name, dtype, autocast, device):
    case = CASES[name]
    own = torch.float32 if autocast else dtype
    model = Bare(case.function, *case.w, device=device, dtype=own)
    x = torch.randn(case.x, device=device, dtype=own)
    with torch.autocast(device, dtype, enabled=autocast):
        expected = results(model, x)
        bare = fp8(model)
        given = results(model, x)
    assert bare.used
    for a, b in zip(given, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - b).double().norm() <= 0.08 * b.double().norm()


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "mxfp8"])
def test_recipes(recipe, device):
    model = Bare(lambda x, w: torch.bmm(x @ w[0], w.mT), 4, 64, 96, device=device)
    x = torch.randn(4, 20, 64, device=device)
    expected = results(model, x)
    fp8(model, fp8_recipe=recipe)
    for given, exact in zip(results(model, x), expected, strict=True):
        assert 1e-4 < (given - exact).norm() / exact.norm() < 0.1


BIASED = {
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "Tensor.addmm": lambda x, w, b: b.addmm(x, w),
    "linear": lambda x, w, b: F.linear(x, w.t(), b),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", BIASED.values(), ids=BIASED)
def test_biases(call, dtype, device):
    model = Bare(lambda x, w: call(x, w, model.b), 96, 48, device=device, dtype=dtype)
    model.b = nn.Parameter(torch.randn(48, device=device).to(dtype))
    x = torch.randn(33, 96, device=device).to(dtype)
    bare = fp8(model)
    y, dx, dw, db = results(model, x)
    bias = model.b.detach().clone()
    model.b.data.zero_()
    without = results(model, x)
    assert bare.used == {"w"}
    assert y.dtype is db.dtype is dtype
    assert (y - without[0] - bias).abs().max() <= 4 * torch.finfo(dtype).eps * y.abs().max()
    assert_same_bits([dx, dw], without[1:3])
    assert (db == 33).all()


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2.0), (0, 1)])
@pytest.mark.parametrize(("rows", "left"), [(1, False), (33, False), (96, True)])
def test_addmm_adds_what_is_no_bias(beta, alpha, rows, left, device):
    added = torch.randn(rows, 48, device=device)
    if beta == 0:
        added[:] = torch.nan

    def add(x, w):
        return torch.addmm(added, *((w, x) if left else (x, w)), beta=beta, alpha=alpha)

    model = Bare(add, 96, 64 if left else 48, device=device)
    x = torch.randn(*((64, 48) if left else (33, 96)), device=device)
    expected = model(x)
    bare = fp8(model)
    assert 1e-4 < (model(x) - expected).norm() / expected.norm() < 0.06
    assert bare.used


def test_parts_of_a_parameter_are_cast_as_they_are(device):
    model = Bare(lambda x, w: x @ w[:, 16:80], 96, 96, device=device)
    x = torch.randn(33, 96, device=device)
    fp8(model)
    y, dx, dw = results(model, x)
    x8, w8 = rounded(x, E4M3), rounded(model.w[:, 16:80], E4M3)
    assert_close(y, x8 @ w8, "y")
    assert_close(dx, torch.ones(33, 64).double() @ w8.T, "dx")
    assert_close(dw[:, 16:80], x8.T @ torch.ones(33, 64).double(), "dw")
    assert (dw[:, :16] == 0).all()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(320, 32)
        self.proj = nn.Linear(32, 32)

    def forward(self, tokens):
        return F.linear(self.proj(self.embed(tokens).float()), self.embed.weight)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])  # as O2 does
def test_a_tied_head(stored, device):
    """The product belongs to the module whose forward makes it, not to the one that owns the weight."""
    model = Tied().to(device)
    model.embed.weight.data = model.embed.weight.data.to(stored)
    tokens = torch.randint(0, 320, (2, 17), device=device)
    hidden = model.proj(model.embed(tokens).float()).detach()
    bare = fp8(model)
    y = model(tokens)
    assert bare.used == {"embed.weight"}  # the Linear's 1024 elements are fewer than min_numel
    exact = rounded(hidden, E4M3) @ rounded(model.embed.weight, E4M3).T
    assert_close(y, exact, "y")
    y.sum().backward()
    assert (y.dtype, model.embed.weight.grad.dtype) == (torch.float32, stored)


def test_gradients_stop_where_autograd_stops():
    def stopped(x, w):
        with torch.no_grad():
            view = w.t()
        return F.linear(x, view) + x @ w.detach()

    model = Bare(stopped, 96, 96)
    bare = fp8(model)
    x = torch.randn(20, 96, requires_grad=True)
    for function, frozen in ((stopped, False), (torch.matmul, True), (torch.matmul, False)):
        model.function = function
        model.w.requires_grad_(not frozen)
        model(x).sum().backward()
        assert (model.w.grad is None) == (function is stopped or frozen)
        assert x.grad is not None
    assert bare.used == {"w"}
    assert set(bare.left) <= {"neither or both operands are parameters"}  # detach() may be no view


# --- what is left to torch

LEFT = {
    "no parameter": (lambda x, w: x @ x.mT, (20, 96), (96, 96), "neither or both"),
    "two parameters": (lambda x, w: x + w @ w.t(), (96, 96), (96, 96), "neither or both"),
    "a computed weight": (lambda x, w: x @ (w * 2), (20, 96), (96, 96), "neither or both"),
    "empty": (lambda x, w: x @ w, (0, 96), (96, 96), "empty"),
    "small": (lambda x, w: x @ w, (20, 32), (32, 64), "min_numel"),
    "small experts": (lambda x, w: x @ w, (8, 20, 32), (8, 32, 64), "min_numel"),
    "vector": (lambda x, w: x @ w, (20, 5000), (5000,), "not a matrix"),
    "expert of none": (lambda x, w: x @ w, (20, 96), (1, 4, 96, 96), "not a matrix"),
    "expanded": (lambda x, w: w.expand(4, -1, -1) @ x, (4, 96, 20), (1, 96, 96), "stack of experts"),
    "four dimensions": (lambda x, w: x @ w, (2, 3, 20, 96), (2, 3, 96, 96), "not a matrix"),
    "einsum, sums": (einsum("ti,io->o"), (20, 96), (96, 96), "not one"),
    "einsum, products": (einsum("ti,io->tio"), (20, 96), (96, 96), "not one"),
    "einsum, diagonal": (einsum("ii,io->io"), (96, 96), (96, 96), "not one"),
    "einsum, sum of w": (einsum("ti,io->ti"), (20, 96), (96, 96), "not one"),
    "einsum, shuffled w": (einsum("thk,hdk->td"), (20, 4, 24), (4, 96, 24), "not one"),
    "einsum, two batches": (einsum("abti,abio->abto"), (2, 3, 20, 96), (2, 3, 96, 96), "not one"),
    "einsum, no tokens": (einsum("ei,eio->eo"), (4, 96), (4, 96, 96), "not one"),
    "einsum, dots in w": (einsum("ti,...io->...to"), (20, 96), (4, 96, 96), "not one"),
    "einsum, implicit": (einsum("ti,io"), (20, 96), (96, 96), "not one"),
    "einsum, one": (lambda x, w: torch.einsum("io->oi", w), (20, 96), (96, 96), "not one"),
    "einsum, three": (
        lambda x, w: torch.einsum("ti,io,to->t", x, w, x), (20, 96), (96, 96), "not one"
    ),
    "out": (
        lambda x, w: torch.matmul(x, w.detach(), out=torch.empty(20, 96)), (20, 96), (96, 96), None
    ),
    "another function": (lambda x, w: F.embedding(x.long().abs(), w) * 2, (20, 96), (96, 96), None),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_does_not_fit_is_left_to_torch(name):
    function, x_shape, w_shape, reason = LEFT[name]
    model = Bare(function, *w_shape)
    x = torch.randn(x_shape)
    expected = model(x)
    bare = fp8(model)
    assert_same_bits(model(x), expected)
    assert not bare.used
    assert reason is None or any(reason in key for key in bare.left)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_other_dtypes_are_left_to_torch(dtype):
    model = Bare(torch.matmul, 96, 96)
    model.w = nn.Parameter((torch.randn(96, 96) * 9).to(dtype), requires_grad=False)
    x = (torch.randn(20, 96) * 9).to(dtype)
    expected = model(x)
    bare = fp8(model)
    assert_same_bits(torch.view_as_real(model(x)) if dtype.is_complex else model(x),
                     torch.view_as_real(expected) if dtype.is_complex else expected)  # fmt: skip
    assert bare.left == {"dtypes": 1}


ERRORS = [
    (torch.matmul, torch.randn(20, 80), "shapes cannot be multiplied"),
    (torch.mm, torch.randn(2, 20, 96), "must be a matrix"),
    (torch.matmul, torch.randn(20, 96).half(), "same dtype"),
    (torch.matmul, torch.randn(()), "at least 1D"),
    (torch.matmul, [1.0], "must be Tensor"),
    (lambda x, w: F.linear(x, w, torch.ones(3)), torch.randn(20, 96), "expanded size"),
]


@pytest.mark.parametrize(("function", "x", "message"), ERRORS)
def test_errors_are_torchs(function, x, message):
    model = Bare(function, 96, 96)
    fp8(model)
    with pytest.raises((RuntimeError, TypeError), match=message):
        model(x)


def test_min_numel(device):
    model, x = Bare(torch.matmul, 90, 64, device=device), torch.randn(20, 90, device=device)
    expected = model(x)
    bare = fp8(model, min_numel=90 * 64 + 1)
    assert_same_bits(model(x), expected)
    assert bare.left == {"smaller than min_numel": 1}


class Pair(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.first = Bare(torch.matmul, 96, 96, device=device)
        self.head = Bare(torch.matmul, 96, 96, device=device)

    def forward(self, x):
        return self.head(self.first(x)) @ self.head.w.t()


def test_skip(device):
    model = Pair(device)
    x = torch.randn(20, 96, device=device)
    bare = fp8(model, skip=["head"])
    assert not isinstance(model.head, MultipliesParameters)
    y = model(x)
    assert bare.used == {"first.w"}
    assert bare.left == {"skip": 1}  # its own forward is not looked at
    assert_same_bits(y, model.first(x) @ model.head.w @ model.head.w.t())
    twin = copy.deepcopy(model)
    assert_same_bits(twin(x), y)
    assert_same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)


# --- the life of a model


class Block(nn.Module):
    """A mixture of experts, each spelling once, with a method that may be checkpointed."""

    def __init__(self, dim=64, experts=2, reentrant=None):
        super().__init__()
        self.norm, self.reentrant = nn.LayerNorm(dim), reentrant
        self.qkv = nn.Parameter(torch.randn(dim, 3 * dim) * 0.1)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) * 0.1)
        self.bias = nn.Parameter(torch.randn(dim))

    def attend(self, x):
        q, k, v = (self.norm(x) @ self.qkv).chunk(3, -1)
        return x + (q @ k.mT / 8).softmax(-1) @ v  # deterministic in backward, too

    def mix(self, x):
        h = F.gelu(torch.einsum("etd,edf->etf", x, self.up))
        return x + torch.bmm(h, self.down) + self.bias

    def forward(self, x):
        if self.reentrant is None:
            return self.mix(self.attend(x))
        return self.mix(checkpoint(self.attend, x, use_reentrant=self.reentrant))


class Stack(nn.Sequential):
    """A class of the user's own."""


def stack(modules=None, methods=None):
    """Return always the same model; what is recomputed, `reentrant` or not."""
    torch.manual_seed(0)
    blocks = [Block(reentrant=methods) for _ in range(2)]
    if modules is not None:
        blocks = [Checkpointed(block, modules) for block in blocks]
    return Stack(*blocks, Bare(F.linear, 96, 64))


@REENTRANT
@pytest.mark.parametrize("where", ["modules", "methods", "both"])
def test_recomputation_is_fp8_and_bit_identical(reentrant, where, device):
    again = stack(
        None if where == "methods" else reentrant, None if where == "modules" else reentrant
    )
    model, again = stack().to(device), again.to(device)
    x = torch.randn(2, 33, 64, device=device)
    exact = results(model, x)
    bare = fp8(model)
    fp8(again)
    expected = results(model, x)
    assert len(bare.used) == 7
    for given, wanted, other in zip(results(again, x), expected, exact, strict=True):
        assert_same_bits(given, wanted)
        assert not torch.equal(given, other) or (given == given.flatten()[0]).all()
    assert torch._C._len_torch_function_stack() == 0


def test_methods_outside_forward_stay_as_they_are():
    model = Block()
    x = torch.randn(2, 33, 64)
    expected = model.mix(x)
    fp8(model)
    assert_same_bits(model.mix(x), expected)
    assert not torch.equal(model(x), expected)


@pytest.mark.parametrize("how", ["", "recomputed", "block by block"])
def test_compiles_to_one_graph_with_the_same_bits(how, device):
    """A block that is compiled alone is entered with the mode of the model around it."""
    torch._dynamo.reset()
    model = stack(modules=False if how == "recomputed" else None).to(device)
    model = model if how == "block by block" else model[1:]
    x = torch.randn(2, 33, 64, device=device)
    fp8(model)
    expected = results(model, x)
    for part in model[:2] if how == "block by block" else [model]:
        part.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=how != "block by block"):
        for _ in range(2):
            assert_same_bits(results(model, x), expected)


class Probe(nn.Module):
    def forward(self, x):
        self.modes = torch._C._len_torch_function_stack()
        return x


def test_the_mode_is_entered_once():
    probe, x = Probe(), torch.randn(2, 16, 64)
    model = Stack(Block(), probe)
    fp8(model)
    for training in (True, False):  # histories do not move on in evaluation
        probe.train(training)
        model(x)
        assert probe.modes == 2 - training
        assert torch._C._len_torch_function_stack() == 0
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 16, 63))
    assert torch._C._len_torch_function_stack() == 0


class TiedByHand(nn.Module):
    """Multiplies by the weight of another module; what is inside does not."""

    def __init__(self):
        super().__init__()
        self.embed, self.probe, self.gain = (
            nn.Embedding(128, 64),
            Probe(),
            nn.Parameter(torch.ones(64, 64)),
        )
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ModuleList([Outer(self.probe)])[0])

    def forward(self, tokens):
        return self.body(self.embed(tokens)) @ self.embed.weight.t()


class Outer(nn.Module):
    """Has a matrix, and no product."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.table = inner, nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return self.inner(x) + self.table[0]


class Looks(nn.Module):
    def forward(self, x, shape):
        x = x.to(self.up.weight.device) @ self.down.weight.view(self.up.weight.shape)
        return self.words(x, self.embed) + torch.broadcast_to(self.gate.weight, shape)

    def words(self, x, embed):
        return x @ embed.weight.t()


def test_a_weight_is_read_where_its_values_are():
    assert owners_read(Looks) == {"down", "gate", "embed"}


def test_auto_looks_where_parameters_are_multiplied_and_nowhere_else(device):
    model, tokens = TiedByHand().to(device), torch.arange(64, device=device).view(2, 32)
    options = {"compute": "native", "select": "all", "fp8_recipe": "current", "head": "fp8"}
    fp8stack.initialize(model, None, "O0", **options)
    assert isinstance(model, MultipliesParameters)
    assert not isinstance(model.body[1], MultipliesParameters)
    y, report = model(tokens), fp8stack.get_report(model)
    assert model.probe.modes == 0
    assert report.multiplied == {"embed.weight"}
    assert report.outside.keys() == {"body.1.table"}
    assert "has no product" in report.outside["body.1.table"]
    h = model.body(model.embed(tokens))
    assert_same_bits(y, fp8_product(h, model.embed.weight))
    assert_same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(tokens), y)
    for twin in (copied(model) for copied in COPIES.values()):
        assert_same_bits(twin(tokens), y)
        assert twin.probe.modes == 0
    fp8stack.restore(model)
    assert type(model) is TiedByHand
    assert type(model.body[1]) is Outer


def fp8_product(x, weight):
    """Return x @ weight.T as a layer of that weight makes it."""
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight = weight
    return native(nn.Sequential(layer), x.device.type, select="all")(x)


class Owner(nn.Module):
    """Multiplies by its own parameter what another module makes of x."""

    def __init__(self, inner=None, **attributes):
        super().__init__()
        self.inner, self.w = inner or nn.Identity(), nn.Parameter(torch.randn(64, 64))
        vars(self).update(attributes)

    def forward(self, x):
        y = self.inner(x) @ self.w
        y += 1
        return y.relu_()


class Settings(dict):
    __getattr__ = dict.__getitem__


class Once(type(nn.Module)):
    """Takes no two classes of one base."""

    def __new__(mcs, name, bases, body):
        assert not any(isinstance(base, Once) for base in bases), name
        return super().__new__(mcs, name, bases, body)


class BuiltIn(nn.Module):
    forward = torch.relu


class Static(nn.Module):
    forward = staticmethod(torch.relu)


class Unique(nn.Module, metaclass=Once):
    def forward(self, x):
        return x * 2


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return x @ self.w


class Aliased(Owner):
    """Gives a function of its own to checkpointing, under a name that does not say so."""

    def forward(self, x):
        def product(x):
            return (x @ self.w).relu() @ self.w

        return again(product, x, use_reentrant=False)


again = checkpoint
ODD = {  # what multiplies in FP8 of it
    "in place": (Owner, {"w"}), "built-in": (lambda: Owner(BuiltIn()), {"w"}),
    "static": (lambda: Owner(Static()), {"w"}), "settings": (lambda: Owner(config=Settings()), {"w"}),
    "unique": (lambda: Owner(Unique()), {"w"}), "router": (lambda: Owner(Router()), {"w"}),
    "closure": (Aliased, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_modules_go_on_working_by_default(name, device):
    make, multiplied = ODD[name]
    torch.manual_seed(0)
    model, x = make().to(device), torch.randn(2, 32, 64, device=device)
    kinds, expected = [type(m) for m in model.modules()], make().to(device)
    expected.load_state_dict(model.state_dict())
    fp8stack.initialize(model, None, "O0", compute="native", select="all")
    for y in (model(x), torch.compile(model, backend="aot_eager")(x)):
        y.sum().backward()
        assert (y - expected(x)).norm() < 0.1 * y.norm()
    assert fp8stack.get_report(model).multiplied == multiplied
    if name == "router":  # its bits are torch's, in a graph, too
        assert_same_bits(model.inner(x), expected.inner(x))
        assert "routers keep their dtype" in fp8stack.get_report(model).outside["inner.w"]
    fp8stack.restore(model)
    assert [type(m) for m in model.modules()] == kinds


def test_transforms_of_torch_func_are_torchs():
    model, x = Owner(), torch.randn(4, 64)
    expected = torch.func.grad(lambda x: (model.inner(x) @ model.w).sum())(x)
    fp8stack.initialize(model, None, "O0")
    assert_same_bits(torch.func.grad(lambda x: (model.inner(x) @ model.w).sum())(x), expected)
    assert torch.func.vmap(model)(x).shape == (4, 64)


def test_what_a_class_makes_of_an_initialized_module_is_its_own():
    class Head(nn.Sequential):
        def __init__(self, *inner):
            super().__init__(*inner)
            self.register_parameter("w", nn.Parameter(torch.randn(64, 64)))

        def forward(self, x):
            return super().forward(x) @ self.w

    model, x = Head(nn.Linear(64, 64)), torch.randn(4, 64)
    fp8stack.initialize(model, None, "O0")
    assert type(model)()(x).shape == (4, 64)


def test_a_converted_module_looks_as_before():
    model = stack()
    signature, text = inspect.signature(model.forward), repr(model)
    fp8(model)
    assert type(model[0]) is type(model[1])
    assert isinstance(model[0], MultipliesParameters)
    assert inspect.signature(model.forward) == signature
    assert repr(model) == text


def test_copies_keep_a_record_of_their_own():
    model = stack()
    bare = fp8(model)
    for twin in (copied(model) for copied in COPIES.values()):
        assert isinstance(twin, MultipliesParameters)
        assert twin._bare_matmuls is twin[1]._bare_matmuls is not bare
    take_off(model)
    assert type(twin) is not Stack


made = []


class Registered(nn.Module, ABC):
    def __init_subclass__(cls, **options):
        made.append(cls.__name__)
        super().__init_subclass__(**options)

    @abstractmethod
    def forward(self, x): ...


class Inherits(Registered):
    size = 96

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(96, 96))

    def forward(self, x):
        return x @ self.w

    @torch.compiler.disable
    def disabled(self, x):
        return x


class Calls(Inherits):
    @property
    def disabled(self):  # a method of the base
        return self.size

    def forward(self, x):
        return super().forward(x) @ self.w.t()


def test_classes_with_bases_metaclasses_and_registries():
    model = nn.Sequential(Calls(), Inherits())
    bare = fp8(model)
    assert made == ["Inherits", "Calls"]
    model(torch.randn(20, 96))
    assert bare.used == {"0.w", "1.w"}
    assert isinstance(model[0], Inherits)
    assert model[0].disabled == 96
    assert model[1].disabled(1) == 1
    assert type(model) is nn.Sequential  # torch's own modules make no products of their own


def test_what_an_fp8_layer_calls_does_not_pass_through_the_mode(device, monkeypatch):
    """Each of a layer's own torch calls would cost a call of Python more."""
    model = Root().to(device)
    fp8stack.initialize(model, None, "O0", compute="native", matmuls=True)
    seen, through = [], _Mode.__torch_function__

    def watch(self, func, *rest):
        seen.append(func)
        return through(self, func, *rest)

    monkeypatch.setattr(_Mode, "__torch_function__", watch)
    model(torch.randn(16, 64, device=device)).sum().backward()
    assert torch.relu in seen
    assert {f.__name__ for f in seen} == {"__get__", "matmul", "relu"}  # the model's own
    assert len(seen) < 8


class LowRank(nn.Module):
    """A parametrization with a product of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(128, 16)), nn.Parameter(torch.randn(16, 64))

    def forward(self, weight):
        return weight + self.a @ (self.b * 2)


def test_the_weight_of_an_fp8_layer_is_computed_as_without_fp8(device):
    model = Root().to(device)
    fp8stack.initialize(model, None, "O0", compute="native", matmuls=True, min_numel=1)
    plain = copy.deepcopy(model)
    torch.nn.utils.parametrize.register_parametrization(model.layer, "weight", LowRank().to(device))
    with torch.no_grad():
        plain.layer.weight.copy_(model.layer.weight)
    x = torch.randn(16, 64, device=device)
    assert_same_bits(model(x), plain(x))
