"""What the formats of optimizer state promise: bounded updates, moments that decay, closeness to exact Adam."""

import math

import pytest
import torch
from helpers import BF16, INF, Step, StepCase, assert_same_bits, make_hyper

from fp8stack.formats import BLOCK, E4M3
from fp8stack.kernels.reference.master import split
from fp8stack.kernels.reference.power_of_two import decode_tensor, encode_tensor, power_of_two_scale

BLOCK_STATES = ["8bit", "fp8", "4bit"]


# --- bounded updates


def test_updates_stay_bounded_while_moments_decay(device):
    """After the last gradient m and v shrink to nothing together; neither may reach zero far before the other."""
    for states in BLOCK_STATES:
        x = Step(StepCase(states=states), (3, 256), device).zero_states()
        for step in range(1, 221):
            x.set(grad=torch.randn(3, 256) if step <= 20 else torch.zeros(3, 256))
            before = x.weight.clone()
            x.step(make_hyper(step=step, lr=1.0, eps=1e-30))
            assert ((x.weight - before).abs() <= 3.2).all(), f"{states}, step {step}"
        m, v = x.moments
        assert m.abs().max() < 1e-6
        assert v.gt(0).all()


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


def largest_update(states, kind, beta2, device, floor=True):
    x = Step(StepCase(states=states), (1, 128), device).zero_states()
    largest = 0.0
    for step, grad in enumerate(gradients_over_six_decades(kind, 110), 1):
        x.set(grad=grad)
        before = x.weight.clone()
        x.step(make_hyper(step=step, lr=1.0, betas=(0.9, beta2), eps=1e-12))
        if not floor:
            raw = x.v.view(torch.uint8)
            raw[raw == 1] = 0
        largest = max(largest, float((x.weight - before).abs().max()))
    return largest


@pytest.mark.parametrize("kind", ["constant", "signs", "normal", "sparse", "spike"])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("states", BLOCK_STATES)
def test_block_of_six_decades_never_moves_a_weight_by_more_than_3_2_learning_rates(
    states, kind, beta2, device
):
    """(1 - 0.9) / sqrt(1 - 0.999) = 3.16 is the most that exact Adam can do; rounding up v keeps below it."""
    assert 0.4 < largest_update(states, kind, beta2, device) < 3.2


def test_update_would_explode_if_small_second_moments_were_rounded_to_zero(device):
    assert largest_update("8bit", "sparse", 0.999, device, floor=False) > 1000


@pytest.mark.parametrize("states", BLOCK_STATES)
@pytest.mark.parametrize("power", [-30, 30])
def test_gradient_scale_does_not_matter(states, power, device):
    """Powers of two from 1e-9 to 1e9 change scales only; with epsilon at zero the weights come out the same."""
    plain = Step(StepCase(states=states), (4, 256), device).zero_states()
    scaled = plain.copy(device)
    for step in range(1, 6):
        grad = torch.randn(4, 256)
        hyper = make_hyper(step=step, lr=0.1, eps=0.0)
        plain.set(grad=grad).step(hyper)
        scaled.set(grad=grad * 2.0**power).step(hyper)
    for name in ("weight", "m", "v"):
        assert_same_bits(getattr(scaled, name), getattr(plain, name), name)
    assert_same_bits(scaled.m_scale, plain.m_scale * 2.0**power)
    assert_same_bits(scaled.v_scale, plain.v_scale * 2.0**power)


# --- moments that decay


def decayed_second_moment(case, device, steps=500, beta2=0.999):
    """Return v after `steps` without gradient over what it was, per element.

    The first element of each block goes on getting its gradient, so that no scale decays with the others.
    """
    x = Step(case, (32, 256), device)
    v = torch.rand(32, 256) * 0.8 + 0.1
    v[:, ::BLOCK] = 1.0
    grad = torch.zeros(32, 256)
    grad[:, ::BLOCK] = 1.0
    x.set(v=v, grad=grad)
    start = x.moments[1].clone()
    for step in range(1, steps + 1):
        x.step(make_hyper(step=step, lr=1e-3, betas=(0.9, beta2)))
    quiet = torch.arange(256) % BLOCK > 0
    return (x.moments[1] / start).cpu()[:, quiet]


@pytest.mark.parametrize(
    ("states", "of_root", "of_v"),
    [
        ("8bit", 0.005, 0.01), ("fp8", 0.02, 0.03), ("4bit", 0.02, 0.1), ("fp8-lm", 0.005, 0.005),
        ("bf16", 0.01, 0.01), ("fp32", 1e-4, 1e-4),
    ],
)  # fmt: skip
def test_dithered_second_moment_decays_as_it_should(states, of_root, of_v, device):
    """Over 500 steps by 0.999^500 = 0.61. What ue3m1 keeps right is the mean of the root; squares come out larger."""
    ratio, exact = decayed_second_moment(StepCase(states=states), device), 0.999**500
    assert ratio.sqrt().mean().item() == pytest.approx(exact**0.5, rel=of_root)
    assert ratio.mean().item() == pytest.approx(exact, rel=of_v)


def test_second_moment_rounded_to_nearest_stays_where_it_is(device):
    """Which is why the formats above are not rounded to nearest; torch's own in bfloat16 are."""
    case = StepCase(states="keep", weight=BF16)
    assert (decayed_second_moment(case, device, steps=50) > 0.99).float().mean() > 0.9
    assert decayed_second_moment(case, device, steps=50, beta2=0.95).mean() < 0.2


# --- moments and masters that follow


@pytest.mark.parametrize(
    ("states", "off"), [("8bit", 0.03), ("fp8", 0.08), ("4bit", 0.25), ("fp8-lm", 0.03), ("bf16", 0.03)]
)  # fmt: skip
def test_updates_follow_gradients_that_grow_or_shrink_beside_larger_ones(states, off, device):
    """To nearest, an element whose gradient grows moves three times too far for thousands of steps."""
    x = Step(StepCase(states=states), (16, 128), device).zero_states()
    m = v = torch.zeros(16, 128, dtype=torch.float64)
    start, exact = x.weight.cpu().double(), 0.0
    for step in range(1, 1001):
        grad = torch.ones(16, 128)
        grad[:, 1::4] = 0.1 if step <= 300 else 0.5
        grad[:, 2::4] = 1.0 if step <= 300 else 0.05
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.double().square()
        if step <= 300:
            start = x.weight.cpu().double()
        else:
            exact = exact + (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        x.set(grad=grad).step(make_hyper(step=step, lr=1e-3))
    moved = (start - x.weight.cpu().double()) / 1e-3
    for kind in range(3):
        ratio = moved[:, kind::4].mean() / exact[:, kind::4].mean()
        assert ratio.item() == pytest.approx(1, abs=off), kind
    assert (moved - exact).norm() < 1.5 * off * exact.norm()


@pytest.mark.parametrize(("master", "off"), [("split24", 0.05), ("split32", 1e-3)])
@pytest.mark.parametrize("steady", [True, False])
def test_master_follows_a_learning_rate_of_a_millionth(master, off, steady, device):
    """After 200 steps; to nearest, 24 bits lose 40 % of the way and more."""
    x = Step(StepCase(master=master), (32, 128), device).zero_states()
    exact = Step(StepCase(), (32, 128), device).zero_states()
    start = (torch.randn(32, 128) * 0.2).bfloat16().float()
    for t in (x, exact):
        t.set(weight=start)
    gradients = torch.randn(16, 32, 128) * (0.1 if steady else 1) + torch.randn(32, 128).sign()
    for step in range(1, 201):
        for t in (x, exact):
            t.set(grad=gradients[step % 16]).step(make_hyper(step=step, lr=1e-6))
    path = exact.weight.double() - start.to(device)
    assert (x.value.double() - start.to(device) - path).norm() < off * path.norm()
    assert_same_bits(x.weight, split(x.value, x.master.dtype)[0])


# --- against exact Adam


@pytest.mark.parametrize(
    ("algorithm", "states", "master", "of_path", "of_m", "of_root"),  # relative, about a third above what they are
    [
        ("adam", "8bit", "keep", 0.03, 0.035, 0.025),
        ("adam", "fp8", "keep", 0.07, 0.075, 0.085),
        ("adam", "4bit", "keep", 0.23, 0.035, 0.36),
        ("adam", "bf16", "keep", 0.0035, 0.005, 0.005),
        # Few large elements make up the norm of m, wherever they lie between powers of two: a step of E4M3 is 2^-3 of
        # them at most. Dither errs by sqrt(1/6) of a step, the root of the mean of f (1 - f), and m adds errors up by
        # 0.9^k: by sqrt(1/6 / (1 - 0.9^2)) / 8 = 0.117 of m, were they independent.
        ("adam", "fp8-lm", "keep", 0.04, 0.117, 0.0005),
        ("adam", "fp8-lm", "fp16", 0.06, 0.117, 0.0005),
        ("sgd", "8bit", "keep", 0.03, 0.04, None),
        ("nesterov", "8bit", "keep", 0.03, 0.04, None),
        ("sgd", "fp8", "keep", 0.06, 0.08, None),
        ("sgd", "fp8-lm", "keep", 0.06, 0.117, None),
        ("lion", "8bit", "keep", 0.2, 0.1, None),
    ],
)  # fmt: skip
def test_fifty_steps_follow_those_of_float32(
    algorithm, states, master, of_path, of_m, of_root, device
):
    """Gradients of sizes over an order of magnitude either way within each block, with a mean to follow."""
    size = torch.exp(torch.randn(16, 200))
    x = Step(StepCase(algorithm, states, master), (16, 200), device).zero_states()
    exact = Step(StepCase(algorithm), (16, 200), device).zero_states().set(weight=x.value.cpu())
    start = exact.weight.double()
    for step in range(1, 51):
        grad = (torch.randn(16, 200) + 0.3) * size
        for t in (x, exact):
            t.set(grad=grad).step(make_hyper(algorithm, step, 1e-2, (0.9, 0.95)))
    (m, v), path = x.moments, exact.weight - start
    assert (x.value - exact.weight).norm() < of_path * path.norm()
    assert (m - exact.m).norm() < of_m * exact.m.norm()
    assert v is None or (v.sqrt() - exact.v.sqrt()).norm() < of_root * exact.v.sqrt().norm()
    cosine = torch.nn.functional.cosine_similarity
    assert cosine((x.value - start).flatten(), path.flatten(), 0) > 0.7


# --- FP8-LM: one power-of-two scale a tensor


@pytest.mark.parametrize("largest", [E4M3.max, 65504.0], ids=["e4m3", "fp16"])
def test_power_of_two_scale_is_the_smallest_that_fits(largest):
    exact = largest * torch.exp2(torch.arange(-60.0, 60.0))
    above, below = (torch.nextafter(exact, torch.tensor(end)) for end in (INF, 0.0))
    for amax, expected in ((exact, 1.0), (above, 2.0), (below, 1.0)):
        scale = torch.stack([power_of_two_scale(x, largest) for x in amax])
        assert_same_bits(scale, expected * torch.exp2(torch.arange(-60.0, 60.0)))
    special = torch.tensor([0.0, math.nan, INF])
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


@pytest.mark.parametrize("top", [1.0, 3e-9, 65504.0, 1e30, 2.0**-100, 2.0**-140])
def test_second_moment_with_one_scale_never_becomes_zero(top):
    """Of 2^60, or what float32 has below `top`, float16 holds 2^40. What would round to zero becomes 2^-24 of the
    scale, which no other code changes for; zeros stay zeros."""
    v = top * torch.exp2(-torch.linspace(0, 60, 1000))
    v[1::10], v[2::10] = 0.0, -0.0
    codes, scale = encode_tensor(v, torch.float16, lift=True)
    plain, same = encode_tensor(v, torch.float16)
    assert_same_bits(scale, same)
    assert torch.equal(codes > 0, v > 0)
    lost = (v > 0) & (plain == 0)
    assert lost.any() == (top > 2.0**-109)  # a scale of 2^-125 and more: float32 ends at 2^-149
    assert codes[lost].eq(2.0**-24).all()
    assert_same_bits(codes[~lost], plain[~lost])
    values = decode_tensor(codes, scale)
    assert torch.equal(values > 0, v > 0)
    assert (values[lost] >= v[lost]).all()
    assert values[lost].eq(2.0**-24 * scale).all()


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_second_moment_with_one_scale_that_is_not_finite_is_nan_everywhere(bad):
    v = torch.cat([torch.tensor([bad, 0.0, 1e-30]), torch.rand(100)])
    codes, scale = encode_tensor(v, torch.float16, lift=True)
    assert scale.isnan()
    assert codes.isfinite().all()
    assert decode_tensor(codes, scale).isnan().all()


@pytest.mark.parametrize("coupled", [False, True], ids=["adamw", "adam"])
def test_nan_spreads_over_the_whole_tensor_in_the_formats_of_fp8_lm(coupled, device):
    """Where it is applied: one scale is all there is. A skip leaves everything as it was."""
    x = Step(StepCase("adam", "fp8-lm", "fp16", coupled=coupled), (8, 200), device)
    x.set(grad=torch.randn(8, 200)).step(make_hyper(coupled=0.1))
    before = x.written()
    x.grad[3, 7] = math.nan
    x.step(make_hyper(step=2, apply=0.0, coupled=0.1))
    x.assert_same(before)
    x.step(make_hyper(step=2, coupled=0.1))
    assert all(s.isnan() for s in (x.m_scale, x.v_scale, x.master_scale))
    assert x.weight.isnan().all()
