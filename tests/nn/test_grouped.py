"""Products grouped over experts: numbers against float64, every way in, and what is left to torch with a reason."""

import itertools

import pytest
import torch
from helpers import assert_same_bits
from layers import rounded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.errors import ModelError
from fp8stack.formats import E4M3
from fp8stack.nn import grouped
from fp8stack.nn.grouped import grouped_matmul, padded_rows

ENDS = [10, 10, 45, 96]
GROUPS, ROWS, IN, OUT = 4, 100, 64, 96
LAYOUTS = pytest.mark.parametrize("turned", [False, True], ids=["[g,out,in]", "[g,in,out]"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Experts(nn.Module):
    """A model of one stack, which it multiplies by as torch has it."""

    def __init__(self, turned=True, sizes=(IN, OUT), dtype=torch.bfloat16):
        super().__init__()
        self.turned = turned
        self.w = nn.Parameter(torch.randn(GROUPS, *(sizes if turned else sizes[::-1])).to(dtype))

    def forward(self, x, ends):
        return torch._grouped_mm(x, self.w if self.turned else self.w.transpose(1, 2), offs=ends)


class Called(Experts):
    def forward(self, x, ends):
        return grouped_matmul(x, self.w, ends)


def draw(dtype=torch.bfloat16, device="cpu"):
    """Return x, a gradient, and where groups end; what lies behind the last one is zero."""
    made = [torch.randn(ROWS, size).to(device, dtype) for size in (IN, OUT)]
    for x in made:
        x[ENDS[-1] :] = 0
    return *made, torch.tensor(ENDS, dtype=torch.int32, device=device)


def need_grouped(device):
    if device == "cuda" and (reason := grouped.obstacle(torch.empty(1, 16, 16, device=device))):
        pytest.skip(reason)


@LAYOUTS
@DTYPES
def test_products_and_gradients_are_those_of_the_rounded_operands(turned, dtype, device):
    need_grouped(device)
    x, grad, ends = draw(dtype, device)
    stack = torch.randn(GROUPS, *((IN, OUT) if turned else (OUT, IN))).to(device, dtype)
    stack, x = stack.requires_grad_(), x.requires_grad_()
    y = grouped_matmul(x, stack if turned else stack.transpose(1, 2), ends)
    y.backward(grad)
    x8, g8, w8 = (rounded(t, E4M3) for t in (x, grad, stack))
    w8 = w8 if turned else w8.mT
    parts = [slice(a, b) for a, b in itertools.pairwise([0, *ENDS])]
    expected = torch.cat([x8[p] @ w for p, w in zip(parts, w8, strict=True)])
    dx = torch.cat([g8[p] @ w.T for p, w in zip(parts, w8, strict=True)])
    dw = torch.stack([x8[p].T @ g8[p] for p in parts])
    exact = expected, dx, dw if turned else dw.mT
    # Hopper's sums have 14 bits, and its results are bfloat16.
    eps = 2**-7 if dtype is torch.bfloat16 or device == "cuda" else 2**-20
    for given, right in zip((y[: ENDS[-1]], x.grad[: ENDS[-1]], stack.grad), exact, strict=True):
        assert given.dtype is dtype
        difference = (given.detach().double().cpu() - right).abs().max()
        assert difference <= eps * right.abs().max()
    assert not stack.grad[1].any()  # of the empty group


def test_rows_behind_the_last_group_do_not_count(device):
    need_grouped(device)
    found = []
    for beyond in (0.0, torch.nan):
        torch.manual_seed(0)
        stack = torch.randn(GROUPS, IN, OUT, device=device).requires_grad_()
        x, grad, ends = draw(torch.float32, device)
        x[ENDS[-1] :], grad[ENDS[-1] :] = beyond, beyond
        y = grouped_matmul(x.requires_grad_(), stack, ends)
        y.backward(grad)
        assert not y[ENDS[-1] :].any()
        found.append([y.detach(), x.grad, stack.grad])
    assert_same_bits(found[1], found[0])


def test_no_rows(device):
    need_grouped(device)
    stack = torch.randn(GROUPS, IN, OUT, device=device).requires_grad_()
    y = grouped_matmul(torch.empty(0, IN, device=device), stack, stack.new_zeros(GROUPS).int())
    y.sum().backward()
    assert y.shape == (0, OUT)
    assert not stack.grad.any()


@LAYOUTS
def test_a_models_own_grouped_products_are_fp8(turned, device):
    need_grouped(device)
    model = Experts(turned).to(device)
    x, _, ends = draw(device=device)
    plain = model(x, ends)
    model, _ = fp8stack.initialize(model, None, "O0", select="all")
    y, stack = model(x, ends), model.w if turned else model.w.transpose(1, 2)
    assert_same_bits(y[: ENDS[-1]], grouped_matmul(x, stack, ends)[: ENDS[-1]])
    error = (y - plain)[: ENDS[-1]].norm() / plain[: ENDS[-1]].norm()
    assert 0.01 < error < 0.06  # what FP8 rounds off
    report = fp8stack.get_report(model)
    assert (report.share, report.multiplied, report.fallbacks) == (1.0, {"w"}, [])


def test_checkpointing_and_graphs_change_no_bit(device):
    need_grouped(device)
    model = Called().to(device)  # Dynamo shows torch's own to no mode
    x, grad, ends = draw(device=device)
    found = []
    for run in (
        model,
        lambda *a: checkpoint(model, *a, use_reentrant=False),
        torch.compile(model, backend="aot_eager", fullgraph=True),
    ):
        model.zero_grad()
        given = x.clone().requires_grad_()
        y = run(given, ends)
        y.backward(grad)
        found.append([t[: ENDS[-1]] for t in (y, given.grad)] + [model.w.grad])
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


@pytest.mark.parametrize(("fast", "expected"), [(None, True), (True, True), (False, False)])
def test_sums_are_fast_unless_told_otherwise(fast, expected):
    recipe = fp8stack.levels.recipe_for("O0", fp8_fast_accum=fast)
    assert fp8stack.nn.casts.Products(recipe).fast_groups is expected


@pytest.mark.parametrize(
    "ends", [ENDS, [0, 0, 0, 0], [100, 100, 100, 100], [16, 32, 48, 64]], ids=str
)
def test_padded_rows_hold_each_row_once(ends, device):
    index, padded = padded_rows(torch.tensor(ends, dtype=torch.int32, device=device), ROWS)
    assert index.dtype is padded.dtype is torch.int32
    index, padded = index.tolist(), padded.tolist()
    assert len(index) == padded[-1]
    assert all(end % 16 == 0 for end in padded)
    bounds = zip(itertools.pairwise([0, *ends]), itertools.pairwise([0, *padded]), strict=True)
    for (start, end), (first, last) in bounds:
        held = index[first:last]
        assert held == [*range(start, end)] + [-1] * (len(held) - (end - start))


def test_sizes_that_fp8_does_not_take_are_left_to_torch():
    model, _ = fp8stack.initialize(Experts(sizes=(IN, 88)), None, "O0", select="all")
    x, _, ends = draw()
    assert model(x, ends).shape == (ROWS, 88)
    report = fp8stack.get_report(model)
    assert report.left_alone == {"grouped products in FP8 take sizes in multiples of 16": 1}
    assert report.multiplied == set()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.zeros(ROWS, 32)}, "takes x .rows, in., weight .groups, in, out."),
        ({"x": torch.zeros(2, ROWS, IN)}, "takes x .rows, in."),
        ({"offs": torch.tensor([5, 9], dtype=torch.int32)}, "offs .groups."),
        ({"offs": torch.tensor([5, 9, 8, 20], dtype=torch.int32)}, "do not rise to 100 rows"),
        ({"offs": torch.tensor([5, 9, 10, 200], dtype=torch.int32)}, "do not rise to 100 rows"),
        ({"offs": torch.zeros(GROUPS)}, "int32 offs"),
        ({"weight": torch.zeros(GROUPS, IN, 8)}, "multiples of 16"),
        ({"weight": torch.zeros(GROUPS, 2 * IN, OUT)[:, ::2]}, "neither contiguous nor a transpose"),
        ({"weight": torch.zeros(GROUPS, IN, OUT).double()}, "float64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, told):
    x, _, offs = draw(torch.float32)
    given = {"x": x, "weight": torch.zeros(GROUPS, IN, OUT), "offs": offs, **change}
    with pytest.raises(ModelError, match=told):
        grouped_matmul(**given)


def test_a_device_without_grouped_products_is_named(monkeypatch):
    with FakeTensorMode():
        stack = torch.empty(2, 16, 16, device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "need compute capability 9.0, this is 8.9" in grouped.obstacle(stack) or (
        grouped._kernel is None
    )
    monkeypatch.setattr(grouped, "_kernel", None)
    assert "has no grouped products in FP8" in grouped.obstacle(stack)
