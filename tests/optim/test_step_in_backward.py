"""Gradient release: the same steps without resident gradients, and a clear refusal of what it cannot do."""

import pytest
import torch
from helpers import TinyLM, assert_same_bits, batch, train
from ranks import run_ranks
from torch import nn

import fp8stack
from fp8stack.errors import ConfigError, GradientError, ModelError
from fp8stack.optim import SGD, AdamW, Lion


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_stepping_in_backward_is_stepping_afterwards(kind, device):
    torch.manual_seed(0)
    start = TinyLM().to(device).bfloat16()
    results = []
    for release in (False, True):
        model = TinyLM().to(device).bfloat16()
        model.load_state_dict(start.state_dict())
        optimizer = kind(model.parameters(), lr=1e-3)
        if release:
            optimizer.step_in_backward()
        for step in range(4):
            loss = model(*batch(step, device))
            loss.backward()
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append((model, optimizer))
    (model, optimizer), (released, other) = results
    for p, q in zip(model.parameters(), released.parameters(), strict=True):
        assert_same_bits(q, p)
        assert_same_bits(other.state[q].values(), optimizer.state[p].values())


def test_initialize_releases_gradients_and_restore_ends_it(device):
    torch.manual_seed(0)
    model = TinyLM(tied=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", step_in_backward=True)
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


def test_a_handle_that_is_removed_twice_ends_no_other():
    p = nn.Parameter(torch.ones(64, 128))
    optimizer = AdamW([p])
    handle = optimizer.step_in_backward()
    handle.remove()
    assert optimizer.release is None
    other = optimizer.step_in_backward()
    handle.remove()
    assert optimizer.release is other
    for _ in range(2):
        p.sum().backward()
        optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_a_second_backward_before_the_step_is_refused():
    model = TinyLM()
    optimizer = AdamW(model.parameters())
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
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="does not go with several processes"):
        fp8stack.initialize(model, optimizer, "O2", step_in_backward=True)


def test_several_ranks_are_refused():
    run_ranks(ask_for_release, 2)
