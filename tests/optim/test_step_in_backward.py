"""Gradient release: the same steps without resident gradients, and a clear refusal of what it cannot do."""

import pytest
import torch
from helpers import TinyLM, assert_same_bits, batch, build, snapshot, train
from ranks import run_ranks
from torch import nn

import fp8stack
from fp8stack.errors import ConfigError, GradientError, ModelError
from fp8stack.optim import SGD, AdamW, Lion


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_stepping_in_backward_is_stepping_afterwards(kind, device):
    results = []
    for release in (False, True):
        model, optimizer = build(device=device, dtype=torch.bfloat16, optimizer=kind)
        if release:
            optimizer.step_in_backward()
        for step in range(4):
            loss = model(*batch(step, device))
            loss.backward()
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(list(model.parameters()), optimizer))
    assert_same_bits(*results)


def test_initialize_releases_gradients_and_restore_ends_it(device):
    model, optimizer = build("O2", device, tied=True, step_in_backward=True)
    report = fp8stack.get_report(model)
    assert report.bytes_per_parameter < 5.1
    assert report.gradients == "used in backward and freed"
    losses = train(model, optimizer, 12, device=device)
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is None for p in model.parameters())
    model, optimizer = fp8stack.restore(model, optimizer)
    assert type(optimizer) is torch.optim.AdamW
    model(*batch(0, device)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_handle_that_is_removed_ends_its_release_and_twice_no_other():
    p = nn.Parameter(torch.ones(64, 128))
    optimizer = AdamW([p])
    handle = optimizer.step_in_backward()
    handle.remove()
    assert optimizer.release is None
    p.sum().backward()
    assert p.grad is not None
    optimizer.zero_grad()
    other = optimizer.step_in_backward()
    handle.remove()
    assert optimizer.release is other
    for _ in range(2):
        p.sum().backward()
        assert p.grad is None
        optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_a_second_backward_before_the_step_is_refused():
    model, optimizer = build(optimizer=AdamW)
    optimizer.step_in_backward()
    model(*batch(0)).backward()
    with pytest.raises(GradientError, match=r"second gradient before optimizer\.step"):
        model(*batch(1)).backward()


def test_a_bad_gradient_skips_its_own_parameter():
    a, b = (nn.Parameter(torch.ones(64, 128)) for _ in range(2))
    optimizer = AdamW([a, b], lr=0.1)
    optimizer.step_in_backward()
    (a.sum() + (b * torch.inf).sum()).backward()
    assert a.ne(1).all()
    assert b.eq(1).all()
    assert float(optimizer.skipped_steps) == 1


def test_a_scaled_loss_is_refused():
    p = nn.Parameter(torch.ones(64, 128))
    optimizer = AdamW([p])
    optimizer.step_in_backward()
    p.sum().backward()
    optimizer.grad_scale = torch.tensor(8.0)
    with pytest.raises(ConfigError, match="scaled by a GradScaler"):
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options", "level", "error", "match"),
    [
        (AdamW, {"max_grad_norm": 1.0}, "O2", ConfigError, "no norm to clip by"),
        (torch.optim.AdamW, {}, "O0", ConfigError, "yours is left as it is"),
        (torch.optim.Adagrad, {}, "O1", ModelError, "Adagrad does not go with step_in_backward"),
    ],
)
def test_what_needs_all_gradients_is_refused_at_the_call(kind, options, level, error, match):
    model = TinyLM()
    optimizer = kind(model.parameters(), **options)
    with pytest.raises(error, match=match):
        fp8stack.initialize(model, optimizer, level, step_in_backward=True)
    if kind is AdamW:
        with pytest.raises(error, match=match):
            optimizer.step_in_backward()
    assert type(model.up) is nn.Linear


def ask_for_release(rank):
    with pytest.raises(ConfigError, match="does not go with several processes"):
        build("O2", step_in_backward=True)


def test_several_ranks_are_refused():
    run_ranks(ask_for_release, 2)
