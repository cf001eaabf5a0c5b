"""What the monitor adds to its counts: update/weight ratios and advice; ordinary steps pay nothing."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8stack
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.monitor import RULES, Monitor
from fp8stack.monitor.advice import find

NAN = math.nan
LIMITS = {(rule.field, rule.above): rule.limit for rule in RULES}


def make(level="O2", kind=torch.optim.AdamW, lr=1e-3, device="cpu", size=64, **options):
    model = nn.Sequential(nn.Linear(size, 128), nn.GELU(), nn.Linear(128, size)).to(device)
    optimizer = kind(model.parameters(), lr=lr)
    return fp8stack.initialize(model, optimizer, level, compute="native", **options)


def backward(model, x=None):
    weight = model[0].weight
    x = torch.randn(32, weight.shape[1], device=weight.device) if x is None else x
    model(x).square().mean().backward()


def step(model, optimizer, x=None):
    backward(model, x)
    optimizer.step()
    optimizer.zero_grad()


def weights(model, optimizer):
    master = getattr(optimizer, "master_weight", lambda p: p.detach().float().clone())
    return {name: master(model.get_submodule(name).weight) for name in "02"}


# --- update/weight ratio


@pytest.mark.parametrize(
    "options",
    [
        {}, {"master": "split32"}, {"master": "fp16"}, {"master": "none"}, {"states": "fp32", "master": "keep"},
        {"level": "O0"}, {"level": "O1", "kind": torch.optim.SGD, "lr": 0.1}, {"step_in_backward": True},
        {"optimizer_backend": "bitsandbytes"},
    ],
    ids=str,
)  # fmt: skip
def test_the_ratio_is_that_of_what_the_optimizer_accumulates_in(options):
    model, optimizer = make(**options)
    step(model, optimizer)
    before = weights(model, optimizer)
    with Monitor(model, optimizer) as monitor:
        assert monitor.metrics() == {}
        step(model, optimizer)
        numbers = monitor.read()
    after = weights(model, optimizer)
    for name in "02":
        moved = (after[name] - before[name]).norm() / before[name].norm()
        assert numbers[name]["w"]["update_ratio"] == pytest.approx(moved.item(), rel=1e-5)
        assert moved > 1e-6
    both = [numbers[name]["w"]["update_ratio"] for name in "02"]
    assert monitor.metrics()["fp8/update_ratio"] == pytest.approx(sum(both) / 2)


def test_of_a_large_weight_a_sample_is_read():
    model, optimizer = make(size=4096)
    step(model, optimizer)
    with torch.no_grad():  # rows and columns are not alike
        model[0].weight *= torch.logspace(0, 1, 128)[:, None] * torch.logspace(1, 0, 4096)
    before = weights(model, optimizer)
    with Monitor(model, optimizer) as monitor:
        backward(model)
        kept, sizes = monitor._updates._before, []
        assert not kept
        look = lambda *_: sizes.extend(t.numel() for _, t in kept.values())  # noqa: E731
        optimizer.register_step_pre_hook(look)
        optimizer.step()
        after, numbers = weights(model, optimizer), monitor.read()
    assert max(sizes) <= 2**14 < model[0].weight.numel()
    for name in "02":
        moved = (after[name] - before[name]).norm() / before[name].norm()
        assert numbers[name]["w"]["update_ratio"] == pytest.approx(moved.item(), rel=0.03)


def test_micro_batches_come_before_their_step_and_a_skipped_one_moves_nothing():
    model, optimizer = make()
    with Monitor(model, optimizer, every=4) as monitor:
        for sampled, bad in ((0, False), (4, True)):
            for _ in range(4):
                backward(model)
                assert "update_ratio" not in monitor.read()["0"]["w"]
            if bad:
                model[0].bias.grad[0] = NAN
            optimizer.step()
            assert (monitor.read()["0"]["w"]["update_ratio"] == 0) == bad
            assert monitor.step == sampled


def test_says_where_it_cannot_see_the_weights():
    model, _ = make()
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with Monitor(model, stranger) as monitor:
        backward(model)
        with pytest.warns(Fp8StackWarning, match="owns no weight"):
            stranger.step()
        assert "update_ratio" not in monitor.read()["0"]["w"]


def test_of_transformer_engine_s_layers_there_are_updates_only():
    layer = nn.Linear(8, 8)
    layer.__class__ = fp8stack.nn.TeLinear  # whose forward needs a GPU
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(Fp8StackWarning, match="1 layers are TransformerEngine's"):
        monitor = Monitor(model, optimizer, by_hand=True)
    with monitor:
        monitor.begin_step()
        layer.weight.grad = layer.weight.detach().clone()
        optimizer.step()
        assert monitor.read() == {"0": {"w": {"update_ratio": pytest.approx(0.1)}}}
        assert monitor.step == 0
        assert monitor.metrics()["fp8/update_ratio"] == pytest.approx(0.1)
        assert "raise" not in str(monitor.advice())


def test_refuses_what_is_no_model_no_number_and_no_optimizer():
    from accelerate import Accelerator

    model, optimizer = make()
    wrapped = Accelerator(cpu=True).prepare(optimizer)
    for given, message in (
        ((model, 100), r"every=\.\.\."),
        ((model, wrapped), r"wraps one: pass its \.optimizer"),
        ((None,), "model=NoneType is not a torch"),
        *(((model, None, every), "every=") for every in (0, 1.5, "10", True)),
    ):
        with pytest.raises(ConfigError, match=message):
            Monitor(*given)


# --- what it costs


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_an_ordinary_step_does_what_it_does_without_a_monitor():
    model, optimizer = make()
    x = torch.randn(32, 64)

    def operations():
        with Recorder() as recorder:
            step(model, optimizer, x)
        return recorder.seen

    step(model, optimizer, x)
    plain = operations()
    assert len(plain) > 20
    with Monitor(model, optimizer, every=10) as monitor:
        assert len(operations()) > len(plain)
        operations()  # ends the sample
        for _ in range(8):
            assert operations() == plain
            assert model[0].products.probe is None
        assert monitor.read()
        assert monitor.step == 0
        assert len(operations()) > len(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_nothing_waits_for_the_gpu(recipe):
    model, optimizer = make(device="cuda", fp8_recipe=recipe)
    x = torch.randn(128, 64, device="cuda")
    for _ in range(20):
        step(model, optimizer, x)
    with Monitor(model, optimizer, every=2) as monitor:
        step(model, optimizer, x)
        monitor.read()
        step(model, optimizer, x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(2 * 10**9)  # about a second
            for _ in range(3):
                step(model, optimizer, x)
                numbers = monitor.metrics()
                monitor.advice()
            event = torch.cuda.Event()
            event.record()
            assert not event.query()  # the host is far ahead
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert monitor.step == 0
        assert numbers["fp8/amax"] > 0
    assert monitor.read(wait=True)["0"]["w"]["update_ratio"] > 0
    assert monitor.step == 4


# --- advice


def test_advice_on_a_healthy_run_and_on_learning_rates():
    model, optimizer = make(lr=1e-4)
    with Monitor(model, optimizer, every=1) as monitor:
        assert monitor.advice() == []
        for lr, says in ((1e-4, None), (1e-9, "raise the learning rate"), (1.0, "lower the")):
            for group in optimizer.param_groups:
                group["lr"] = lr
            step(model, optimizer)
            advice = monitor.advice()
            assert len(advice) == (says is not None), advice
            assert not advice or says in advice[0]
            assert not advice or advice[0].startswith(("0 (and 1 more layers): ", "2 (and 1"))
    assert LIMITS["update_ratio", False] < 1e-3 < LIMITS["update_ratio", True]


class Half(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x))


def test_a_layer_that_stands_still_gets_advice_if_it_is_used():
    model = Half(*(nn.Linear(64, 64) for _ in range(3)))
    groups = [{"params": model[i].parameters(), "lr": 1e-3 * (i != 1)} for i in range(3)]
    model, optimizer = fp8stack.initialize(model, torch.optim.AdamW(groups), "O2", compute="native")
    with Monitor(model, optimizer, every=1) as monitor:
        step(model, optimizer)
        still = [monitor.read(wait=True)[name]["w"]["update_ratio"] == 0 for name in "012"]
        assert still == [False, True, True]
        (found,) = (f for f in monitor.findings() if f.field == "update_ratio" and not f.above)
        assert found.layers == ("1",)
        optimizer.step()  # without gradients nothing moves, which is said as before
        model(torch.randn(8, 64))
        optimizer.step()
        monitor.remove()
        (found,) = (f for f in monitor.findings() if f.field == "update_ratio")
        assert set(found.layers) == {"0", "1", "2"}


LONG = {"fp8_recipe": "delayed", "fp8_format": "e4m3"}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"fp8_format": "e4m3"}, 'use fp8_format="hybrid"'),
        ({}, 'use fp8_recipe="blockwise"'),
        ({"fp8_recipe": "blockwise"}, 'leave the layer out with precision_for={"0": "backward-bf16"}.'),
        ({"precision_for": {"0": "forward-bf16"}}, 'leave the layer out with precision_for={"0": "bf16"}.'),
        # as after the first steps of a run without warm-up
        ({**LONG, "amax_history_len": 1024}, "use amax_history_len=16:"),
        ({**LONG, "amax_history_len": 16}, 'use fp8_format="hybrid"'),
        ({**LONG, "amax_history_len": 1024, "amax_compute_algo": "most_recent"}, 'use fp8_format="hybrid"'),
    ],
    ids=str,
)  # fmt: skip
def test_advice_on_gradients_that_underflow(options, remedy):
    model, _ = make("O0", size=128, **options)
    columns = torch.ones(128)
    columns[2:] = 1e-12  # beyond E5M2 too, and within a block
    sizes = (1e6, 1.0) if "amax_history_len" in options else (1.0,)
    with Monitor(model, every=1, by_hand=True) as monitor:
        for size in sizes:
            monitor.begin_step()
            (model[0](torch.randn(256, 128)) * columns * size).sum().backward()
        (line,) = (line for line in monitor.advice() if "of the gradient underflows" in line)
    assert line.startswith("0: ")
    assert remedy in line


@pytest.mark.parametrize(
    ("growth", "says"), [(2.6, "is under its quantization noise"), (2.2, "has an SNR of 5.3 dB")]
)
def test_a_gradient_under_its_quantization_noise_is_told_of(growth, says):
    """A gradient of one value outgrows its history and is clipped: the error is 1 - 1 / growth of it; 2.37: 1 / √3."""
    model, _ = make("O0", size=128, fp8_recipe="delayed")
    with Monitor(model, every=1, by_hand=True) as monitor:
        for size in (1.0, growth):
            monitor.begin_step()
            (model[0](torch.randn(256, 128)) * size).sum().backward()
        noise = 1 - 1 / growth
        assert (noise * math.sqrt(3) > 1) == ("under" in says)
        assert monitor.read()["0"]["g"]["snr_db"] == pytest.approx(
            -20 * math.log10(noise), rel=1e-4
        )
        found = [f for f in monitor.findings() if f.operand == "g" and f.field != "overflow"]
    assert [(f.field, f.layers) for f in found] == [
        ("under_noise" if "under" in says else "snr_db", ("0",))
    ]
    assert says in found[0].text
    assert 'or precision_for={"0": "backward-bf16"}.' in found[0].text


def test_advice_names_the_first_layer_with_numbers_that_are_not_finite():
    model, _ = make("O0")
    x = torch.randn(32, 64)
    x[3, 5] = NAN
    with Monitor(model) as monitor:
        model(x)
        assert monitor.advice() == [
            "0 (and 1 more layers): 1 elements of the input are NaN or infinite. Remedy: look at what comes before the "
            "layer, and lower the learning rate."
        ]


CURRENT = SimpleNamespace(fp8_recipe="current", name="hybrid", g_state=None, layer="", in_bf16="")


def test_findings_name_all_layers_the_worst_first():
    numbers = {n: {"x": {"overflow": share}} for n, share in (("a", 0.1), ("b", 0), ("c", 0.3))}
    numbers["a"]["x"] |= {"underflow": 0.5, "dead_blocks": 0.02, "snr_db": 12.3}
    numbers["b"] |= {"w": {"update_ratio": 1.0}, "x": {"overflow": 0, "snr_db": 30.0}}
    found = find(numbers, dict.fromkeys("abc", CURRENT))
    assert [(f.field, f.operand, f.above, f.layers) for f in found] == [
        ("overflow", "x", True, ("c", "a")),
        ("underflow", "x", True, ("a",)),
        ("dead_blocks", "x", True, ("a",)),
        ("snr_db", "x", False, ("a",)),
        ("update_ratio", "w", True, ("b",)),
    ]
    wider = 'use fp8_recipe="blockwise", a scale for each 128 elements, or skip=["a"]'
    assert [f.remedy for f in found] == [
        'raise fp8_margin by one, or use fp8_recipe="current"', wider, wider, wider,
        "lower the learning rate, or warm up longer, unless the loss falls as it should",
    ]  # fmt: skip
    for finding, text in (
        (found[0], "c (and 1 more layers): 30.000% of the input is clipped"),
        (found[2], "a: 2.0% of the blocks of the input are flushed to zero, more than 1%."),
        (found[3], "a: the input has an SNR of 12.3 dB, less than 20."),
    ):
        assert finding.text.startswith(text)
