"""Frozen weights that are kept in FP8: a byte an element, and products, files and copies of the values they hold."""

import copy
import math
import warnings
import weakref

import pytest
import torch
from helpers import assert_same_bits
from layers import COPIES, RECIPES, conv1d, native
from ranks import assert_equal_everywhere, run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint as recomputed

import fp8stack
from fp8stack import checkpoint, memory
from fp8stack.comm import DataParallel
from fp8stack.errors import Fp8StackWarning, ModelError
from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.monitor import Monitor
from fp8stack.nn import fuse
from fp8stack.nn.frozen import FrozenWeight, choose_frozen
from fp8stack.nn.select import NEVER

HOW = [*({"fp8_recipe": recipe} for recipe in RECIPES), {"compute": "bf16"}]
PRODUCTS = pytest.mark.parametrize("how", HOW, ids=lambda how: next(iter(how.values())))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


class Adapted(nn.Module):
    """A frozen layer and an adapter beside it."""

    def __init__(self, base, inner, outer):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(inner, 16, bias=False)
        self.b = nn.Linear(16, outer, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def adapted(dtype=torch.float32, turned=False, device="cpu"):
    """Return two adapted layers; `turned`: the frozen ones are Conv1D."""
    layer = conv1d if turned else nn.Linear
    model = nn.Sequential(
        Adapted(layer(128, 256), 128, 256), nn.GELU(), Adapted(layer(256, 128), 256, 128)
    )
    return model.to(device, dtype)


def weights(model):
    return [p for p in model.parameters() if isinstance(p, FrozenWeight)]


def kept_in_fp8(model, level="O0", **options):
    """Return the model and its optimizer at a level, with the base in FP8."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # of float16, too
    return fp8stack.initialize(model, optimizer, level, frozen="fp8", fuse=False, **options)


def with_values_of(model, twin):
    """Return `twin` with the values that the parameters of `model` have."""
    with torch.no_grad():
        for own, p in zip(twin.parameters(), model.parameters(), strict=True):
            own.copy_(p)
    return twin


def learn(model, optimizer, steps=3):
    device, dtype = (p := next(model.parameters())).device, p.dtype
    losses = []
    for step in range(steps):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
        loss = (model(x.to(device, dtype)) - x.to(device).roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- the values


def values_by_hand(w):
    """Return what E4M3 and the smallest power of two that reaches the largest make of `w`, in float64."""
    w = w.double()
    scale = 2.0 ** math.ceil(math.log2(w.abs().max().item() / 448))
    exponent = (w / scale).abs().clamp(min=2.0**-6).log2().floor()
    step = 2.0 ** (exponent - 3)
    return (w / scale / step).round() * step * scale  # halves to even, as torch rounds


@DTYPES
@pytest.mark.parametrize("size", [1e-7, 0.02, 30.0])
def test_a_weight_has_the_nearest_values_of_e4m3_and_keeps_them(dtype, size, device):
    w = (size * torch.randn(48, 160)).to(dtype)
    frozen = FrozenWeight.quantize(w.to(device))
    values = frozen.dequantize().cpu()
    expected = values_by_hand(w).to(dtype)
    assert_same_bits(values, expected)
    assert (frozen.shape, frozen.dtype, frozen.nbytes) == (w.shape, dtype, w.nbytes)  # its face
    assert frozen.codes.nbytes + frozen.scale.nbytes == w.numel() + 4
    assert_same_bits(FrozenWeight.quantize(frozen.dequantize()).dequantize().cpu(), values)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(math.inf, (2.66, 2.64, 2.57)), (5, (2.65, 2.65, 2.46))]
)
def test_one_scale_a_weight_is_nearly_as_precise_as_many(degrees, expected):
    """The numbers of the documentation, in percent: one scale, one a square of 128, one for 128 of a row."""
    torch.manual_seed(0)
    w = torch.randn(1024, 1024)
    if degrees < math.inf:
        w = torch.distributions.StudentT(degrees).sample(w.shape)
    codes, scale, *_ = ops.cast_128x128(w, E4M3)
    squares = codes.float() * scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    rows = ops.dequantize_blocks(*ops.quantize_blocks(w, E4M3), E4M3)
    values = FrozenWeight.quantize(w).dequantize(), squares, rows
    found = [100 * float((v - w).norm() / w.norm()) for v in values]
    assert found == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@DTYPES
def test_a_weight_that_is_not_finite_is_nan_and_zeros_are_zeros(bad, dtype):
    w = torch.zeros(16, 16, dtype=dtype)
    assert_same_bits(FrozenWeight.quantize(w).dequantize(), w)
    w[3, 4] = bad
    assert FrozenWeight.quantize(w).dequantize().isnan().all()


READS = [
    lambda w: w[0, 0], lambda w: w.t(), lambda w: w[3:5, 7:], lambda w: w.view(-1), lambda w: w.mT,
    lambda w: w.reshape(2, 16, 48).transpose(0, 2), lambda w: w.view(torch.int32), lambda w: w + 1,
    lambda w: torch.cat([w, w]), lambda w: w.double(), lambda w: w.bfloat16(), lambda w: w.chunk(2)[1],
    lambda w: w.norm(), lambda w: w.expand(2, 32, 48), lambda w: torch.ones(32) @ w,
    lambda w: w.to("meta", copy=True).shape,
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("read", READS)
def test_whoever_reads_it_gets_its_values(read, inference):
    frozen = FrozenWeight.quantize(torch.randn(32, 48))
    with torch.inference_mode(inference):
        found, expected = read(frozen), read(frozen.dequantize())
        if isinstance(found, FrozenWeight):
            found = found.dequantize()
        assert (
            found == expected
            if isinstance(expected, torch.Size)
            else torch.equal(found, expected) and found.dtype is expected.dtype
        )


# --- the products


def on_the_grid(model):
    """Let the own scale of each frozen weight be a power of two, so that any cast of it gives the same codes."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.requires_grad and p.ndim == 2:
                p.clamp_(-0.2, 0.2)
                p.view(p.shape[0] // 128, 128, -1, 128)[:, 0, :, 0] = (
                    448 * 2.0**-11
                )  # of each square
    return model


@PRODUCTS
@pytest.mark.parametrize("turned", [False, True], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_have_the_bits_of_a_float_weight_of_its_values(how, turned, dtype, device):
    plain = on_the_grid(adapted(dtype, turned))
    ours = native(copy.deepcopy(plain), device, frozen="fp8", **{"compute": "native", **how})
    assert len(weights(ours)) == 2
    theirs = native(with_values_of(ours, plain), device, **{"compute": "native", **how})
    trained = [p for p in theirs.parameters() if p.requires_grad]
    x = torch.randn(40, 128, device=device, dtype=dtype)
    for _ in range(2):
        y, expected = (model(x.requires_grad_()) for model in (ours, theirs))
        inputs = [x, *(p for p in ours.parameters() if p.requires_grad)]
        found = torch.autograd.grad(y.float().square().mean(), inputs)
        wanted = torch.autograd.grad(expected.float().square().mean(), [x, *trained])
        assert_same_bits([y.detach(), *found], [expected.detach(), *wanted])


@pytest.mark.parametrize("how", [HOW[0], HOW[2], HOW[3]], ids=lambda how: next(iter(how.values())))
def test_compiled_recomputed_and_fused_it_computes_the_same(how):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)

        def forward(self, x):
            return self.down(nn.functional.silu(self.up(x)))

    model = nn.Sequential(Block().requires_grad_(False), nn.Linear(128, 32))
    model = native(model, frozen="fp8", **{"compute": "native", **how})
    x = torch.randn(64, 128)
    expected = results_of_trained(model, x)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    for found in (
        results_of_trained(compiled, x),
        results_of_trained(lambda x: recomputed(model, x, use_reentrant=False), x, model),
        results_of_trained(copy.deepcopy(model), x),
    ):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))
    assert len(weights(model)) == 2
    if how.get("fp8_recipe") == "current":
        assert fuse(model) == ["0"]
        y, dx, *_ = results_of_trained(model, x)
        assert ((y - expected[0]).norm(), (dx - expected[1]).norm()) < (
            0.03 * expected[0].norm(),
            0.03 * expected[1].norm(),
        )


def results_of_trained(model, x, owner=None):
    """Return the output and the gradients of the input and of what is trained."""
    owner = owner or model
    for p in owner.parameters():
        p.grad = None
    y = model(x := x.clone().requires_grad_())
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in owner.parameters() if p.requires_grad)]


@pytest.mark.parametrize("mode", ["autocast", "evaluation", "few rows", "matmuls"])
def test_a_layer_that_multiplies_in_16_bits_makes_its_values_on_the_fly(mode):
    """And autograd keeps codes, not values."""
    model = adapted(torch.bfloat16)
    model, _ = kept_in_fp8(model, matmuls=True if mode == "matmuls" else "auto")
    plain = with_values_of(model, adapted(torch.bfloat16))
    if mode == "few rows":
        for layer in (m for m in model.modules() if hasattr(m, "products")):
            layer.products.least_rows = NEVER
    model.train(mode != "evaluation")
    x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        y = model(x.float() if mode == "autocast" else x)
    assert not any(t.shape in ((256, 128), (128, 256)) and type(t) is torch.Tensor for t in kept)
    expected = plain(x)
    bound = 0.01 if mode == "few rows" else 0.15  # of products in FP8
    assert (y - expected).norm() < bound * expected.norm()
    y.float().sum().backward()


def test_encoder_layers_of_torch_take_it_in_evaluation_too():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1).requires_grad_(False), nn.Linear(64, 16))
    x, plain = torch.randn(2, 16, 64), copy.deepcopy(model).eval()
    model = native(model, frozen="fp8", matmuls=False)
    assert len(weights(model)) == 3  # of linear1, linear2 and out_proj
    with torch.no_grad():
        expected = plain(x)
        assert (model.eval()(x) - expected).norm() < 0.1 * expected.norm()


def test_a_monitor_sees_its_values():
    model, optimizer = kept_in_fp8(adapted())
    with Monitor(model, optimizer, every=1) as watching:
        learn(model, optimizer, 1)
        numbers = watching.read(wait=True)["0.base"]["w"]
    assert numbers["amax"] == model[0].base.weight.abs().max()
    assert numbers["scale"] == model[0].base.weight.scale


# --- a life of a model


@pytest.mark.parametrize(
    ("level", "dtype"),
    [("O0", torch.float32), ("O1", torch.bfloat16),
     *(("O2", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))],
    ids=str,
)  # fmt: skip
def test_a_model_trains_over_it_saves_resumes_and_is_restored(level, dtype, tmp_path):
    model = adapted(dtype)
    identities, keys = [*map(id, model.parameters())], [*model.state_dict()]
    model[0].base.weight.mine = "kept"
    plain_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad and p.ndim == 2)
    model, optimizer = kept_in_fp8(model, level)
    assert isinstance(model[0].base.weight, nn.Parameter)
    assert memory.measure(model).bytes["weight"] < memory.measure(adapted(dtype)).bytes["weight"]
    report = fp8stack.get_report(model)
    assert report.frozen == ["0.base.weight", "2.base.weight"]
    assert report.frozen_gib == (2 * 256 * 128 / 2**30, plain_bytes / 2**30)
    learn(model, optimizer)
    held = [w.dequantize() for w in weights(model)]
    state = model.state_dict()
    assert [*state] == keys
    assert {type(value) for value in state.values()} == {torch.Tensor}
    checkpoint.save(tmp_path / "all.pt", model, optimizer)
    other, other_optimizer = kept_in_fp8(adapted(dtype), level)
    checkpoint.load(tmp_path / "all.pt", other, other_optimizer)
    assert learn(other, other_optimizer) == learn(model, optimizer)
    assert_same_bits([w.dequantize() for w in weights(model)], held)  # nobody steps them
    assert_same_bits([w.codes for w in weights(other)], [w.codes for w in weights(model)])
    model, optimizer = fp8stack.restore(model, optimizer)
    assert [*map(id, model.parameters())] == identities
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_same_bits([model[0].base.weight.detach(), model[2].base.weight.detach()], held)
    assert model[0].base.weight.mine == "kept"
    adapted(dtype).load_state_dict(state)
    learn(model, optimizer, 1)


@pytest.mark.parametrize("way", [*COPIES, "moved", "loaded", "data"])
def test_copies_and_moves_are_kept_in_fp8(way):
    model, _ = kept_in_fp8(adapted(torch.bfloat16))
    model[2].base.weight = model[2].base.weight  # as ties are made
    values = model[0].base.weight.dequantize()
    other = COPIES[way](model) if way in COPIES else model
    if way == "moved":
        other = model.to(torch.float32).to(torch.bfloat16)
    elif way == "loaded":
        other.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
        values = 2 * values
    elif way == "data":
        other[0].base.weight.data = 2 * values
        values = 2 * values
    found = other[0].base.weight
    assert isinstance(found, nn.Parameter)
    assert isinstance(found, FrozenWeight)
    assert torch.equal(found.detach() + 0, values)
    assert found.dtype is torch.bfloat16
    x = torch.randn(16, 128, dtype=torch.bfloat16)
    assert torch.isfinite(other(x)).all()
    if way in COPIES:
        found.data.copy_(torch.zeros_like(values))
        assert torch.equal(model[0].base.weight.dequantize(), values)


WRITES = {
    "merging": lambda w: w.data.add_(1), "arithmetic": lambda w: w.mul_(2),
    "initializing": lambda w: nn.init.normal_(w), "a part": lambda w: w[:16].copy_(torch.zeros(16, 128)),
    "an element": lambda w: w.__setitem__((0, 0), 1.0), "out=": lambda w: torch.add(torch.ones(256, 128), 1, out=w),
    "lists": lambda w: torch._foreach_mul_([w], 2.0), "another shape": lambda w: setattr(w, "data", torch.zeros(3, 4)),
    "unfreezing": lambda w: w.requires_grad_(),
    "unfreezing by the attribute": lambda w: setattr(w, "requires_grad", True),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_e4m3_would_round_away_is_refused_and_nothing_changes(write):
    model, _ = kept_in_fp8(adapted())
    before = model[0].base.weight.dequantize()
    with torch.no_grad(), pytest.raises(ModelError, match=r"fp8stack\.restore\(model\) first"):
        write(model[0].base.weight)
    assert torch.equal(model[0].base.weight.dequantize(), before)
    with pytest.raises(ModelError, match="cannot be trained"):
        model.requires_grad_()


# --- which weights


class Odd(nn.Module):
    """Frozen weights of every fate."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
        self.a, self.b, self.skipped = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.odd, self.trained = nn.Linear(64, 10), nn.Linear(64, 64)
        self.head.weight, self.b.weight = self.embed.weight, self.a.weight
        self.requires_grad_(False)
        self.trained.requires_grad_(True)

    def forward(self, x):
        x = self.skipped(self.b(self.a(self.trained(self.embed(x)))))
        return self.head(x), self.odd(x)


def test_the_card_names_the_weights_that_stay_as_they_are():
    model = Odd()
    model = native(model, frozen="fp8", skip=["skipped"])
    report = fp8stack.get_report(model)
    assert report.frozen == ["b.weight"]
    assert report.unfrozen == {
        "head.weight": "Embedding reads it, too",
        "odd.weight": "its sizes are no multiples of 16",
        "skipped.weight": 'matches skip="skipped"',
    }
    assert "frozen weights in FP8: " in str(report)
    assert "head.weight (Embedding reads it, too)" in str(report).replace("\n    ", " ")
    assert model.a.weight is model.b.weight
    assert copy.deepcopy(model).a.weight is not model.a.weight
    y = model(torch.arange(8))[0]
    with pytest.raises(ModelError, match=r"hold weights that are kept in FP8: \['a\.weight'"):
        fp8stack.restore(model)
    assert isinstance(model.a.weight, FrozenWeight)
    del y
    fp8stack.restore(model)
    assert type(model.a.weight) is nn.Parameter
    assert model.a.weight is model.b.weight


def test_a_weight_that_torch_cannot_replace_stays_as_it_is():
    model = adapted()
    holder = weakref.ref(model[0].base.weight)
    report = fp8stack.get_report(native(model, frozen="fp8"))
    assert report.frozen == ["2.base.weight"]
    assert "weak references" in report.unfrozen["0.base.weight"]
    assert type(holder()) is nn.Parameter


def test_nothing_frozen_that_fits_is_a_warning():
    small = nn.Sequential(nn.Linear(40, 48)).requires_grad_(False)
    with pytest.warns(Fp8StackWarning, match="has no effect: 0.weight .*multiples of 16"):
        native(small, frozen="fp8", fp8_recipe="blockwise")
    with pytest.warns(Fp8StackWarning, match="no Linear layer's weight is frozen"):
        native(nn.Sequential(nn.Linear(48, 48)), frozen="fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native(nn.Sequential(nn.Linear(48, 48)))


# --- ranks


def share_a_base(rank):
    for wrap in (DataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(rank)
        model = adapted()
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.requires_grad):
                p.fill_(0.01)  # alike, so that masters are
        model, optimizer = kept_in_fp8(model, "O2")
        parallel = wrap(model)
        parallel(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
        assert len(weights(model)) == 2
        for part in (part for w in weights(model) for part in (w.codes, w.scale)):
            assert_equal_everywhere(part)
        assert_equal_everywhere(model[0].b.weight)


def test_ranks_begin_with_the_base_of_the_first():
    run_ranks(share_a_base, 2)


# --- on a GPU


@pytest.mark.gpu
def test_a_gpu_holds_one_byte_an_element_and_keeps_no_copy():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3)))
    model = model.to("cuda", torch.bfloat16).requires_grad_(False)
    before = torch.cuda.memory_allocated()
    fp8stack.initialize(model, None, "O0", frozen="fp8")
    assert before - torch.cuda.memory_allocated() > 0.99 * 3 * 2048**2
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x)  # cuBLAS takes its workspace
    held = torch.cuda.memory_allocated()
    y = model(x)
    assert torch.cuda.memory_allocated() - held < 1.1 * y.nbytes
    y.float().square().mean().backward()
    expected, codes = x.grad, [w.codes for w in weights(model)]
    assert all(c.is_cuda and c.dtype.itemsize == E4M3.dtype.itemsize for c in codes)
    w = [p.dequantize().double() for p in model.parameters()]
    g = 2 * y.detach().double() / y.numel()
    for matrix in reversed(w):
        g = g @ matrix
    assert (expected.double() - g).norm() < 0.15 * g.norm()
    assert all(not value.is_cuda for value in model.state_dict().values())


def test_what_would_lose_weights_is_refused_or_named():
    def base():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        return model.requires_grad_(False)

    odd = base()
    odd[1].weight[0, 0] = torch.inf
    fp8stack.initialize(odd, None, "O0", frozen="fp8")
    report = fp8stack.get_report(odd)
    assert report.frozen == ["2.weight"]
    assert report.unfrozen == {
        "1.weight": "it has values that are not finite", "0.weight": "Embedding reads it itself",
    }  # fmt: skip
    model = base()
    state = model.state_dict()
    fp8stack.initialize(model, None, "O0", frozen="fp8")
    with pytest.raises(ModelError, match=r"assign=True. would replace 1.weight"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ModelError, match="not finite"), torch.no_grad():
        model[1].weight.copy_(torch.full((64, 64), torch.nan))
    model.share_memory()
    assert model[1].weight.is_shared()
    fp8stack.restore(model)
    model.load_state_dict(state, assign=True)


def test_block_scales_take_a_shared_weight_of_any_size_that_16_divides():
    model = nn.ModuleDict({name: nn.Linear(80, 144) for name in "ab"}).requires_grad_(False)
    model["a"].weight = model["b"].weight
    fp8stack.initialize(model, None, "O0", frozen="fp8", precision_for={"a": "forward-bf16"})
    weight, x = model["a"].weight.dequantize(), torch.randn(8, 80, requires_grad=True)
    assert len(fp8stack.get_report(model).frozen) == 1
    for layer in model.values():
        (gradient,) = torch.autograd.grad(layer(x).sum(), x)
        torch.testing.assert_close(gradient, weight.sum(0).expand(8, -1), rtol=0.05, atol=0.05)


def test_weights_without_data_are_not_looked_at():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    ((name, _, reason),) = choose_frozen(model, set(model), {}, "native")
    assert name == "0.weight"
    assert reason.startswith("torch cannot replace it")  # whose mode refers to it
