"""The monitor, on top of what it counts: how far steps move weights, advice, writers; ordinary steps pay nothing."""

import gc
import json
import logging
import math
import resource
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8stack
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.formats import E4M3, E5M2
from fp8stack.kernels.reference.quantize import quantize_tensor
from fp8stack.monitor import OVERFLOW, UPDATE_RATIO, Monitor
from fp8stack.monitor.advice import Layer, find
from fp8stack.monitor.outputs import write

NAN = math.nan


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


def train(model, optimizer, steps):
    for _ in range(steps):
        step(model, optimizer)


def weights(model, optimizer):
    master = getattr(optimizer, "master_weight", lambda p: p.detach().float().clone())
    return {name: master(model.get_submodule(name).weight) for name in "02"}


# --- update/weight ratio


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"master": "split32"},
        {"master": "fp16"},
        {"master": "none"},
        {"states": "fp32", "master": "keep"},
        {"level": "O0"},
        {"level": "O1", "kind": torch.optim.SGD, "lr": 0.1},
        {"step_in_backward": True},
        {"optimizer_backend": "bitsandbytes"},
    ],
    ids=str,
)
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
        assert not monitor._updates._before
        sizes, called = [], []
        optimizer.register_step_pre_hook(lambda *_: sizes.extend(kept(monitor)))
        optimizer.register_step_post_hook(lambda *_: called.append(True))
        optimizer.step()
        after, numbers = weights(model, optimizer), monitor.read()
    assert called == [True]
    assert max(sizes) <= 2**14 < model[0].weight.numel()
    for name in "02":
        moved = (after[name] - before[name]).norm() / before[name].norm()
        assert numbers[name]["w"]["update_ratio"] == pytest.approx(moved.item(), rel=0.03)


def kept(monitor):
    return [sample.numel() for _, sample in monitor._updates._before.values()]


def test_a_step_that_is_skipped_moves_nothing():
    model, optimizer = make()
    step(model, optimizer)
    with Monitor(model, optimizer) as monitor:
        backward(model)
        model[0].bias.grad[0] = NAN
        optimizer.step()
        assert [kinds["w"]["update_ratio"] for kinds in monitor.read().values()] == [0, 0]


def test_micro_batches_come_before_their_step():
    model, optimizer = make()
    with Monitor(model, optimizer, every=4) as monitor:
        for number in range(4):
            backward(model)
            found = "update_ratio" in monitor.read()["0"]["w"]
            assert not found, number
        optimizer.step()
        assert monitor.read()["0"]["w"]["update_ratio"] > 0
        assert monitor.step == 0


def test_says_where_it_cannot_see_the_weights():
    model, _ = make()
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with Monitor(model, stranger) as monitor:
        backward(model)
        with pytest.warns(Fp8StackWarning, match="owns no weight"):
            stranger.step()
        assert "update_ratio" not in monitor.read()["0"]["w"]


def test_of_transformer_engine_s_layers_there_are_updates_only(tmp_path):
    layer = nn.Linear(8, 8)
    layer.__class__ = fp8stack.nn.TeLinear  # whose forward needs a GPU
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(Fp8StackWarning, match="1 layers are TransformerEngine's"):
        monitor = Monitor(model, optimizer, by_hand=True, to=tmp_path / "log")
    with monitor:
        monitor.begin_step()
        layer.weight.grad = layer.weight.detach().clone()
        optimizer.step()
        assert monitor.read() == {"0": {"w": {"update_ratio": pytest.approx(0.1)}}}
        assert monitor.step == 0
        assert "raise" not in str(monitor.advice())
    (line,) = lines(tmp_path / "log")
    assert line["fp8/update_ratio"] == pytest.approx(0.1)


@pytest.mark.parametrize(("given", "message"), [(100, r"every=\.\.\."), ("adam", "is not a torch")])
def test_refuses_what_is_no_optimizer(given, message):
    with pytest.raises(ConfigError, match=message):
        Monitor(make()[0], given)


def test_refuses_what_is_no_model():
    model, optimizer = make()
    for given in ((None,), (optimizer, model)):
        with pytest.raises(ConfigError, match=f"model={type(given[0]).__name__} is not a torch"):
            Monitor(*given)


def test_refuses_an_optimizer_that_wraps_one():
    from accelerate import Accelerator

    model, optimizer = make()
    with pytest.raises(ConfigError, match=r"wraps one: pass its \.optimizer"):
        Monitor(model, Accelerator(cpu=True).prepare(optimizer))


# --- what it costs


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_an_ordinary_step_does_what_it_does_without_a_monitor(tmp_path):
    model, optimizer = make()
    x = torch.randn(32, 64)

    def operations():
        with Recorder() as recorder:
            step(model, optimizer, x)
        return recorder.seen

    step(model, optimizer, x)
    plain = operations()
    hooks = dict(optimizer._optimizer_step_post_hooks)
    assert len(plain) > 20
    with Monitor(model, optimizer, every=10, to=[tmp_path / "log"]) as monitor:
        assert len(operations()) > len(plain)
        operations()  # ends the sample
        for _ in range(8):
            assert operations() == plain
            assert not optimizer._optimizer_step_pre_hooks
            assert dict(optimizer._optimizer_step_post_hooks) == hooks
            assert model[0].products.probe is None
        assert monitor.step == 0
        assert len(operations()) > len(plain)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(tmp_path):
    model, optimizer = make(device="cuda")
    x = torch.randn(128, 64, device="cuda")
    for _ in range(20):
        step(model, optimizer, x)
    path = tmp_path / "log"
    with Monitor(model, optimizer, every=2, to=[path]) as monitor:
        step(model, optimizer, x)
        monitor.read()
        step(model, optimizer, x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(2 * 10**9)  # about a second
            for _ in range(3):
                step(model, optimizer, x)
                monitor.metrics()
                monitor.advice()
            event = torch.cuda.Event()
            event.record()
            assert not event.query()  # the host is far ahead
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert monitor.step == 0
    assert monitor.step == 4
    assert monitor.read()["0"]["w"]["update_ratio"] > 0
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 4


@pytest.mark.gpu
def test_a_sample_costs_less_than_a_step():
    """So one step in a hundred costs less than 1 %."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", compute="native")
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def measure():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(model, optimizer, x)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    plain, sampled = [], []
    for _ in range(15):  # by turns: what else runs on the GPU slows both
        plain.append(measure())
        with Monitor(model, optimizer, every=1):
            measure()
            sampled.append(measure())  # and ends the sample before
    assert statistics.median(sampled[5:]) < 2 * statistics.median(plain[5:])


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
    assert UPDATE_RATIO[0] < 1e-3 < UPDATE_RATIO[1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_layer_that_is_used_and_stands_still_gets_advice(level):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}], lr=1e-3
    )
    model, optimizer = fp8stack.initialize(model, optimizer, level, compute="native")
    with Monitor(model, optimizer, every=1) as monitor:
        step(model, optimizer)
        assert monitor.read(wait=True)["1"]["w"]["update_ratio"] == 0
        (found,) = (f for f in monitor.findings() if f.field == "update_ratio" and not f.above)
        assert found.layers == ("1",)


def test_half_a_line_is_taken_back(tmp_path):
    path, limit = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    write(path, {"a": 1.0}, 1)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limit[1]))
        with pytest.raises(OSError, match="File too large"):
            write(path, {"a": 2.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    write(path, {"a": 3.0}, 3)
    assert [line["step"] for line in lines(path)] == [1, 3]


class Half(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x))


def test_a_layer_that_is_not_used_gets_no_advice_on_learning_rates():
    model = Half(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", compute="native")
    with Monitor(model, optimizer, every=1) as monitor:
        step(model, optimizer)
        assert monitor.read(wait=True)["2"]["w"]["update_ratio"] == 0
        assert not [found for found in monitor.findings() if "2" in found.layers]
        model.zero_grad()
        optimizer.step()  # without gradients nothing moves, which is said as before
        model(torch.randn(8, 64))
        optimizer.step()
        monitor.remove()
        (found,) = (f for f in monitor.findings() if f.field == "update_ratio")
        assert set(found.layers) == {"0", "1", "2"}


def test_remove_after_the_model_is_gone():
    model = make()[0]
    monitor = Monitor(model)
    del model
    gc.collect()
    monitor.remove()


def test_advice_on_clipped_activations():
    model, _ = make("O0", fp8_recipe="delayed")
    with Monitor(model, every=1) as monitor:
        for size in (1.0, 1.0, 100.0):
            backward(model, size * torch.randn(32, 64))
        advice = monitor.advice()
        share = monitor.read()["0"]["x"]["overflow"]
    assert share > OVERFLOW
    line = next(line for line in advice if "of the input is clipped" in line)
    assert line.startswith("0 (and 1 more layers): ")
    assert f"{share:.3%}" in line or line.startswith("2")
    assert 'raise fp8_margin by one, or use fp8_recipe="current"' in line


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"fp8_format": "e4m3"}, 'use fp8_format="hybrid"'),
        ({}, 'use fp8_recipe="blockwise"'),
        ({"fp8_recipe": "blockwise"}, 'skip=["0"]'),
    ],
    ids=["e4m3", "hybrid", "blockwise"],
)
def test_advice_on_gradients_that_underflow(options, remedy):
    model, _ = make("O0", size=128, **options)
    y = torch.randn(256, 128)
    columns = torch.ones(128)
    columns[2:] = 1e-12  # beyond E5M2 too, and within a block
    with Monitor(model, by_hand=True) as monitor:
        monitor.begin_step()
        (model[0](y) * columns).sum().backward()
        (line,) = (line for line in monitor.advice() if "of the gradient underflows" in line)
    assert line.startswith("0: ")
    assert remedy in line


@pytest.mark.parametrize("history", [1024, 2])
def test_advice_on_gradients_far_below_those_that_a_history_remembers(history):
    """As after the first steps of a run without warm-up."""
    options = {"fp8_recipe": "delayed", "fp8_format": "e4m3", "amax_history_len": history}
    model, _ = make("O0", size=128, **options)
    with Monitor(model, every=1, by_hand=True) as monitor:
        for size in (1e6, *(6 * [1.0])):
            monitor.begin_step()
            (model(torch.randn(256, 128)) * torch.randn(256, 128) * size).sum().backward()
        advice = [line for line in monitor.advice() if "of the gradient underflows" in line]
    assert bool(advice) == (history == 1024)
    assert all("Remedy: use amax_history_len=16:" in line for line in advice)


@pytest.mark.parametrize(
    "options",
    [{"amax_history_len": 16}, {"amax_compute_algo": "most_recent"}, {"fp8_recipe": "current"}],
    ids=["short", "latest", "current"],
)
def test_a_history_that_is_short_already_is_not_to_be_shortened(options):
    model, _ = make("O0", **{"fp8_recipe": "delayed", "fp8_format": "e4m3", **options})
    broken = {"0": {"g": {"underflow": 1.0, "amax": 1.0, "scale": 9.0}}}
    (finding,) = find(broken, {"0": Layer.of(model[0].products)})
    assert finding.remedy.startswith("use {fp8_format=hybrid}")


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


def test_advice_on_dead_blocks_and_noise():
    numbers = {"a": {"x": {"dead_blocks": 0.02, "snr_db": 12.3}}, "b": {"x": {"snr_db": 30.0}}}
    found = find(numbers, dict.fromkeys("ab", Layer("current", "hybrid")))
    dead, noise = (finding.text() for finding in found)
    assert dead.startswith("a: 2.0% of the blocks of the input are flushed to zero, more than 1%.")
    assert noise.startswith("a: the input has an SNR of 12.3 dB, less than 20.")


def test_findings_name_all_layers_and_are_spelled_as_an_application_has_options():
    numbers = {n: {"x": {"overflow": share}} for n, share in (("a", 0.1), ("b", 0), ("c", 0.3))}
    numbers["a"]["x"]["underflow"], numbers["b"]["w"] = 0.5, {"update_ratio": 1.0}
    found = find(numbers, dict.fromkeys("abc", Layer("delayed", "hybrid")))
    assert [(f.field, f.operand, f.above, f.layers) for f in found] == [
        ("overflow", "x", True, ("c", "a")),  # the worst first
        ("underflow", "x", True, ("a",)),
        ("update_ratio", "w", True, ("b",)),
    ]

    def spell(name, value):
        return f"<{name} {value}>"

    assert [f.text(spell).partition(". Remedy: ")[2] for f in found] == [
        "raise <fp8_margin None> by one, or use <fp8_recipe current>.",
        "use <fp8_recipe blockwise>, a scale for each 128 elements, or <skip a>.",
        "lower <lr None>, or <warm_up None>, unless the loss falls as it should.",
    ]
    assert found[0].text(spell).startswith("c (and 1 more layers): 30.000% of the input is clipped")


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_sampled_snr_is_the_codes(fmt):
    model, _ = make("O0", fp8_format=fmt.name)
    x = torch.randn(32, 64)
    with Monitor(model) as monitor:
        backward(model, x)
        numbers = monitor.read()["0"]["x"]
    codes, scale = quantize_tensor(x, fmt)
    noise = x.double() - codes.double() * scale.double()
    snr = 10 * (x.double().square().sum() / noise.square().sum()).log10().item()
    assert numbers["snr_db"] == pytest.approx(snr, rel=1e-6)


# --- writers


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_sample_is_written_once(tmp_path):
    model, optimizer = make()
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with Monitor(model, optimizer, every=3, to=[path, str(other)]) as monitor:
        for number in range(8):
            step(model, optimizer)
            assert number < 1 or len(lines(path)) == (number + 2) // 3
        metrics = monitor.metrics()
    assert [line["step"] for line in lines(path)] == [0, 3, 6]
    last = lines(path)[-1]
    assert last.keys() == {"step", "time", *metrics}
    assert {name: last[name] for name in metrics} == metrics
    assert [line["step"] for line in lines(other)] == [0, 3, 6]


def test_a_sample_of_micro_batches_is_written_with_its_step(tmp_path):
    model, optimizer = make()
    path = tmp_path / "log.jsonl"
    with Monitor(model, optimizer, every=4, to=path.as_posix()):
        for _ in range(2):
            for _ in range(4):
                backward(model)
            optimizer.step()
            optimizer.zero_grad()
    assert [(line["step"], "fp8/update_ratio" in line) for line in lines(path)] == [
        (0, True),
        (4, True),
    ]


def test_json_has_null_where_a_number_is_not_finite(tmp_path):
    model, _ = make("O0")
    with Monitor(model) as monitor:
        monitor.log(tmp_path / "none")
        model(torch.full((4, 64), NAN))
        monitor.log(tmp_path / "log")
    assert not (tmp_path / "none").exists()
    (line,) = lines(tmp_path / "log")
    assert line["fp8/fwd_scale"] is None
    assert line["fp8/0/x_nonfinite"] == 4 * 64


def test_tensorboard_has_every_metric(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = make()
    with SummaryWriter(tmp_path) as writer, Monitor(model, optimizer, 2, to=[writer]) as monitor:
        for _ in range(3):
            step(model, optimizer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == monitor.metrics().keys()
    (first, last) = events.Scalars("fp8/update_ratio")
    assert (first.step, last.step) == (0, 2)
    assert last.value == pytest.approx(monitor.metrics()["fp8/update_ratio"])


def test_wandb_gets_a_row_with_the_sampled_step(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    model, optimizer = make()
    run = wandb.init(mode="offline", dir=tmp_path, project="test")
    with Monitor(model, optimizer, to=[run]) as monitor:
        step(model, optimizer)
    summary = dict(run.summary)
    run.finish()
    assert summary["fp8/step"] == 0
    assert summary["fp8/update_ratio"] == monitor.metrics()["fp8/update_ratio"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_is_a_warning_and_training_goes_on(tmp_path):
    model, optimizer = make()
    (tmp_path / "log").symlink_to("/dev/full")
    files = [tmp_path / "log", tmp_path / "other"]
    said = pytest.warns(Fp8StackWarning, match="cannot write to .*log: No space left on device")
    with Monitor(model, optimizer, every=1, to=files), said:
        train(model, optimizer, 3)
    assert len(lines(tmp_path / "other")) == 3


def test_refuses_what_cannot_be_written_to(tmp_path):
    model, _ = make()
    for path in (tmp_path, tmp_path / "no" / "log"):  # not at the first sample
        with pytest.raises(ConfigError, match=r"cannot write to .* a folder that is there"):
            Monitor(model, to=path)
    with pytest.raises(ConfigError, match="cannot write to 5"):
        Monitor(model, to=[5])
    # whose log(level, text) is another
    with pytest.raises(ConfigError, match="cannot write to <Logger"):
        Monitor(model, to=logging.getLogger("x"))
    with Monitor(model) as monitor, pytest.raises(ConfigError, match="cannot write to None"):
        monitor.log(None)
