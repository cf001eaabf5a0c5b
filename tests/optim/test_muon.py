"""Muon: against torch's, its kernels against the reference, its groups, and training in 8 bits."""

import pytest
import torch
from helpers import TinyLM, assert_same_bits, random_parameters, set_gradients, snapshot
from torch import nn

import fp8stack
from fp8stack.errors import ModelError
from fp8stack.optim import Muon, triton_step
from fp8stack.optim.muon import learning_rate_ratio, orthogonalize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter
torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon yet")
DEFAULTS = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
SHAPES = [(32, 160), (160, 32), (48, 48), (32, 160)]

TRITON = "fp8stack.optim.optimizer.triton_runs_on"


def matrices(shapes=SHAPES, dtype=torch.float32, device="cpu"):
    return random_parameters(shapes, device, dtype)


def move(make, shapes, device, steps):
    """Return how the weights of an optimizer move in some steps, and the optimizer."""
    parameters = matrices(shapes, device=device)
    optimizer = make(parameters)
    for step in range(steps):
        set_gradients(parameters, step)
        optimizer.step()
    starts = matrices(shapes, device=device)
    return [(p - start).detach() for p, start in zip(parameters, starts, strict=True)], optimizer


# --- the numbers


@pytest.mark.parametrize("shape", [(64, 200), (200, 64), (3, 64, 128)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape, device):
    u = torch.randn(shape, device=device).bfloat16()
    o = orthogonalize(u[None].flatten(0, -3), DEFAULTS).view(shape).float()
    values = torch.linalg.svdvals(o)
    assert values.min() > 0.4
    assert values.max() < 1.35
    # and the directions of u: U V' of its own decomposition
    left, _, right = torch.linalg.svd(u.float(), full_matrices=False)
    exact = left @ right
    cosine = (o * exact).sum() / (o.norm() * exact.norm())
    assert cosine > 0.97


def test_a_zero_matrix_has_no_direction():
    assert not orthogonalize(torch.zeros(1, 8, 16).bfloat16(), DEFAULTS).any()


@pytest.mark.parametrize(
    ("adjustment", "tall", "wide"),
    [(None, 2.0, 1.0), ("original", 2.0, 1.0), ("match_rms_adamw", 4.0, 4.0)],
)
def test_the_learning_rate_fits_the_shape(adjustment, tall, wide):
    for shape, expected in (((400, 100), tall), ((100, 400), wide)):
        ratio = learning_rate_ratio(torch.Size(shape), {"adjust_lr_fn": adjustment})
        assert ratio == pytest.approx(expected)


@torch_muon
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjustment", [None, "match_rms_adamw"])
def test_in_float32_it_is_torch_s(nesterov, adjustment, device):
    options = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjustment, "momentum": 0.9}
    ours, a = move(lambda p: Muon(p, **options, states="fp32"), SHAPES, device, 4)
    theirs, b = move(lambda p: torch.optim.Muon(p, **options), SHAPES, device, 4)
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).norm() < 0.01 * y.norm()  # bf16 products, summed in another order
    for mine, other in zip(a.state.values(), b.state.values(), strict=True):
        buffers = mine["momentum_buffer"], other["momentum_buffer"]
        assert torch.allclose(*buffers, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("states", ["8bit", "fp8"])
def test_few_bits_of_momentum_leave_the_direction(states, device):
    ((x,), _), ((y,), _) = (
        move(lambda p, s=s: Muon(p, lr=0.02, states=s), [(64, 256)], device, 10)
        for s in (states, "fp32")
    )
    limit = {"8bit": 0.999, "fp8": 0.998}[states]
    assert (x * y).sum() / (x.norm() * y.norm()) > limit


# --- kernels against the reference


@pytest.mark.parametrize(("master", "fp8"), [("split24", True), ("none", True), ("fp32", False)])
def test_launches_by_shape_equal_the_reference(master, fp8, kernel_device, monkeypatch):
    monkeypatch.setattr(triton_step, "FAST", False)
    results = []
    for on in (True, False):
        monkeypatch.setattr(TRITON, lambda device, on=on: on)
        shapes = [(8, 160), (40, 16), (24, 24), (8, 160), (130,), (2, 8, 160), (3, 50)]
        parameters = matrices(shapes, torch.bfloat16, kernel_device)
        groups = [
            {"params": parameters[:5]},
            {"params": parameters[5:6], "algorithm": "muon"},
            {"params": parameters[6:], "algorithm": "adamw", "lr": 1e-3},
        ]
        optimizer = Muon(groups, lr=0.02, min_numel=256, master=master, max_grad_norm=1.0)
        for step in range(3):
            set_gradients(parameters, step, fp8)
            if step == 1:
                parameters[1].grad = None
            optimizer.step()
        assert [float(optimizer.state[p]["step"]) for p in parameters] == [3, 2, 3, 3, 3, 3, 3]
        results.append((parameters, optimizer))
    (ours, a), (theirs, b) = results
    assert torch.allclose(a.grad_norm, b.grad_norm)
    for p, q in zip(ours, theirs, strict=True):
        # Products of a batch may be summed in another order than one by one; the momentum knows nothing of them.
        x, y = a.master_weight(p), b.master_weight(q)
        assert (x - y).norm() <= 1e-3 * y.norm(), p.shape
        for key in a.state[p].keys() - {"remainder", "master"}:
            x, y = a.state[p][key].float(), b.state[q][key].float()
            limit = 1e-5 * y.abs() + 1e-7 * y.abs().max()
            assert ((x - y).abs() > limit).float().mean() <= 1e-3, (p.shape, key)


def test_large_shapes_are_orthogonalized_in_batches(kernel_device, monkeypatch):
    monkeypatch.setattr(TRITON, lambda device: True)
    parameters = matrices([(8, 160)] * 5, torch.bfloat16, kernel_device)
    optimizer = Muon(parameters, lr=0.02, states="fp32")
    set_gradients(parameters, 0)
    for elements, batches in ((2 * 8 * 160, [2, 2, 1]), (2 * 8 * 160 - 1, [1] * 5)):
        monkeypatch.setattr(triton_step, "MATRICES", elements)
        optimizer._forget_tables()
        optimizer.step()
        ((tables,),) = optimizer._tables.values()
        assert [len(s.parameters) for s in tables.batches] == batches


@pytest.mark.parametrize("norm", [None, 1.0])
def test_gradients_that_arrive_later_join(norm, kernel_device, monkeypatch):
    """A vector of another family, whose first gradient comes when the matrix has had steps: a bad one counts too."""
    monkeypatch.setattr(TRITON, lambda device: True)
    matrix, bias = matrices([(8, 160), (40,)], torch.bfloat16, kernel_device)
    optimizer = Muon([matrix, bias], lr=0.02, max_grad_norm=norm, min_numel=256)
    set_gradients([matrix], 0)
    optimizer.step()
    before = bias.detach().clone()
    set_gradients([matrix, bias], 1)
    optimizer.step()
    assert not torch.equal(bias, before)
    before = snapshot([matrix, bias], optimizer)
    set_gradients([matrix, bias], 2)
    bias.grad[0] = torch.nan
    optimizer.step()
    assert_same_bits(snapshot([matrix, bias], optimizer), before)
    assert float(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("on", [True, False])
def test_an_empty_matrix_has_nothing_to_step(on, kernel_device, monkeypatch):
    monkeypatch.setattr(TRITON, lambda device: on)
    full, empty = matrices([(8, 160), (0, 160)], torch.bfloat16, kernel_device)
    optimizer = Muon([full, empty], lr=0.02)
    set_gradients([full, empty], 0)
    before = full.detach().clone()
    optimizer.step()
    assert not torch.equal(full, before)


def test_autocast_around_a_step_changes_nothing(kernel_device, monkeypatch):
    monkeypatch.setattr(TRITON, lambda device: True)
    results = []
    for cast in (False, True):
        parameters = matrices([(8, 160)], torch.bfloat16, kernel_device)
        optimizer = Muon(parameters, lr=0.02, min_numel=256)
        set_gradients(parameters, 0)
        with torch.autocast(kernel_device, torch.float16, enabled=cast):
            optimizer.step()
        results.append(parameters[0])
    assert torch.equal(*results)


# --- groups and options


def test_what_is_no_matrix_moves_to_a_group_of_adamw():
    shapes = [(64, 128), (128,), (8, 64, 128), (16, 3, 3, 3), (4, 4)]
    a, b, c, d, e = matrices(shapes)
    optimizer = Muon([a, b, c, d, e], lr=0.02)
    assert [g["algorithm"] for g in optimizer.param_groups] == ["muon", "adamw"]
    assert optimizer.param_groups[0]["params"] == [a, e]
    assert optimizer.param_groups[1]["params"] == [b, c, d]
    groups = [{"params": [a, c], "algorithm": "muon"}, {"params": [e], "algorithm": "adamw"}]
    optimizer = Muon(groups)
    assert [g["params"] for g in optimizer.param_groups] == [[a, c], [e]]
    set_gradients([a, c, e], 0)
    optimizer.step()
    assert set(optimizer.state[c]) == {"step", "momentum_buffer_code", "momentum_buffer_scale"}
    assert set(optimizer.state[e]) == {"step", "exp_avg", "exp_avg_sq"}


def test_named_parameters_and_generators_are_taken():
    model = TinyLM()
    optimizer = Muon(p for p in model.parameters())
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="empty"):
        Muon([])
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(matrices())})


def test_sharded_matrices_are_refused(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    p = nn.Parameter(distribute_tensor(torch.randn(64, 128), mesh, [Shard(0)]))
    p.grad = torch.ones_like(p)
    with pytest.raises(ModelError, match=r"Muon's direction depends on all of it.*adamw"):
        Muon([p]).step()
    Muon([{"params": [p], "algorithm": "adamw"}]).step()


# --- in a training run


@torch_muon
def test_initialize_converts_torch_s_muon_and_gives_it_back(device):
    torch.manual_seed(0)
    layers = nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False)
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(32, 128, device=device)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model, ours = fp8stack.initialize(model, optimizer, "O2", compute="bf16")
    assert type(ours) is Muon
    assert ours.param_groups is optimizer.param_groups
    losses = []
    for _ in range(20):
        loss = model(x).square().mean()
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    report = fp8stack.get_report(model)
    assert report.bytes_per_parameter == pytest.approx(2 + 1 + 1.03 + 1.03, abs=0.02)
    model, again = fp8stack.restore(model, ours)
    assert again is optimizer
    assert set(again.state[model[0].weight]) == {"momentum_buffer"}
    model(x).square().mean().backward()
    again.step()
