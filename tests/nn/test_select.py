"""select="auto": by its size and its rows of input a layer multiplies in FP8 or in bfloat16, and the card says so."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits
from layers import SwiGLU, experts_of
from torch import nn

import fp8stack
from fp8stack import api
from fp8stack.errors import Fp8StackWarning
from fp8stack.integrations.verification import verify_initialized
from fp8stack.levels import recipe_for
from fp8stack.monitor import Monitor
from fp8stack.nn import StoredLinear, casts, convert, select
from fp8stack.nn.linear import Fp8Linear
from fp8stack.nn.select import (
    ALWAYS,
    NEVER,
    TOO_SMALL,
    LeastRows,
    describe,
    least_rows,
    least_rows_of_experts,
    least_rows_of_mlp,
    pays,
)

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "layer_shapes.jsonl"


# How many were measured (a new run has a line of its own), how often the rule may be wrong, and what all but so many
# outliers may lose by that.
MEASURED = [
    ("H100", ["current", "alone"], 247, 12, 1, 0.1),
    ("H200", ["alone"], 247, 20, 3, 0.1),
    ("H200", ["forward-bf16"], 36, 2, 0, 0.04),
    ("H200", ["after-a-norm"], 36, 2, 0, 0.05),
    ("H200", ["mlp", "compiled-mlp"], 40, 1, 0, 0.02),
]


@pytest.mark.parametrize(("gpu", "ways", "count", "most", "outliers", "loss"), MEASURED)
def test_the_rule_is_right_about_what_was_measured(gpu, ways, count, most, outliers, loss):
    """The GPU's time alone, as in CUDA graphs; wrong are a few shapes at which both take about as long."""
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    records = [r for r in records if r["variant"] in ways and gpu in r["gpu"]]
    lost = []
    for record in records:
        k, n, share, rows = (record["params"][name] for name in ("k", "n", "share", "rows"))
        mlp = record["variant"] in ("mlp", "compiled-mlp")
        least = least_rows_of_mlp([*[(n, k)] * share, (k, n)]) if mlp else least_rows(k, n, share)
        compiled = record["variant"] in ("after-a-norm", "compiled-mlp")
        wide = record["params"]["x"] == "float32" and not compiled
        if (rows >= least[2 + wide]) is not (record["gain_us"] > 0):
            lost.append(abs(record["value"] - 1))
    assert len(records) == count
    assert len(lost) <= most
    assert max(sorted(lost)[: len(lost) - outliers], default=0) < loss


def test_the_rule_of_experts_is_right_about_what_was_measured():
    sizes = {"Qwen3-MoE of 32 experts": (1024, 768, 32, 4), "Qwen3-30B-A3B": (2048, 768, 128, 8)}
    sizes["Mixtral-8x7B"] = 4096, 14_336, 8, 2
    wrong = []
    lines = (RECORDS.parent / "experts.jsonl").read_text().splitlines()
    for record in (r for r in map(json.loads, lines) if r["name"] == "experts"):
        features, hidden, experts, count = sizes[record["params"]["model"]]
        least = least_rows_of_experts(features, hidden, 3, experts)
        chosen = record["params"]["tokens"] * count >= least.narrow
        if chosen is not (record["fp8"] < record["bf16"]):
            wrong.append(abs(record["bf16"] / record["fp8"] - 1))
    assert len(wrong) <= 1
    assert max(wrong) < 0.05


def test_experts_with_few_tokens_are_transformers(monkeypatch):
    """Where both have 16 bits; torch multiplies float32 weights in float32, and FP8 is always faster."""
    module, few = nn.Sequential(experts_of("Qwen3Moe", 64, 48, 4)), torch.tensor([[0, 1]] * 8)
    given = torch.randn(8, 64), few, torch.rand(8, 2)
    expected = copy.deepcopy(module[0]).bfloat16()(
        *(t.bfloat16() if t.is_floating_point() else t for t in given)
    )
    least = least_rows_of_experts(64, 48, 3, 4)
    fp8stack.initialize(module, None, "O0", compute="native")
    experts = module[0]
    experts.products[0].least_rows = least
    calls = []
    monkeypatch.setattr(type(experts), "_compute", lambda self, x, *_: calls.append(len(x)) or x)
    experts(*given)
    assert calls == [8]
    experts.bfloat16()
    given = [t.bfloat16() if t.is_floating_point() else t for t in given]
    assert_same_bits(experts(*given), expected)
    many = int(least.narrow) // 2 + 1
    experts(torch.randn(many, 64).bfloat16(), few[:1].expand(many, 2), torch.rand(many, 2))
    assert calls == [8, many]
    report = fp8stack.get_report(module)
    assert report.selected == {"0": f"fp8 from {least.narrow:,} pairs of token and expert on"}
    assert report.few_rows == []
    experts(*given)
    assert fp8stack.get_report(module).few_rows == ["0"]


def test_more_rows_larger_layers_and_wider_inputs_are_for_fp8():
    assert least_rows(768, 768) == NEVER._replace(
        wide=least_rows(768, 768).wide, wide_graphed=least_rows(768, 768).wide_graphed
    )
    for smaller, larger in (((1024, 4096), (2048, 4096)), ((2048, 2048), (4096, 4096))):
        assert all(a > b for a, b in zip(least_rows(*smaller), least_rows(*larger), strict=True))
    assert least_rows(2048, 2048, 3).narrow < least_rows(2048, 2048, 1).narrow
    for sizes in ((768, 50_257), (50_257, 768)):  # bfloat16 is slow there
        assert least_rows(*sizes) == ALWAYS == (0, 0, 0, 0)
    narrow, wide, narrow_graphed, wide_graphed = least_rows(2048, 8192)
    assert narrow > wide > wide_graphed
    assert narrow > narrow_graphed > wide_graphed


def test_what_a_card_says():
    assert (
        describe(LeastRows(5000, 1200, 9, 8))
        == "fp8 from 5,000 rows of input on (1,200 in float32)"
    )
    told = "bf16; fp8 from 12 rows of float32 input on (not compiled)"
    assert describe(LeastRows(math.inf, 12, math.inf, 8)) == told
    assert describe(NEVER) == "bf16"  # as a fused MLP of small layers


@pytest.fixture
def by_size(by_size, monkeypatch):
    """Let the rule decide on a CPU too, where `initialize` takes FP8 always, and give layers few least rows."""
    chosen = convert.choose_layers
    monkeypatch.setattr("fp8stack.api.choose_layers", lambda *args: chosen(*args[:4], True))
    by_inputs = {32: LeastRows(8, 4, 6, 2), 64: ALWAYS, 16: NEVER}
    monkeypatch.setattr(select, "least_rows", lambda k, n, sharing: by_inputs[k])


def make(level="O0", **options):
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(16, 16))
    fp8stack.initialize(model, None, level, **options)
    return model, fp8stack.get_report(model)


def test_layers_that_are_too_small_are_left_out_and_others_have_least_rows(by_size):
    model, report = make()
    assert report.converted == ["0", "1"]
    assert report.skipped == {"2": TOO_SMALL}
    assert report.selected == {"0": "fp8 from 8 rows of input on (4 in float32)"}
    assert "fp8 multiplies up to 92 % of the matrix parameters" in str(report)
    assert report.share == (32 * 64 + 64 * 16) / (32 * 64 + 64 * 16 + 16 * 16)
    assert "1 × fp8 from 8 rows of input on" in str(report)
    assert [type(layer) for layer in model] == [Fp8Linear, Fp8Linear, nn.Linear]
    fp8stack.restore(model)
    fp8stack.initialize(model, torch.optim.AdamW(model.parameters()), "O2", min_numel=1)
    assert type(model[2]) is StoredLinear


@pytest.mark.parametrize(
    ("rows", "dtype", "autocast", "fp8"),
    [
        (7, torch.bfloat16, False, False), (8, torch.bfloat16, False, True), (7, torch.float16, False, False),
        (3, torch.float32, True, False), (4, torch.float32, True, True), (1, torch.float32, False, True),
    ],
)  # fmt: skip
def test_rows_decide(by_size, rows, dtype, autocast, fp8):
    layer = make()[0][0]
    layer.weight.data = layer.weight.data.bfloat16()
    layer.bias.data = layer.bias.data.to(torch.bfloat16 if autocast else dtype)
    x = torch.randn(1, rows, 32, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, autocast):
        output = layer(x)
        plain = nn.functional.linear(
            x, layer.weight if autocast else layer.weight.to(dtype), layer.bias
        )
    assert output.dtype is plain.dtype
    assert (output.grad_fn.name() == "_Fp8MatmulBackward") is fp8
    if not fp8:
        assert_same_bits(output.detach(), plain.detach())


def test_compiled_graphs_have_numbers_of_their_own(by_size):
    layer = make()[0][0]
    seen = []

    def backend(graph, _):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        seen.append([(str(node.target), casts.DIGEST in node.args) for node in calls])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, dynamic=False)
    for rows, dtype, fp8 in (
        (5, torch.bfloat16, False), (6, torch.bfloat16, True), (5, torch.float32, False), (6, torch.float32, True),
    ):  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, dtype is torch.float32):
            compiled(torch.randn(rows, 32, dtype=dtype))
        # one call, which takes Dynamo little time, and the key of a cached graph holds its source
        assert (seen[-1] == [("fp8stack.linear", True)]) is fp8


def test_inputs_without_rows_are_refused_as_ever(by_size):
    layer = make()[0][0]
    for bad in (torch.tensor(1.0), torch.nested.nested_tensor([torch.randn(2, 32)])):
        with pytest.raises(fp8stack.errors.ModelError, match="Linear layer 0 got"):
            layer(bad)
    assert pays(torch.empty(0, 32, dtype=torch.bfloat16), LeastRows(0, 0, 0, 0))


def test_a_fused_block_is_run_layer_by_layer_where_one_of_them_is_not_in_fp8(by_size):
    model = nn.Sequential(SwiGLU(32, 64))
    fp8stack.initialize(model, None, "O0")
    inputs = [torch.randn(rows, 32, dtype=torch.bfloat16) for rows in (7, 8)]
    model.bfloat16()
    before = [model(x) for x in inputs]
    assert fp8stack.nn.fuse(model) == ["0"]
    assert_same_bits(model(inputs[0]), before[0])
    assert model(inputs[1]).shape == before[1].shape


def test_a_fused_mlp_has_one_rule_for_its_layers(by_size):
    """It casts nothing between its layers, so FP8 pays from fewer rows on where launches cost nothing."""
    shapes = [(4096, 1024), (1024, 4096)]
    alone = [least_rows(k, n) for n, k in shapes]
    least = least_rows_of_mlp(shapes)
    assert all(least.narrow_graphed < one.narrow_graphed / 2 for one in alone)
    assert least.narrow > 12_608 > least.wide_graphed  # ViT-L's rows
    assert least_rows_of_mlp([(8192, 2048), (8192, 2048), (2048, 8192)]).narrow < 8192  # Llama-1B's
    model = nn.Sequential(SwiGLU(32, 32))
    decisions = api.decide(model, None, recipe_for("O0", compute="native"))
    session = api.carry_out(model, None, decisions._replace(fuse=True))
    rules = {id(layer.products.least_rows) for layer in model[0].children()}
    assert len(rules) == 1
    assert len({*session.report.selected.values()}) == 1
    assert [*session.report.selected] == [f"0.{name}" for name, _ in model[0].named_children()]


def test_a_fused_mlp_of_odd_sizes_is_always_fp8(monkeypatch):
    chosen = convert.choose_layers
    monkeypatch.setattr("fp8stack.api.choose_layers", lambda *args: chosen(*args[:4], True))
    model = nn.Sequential(SwiGLU(1023, 513))
    decisions = api.decide(model, None, recipe_for("O0", compute="native"))
    report = api.carry_out(model, None, decisions._replace(fuse=True)).report
    assert (report.fused, report.selected) == (["0"], {})
    assert [layer.products.least_rows for layer in model[0].children()] == [None] * 3


@pytest.mark.gpu
def test_a_gpu_fuses_by_default():
    def start(**options):
        model = nn.Sequential(
            SwiGLU(256, 512), nn.RMSNorm(256, eps=1e-6), nn.Linear(256, 256)
        ).cuda()
        return fp8stack.initialize(model, None, "O0", compute="native", **options)[0]

    model = start()
    assert fp8stack.get_report(model).fused == ["0", "1"]
    assert "2 RMSNorms and MLPs joined" in str(fp8stack.get_report(model))
    assert type(start(fuse=False)[0]) is SwiGLU
    fp8stack.restore(model)
    assert [*map(type, model)] == [SwiGLU, nn.RMSNorm, nn.Linear]


def test_all_leaves_nothing_out():
    assert recipe_for("O2").select == "auto"
    model, report = make(select="all")
    assert report.selected == {}
    assert "fp8 multiplies 100 % of the matrix parameters" in str(report)
    assert len(report.converted) == len(model) == 3


def test_a_report_says_what_had_too_few_rows(by_size):
    model, report = make()
    assert report.few_rows == []
    told = "of these in bf16 in the last eager forward: 1"
    for rows, few in ((7, ["0"]), (8, []), (7, ["0"])):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(rows, 32, dtype=torch.bfloat16))
        assert fp8stack.get_report(model).few_rows == few
        assert (told in str(report)) is bool(few)
    # a graph says nothing, nor does a forward without gradients
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend="eager")(torch.randn(8, 32, dtype=torch.bfloat16))
        with torch.no_grad():
            model(torch.randn(8, 32, dtype=torch.bfloat16))
    assert fp8stack.get_report(model).few_rows == ["0"]
    fp8stack.finish(model)
    assert (report.few_rows, report.selected) == ([], {})
    assert fp8stack.get_report(model) is report


def test_verify_and_the_monitor_say_that_rows_are_too_few(by_size):
    """FP8 that is silently off looks like FP8 that does not help."""
    model, _ = make()
    told = "2 converted layers (1 of them in bf16, for few rows of input)"
    with Monitor(model, every=1) as monitor:
        for rows, few in ((3, True), (8, False)):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(rows, 32)).sum().backward()
            assert (told in str(verify_initialized(model))) == few
            assert ("0" in monitor.read()) != few
    model[0].products.least_rows = LeastRows(8, 8, 8, 8)
    with Monitor(model[0], every=1) as monitor:
        with torch.autocast("cpu", torch.bfloat16):
            model[0](torch.randn(3, 32)).sum().backward()
        with pytest.warns(Fp8StackWarning, match="and of products in bfloat16"):
            monitor.remove()


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("rows", [3, 4])
def test_the_first_step_says_how_many_layers_had_too_few_rows(
    by_size, level, rows, caplog, monkeypatch
):
    monkeypatch.delenv("FP8STACK_QUIET", raising=False)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8stack.initialize(model, optimizer, level, min_numel=1)
    caplog.set_level("INFO", "fp8stack")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(rows, 32)).sum().backward()
        optimizer.step()
    told = (
        "fp8stack: 1 of 2 layers multiplied in bfloat16, which is faster for their size and rows of input "
        "(see fp8stack.get_report(model).few_rows)"
    )
    assert caplog.messages == [told] * (rows == 3)


@pytest.mark.gpu
def test_on_a_gpu_the_rule_is_the_default(monkeypatch):
    monkeypatch.setattr(convert, "least_rows_of", select.least_rows_of)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4096), nn.Linear(4096, 4096))
    model, optimizer = fp8stack.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    report = fp8stack.get_report(model)
    assert set(report.skipped) | set(report.selected) == {"0", "1", "2"}
    for rows, fp8 in ((256, False), (8192, True)):
        with torch.autocast("cuda", torch.bfloat16):
            x = torch.randn(rows, 512, device="cuda", requires_grad=True)
            output = model[2](torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16))
            assert (output.grad_fn.name() == "_Fp8MatmulBackward") is fp8
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model, _ = make(select="all")
