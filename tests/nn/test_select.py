"""select="auto": which shapes are timed, what the times decide, and that timing leaves no trace.

Without a GPU the times are given by the tests: `time_both` is replaced, and the CPU passes for a device with a clock.
"""

import copy
import gc
import time
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
from helpers import assert_same_bits
from layers import COPIES, native
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.errors import ModelError
from fp8stack.levels import recipe_for
from fp8stack.nn import select

FASTER, SLOWER = (2e-3, 1e-3), (1e-3, 2e-3)  # seconds without FP8 and with it


class Clock:
    """Times given by a test: FP8 wins where a weight has as many elements as 64 × 64."""

    def __init__(self):
        self.shapes, self.modes = [], set()

    def __call__(self, shape, recipe):
        self.shapes.append(shape)
        self.modes.add(
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.compiler.is_compiling(),
             torch.is_autocast_enabled("cpu"))
        )  # fmt: skip
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad(x.exp().sum(), x)  # would call hooks on saved tensors
        return FASTER if shape.k * shape.n >= 4096 else SLOWER


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(select, "_ANSWERS", {})
    torch._dynamo.reset()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(select, "time_both", clock := Clock())
    monkeypatch.setattr(select, "_obstacle", lambda device, data: "" if data else "without data")
    return clock


def make(device="cpu", **options):
    """Return a model with a shape that wins (64 × 64) and one that loses (64 × 32), converted."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 64, False))
    return native(model, device, select="auto", **options)


def of(output=torch.float32, frozen=False, compiled=False):
    """Return a shape on the CPU."""
    dtypes = torch.float32, torch.float32, output
    return select.Shape(16, 64, 64, True, frozen, *dtypes, torch.device("cpu"), compiled)


def plain(layer, x):
    return F.linear(x, layer.weight, layer.bias)


def in_fp8(layer, x):
    twin = copy.deepcopy(layer)
    twin.products.chooser = None
    return twin(x)


# --- what is chosen


def test_winners_stay_and_losers_run_as_if_not_converted(clock):
    model, x = make(), torch.randn(16, 64)
    twin = nn.Linear(64, 32)
    twin.load_state_dict(model[2].state_dict())
    h = F.gelu(in_fp8(model[0], x)).detach()
    y = model(x)
    assert_same_bits(y, plain(model[3], plain(model[2], h)))
    gradient = torch.randn(16, 64)
    y.backward(gradient)
    plain(model[3], twin(h)).backward(gradient)
    assert_same_bits([p.grad for p in model[2].parameters()], [p.grad for p in twin.parameters()])
    assert [(s.rows, s.k, s.n, s.bias) for s in clock.shapes] == [
        (16, 64, 64, True), (16, 64, 32, True), (16, 32, 64, False)
    ]  # fmt: skip
    assert fp8stack.get_report(model).selected == {
        "0": "fp8 (16 tokens: 1 ms, fp32 2 ms)",
        "2": "fp32 (16 tokens: 1 ms, fp8 2 ms)",
        "3": "fp32 (16 tokens: 1 ms, fp8 2 ms)",
    }


def test_a_loser_with_a_stored_weight_computes_in_the_dtype_of_its_input(clock):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    fp8stack.initialize(model, optimizer, "O2", compute="native", select="auto", min_numel=0)
    loser = model[1]
    assert loser.weight.dtype is torch.bfloat16
    x = torch.randn(16, 64)
    assert_same_bits(loser(x), F.linear(x, loser.weight.float(), loser.bias))
    with torch.autocast("cpu", torch.bfloat16):
        y = loser(x)
        assert_same_bits(y, F.linear(x, loser.weight, loser.bias))
    assert [s.output for s in clock.shapes] == [torch.float32, torch.bfloat16]


def out_of_memory(shape, recipe):
    held = torch.empty(2**20, device=shape.device)
    raise torch.OutOfMemoryError(f"out of memory beside {held.nbytes}")


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (lambda *_: (1e-3, 0.96e-3), "fp8 (16 tokens: 0.96 ms, fp32 1 ms)"),
        (lambda *_: (1e-3, 0.98e-3), "fp32 (16 tokens: 1 ms, fp8 0.98 ms)"),
        (out_of_memory, "fp32 (16 tokens: out of memory when timed)"),
    ],
    ids=["faster", "hardly", "out of memory"],
)
def test_fp8_has_to_win_by_a_margin(clock, monkeypatch, times, told):
    monkeypatch.setattr(select, "time_both", times)
    model, x = make(), torch.randn(16, 64)
    y = model[0](x)
    assert fp8stack.get_report(model).selected == {"0": told}
    assert_same_bits(y, (in_fp8 if told.startswith("fp8") else plain)(model[0], x))


def test_a_loser_is_not_caught_as_a_product_by_a_bare_parameter(clock):
    """matmuls=True turns F.linear to FP8 by a mode around the model's forward."""

    class Catch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            assert function is not F.linear
            return function(*args, **(kwargs or {}))

    model, x = make(), torch.randn(16, 64)
    with Catch():
        y = model[2](x)
    assert_same_bits(y, plain(model[2], x))


# --- how often


def test_a_shape_is_timed_once_in_a_process(clock):
    for _ in range(2):
        model = make()
        for rows in (16, 16, 4):
            model(torch.randn(4, rows // 4, 64))
    assert [s.rows for s in clock.shapes] == [16] * 3 + [4] * 3


def test_numbers_of_tokens_close_to_each_other_share_an_answer(clock):
    layer = make()[0]
    for rows in range(7169, 8193, 64):
        layer(torch.randn(1, 64).expand(rows, 64))
    assert [s.rows for s in clock.shapes] == [7169]
    layer(torch.randn(8193, 64))
    assert len(clock.shapes) == 2
    assert sorted({select._round_up(rows) for rows in range(1, 33)}) == [
        1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32
    ]  # fmt: skip


def test_ever_new_lengths_do_not_fill_the_memory(clock, monkeypatch):
    monkeypatch.setattr(select, "_MOST_SHAPES", 3)
    model = make()
    for rows in range(1, 9):
        y = model[3](torch.ones(rows, 32))
        assert_same_bits(y, plain(model[3], torch.ones(rows, 32)))
        assert len(model[3].products.chooser._known) <= 3


def test_dtypes_recipes_and_sums_are_timed_apart_and_no_tokens_not_at_all(clock):
    layer = make()[0]
    x = torch.randn(16, 64)
    assert layer(x[:0]).shape == (0, 64)
    assert clock.shapes == []
    layer(x)
    layer(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    layer.weight.requires_grad_(False)
    layer(x)
    for options in ({"fp8_format": "e4m3"}, {"fp8_fast_accum": True}, {"fp8_fast_accum": False}):
        make(**options)[0](x)
    assert len(clock.shapes) == 6


# --- traces


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_both_ways_run_and_random_numbers_are_left_alone(monkeypatch, recipe, output, frozen):
    monkeypatch.setattr(select, "_wait", lambda: None)  # a CPU has nothing to wait for
    state = torch.get_rng_state()
    times = select.time_both(of(output, frozen), recipe_for("O0", fp8_recipe=recipe))
    assert len(times) == 2
    assert min(times) > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_the_fastest_rounds_count(monkeypatch):
    """Whoever shares the GPU for a while takes the time of no round but theirs."""
    rounds = iter([9.0, 2.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 3.0, 3.0])  # unconverted, FP8, and so on
    monkeypatch.setattr(select, "_time_wall", lambda call, count: 1e-3)
    monkeypatch.setattr(select, "_time_device", lambda call, count: next(rounds))
    assert select.time_both(of(compiled=True), recipe_for("O0")) == (1.0, 2.0)


@pytest.mark.parametrize(
    "context",
    [
        nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail),
    ],
    ids=["plain", "no_grad", "inference_mode", "autocast", "saved_tensors_hooks"],
)  # fmt: skip
def test_timing_sees_none_of_the_callers_modes(clock, context):
    layer = make()[0]
    with context():
        assert layer.products.chooser._choose(of(), "")
    assert clock.modes == {(True, False, False, False)}


def test_a_checkpointed_layer_saves_what_it_recomputes(clock):
    model, x = make(), torch.randn(16, 64)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert model[0].weight.grad is not None


def test_other_errors_are_not_hidden(clock, monkeypatch):
    monkeypatch.setattr(select, "time_both", lambda shape, recipe: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make()(torch.randn(16, 64))


def test_where_nothing_can_be_timed_layers_are_fp8(monkeypatch):
    monkeypatch.setattr(select, "time_both", pytest.fail)
    model, x = make(), torch.randn(16, 64)
    assert_same_bits(model[0](x), in_fp8(model[0], x))
    assert fp8stack.get_report(model).selected == {"0": "fp8 (not timed on cpu)"}


def test_it_tells_once_after_the_first_forward(clock, caplog, monkeypatch):
    monkeypatch.setenv("FP8STACK_QUIET", "0")
    model = make()
    caplog.clear()
    with caplog.at_level("INFO", "fp8stack"):
        for rows in (16, 16, 64):
            model(torch.randn(rows, 64))
    assert [r.getMessage().splitlines()[:3] for r in caplog.records] == [
        [
            'fp8stack select="auto": 1 of 3 Linear layers in FP8',
            "  0: fp8 (16 tokens: 1 ms, fp32 2 ms)",
            "  2 and 1 more: fp32 (16 tokens: 1 ms, fp8 2 ms)",
        ]
    ]
    assert not model._forward_hooks


def test_copies_and_pickles_choose_alike(clock):
    model, x = make(), torch.randn(16, 64)
    y = model(x)
    for copied in COPIES.values():
        assert_same_bits(copied(model)(x), y)
    assert len(clock.shapes) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("features", [64, 32], ids=["fp8", "bf16"])
def test_a_known_shape_does_not_let_other_tensors_pass(clock, mesh, features):
    layer, x = make()[0 if features == 64 else 3], torch.randn(4, features)
    layer(x)
    layer(x)
    others = {
        "sparse": x.to_sparse(),
        "nested": torch.nested.nested_tensor([x]),
        "sharded": distribute_tensor(x, mesh, [Replicate()]),
    }
    for kind, other in others.items():
        with pytest.raises(ModelError, match=f"got {kind}"):
            layer(other)
    for wrong in (x[:, 1:], x.view(2, -1)):
        with pytest.raises(ModelError, match="its last dimension must be"):
            layer(wrong)
    with pytest.raises(ModelError, match="takes float32"):
        layer(x.long())


def test_without_it_and_after_restore_nothing_is_timed(clock):
    model = make()
    fp8stack.restore(model)
    other, _ = fp8stack.initialize(nn.Sequential(nn.Linear(64, 32)), None, "O0", compute="native")
    for each in (model, other):
        each(torch.randn(16, 64))
    assert clock.shapes == []
    assert not model._forward_hooks


# --- under torch.compile


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_holds_the_choice_as_a_constant(clock, caplog, monkeypatch, dynamic):
    monkeypatch.setenv("FP8STACK_QUIET", "0")
    model = make()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    caplog.clear()
    with caplog.at_level("INFO", "fp8stack"):
        for rows in (24, 24, 40, 56, 72):  # padded, all of them
            x = torch.randn(rows, 64)
            y = compiled(x)
            y.sum().backward()
            assert_same_bits(y.detach(), eager(x).detach())
    traced = [s for s in clock.shapes if s.compiled]
    assert {(s.k, s.n) for s in traced} == {(64, 64), (64, 32), (32, 64)}
    assert {s.rows for s in traced} == ({24} if dynamic else {24, 40})
    assert clock.modes == {(True, False, False, False)}
    assert len(caplog.records) == 1
    assert list(fp8stack.get_report(model).selected) == ["0", "2", "3"]


def test_layers_that_are_compiled_one_by_one_share_a_graph(clock):
    model = native(nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]), select="auto")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in model:
        layer.compile(backend=counter, fullgraph=True)
    model(torch.randn(16, 64, requires_grad=True)).sum().backward()
    assert counter.frame_count == 1
    assert len(clock.shapes) == 1
    assert len(fp8stack.get_report(model).selected) == 20


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_small_layer_stays_in_bf16_and_a_large_one_is_fp8(compiled):
    for size, tokens, choice in ((64, 64, "bf16"), (8192, 8192, "fp8")):
        model = native(nn.Sequential(nn.Linear(size, size)).bfloat16(), "cuda", select="auto")
        x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x)
        assert fp8stack.get_report(model).selected["0"].startswith(choice)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_timing_leaves_no_trace_on_a_gpu(recipe):
    model = make("cuda", fp8_recipe=recipe)
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    chooser = model[0].products.chooser
    chooser(x, model[0].weight, model[0].bias)  # cuBLAS' workspace stays
    random = [torch.cuda.get_rng_state(), torch.get_rng_state()]
    gc.collect()
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            chooser(x, model[2].weight, model[2].bias)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(fp8stack.get_report(model).selected) == 2
    gc.collect()
    assert torch.cuda.memory_allocated() == memory
    assert_same_bits([torch.cuda.get_rng_state(), torch.get_rng_state()], random)
    assert all(p.grad is None for p in (x, *model.parameters()))


@pytest.mark.gpu
def test_memory_is_given_back_when_there_is_too_little(monkeypatch):
    monkeypatch.setattr(select, "time_both", out_of_memory)
    model, x = make("cuda"), torch.randn(16, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    assert not model[0].products.chooser(x, model[0].weight, model[0].bias)
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
def test_a_shape_first_seen_in_a_cuda_graph_is_fp8():
    told = []
    model = make("cuda")
    model[0].products.chooser._tell = told.append
    layer, x = model[0], torch.randn(64, 64, device="cuda")
    in_fp8(layer, x)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        layer(x)
        y = layer(x)
    graph.replay()
    assert_same_bits(y, in_fp8(layer, x).detach())
    assert told == ['fp8stack select="auto": FP8 for a GEMM that cannot be timed in a CUDA graph']
    layer(x)  # outside of it, the shape is timed after all
    assert "tokens" in fp8stack.get_report(model).selected["0"]


@pytest.mark.gpu
def test_a_tiny_model_is_not_slower_than_without_fp8():
    given = nn.Sequential(*[nn.Linear(128, 128) for _ in range(16)]).to("cuda", torch.bfloat16)
    model = native(copy.deepcopy(given), "cuda", select="auto")
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)

    def measure(model):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            model(x).sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    # in turn, so that both find the host equally busy
    times = [(measure(model), measure(given)) for _ in range(100)]
    ours, theirs = (min(each) for each in zip(*times, strict=True))
    assert ours <= 1.1 * theirs  # 1.03 seen: a look-up a layer
