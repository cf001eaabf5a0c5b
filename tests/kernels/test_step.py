"""Optimizer steps: float32 formats against torch in float64, what skipping and zeros do, and what masters promise.

On a CPU the reference steps, on a GPU the Triton kernel as it is by default: with approximate reciprocals and roots.
"""

import math

import pytest
import torch
from helpers import BF16, FP16, STEP_CASES, Step, StepCase, assert_same_bits, bits, make_hyper

from fp8stack.kernels.reference.fp8 import noise
from fp8stack.kernels.reference.master import split
from fp8stack.kernels.reference.step_scalars import seed_of

EPS = 1e-8
ALL = pytest.mark.parametrize("case", STEP_CASES, ids=str)


def torch_step(cls, weight, grads, moments=None, step=0, **options):
    """Run torch's own optimizer in float64 from the given state over `grads`; return weight and moments."""
    parameter = torch.nn.Parameter(weight.double().cpu().clone())
    optimizer = cls([parameter], foreach=False, **options)
    if moments is not None:
        m, v = (x.double().cpu().clone() for x in moments)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": v
        }  # fmt: skip
    for grad in grads:
        parameter.grad = grad.double().cpu()
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


# --- float32 formats: torch's own numbers


@pytest.mark.parametrize(
    ("coupled", "weight_decay"), [(False, 0.1), (False, 0.0), (True, 0.1), (True, 0.0)]
)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_adam_in_float32_is_torchs_up_to_rounding(coupled, weight_decay, betas, maximize, device):
    """Each step rounds a handful of times: 2^-21 of the weight and of the learning rate a step covers them."""
    lr, x = 1e-2, Step(StepCase(coupled=coupled), (64, 100), device).zero_states()
    start, grads = x.weight.clone(), torch.randn(10, 64, 100)
    cls = torch.optim.Adam if coupled else torch.optim.AdamW
    options = {"lr": lr, "betas": betas, "eps": EPS, "weight_decay": weight_decay}
    decay = {"coupled" if coupled else "decay": weight_decay}
    for step, grad in enumerate(grads, 1):
        x.set(grad=grad)
        x.step(make_hyper("adam", step, lr, betas, grad_mul=-1.0 if maximize else 1.0, **decay))
        if step in (1, 2, 10):
            weight, m, v = torch_step(cls, start, grads[:step], maximize=maximize, **options)
            bound = step * 2.0**-21 * (weight.abs() + lr)
            assert ((x.weight.cpu() - weight).abs() <= bound).all(), f"step {step}"
            assert ((x.m.cpu() - m).abs() <= step * 2.0**-22).all()
            assert ((x.v.cpu().double().sqrt() - v.sqrt()).abs() <= step * 2.0**-22).all()


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_sgd_with_a_float32_buffer_is_torchs_up_to_rounding(
    momentum, dampening, nesterov, weight_decay, maximize, device
):
    algorithm = "nesterov" if nesterov else "sgd"
    case = StepCase(algorithm, "fp32" if momentum else "none", coupled=True)
    x = Step(case, (20, 100), device).zero_states()
    parameter = torch.nn.Parameter(x.weight.double().cpu())
    exact = torch.optim.SGD(
        [parameter], lr=0.1, momentum=momentum, dampening=dampening, nesterov=nesterov,
        weight_decay=weight_decay, maximize=maximize, foreach=False,
    )  # fmt: skip
    for step in range(1, 9):
        grad = torch.randn(20, 100)
        hyper = make_hyper(
            algorithm, step, 0.1, (momentum, 0), coupled=weight_decay,
            grad_mul=-1.0 if maximize else 1.0, gain=1.0 if step == 1 else 1 - dampening,
        )  # fmt: skip
        x.set(grad=grad).step(hyper)
        parameter.grad = grad.double()
        exact.step()
        bound = step * 2.0**-22 * (parameter.detach().abs() + 1)
        assert ((x.weight.cpu() - parameter.detach()).abs() <= bound).all(), f"step {step}"
    if momentum:
        expected = exact.state[parameter]["momentum_buffer"]
        assert ((x.m.cpu() - expected).abs() <= 8 * 2.0**-22 * (expected.abs() + 1)).all()
    else:
        assert x.m is None


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.5)], ids=str)
def test_lion_in_float32_follows_its_recurrence(betas, weight_decay, device):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", program 1, in float64."""
    (beta1, beta2), lr = betas, 1e-2
    x = Step(StepCase("lion"), (20, 100), device).zero_states()
    w, m = x.weight.double().cpu(), torch.zeros(20, 100, dtype=torch.float64)
    for step in range(1, 11):
        grad = torch.randn(20, 100)
        grad[0] = 0  # its sign is 0, until m has one
        x.set(grad=grad).step(make_hyper("lion", step, lr, betas, decay=weight_decay))
        w = w - lr * weight_decay * w - lr * (beta1 * m + (1 - beta1) * grad.double()).sign()
        m = beta2 * m + (1 - beta2) * grad.double()
        assert ((x.weight.cpu() - w).abs() <= step * 2.0**-22 * (w.abs() + lr)).all()
        assert ((x.m.cpu() - m).abs() <= step * 2.0**-22).all()


@pytest.mark.parametrize("beta2", [0.95, 1.0, 0.0], ids=["nesterov", "momentum", "gradient"])
@pytest.mark.parametrize("momentum", [0.95, 0.5, 0.0])
def test_muon_turns_the_weight_into_its_direction(momentum, beta2, device):
    """torch.optim.Muon's momentum, in float64. Neither the old weight nor learning rate, decay or epsilon counts."""
    x = Step(StepCase("muon"), (20, 100), device).zero_states()
    m = torch.zeros(20, 100, dtype=torch.float64)
    for step in range(1, 11):
        grad = torch.randn(20, 100)
        x.set(grad=grad, weight=torch.full((20, 100), math.nan if step % 2 else 7.0))
        betas = (momentum, beta2)
        x.step(make_hyper("muon", step, 10.0**step, betas, eps=1.0 * step, decay=0.5))
        m = momentum * m + (1 - momentum) * grad.double()
        direction = beta2 * m + (1 - beta2) * grad.double()
        bound = step * 2.0**-22 * (grad.abs() + 1)
        assert ((x.weight.cpu() - direction).abs() <= bound).all(), f"step {step}"
        assert ((x.m.cpu() - m).abs() <= bound).all(), f"step {step}"
    assert x.v is None


@pytest.mark.parametrize("states", ["8bit", "fp32"])
def test_muons_direction_is_rounded_to_the_weights_dtype_once(states, device):
    """From the new momentum as it was before it was quantized."""
    wide = Step(StepCase("muon", states, "keep", "blocks"), (5, 200), device)
    narrow = Step(StepCase("muon", states, "keep", "blocks", weight=BF16), (5, 200), device)
    narrow.tensors = wide.copy(device).tensors._replace(weight=narrow.weight)
    direction = 0.95 * (0.95 * wide.moments[0] + 0.05 * wide.gradient) + 0.05 * wide.gradient
    for x in (wide, narrow):
        x.step(make_hyper("muon", 3, betas=(0.95, 0.95)))
    assert ((wide.weight - direction).abs() <= 2.0**-20 * (direction.abs() + 0.1)).all()
    assert_same_bits(narrow.weight, wide.weight.bfloat16())
    assert_same_bits(narrow.m, wide.m)


@pytest.mark.parametrize(
    "shape", [(), (7,), (0, 4), (5, 200), (3, 129), (17, 256), (2, 3, 64)], ids=str
)
@pytest.mark.parametrize(
    ("states", "of_m", "of_root"),  # the largest error of one rounding, in the largest of the block
    [("8bit", 1 / 31, 1 / 31.5), ("fp8", 1 / 14, 1 / 14), ("4bit", 1 / 31, 1 / 3), ("fp32", 1e-6, 1e-6)],
)  # fmt: skip
def test_any_shape_steps(shape, states, of_m, of_root, device):
    x = Step(StepCase("adam", states, "split24", "blocks"), shape, device)
    before, moments = x.value, x.moments
    weight, m, v = torch_step(
        torch.optim.AdamW, before, [x.gradient], moments, 2, lr=1e-2, weight_decay=0.0
    )
    x.step(make_hyper(step=3, lr=1e-2))
    assert x.weight.shape == shape
    assert ((x.value.cpu() - weight).abs() <= weight.abs() * 2.0**-15 + 2.0**-20).all()
    new_m, new_v = (t.cpu() for t in x.moments)
    if m.numel():
        assert ((new_m - m).abs() <= m.abs().max() * of_m * 1.001).all()
        assert ((new_v.sqrt() - v.sqrt()).abs() <= v.sqrt().max() * of_root * 1.001).all()


# --- skipping and zeros


@ALL
def test_skipped_step_changes_no_bit(case, device):
    x = Step(case, (5, 200), device)
    (x.grad if x.grad_block_scale is None else x.grad_block_scale).view(-1)[1:2].fill_(math.nan)
    before = x.written()
    options = {"step": 4, "lr": 0.1, "decay": 0.1, "coupled": 0.1}
    x.step(make_hyper(case.algorithm, apply=0.0, **options))
    x.assert_same(before)
    x.step(make_hyper(case.algorithm, apply=1.0, **options))
    for name, value in before.items():
        assert not torch.equal(bits(getattr(x, name)), bits(value)), f"{name} was not updated"


@pytest.mark.parametrize("states", ["fp32", "8bit", "fp8", "4bit", "bf16", "fp8-lm"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("algorithm", ["adam", "sgd", "nesterov", "lion"])
def test_zero_gradient_from_zero_state_moves_weights_by_decay_only(
    states, weight_decay, algorithm, device
):
    x = Step(StepCase(algorithm, states), (5, 200), device).zero_states()
    x.weight[0, :3] = torch.tensor([0.0, -0.0, 1e-38])
    x.grad.zero_()
    hyper = make_hyper(algorithm, lr=0.1, decay=weight_decay, eps=0.0)
    expected = x.weight * hyper[1].to(device)
    x.step(hyper)
    assert_same_bits(x.weight, expected)
    assert all(not t.any() for t in x.moments if t is not None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("states", ["8bit", "fp8", "4bit"])
def test_non_finite_gradient_that_is_applied_poisons_one_block_of_state(bad, states, device):
    x = Step(StepCase("adam", states, "split24"), (4, 256), device)
    x.grad[2, 5] = bad
    x.step(make_hyper())
    for scale in (x.m_scale, x.v_scale):
        assert scale.isnan().nonzero().tolist() == [[2, 0]]
    assert (~x.value.isfinite()).nonzero().tolist() == [[2, 5]]


SHARDED = [c for c in STEP_CASES if "tensor" not in c.kind]


@pytest.mark.parametrize("case", SHARDED, ids=str)
@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 7), slice(6, 7), slice(3, 3)], ids=str)
def test_step_on_a_shard_of_rows_is_the_shard_of_the_step(rows, case, device):
    """Noise belongs to an element's place in the whole, which the seed of a part says."""
    full = Step(case, (7, 200), device)
    shard = full.copy(device)
    shard.tensors = type(full.tensors)(*(t if t is None else t[rows].clone() for t in full.tensors))
    for x, first in ((full, 0), (shard, rows.start * 200)):
        x.step(make_hyper(case.algorithm, step=2, lr=0.1, coupled=0.1, seed=seed_of(3, first)))
    shard.assert_same({name: value[rows] for name, value in full.written().items()})


# --- masters


@pytest.mark.parametrize(
    ("master", "error"), [("split24", 2.0**-19), ("split32", 2.0**-22), ("fp32", 2.0**-22)]
)
def test_master_accumulates_what_bfloat16_alone_would_drop(master, error, device):
    """Steps of 1e-4 on weights of 1: a bfloat16 has steps of 2^-8 there and stays where it is."""
    with_master = Step(StepCase(master=master), (4, 256), device)
    without = Step(StepCase(weight=BF16), (4, 256), device)
    for x in (with_master, without):
        x.zero_states().set(weight=torch.ones(4, 256), grad=torch.ones(4, 256))
        for step in range(1, 101):
            x.step(make_hyper(step=step, lr=1e-4))
    assert without.weight.eq(1).all()
    assert (with_master.value - 0.99).abs().max() < 100 * error
    assert with_master.weight.eq(torch.tensor(0.99).bfloat16().item()).all()


def test_bfloat16_weight_without_a_master_moves_by_the_right_amount_on_average(device):
    """Each of the 100 steps leaves a weight where it is or moves it by 2^-8; 40000 of them move by 0.01 on average."""
    x = Step(StepCase(master="none"), (200, 200), device).zero_states()
    x.set(weight=torch.full((200, 200), 0.9), grad=torch.ones(200, 200))
    start = x.weight.double()
    for step in range(1, 101):
        before = x.weight.float()
        x.step(make_hyper(step=step, lr=1e-4))
        assert (x.weight.float() - before).abs().max() <= 2.0**-8
    moved = x.weight.double() - start
    deviation = (
        2.0**-8 * (0.01 * 2**8) ** 0.5
    )  # of a sum of 100 rare steps that know nothing of each other
    assert (moved.mean() + 0.01).abs() < 5 * deviation / 200
    assert 0 < moved.std() < 0.5 * deviation  # but they come at even intervals


@pytest.mark.parametrize(
    ("master", "dtype"),
    [("split24", BF16), ("split32", BF16), ("fp32", BF16), ("fp32", FP16), ("fp16", BF16)],
    ids=["split24", "split32", "fp32", "fp32-fp16", "fp16"],
)
def test_a_master_steps_as_its_float32_value_and_is_rounded_into_the_live_weight(
    master, dtype, device
):
    x = Step(StepCase(master=master, weight=dtype), (5, 200), device)
    plain = Step(StepCase(), (5, 200), device)
    plain.set(weight=x.value.cpu(), **{n: getattr(x, n).cpu() for n in ("grad", "m", "v")})
    hyper = make_hyper(step=2, lr=0.1, decay=0.1, grad_mul=0.7)
    for each in (x, plain):
        each.step(hyper)
    weight = plain.weight
    if master == "fp16":
        kept = x.master.float() * x.master_scale
        assert (kept - weight).abs().max() <= weight.abs().max() * 2.0**-11
        weight = kept
    elif master == "fp32":
        assert_same_bits(x.master, weight)
    else:
        random = noise(weight.shape, *hyper[11:13].view(torch.int32).to(device))
        assert_same_bits((x.weight, x.master), split(weight, x.master.dtype, random))
        return
    assert_same_bits(x.weight, weight.to(dtype))
    assert_same_bits(x.value, weight)


@pytest.mark.parametrize("master", ["split24", "split32", "fp32", "fp16"])
def test_weight_that_somebody_wrote_counts_more_than_its_master(master, device):
    """A row set to zero, a row set to one: the step starts from there, within half a step of the weight."""
    x = Step(StepCase(master=master), (4, 200), device).zero_states()
    x.weight[1] = 0
    x.weight[2] = 1
    x.grad.fill_(0.0)
    x.step(make_hyper(lr=0.1))
    assert x.value[1].abs().max() < 2.0**-130
    assert (x.value[2] - 1).abs().max() <= 2.0**-8
    x.grad.fill_(1.0)
    x.zero_states().step(make_hyper(lr=0.25))
    assert (x.value[1] + 0.25).abs().max() < 1e-3
    assert (x.value[2] - 0.75).abs().max() < 2.0**-7
