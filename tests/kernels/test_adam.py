"""Optimizer steps: float32 formats against torch in float64, and what 8-bit states, masters and `apply` promise."""

import math

import pytest
import torch
from helpers import assert_same_bits, bits

from fp8stack.formats import E4M3, S1E3M4, UE3M5
from fp8stack.kernels import ops
from fp8stack.kernels.reference.fp8lm import decode_tensor, encode_tensor, power_of_two_scale
from fp8stack.kernels.reference.master import join, split

EPS = 1e-8
SHAPES = pytest.mark.parametrize(
    "shape", [(), (7,), (0, 4), (5, 200), (17, 256), (2, 3, 64)], ids=str
)


class Tensors:
    """The tensors of one step: weight, master, gradient and states in the formats asked for."""

    def __init__(self, shape, device="cpu", master=None, states="float32", gradient=torch.float32):
        def random(*scale):
            return torch.randn(shape, device=device)

        self.weight, self.master, self.grad_scale, self.m_scale, self.v_scale = (
            random(),
            None,
            None,
            None,
            None,
        )
        if master == "split":
            self.weight, self.master = split(self.weight)
        elif master == "float32":
            self.master, self.weight = self.weight, self.weight.bfloat16()
        self.grad = random() * 0.1
        if gradient == "blocks":
            self.grad, self.grad_scale = ops.quantize_blocks(self.grad, E4M3)
        else:
            self.grad = self.grad.to(gradient)
        self.m, self.v = random() * 0.1, random().square() * 0.01
        if states == "8bit":
            self.m, self.m_scale = ops.quantize_blocks(self.m, S1E3M4)
            self.v, self.v_scale = ops.quantize_blocks(self.v, UE3M5)

    def zero_states(self):
        for x in (self.m, self.m_scale, self.v, self.v_scale):
            if x is not None:
                x.zero_()
        return self

    def step(self, hyper, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0, decoupled=True):
        ops.adam_step(
            self.weight, self.master, self.grad, self.grad_scale, self.m, self.m_scale, self.v, self.v_scale,
            hyper.to(self.weight.device), *betas, eps, weight_decay, decoupled,
        )  # fmt: skip
        return self

    def written(self):
        """Return copies of everything that a step writes."""
        named = {k: v for k, v in vars(self).items() if v is not None and not k.startswith("grad")}
        return {name: tensor.clone() for name, tensor in named.items()}

    @property
    def master_value(self):
        """The value that the optimizer accumulates in."""
        if self.master is None:
            return self.weight.float()
        return join(self.weight, self.master) if self.master.dtype is torch.int8 else self.master

    @property
    def moments(self):
        if self.m_scale is None:
            return self.m.float(), self.v.float()
        return (
            ops.dequantize_blocks(self.m, self.m_scale, S1E3M4),
            ops.dequantize_blocks(self.v, self.v_scale, UE3M5),
        )


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


# --- float32 states: torch's own numbers


@pytest.mark.parametrize(
    ("decoupled", "weight_decay"), [(True, 0.1), (True, 0.0), (False, 0.1), (False, 0.0)]
)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_float32_steps_are_torchs_up_to_rounding(
    decoupled, weight_decay, betas, maximize, device, adam_hyper
):
    """Each step rounds a handful of times: 2^-22 of the weight and of the learning rate a step covers them."""
    lr, x = 1e-2, Tensors((64, 100), device).zero_states()
    start, grads = x.weight.clone(), torch.randn(10, 64, 100, device=device)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {
        "lr": lr,
        "betas": betas,
        "eps": EPS,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    for step, x.grad in enumerate(grads, 1):
        sign = -1.0 if maximize else 1.0
        x.step(adam_hyper(step, lr, betas, weight_decay, sign), betas, EPS, weight_decay, decoupled)
        if step in (1, 2, 10):
            weight, m, v = torch_step(cls, start, grads[:step], **options)
            bound = step * 2.0**-22 * (weight.abs() + lr)
            assert ((x.weight.cpu() - weight).abs() <= bound).all(), f"step {step}"
            assert ((x.m.cpu() - m).abs() <= step * 2.0**-22).all()
            assert ((x.v.cpu().double().sqrt() - v.sqrt()).abs() <= step * 2.0**-22).all()


def test_gradient_multiplier_unscales_the_loss(device, adam_hyper):
    """A power of two, so that the products are exact."""
    scaled, plain = Tensors((5, 200), device), Tensors((5, 200), device)
    for name, value in plain.written().items():
        getattr(scaled, name).copy_(value)
    scaled.grad = plain.grad * 1024
    scaled.step(adam_hyper(grad_mul=2.0**-10))
    plain.step(adam_hyper())
    for name, value in plain.written().items():
        assert_same_bits(getattr(scaled, name), value, name)


@SHAPES
def test_any_shape_steps(shape, device, adam_hyper):
    x = Tensors(shape, device, "split", "8bit", "blocks")
    before, moments = x.master_value, x.moments
    gradient = ops.dequantize_blocks(x.grad, x.grad_scale, E4M3)
    x.step(adam_hyper(step=3, lr=1e-2))
    weight, m, v = torch_step(
        torch.optim.AdamW, before, [gradient], moments, 2, lr=1e-2, weight_decay=0.0
    )
    assert ((x.master_value.cpu() - weight).abs() <= weight.abs() * 2.0**-15 + 2.0**-20).all()
    new_m, new_v = (t.cpu() for t in x.moments)
    if m.numel():
        assert ((new_m - m).abs() <= m.abs().max() / 32).all()
        assert ((new_v.sqrt() - v.sqrt()).abs() <= v.sqrt().max() / 63).all()


# --- skipping and zeros


@pytest.mark.parametrize("master", [None, "split", "float32"])
@pytest.mark.parametrize("states", ["float32", "8bit"])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, "blocks"], ids=str)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_skipped_step_changes_no_bit(master, states, gradient, decoupled, device, adam_hyper):
    x = Tensors((5, 200), device, master, states, gradient)
    (x.grad if x.grad_scale is None else x.grad_scale).view(-1)[1:2].fill_(math.nan)
    before = x.written()
    hyper = {"step": 4, "lr": 0.1, "weight_decay": 0.1}
    x.step(adam_hyper(apply=0.0, **hyper), weight_decay=0.1, decoupled=decoupled)
    for name, value in before.items():
        assert_same_bits(getattr(x, name), value, name)
    x.step(adam_hyper(apply=1.0, **hyper), weight_decay=0.1, decoupled=decoupled)
    for name, value in before.items():
        assert not torch.equal(bits(getattr(x, name)), bits(value)), f"{name} was not updated"


@pytest.mark.parametrize("states", ["float32", "8bit"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_zero_gradient_from_zero_state_moves_weights_by_decay_only(
    states, weight_decay, device, adam_hyper
):
    x = Tensors((5, 200), device, states=states).zero_states()
    x.weight[0, :3] = torch.tensor([0.0, -0.0, 1e-38])
    x.grad.zero_()
    hyper = adam_hyper(1, 0.1, weight_decay=weight_decay)
    expected = x.weight * hyper[1].to(device)
    x.step(hyper, weight_decay=weight_decay)
    assert_same_bits(x.weight, expected)
    assert all(not t.any() for t in x.moments)


def test_zero_gradient_decays_the_moments(device, adam_hyper):
    x = Tensors((5, 200), device)
    x.grad.zero_()
    before = x.written()
    x.step(adam_hyper(5))
    assert_same_bits(x.m, 0.9 * before["m"])
    assert_same_bits(x.v, 0.999 * before["v"])
    assert (x.weight != before["weight"]).float().mean() > 0.9  # the momentum goes on


def test_updates_stay_bounded_while_eight_bit_moments_decay(device, adam_hyper):
    """After the last gradient m and v shrink to nothing together; neither may reach zero far before the other."""
    x = Tensors((3, 256), device, states="8bit").zero_states()
    for step in range(1, 221):
        x.grad = torch.randn_like(x.grad) if step <= 20 else torch.zeros_like(x.grad)
        before = x.weight.clone()
        x.step(adam_hyper(step, lr=1.0), eps=1e-30)
        assert ((x.weight - before).abs() <= 3.2).all(), f"step {step}"
    m, v = x.moments
    assert m.abs().max() < 1e-6
    assert v.gt(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_that_is_applied_poisons_one_block_of_state(bad, device, adam_hyper):
    x = Tensors((4, 256), device, "split", "8bit")
    x.grad[2, 5] = bad
    x.step(adam_hyper())
    for scale in (x.m_scale, x.v_scale):
        assert scale.isnan().nonzero().tolist() == [[2, 0]]
    assert (~x.master_value.isfinite()).nonzero().tolist() == [[2, 5]]


# --- 8-bit states


def gradients_over_six_decades(kind, count):
    """Yield gradients of one block whose elements have sizes from 1e-6 to 1, in random order."""
    size = torch.logspace(-6, 0, 128)[torch.randperm(128)].reshape(1, 128)
    for step in range(count):
        yield (
            size
            * {
                "constant": torch.ones(1, 128),
                "signs": torch.randn(1, 128).sign(),
                "normal": torch.randn(1, 128),
                "sparse": (torch.rand(1, 128) < 0.02).float(),
                "spike": torch.full((1, 128), 1e-3 if step % 50 else 1.0),
            }[kind]
        )


def largest_update(kind, beta2, device, adam_hyper, floor=True):
    x = Tensors((1, 128), device, states="8bit").zero_states()
    largest = 0.0
    for step, x.grad in enumerate(gradients_over_six_decades(kind, 200), 1):
        x.grad, before = x.grad.to(device), x.weight.clone()
        x.step(adam_hyper(step, lr=1.0, betas=(0.9, beta2)), (0.9, beta2), eps=1e-12)
        if not floor:
            x.v[x.v == 1] = 0
        largest = max(largest, float((x.weight - before).abs().max()))
    return largest


@pytest.mark.parametrize("kind", ["constant", "signs", "normal", "sparse", "spike"])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_block_of_six_decades_never_moves_a_weight_by_more_than_3_2_learning_rates(
    kind, beta2, device, adam_hyper
):
    """(1 - 0.9) / sqrt(1 - 0.999) = 3.16 is the most that exact Adam can do; rounding up v keeps below it."""
    assert 0.4 < largest_update(kind, beta2, device, adam_hyper) < 3.2


def test_update_would_explode_if_small_second_moments_were_rounded_to_zero(device, adam_hyper):
    assert largest_update("sparse", 0.999, device, adam_hyper, floor=False) > 1000


def test_gradient_scale_does_not_matter_to_eight_bit_states(device, adam_hyper):
    """Powers of two from 1e-9 to 1e9 change scales only; with epsilon at zero the weights come out the same."""
    grads = torch.randn(5, 4, 256, device=device)
    results = []
    for power in (-30, 0, 30):
        x = Tensors((4, 256), device, states="8bit").zero_states()
        x.weight.copy_(torch.linspace(-1, 1, 1024).reshape(4, 256))
        for step, grad in enumerate(grads, 1):
            x.grad = grad * 2.0**power
            x.step(adam_hyper(step, lr=0.1), eps=0.0)
        results.append(x)
    for x, power in ((results[0], -30), (results[2], 30)):
        for name in ("weight", "m", "v"):
            assert_same_bits(getattr(x, name), getattr(results[1], name), name)
        assert_same_bits(x.m_scale, results[1].m_scale * 2.0**power)


@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 7), slice(6, 7), slice(3, 3)], ids=str)
def test_step_on_a_shard_of_rows_is_the_shard_of_the_step(rows, device, adam_hyper):
    full = Tensors((7, 200), device, "split", "8bit", "blocks")
    shard = Tensors((0, 200), device, "split", "8bit", "blocks")
    for name, value in vars(full).items():
        setattr(shard, name, value[rows].clone())
    full.step(adam_hyper(2, lr=0.1))
    shard.step(adam_hyper(2, lr=0.1))
    for name, value in full.written().items():
        assert_same_bits(getattr(shard, name), value[rows], name)


# --- masters


def test_split_master_accumulates_what_bfloat16_alone_would_drop(device, adam_hyper):
    """Steps of 1e-4 on weights of 1: a bfloat16 has steps of 2^-8 there and stays where it is."""
    with_master = Tensors((4, 256), device, "split").zero_states()
    without = Tensors((4, 256), device).zero_states()
    for x in (with_master, without):
        x.weight = torch.ones(4, 256, device=device).bfloat16()
        x.grad = torch.ones(4, 256, device=device)
    with_master.master.zero_()
    for step in range(1, 101):
        for x in (with_master, without):
            x.step(adam_hyper(step, lr=1e-4))
    assert without.weight.eq(1).all()
    assert (with_master.master_value - 0.99).abs().max() < 100 * 2.0**-17
    assert with_master.weight.eq(torch.tensor(0.99).bfloat16().item()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_float32_master_steps_as_a_float32_weight_and_is_rounded_into_the_live_one(
    dtype, device, adam_hyper
):
    plain = Tensors((5, 200), device)
    mixed = Tensors((5, 200), device, "float32")
    for name in ("grad", "m", "v"):
        setattr(mixed, name, getattr(plain, name).clone())
    mixed.master, mixed.weight = plain.weight.clone(), plain.weight.to(dtype)
    for x in (plain, mixed):
        x.step(adam_hyper(2, lr=0.1, weight_decay=0.1), weight_decay=0.1)
    assert_same_bits(mixed.master, plain.weight)
    assert_same_bits(mixed.weight, plain.weight.to(dtype))


def test_split_master_steps_as_its_float32_value_rounded_to_24_bits(device, adam_hyper):
    halves = Tensors((5, 200), device, "split")
    whole = Tensors((5, 200), device)
    whole.weight = halves.master_value
    for name in ("grad", "m", "v"):
        setattr(whole, name, getattr(halves, name).clone())
    for x in (halves, whole):
        x.step(adam_hyper(2, lr=0.1, weight_decay=0.1), weight_decay=0.1)
    weight, remainder = split(whole.weight)
    assert_same_bits(halves.weight, weight)
    assert_same_bits(halves.master, remainder)


# --- FP8-LM: one power-of-two scale a tensor


@pytest.mark.parametrize("largest", [E4M3.max, 65504.0], ids=["e4m3", "fp16"])
def test_power_of_two_scale_is_the_smallest_that_fits(largest):
    exact = largest * torch.exp2(torch.arange(-60.0, 60.0))
    above, below = (torch.nextafter(exact, torch.tensor(end)) for end in (math.inf, 0.0))
    for amax, expected in ((exact, 1.0), (above, 2.0), (below, 1.0)):
        scale = torch.stack([power_of_two_scale(x, largest) for x in amax])
        assert_same_bits(scale, expected * torch.exp2(torch.arange(-60.0, 60.0)))
    special = torch.tensor([0.0, math.nan, math.inf])
    scales = [float(power_of_two_scale(x, largest)) for x in special]
    assert scales[0] == 1
    assert all(map(math.isnan, scales[1:]))


@pytest.mark.parametrize(
    ("dtype", "bits_kept"), [(torch.float8_e4m3fn, 3), (torch.float16, 10)], ids=["e4m3", "fp16"]
)
def test_tensor_with_a_power_of_two_scale_decodes_within_half_a_step(dtype, bits_kept):
    x = torch.cat([torch.randn(500), torch.zeros(12)]) * 1e-5
    codes, scale = encode_tensor(x, dtype)
    assert codes.dtype is dtype
    smallest = {torch.float8_e4m3fn: 2.0**-9, torch.float16: 2.0**-24}[dtype]
    bound = torch.maximum(x.abs() * 2.0 ** -(bits_kept + 1), scale * smallest / 2)
    assert ((decode_tensor(codes, scale) - x).abs() <= bound).all()
    assert decode_tensor(codes, scale)[500:].eq(0).all()
    for power in (-20, 20):
        same_codes, other_scale = encode_tensor(x * 2.0**power, dtype)
        assert_same_bits(same_codes, codes)
        assert_same_bits(other_scale, scale * 2.0**power)


class PaperState:
    """Weight, master, m and v of one tensor in the formats of FP8-LM, zero at the start."""

    def __init__(self, weight):
        self.weight = weight.bfloat16()
        self.master, self.master_scale = encode_tensor(self.weight.float(), torch.float16)
        self.m, self.m_scale = encode_tensor(torch.zeros_like(weight), E4M3.dtype)
        self.v, self.v_scale = encode_tensor(torch.zeros_like(weight), torch.float16)

    def step(self, grad, hyper, weight_decay=0.0, decoupled=True):
        ops.fp8lm_adam_step(
            self.weight, self.master, self.master_scale, grad, None, self.m, self.m_scale, self.v, self.v_scale,
            hyper.to(grad.device), 0.9, 0.999, EPS, weight_decay, decoupled,
        )  # fmt: skip


def test_steps_in_the_formats_of_fp8_lm_follow_exact_adam(device, adam_hyper):
    start = torch.randn(8, 200, device=device)
    x, lr, grads = PaperState(start), 1e-2, torch.randn(20, 8, 200, device=device)
    begin = decode_tensor(x.master, x.master_scale).double().cpu()
    for step, grad in enumerate(grads, 1):
        x.step(grad, adam_hyper(step, lr))
    weight, m, v = torch_step(torch.optim.AdamW, begin, grads, lr=lr, weight_decay=0.0)
    moved, expected = decode_tensor(x.master, x.master_scale).double().cpu() - begin, weight - begin
    cosine = torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), 0)
    assert cosine > 0.99
    assert ((decode_tensor(x.m, x.m_scale).cpu() - m).norm() < 2.0**-3 * m.norm()).all()
    assert ((decode_tensor(x.v, x.v_scale).cpu() - v).norm() < 2.0**-7 * v.norm()).all()
    live = x.weight.double().cpu() - begin
    assert (live - expected).norm() < 2.0**-2 * expected.norm()


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_skipped_step_in_the_formats_of_fp8_lm_changes_no_bit(decoupled, device, adam_hyper):
    x = PaperState(torch.randn(8, 200, device=device))
    x.step(torch.randn(8, 200, device=device), adam_hyper())
    before = {name: tensor.clone() for name, tensor in vars(x).items()}
    bad = torch.full((8, 200), math.nan, device=device)
    x.step(bad, adam_hyper(2, apply=0.0), 0.1, decoupled)
    for name, value in before.items():
        assert_same_bits(getattr(x, name), value, name)
    x.step(bad, adam_hyper(2), 0.1, decoupled)
    assert x.m_scale.isnan()
    assert x.weight.isnan().all()


# --- SGD


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_sgd_with_a_float32_buffer_is_torchs_up_to_rounding(
    momentum, dampening, nesterov, weight_decay, maximize, device
):
    lr, weight = 0.1, torch.randn(20, 100, device=device)
    parameter = torch.nn.Parameter(weight.double().cpu())
    exact = torch.optim.SGD(
        [parameter], lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov,
        weight_decay=weight_decay, maximize=maximize, foreach=False,
    )  # fmt: skip
    buffer = torch.zeros_like(weight) if momentum else None
    for step in range(1, 9):
        grad = torch.randn(20, 100, device=device)
        gain = 1.0 if step == 1 else 1 - dampening
        hyper = torch.tensor([-1.0 if maximize else 1.0, lr, gain, 1, 0, 0, 0, 0], device=device)
        ops.sgd_step(
            weight, None, grad, None, buffer, None, hyper, momentum, weight_decay, nesterov
        )
        parameter.grad = grad.double().cpu()
        exact.step()
        bound = step * 2.0**-22 * (parameter.detach().abs() + 1)
        assert ((weight.cpu() - parameter.detach()).abs() <= bound).all(), f"step {step}"
    if buffer is not None:
        expected = exact.state[parameter]["momentum_buffer"]
        assert ((buffer.cpu() - expected).abs() <= 8 * 2.0**-22 * (expected.abs() + 1)).all()


@pytest.mark.parametrize("kind", ["none", "fp32", "8bit"])
@pytest.mark.parametrize("master", [None, "split"])
def test_skipped_sgd_step_changes_no_bit(kind, master, device):
    x = Tensors((5, 200), device, master, gradient="blocks")
    buffer, buffer_scale = (None if kind == "none" else x.m), None
    if kind == "8bit":
        buffer, buffer_scale = ops.quantize_blocks(x.m, S1E3M4)
    tensors = [t for t in (x.weight, x.master, buffer, buffer_scale) if t is not None]
    before = [t.clone() for t in tensors]
    for apply in (0.0, 1.0):
        hyper = torch.tensor([1, 0.1, 1, apply, 0, 0, 0, 0], device=device)
        ops.sgd_step(
            x.weight, x.master, x.grad, x.grad_scale, buffer, buffer_scale, hyper, 0.9, 0.1, False
        )
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(bits(tensor), bits(old)) == (apply == 0)


def test_sgd_with_an_eight_bit_buffer_follows_the_exact_one(device):
    weight, grads = torch.randn(8, 200, device=device), torch.randn(20, 8, 200, device=device)
    start = weight.double().cpu()
    buffer, buffer_scale = ops.quantize_blocks(torch.zeros_like(weight), S1E3M4)
    parameter = torch.nn.Parameter(start.clone())
    exact = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    hyper = torch.tensor([1, 0.1, 1, 1, 0, 0, 0, 0], device=device)
    for grad in grads:
        ops.sgd_step(weight, None, grad, None, buffer, buffer_scale, hyper, 0.9, 0.0, False)
        parameter.grad = grad.double().cpu()
        exact.step()
    moved, expected = weight.double().cpu() - start, parameter.detach() - start
    assert (moved - expected).norm() < 2.0**-5 * expected.norm()
