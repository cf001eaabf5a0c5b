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
    assert (
        torch.dot(error.flatten(), moved.flatten()).abs() < 0.02 * moved.norm() ** 2
    )  # no bias along the way


def test_state_formats_follow_size_and_dimension():
    big, small = nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(8, 8))
    vector, half = (
        nn.Parameter(torch.zeros(8192)),
        nn.Parameter(torch.zeros(16, dtype=torch.bfloat16)),
    )
    optimizer = AdamW([big, small, vector, half])
    for p in (big, small, vector, half):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[big]["exp_avg_code"].dtype is torch.uint8
    assert optimizer.state[big]["exp_avg_scale"].shape == (64, 1)
    for p in (small, vector, half):
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32
    assert "master" not in optimizer.state[vector]
    assert (
        optimizer.state[half]["master"].dtype is torch.float32
    )  # a bfloat16 vector still accumulates in float32


def test_a_bfloat16_weight_without_a_master_would_not_move_where_ours_does():
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    plain = nn.Parameter(weight.detach().clone())
    optimizer = AdamW([weight], lr=1e-3, weight_decay=0.0)
    rounding = torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        weight.grad, plain.grad = torch.ones_like(weight), torch.ones_like(plain)
        optimizer.step()
        rounding.step()
    assert (plain == 1).all()
    moved = 1 - optimizer.master_weight(weight)
    torch.testing.assert_close(moved, torch.full_like(moved, 100 * 1e-3), rtol=0.01, atol=0)


def test_the_first_step_can_be_skipped_too():
    weight = nn.Parameter(torch.randn(64, 128))
    clean = nn.Parameter(weight.detach().clone())
    a, b = (
        SGD([weight], lr=0.1, momentum=0.9, dampening=0.5),
        SGD([clean], lr=0.1, momentum=0.9, dampening=0.5),
    )
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


def test_gradient_scale_invariance(device):
    """Adam divides its gradient's scale out; states in low precision must too, down to scales that fp16 cannot hold."""
    paths = []
    for scale in (1.0, 2.0**-20, 1e-6, 1e-12, 1e6):
        weight = nn.Parameter(
            torch.randn(16, 512, generator=torch.Generator().manual_seed(1)).to(device)
        )
        start = weight.detach().clone()
        optimizer = AdamW([weight], lr=1e-2, eps=0.0, weight_decay=0.0)
        generator = torch.Generator().manual_seed(2)
        for _ in range(30):
            gradient = torch.randn(16, 512, generator=generator) * torch.logspace(-3, 0, 512)
            weight.grad = BlockScaledTensor.quantize((gradient * scale).to(device))
            optimizer.step()
        paths.append(weight.detach() - start)
    assert_same_bits(paths[1], paths[0], "a power of two changes no code")
    for path in paths[2:]:  # other factors may flip a rounding of a code here and there
        assert (path - paths[0]).norm() < 0.01 * paths[0].norm()


def test_coordinates_without_gradient_move_by_decay_alone():
    weight = nn.Parameter(torch.randn(64, 128))
    start = weight.detach().clone()
    optimizer = AdamW([weight], lr=0.01, weight_decay=0.1)
    for _ in range(20):
        gradient = torch.randn(64, 128)
        gradient[:, ::2] = 0
        weight.grad = BlockScaledTensor.quantize(gradient)
        optimizer.step()
    torch.testing.assert_close(weight[:, ::2], start[:, ::2] * (1 - 0.001) ** 20, rtol=1e-5, atol=0)


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


def test_weights_version_is_bumped_so_that_autograd_notices():
    weight = nn.Parameter(torch.ones(64, 128))
    optimizer = AdamW([weight])
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_scaler_s_scale_is_divided_out_in_the_step(device):
    a, b = (nn.Parameter(torch.ones(64, 128, device=device)) for _ in range(2))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    first, second = AdamW([a], lr=0.1), AdamW([b], lr=0.1)
    for _ in range(3):
        scaler.scale((a * a).sum()).backward()
        (b * b).sum().backward()
        scaler.step(first)
        scaler.update()
        second.step()
        first.zero_grad()
        second.zero_grad()
    assert_same_bits(a, b)
    scaler.scale((a * torch.inf).sum()).backward()
    scaler.step(first)
    scaler.update()
    assert_same_bits(a, b, "a step with an infinity is skipped")
    assert scaler.get_scale() == 2.0**9


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


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_weights_in_another_memory_order_take_the_same_steps(kind, dtype, fp8, device):
    """channels_last convolutions and transposed weights: blocks are row-major, storage is what it is."""
    options = {"momentum": 0.9} if kind is SGD else {}
    start = torch.randn(32, 16, 3, 3).to(dtype)
    a = nn.Parameter(start.clone().to(device))
    b = nn.Parameter(start.clone().to(device).to(memory_format=torch.channels_last))
    first, second = kind([a], lr=0.01, **options), kind([b], lr=0.01, **options)
    for _ in range(3):
        gradient = torch.randn(32, 16, 3, 3, device=device).to(dtype)
        a.grad = gradient
        b.grad = gradient.to(memory_format=torch.channels_last)
        if fp8:
            a.grad, b.grad = BlockScaledTensor.quantize(a.grad), BlockScaledTensor.quantize(b.grad)
        first.step()
        second.step()
    assert b.is_contiguous(memory_format=torch.channels_last)
    assert_same_bits(b.detach().contiguous(), a)
    for key, value in first.state[a].items():
        assert_same_bits(second.state[b][key], value, key)


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
