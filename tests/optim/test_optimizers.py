"""The optimizers on their own: they follow torch's, skip bad steps, and keep their promises about formats."""

import math

import pytest
import torch
from helpers import assert_same_bits
from torch import nn

from fp8stack import BlockScaledTensor
from fp8stack.errors import ConfigError, GradientError, ModelError
from fp8stack.optim import SGD, Adam, AdamW, Muon

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
    with pytest.raises(ModelError, match=r"became torch.float32 after its master"):
        optimizer.step()


THREE = "ns_coefficients must be three finite numbers"
REFUSED = [
    (AdamW, {"lr": -1}, "lr must be a finite number >= 0, got -1"),
    (AdamW, {"lr": math.nan}, "lr must be a finite number >= 0, got nan"),
    (AdamW, {"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\)"),
    (AdamW, {"eps": -1e-8}, "eps must be a finite number >= 0, got -1e-08"),
    (AdamW, {"states": "7bit"}, "states='7bit' is not a choice"),
    (AdamW, {"master": "split16"}, "master='split16' is not a choice"),
    (AdamW, {"offload": "gpu"}, "offload='gpu' is not a choice"),
    (AdamW, {"max_grad_norm": 0.0}, "max_grad_norm must be > 0"),
    (AdamW, {"group": {"states": "int8"}}, "states='int8' is not a choice"),
    (SGD, {"nesterov": True}, "nesterov needs momentum"),
    (SGD, {"momentum": -0.5}, "momentum must be a finite number >= 0"),
    (Muon, {"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
    (Muon, {"momentum": -0.1}, "momentum must be a finite number >= 0"),
    (Muon, {"ns_steps": 0}, "ns_steps must be an integer from 1 to 99, got 0"),
    (Muon, {"ns_steps": True}, "ns_steps must be an integer from 1 to 99, got True"),
    (Muon, {"ns_coefficients": (1.0, 2.0)}, THREE),
    (Muon, {"ns_coefficients": 3.0}, f"{THREE}, got 3.0"),
    (Muon, {"ns_coefficients": (math.nan, 1, 1)}, THREE),
    (Muon, {"ns_coefficients": ("a", "b", "c")}, THREE),
    (Muon, {"adjust_lr_fn": "match_rms_adam"}, "Did you mean.*match_rms_adamw"),
    (Muon, {"betas": (0.9, 1.0)}, "betas must lie"),
    (Muon, {"adamw_eps": -1.0}, "adamw_eps must be"),
    (Muon, {"group": {"algorithm": "adam"}}, "algorithm='adam' is not a choice.*adamw"),
]


@pytest.mark.parametrize(("kind", "options", "match"), REFUSED)
def test_bad_options_say_what_is_wrong(kind, options, match):
    options = dict(options)
    group = {"params": [nn.Parameter(torch.zeros(4, 4))], **options.pop("group", {})}
    with pytest.raises(ConfigError, match=match):
        kind([group], **options)
