"""The optimizers on their own: they follow torch's, skip bad steps, and keep their promises about formats."""

import inspect
import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from helpers import assert_same_bits, every_two
from torch import nn
from torch.optim import lr_scheduler

import fp8stack
from fp8stack import BlockScaledTensor
from fp8stack.errors import ConfigError, GradientError, ModelError
from fp8stack.optim import SGD, Adam, AdamW, Lion, Muon

PAIRS = [
    pytest.param(AdamW, torch.optim.AdamW, {"weight_decay": 0.1}, id="adamw"),
    pytest.param(Adam, torch.optim.Adam, {"weight_decay": 0.01}, id="adam"),
    pytest.param(Adam, torch.optim.Adam, {"maximize": True}, id="adam-maximize"),
    pytest.param(SGD, torch.optim.SGD, {"momentum": 0.9}, id="sgd-momentum"),
    pytest.param(SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, id="sgd-nesterov"),
    pytest.param(SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, id="sgd-dampening"),
    pytest.param(SGD, torch.optim.SGD, {"weight_decay": 0.1}, id="sgd-plain"),
]


def descend(parameter, optimizer, steps, fp8=False):
    """Minimize a noisy quadratic; noise and target are the same at every call."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(parameter.shape, generator=generator)
    for _ in range(steps):
        noise = torch.randn(parameter.shape, generator=generator)
        gradient = parameter.detach().float().cpu() - target + noise
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
        if fp8:
            parameter.grad = BlockScaledTensor.quantize(parameter.grad)
        optimizer.step()


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_float32_states_follow_torch_to_rounding(ours, theirs, options, device):
    start = torch.randn(40, 160)
    a, b = (nn.Parameter(start.clone().to(device)) for _ in range(2))
    descend(a, ours([a], lr=0.01, states="fp32", **options), 50)
    descend(b, theirs([b], lr=0.01, **options), 50)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_states_follow_torch_closely(ours, theirs, options, dtype, device):
    """8-bit states, FP8 gradients and, for bfloat16, the 24-bit master: the path taken differs by a few percent."""
    start = torch.randn(40, 160).to(dtype)
    a = nn.Parameter(start.clone().to(device))
    b = nn.Parameter(start.float().clone().to(device))
    optimizer = ours([a], lr=0.01, **options)
    descend(a, optimizer, 100, fp8=True)
    descend(b, theirs([b], lr=0.01, **options), 100)
    moved = b.detach().cpu() - start.float()
    error = optimizer.master_weight(a).cpu() - b.detach().cpu()
    assert error.norm() < 0.04 * moved.norm()
    bias = torch.dot(error.flatten(), moved.flatten())  # along the way
    assert bias.abs() < 0.02 * moved.norm() ** 2


def test_state_formats_follow_size_and_dimension():
    # of 4,096 elements in rows of 8, and of more in rows of 7
    big, small = nn.Parameter(torch.zeros(512, 8)), nn.Parameter(torch.zeros(600, 7))
    vector = nn.Parameter(torch.zeros(8192))
    half = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    optimizer = AdamW([big, small, vector, half])
    for p in (big, small, vector, half):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[big]["exp_avg_code"].dtype is torch.uint8
    assert optimizer.state[big]["exp_avg_scale"].shape == (512, 1)
    for p in (small, vector, half):
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32
    assert "master" not in optimizer.state[vector]
    # a bfloat16 vector still accumulates in float32
    assert optimizer.state[half]["master"].dtype is torch.float32


def test_the_first_step_can_be_skipped_too():
    weight = nn.Parameter(torch.randn(64, 128))
    clean = nn.Parameter(weight.detach().clone())
    a, b = (SGD([p], lr=0.1, momentum=0.9, dampening=0.5) for p in (weight, clean))
    weight.grad = torch.full_like(weight, torch.nan)
    a.step()
    for p, optimizer in ((weight, a), (clean, b)):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert_same_bits(weight, clean)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_step_never_waits_for_the_gpu(kind):
    parameters = [nn.Parameter(torch.randn(256, 256, device="cuda").bfloat16()) for _ in range(3)]
    optimizer = kind(parameters, lr=0.1, **({"momentum": 0.9} if kind is SGD else {}))
    for step in range(3):
        for p in parameters:
            p.grad = BlockScaledTensor.quantize(torch.randn_like(p))
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("states", ["8bit", "fp8", "4bit", "fp8-lm", "bf16", "fp32"])
def test_coupled_decay_of_huge_weights_is_finite_and_moves_them_by_the_learning_rate(
    states, device
):
    """The decayed weight is part of the gradient, and the square of that would be infinite."""
    p = nn.Parameter(torch.full((4, 128), 2.0**100, device=device))
    optimizer = Adam([p], lr=2.0**90, weight_decay=0.1, states=states, min_numel=1)
    for step in range(1, 4):
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert ((p - (2.0**100 - step * 2.0**90)).abs() < 0.07 * step * 2.0**90).all()


def test_a_tensor_learning_rate_and_a_changed_one_are_followed():
    a, b = (nn.Parameter(torch.ones(64, 128)) for _ in range(2))
    tensor_lr = torch.tensor(0.01)
    first, second = AdamW([a], lr=tensor_lr), AdamW([b], lr=0.01)
    for lr in (0.01, 0.005):
        tensor_lr.fill_(lr)
        second.param_groups[0]["lr"] = lr
        for p, optimizer in ((a, first), (b, second)):
            p.grad = torch.ones_like(p)
            optimizer.step()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_closures_hooks_and_groups_work_as_in_torch():
    a, b = nn.Parameter(torch.ones(64, 128)), nn.Parameter(torch.ones(64, 128))
    optimizer = AdamW([{"params": [a], "lr": 0.1}], lr=0.5)
    optimizer.add_param_group({"params": [b], "weight_decay": 0.0})
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))

    def closure():
        optimizer.zero_grad()
        loss = (a.sum() + b.sum()) * 1.0
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2 * 64 * 128
    assert called == ["pre"]
    torch.testing.assert_close(a.mean(), torch.tensor(1 - 0.1 * 0.01 - 0.1))
    torch.testing.assert_close(b.mean(), torch.tensor(0.5))


def test_bad_parameters_and_gradients_say_what_is_wrong():
    double = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    double.grad = torch.ones_like(double)
    with pytest.raises(ModelError, match="float64; AdamW takes float32, bfloat16 and float16"):
        AdamW([double]).step()
    sparse = nn.Embedding(10, 4, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match="sparse=False"):
        AdamW(sparse.parameters()).step()
    weight = nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    optimizer = AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.data, weight.grad = weight.data.float(), torch.ones(64, 128)
    with pytest.raises(ModelError, match=r"became torch.float32 of shape"):
        optimizer.step()


FINITE, BETAS = "must be a finite number >= 0", r"betas=.* must be .*in \[0, 1\)"
TWO, HUGE = "must be two numbers", 10**400
REFUSED = [
    *((AdamW, {"lr": lr}, f"lr=.* {FINITE}") for lr in (-1, math.nan, "1", None, 1j, HUGE, -HUGE, np.float32("inf"))),
    (AdamW, {"lr": torch.ones(2)}, "lr=tensor.* must be one number"),
    (AdamW, {"lr": torch.tensor(-1.0)}, f"lr=-1.0 {FINITE}"),
    *((AdamW, {"betas": betas}, BETAS) for betas in ((0.9, 1.0), (0.9, "1"), (-0.1, 0.9), (None, 0.9), (0.9, HUGE))),
    *((AdamW, {"betas": b}, TWO) for b in (None, 0.9, (), (0.9,), (0.9, 0.9, 0.9), {0.9, 0.99}, {"a": 1, "b": 2})),
    (AdamW, {"eps": -1e-8}, f"eps=-1e-08 {FINITE}"),
    (AdamW, {"weight_decay": np.float64(-1)}, f"weight_decay=.* {FINITE}"),
    (AdamW, {"maximize": "no"}, "maximize='no' is not a choice"),
    (AdamW, {"min_numel": 0.5}, "min_numel=0.5 must be an integer >= 0"),
    (AdamW, {"states": "7bit"}, "states='7bit' is not a choice"),
    (AdamW, {"master": "split16"}, "master='split16' is not a choice"),
    (AdamW, {"offload": "gpu"}, "offload='gpu' is not a choice"),
    *((AdamW, {"max_grad_norm": x}, "max_grad_norm=.* must be a number above 0") for x in (0.0, "1", math.nan, -1)),
    (AdamW, {"fused": True}, "AdamW, whose step is fused and capturable.*'fused' is not a choice"),
    (Adam, {"state": "fp8"}, "'state' is not a choice. Did you mean \"states\""),
    (AdamW, {"group": {"states": "int8"}}, "states='int8' is not a choice"),
    (AdamW, {"group": {"lr": "1e-3"}}, f"lr='1e-3' {FINITE}"),
    (SGD, {"nesterov": True}, "nesterov needs momentum"),
    (SGD, {"nesterov": torch.ones(2)}, "nesterov=.* is not a choice"),
    (SGD, {"momentum": -0.5}, f"momentum=-0.5 {FINITE}"),
    (SGD, {"dampening": "no"}, "dampening='no' must be a finite number"),
    (Muon, {"momentum": 1.0}, r"momentum=1.0 must be a finite number in \[0, 1\)"),
    (Muon, {"momentum": -0.1}, "momentum=-0.1 must be"),
    *((Muon, {"ns_steps": n}, "ns_steps=.* must be an integer from 1 to 99") for n in (0, True, 5.0, 100, HUGE)),
    *((Muon, {"ns_coefficients": x}, "must be three finite numbers") for x in ((1.0, 2.0), 3.0, None)),
    *((Muon, {"ns_coefficients": (x, 1, 1)}, "ns_coefficients=.* must be a finite number") for x in (math.nan, "a")),
    (Muon, {"adjust_lr_fn": "match_rms_adam"}, "Did you mean.*match_rms_adamw"),
    (Muon, {"betas": (0.9, 1.0)}, BETAS),
    (Muon, {"adamw_eps": -1.0}, f"adamw_eps=-1.0 {FINITE}"),
    (Muon, {"group": {"algorithm": "adam"}}, "algorithm='adam' is not a choice.*adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "match"), REFUSED)
def test_bad_options_say_what_is_wrong(kind, options, match):
    options = dict(options)
    group = {"params": [nn.Parameter(torch.zeros(4, 4))], **options.pop("group", {})}
    with pytest.raises(ConfigError, match=match):
        kind([group], **options)


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion, Muon])
def test_a_group_that_is_refused_changes_nothing(kind):
    first, second = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))
    vector = nn.Parameter(torch.zeros(8))
    optimizer = kind([first])
    twice = [second, vector, vector]
    for bad in ({"lr": None}, {"weight_decay": "x"}, {"states": 8}, {"params": twice}):
        with pytest.warns() if twice in bad.values() else nullcontext(), pytest.raises(ConfigError):
            optimizer.add_param_group({"params": [second, vector], **bad})
        assert [g["params"] for g in optimizer.param_groups] == [[first]]
    optimizer.add_param_group({"params": [second, vector]})
    for p in (first, second, vector):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(p.abs().sum() > 0 for p in (first, second, vector))


def test_a_parameter_twice_in_a_group_is_refused():
    """torch warns, and steps it twice."""
    layer = nn.Linear(8, 8, bias=False)
    p = layer.weight
    for make in (AdamW, lambda group: fp8stack.initialize(layer, torch.optim.AdamW(group))):
        with (
            pytest.warns(UserWarning, match="duplicate"),
            pytest.raises(ConfigError, match="twice"),
        ):
            make([p, p])


NUMPY = {
    AdamW: {"lr": 0.1, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25, "min_numel": 16},
    SGD: {"lr": 0.1, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.25, "maximize": True},
    Lion: {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.25},
    Muon: {"lr": 0.1, "momentum": 0.5, "eps": 0.125, "ns_steps": 3, "ns_coefficients": (3.5, -4.75, 2.0)},
}  # fmt: skip


def in_numpy(value, dtype):
    """Return numbers and tuples of them in NumPy's dtypes; these are the same in all."""
    if isinstance(value, tuple):
        return tuple(in_numpy(x, dtype) for x in value)
    return {bool: np.bool_, int: np.int64, float: dtype}[type(value)](value)


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.array])
def test_numbers_of_numpy_are_numbers(kind, dtype):
    own, results = NUMPY[kind], []
    theirs = {name: in_numpy(value, dtype) for name, value in own.items()} | {"lr": 0.1}
    for options in (own, theirs):
        p = nn.Parameter(torch.linspace(-1, 1, 64 * 96).view(64, 96))
        optimizer = kind([p], max_grad_norm=in_numpy(8.0, dtype), **options)
        for step in range(3):
            # 0.125 in all dtypes; a schedule of float32 is an array
            optimizer.param_groups[0]["lr"] = in_numpy(0.125, dtype) if options is theirs else 0.125
            p.grad = torch.linspace(-2, 1, p.numel()).view_as(p) * (step + 1)
            optimizer.step()
        results.append(p)
    assert_same_bits(*results)


# --- schedulers, which write to groups


SCHEDULERS = {
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-3, max_lr=2e-2, step_size_up=3),
    "cyclic-lr": lambda o: lr_scheduler.CyclicLR(
        o, 1e-3, 2e-2, step_size_up=3, cycle_momentum=False
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: np.float32(0.9) ** step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.PolynomialLR(o, 10)]
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}
SCHEDULED = {"AdamW": {}, "Adam": {"betas": (0.8, 0.99)}, "SGD": {"momentum": 0.8}, "Muon": {}}
KINDS = [name for name in SCHEDULED if hasattr(torch.optim, name)]


@every_two(2, scheduler=SCHEDULERS, name=KINDS, tensor_lr=[False, True])
def test_schedulers_drive_the_optimizers_as_they_drive_torchs(scheduler, name, tensor_lr):
    """Made alone, or by `initialize` before and after the scheduler: groups go through the same values."""
    kind = getattr(torch.optim, name)
    if tensor_lr and "foreach" in inspect.signature(kind).parameters:
        kind = partial(kind, foreach=False)
    ours, seen = getattr(fp8stack.optim, name), []
    for make in ("torch", "ours", "before", "after"):
        layer = nn.Linear(64, 64, bias=False)
        lr = torch.tensor(0.02) if tensor_lr else 0.02
        optimizer = (ours if make == "ours" else kind)(layer.parameters(), lr=lr, **SCHEDULED[name])
        schedule = None if make == "after" else SCHEDULERS[scheduler](optimizer)
        if make in ("before", "after"):
            layer, optimizer = fp8stack.initialize(layer, optimizer, "O2", min_numel=64)
        schedule = schedule or SCHEDULERS[scheduler](optimizer)
        values = []
        for step in range(10):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
            schedule.step(*([1.0 + step] if scheduler == "plateau" else []))
            group = optimizer.param_groups[0]
            values.append((float(group["lr"]), group.get("momentum"), group.get("betas")))
        seen.append(values)
    if name == "Muon":  # only ours has betas, which stay as they are
        assert {betas for *_, betas in seen[1]} == {(0.9, 0.95)}
        seen = [[row[:2] for row in values] for values in seen]
    assert seen[1:] == seen[:1] * 3
    assert len({row[0] for row in seen[0]}) > 1  # it does change


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        (level, kind)
        for kind in ("AdamW", "SGD", "Muon", "RMSprop", "NAdam")
        for level in ("O0", "O1", "O2")[: 2 if kind in ("RMSprop", "NAdam") else 3]
        if hasattr(torch.optim, kind)  # torch before 2.9 has no Muon
        # torch's own clipping rounds otherwise in a graph
        if torch.__version__ >= (2, 12) or (level, kind) not in {("O0", "SGD"), ("O0", "Muon")}
    ],
)
def test_a_compiled_step_and_clip_do_what_they_do_eagerly(level, kind):
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False)
        optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=1e-2)
        layer, optimizer = fp8stack.initialize(layer, optimizer, level, min_numel=64)

        def step(optimizer=optimizer, layer=layer):
            nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(step, backend="eager") if compiled else step
        for _ in range(2):
            layer(torch.randn(16, 64)).square().mean().backward()
            step()
        weights.append(layer.weight)
    torch.testing.assert_close(*weights, rtol=0, atol=0 if kind in ("SGD", "Muon") else 1e-6)
