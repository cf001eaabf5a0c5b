"""Steps on hard gradients: every optimizer and format, held to the bounds below.

A case draws an optimizer, formats, hyper-parameters, a shape and a sequence of gradients. Before each step its moments
and master are read; float64 steps from the same values with the same gradient, and what is then stored must be within
the bound of one step: float32's own error, which is carried through the formulas as an interval, and the rounding of
the format. So the bound is exact, and no error of an earlier step excuses a later one. A step with a gradient that is
not finite, or reaches 2^63, must change nothing.

Limits: whether errors of many steps add up is measured by benchmarks/optimizer_accuracy.py. Of Muon's direction only
its size is held: what Newton-Schulz does in bfloat16 has no bound for single elements.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from fuzzing import Broken, main
from helpers import assert_same_bits
from torch import Tensor, nn

from fp8stack import BlockScaledTensor
from fp8stack.formats import BLOCK, GRAD_LIMIT, TINY
from fp8stack.kernels.reference.quantize import as_blocks, from_blocks
from fp8stack.levels import CHOICES
from fp8stack.optim import SGD, Adam, AdamW, Lion, Muon
from fp8stack.optim.muon import learning_rate_ratio
from fp8stack.optim.state_formats import decode_moment, is_second, stored_kind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLACK = (
    2.0**-20
)  # float32's error in a sum, over the sum of its terms' sizes; a GPU's fast root and reciprocal have it
UNDERFLOW = 2.0**-147  # what a few products may lose
LARGEST = GRAD_LIMIT * (1 - 2.0**-24)  # of float32 below the limit

# What is stored of x is at most max(relative × |x|, least × A) off, A being the largest |x| in the block of 128, or in
# the tensor. Of v in blocks x is the root. docs/numerics.md states those of the default and of "4bit".
BLOCK_MOMENTS = {
    "s1e3m4": (2.0**-4, 1 / 1984), "e4m3": (2.0**-3, 1 / 229376), "ue3m5": (2.0**-5, 1 / 4032),
    "e4m3_root": (2.0**-3, 1 / 229376), "ue3m1": (2.0**-1, 1 / 192),
}  # fmt: skip
TENSOR_MOMENTS = {torch.float8_e4m3fn: (2.0**-3, 1 / 114688), torch.float16: (2.0**-10, 2.0**-38)}
DENSE = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DITHERED = 2.0**-7  # bfloat16
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
SPLIT = {torch.int8: 2.0**-15, torch.int16: 0.0}
FLOAT16_MASTER = (2.0**-10, 2.0**-38)

Interval = tuple[Tensor, Tensor]  # float64, lowest and highest


# --- what a case is


SHAPES = [
    (1,), (7,), (130,), (), (0,), (1, 1), (4, 128), (3, 200), (2, 9), (5, 0), (2, 3, 70), (8, 1),
]  # fmt: skip


def draw_options(rng: random.Random) -> tuple[type, dict[str, Any]]:
    def beta() -> float:
        return rng.choice((0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, rng.random()))

    kind = rng.choice((AdamW, AdamW, Adam, Adam, SGD, Lion, Muon))
    options: dict[str, Any] = {
        "lr": rng.choice((0.0, 1e-8, 1e-6, 1e-4, 1e-3, 0.1, 1.0, 10.0)),
        "weight_decay": rng.choice((0.0, 0.0, 0.01, 0.1, 1.0)),
        "states": rng.choice(CHOICES["states"]),
        "master": rng.choice(CHOICES["master"]),
        "min_numel": rng.choice((1, 1, 4096)),
    }
    if kind in (Adam, AdamW):
        options |= {"betas": (beta(), beta()), "eps": 10.0 ** rng.uniform(-30, 0)}
    elif kind is Lion:
        options |= {"betas": (beta(), beta())}
    else:
        options |= {"momentum": rng.choice((0.5, 0.9, 0.99))}
        options |= {"nesterov": rng.random() < 0.5}
    if kind is SGD and not options["nesterov"]:
        options |= {"momentum": beta(), "dampening": rng.choice((0.0, 0.5))}
    if kind in (Adam, AdamW, SGD):
        options["maximize"] = rng.random() < 0.2
    if rng.random() < 0.2:
        options["max_grad_norm"] = 10.0 ** rng.uniform(-6, 3)
    return kind, options


KINDS = (
    "noise", "constant", "alternating", "grows", "jumps", "pauses", "largest", "denormal", "spike", "spread", "shrinks",
    "switches",
)  # fmt: skip


def draw_gradients(rng: random.Random, shape: tuple[int, ...], steps: int) -> list[Tensor]:
    """Return a float32 gradient for each step; some reach 2^63, or are not finite."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator)

    kind, size = (
        rng.choice(KINDS),
        10.0 ** rng.choice((0, 0, rng.uniform(-38, 19), rng.uniform(-12, 6))),
    )
    first, spread = normal(), rng.choice((0.0, 1.0, 4.0))
    first = first * (spread * normal()).exp()
    at = rng.randrange(steps)
    found = []
    for step in range(steps):
        g = first if rng.random() < 0.5 else normal() * first.abs()
        if kind == "constant":
            g = first
        elif kind == "alternating":
            g = first * (-1) ** step
        elif kind == "grows":
            g = g * 10.0 ** (6 * step / steps)
        elif kind == "shrinks":
            g = g * 10.0 ** (-6 * step / steps)
        elif kind == "jumps":
            g = g * (1e6 if step >= at else 1.0)
        elif kind == "pauses":
            g = g * (step % 3 > 0)
        elif kind == "switches":  # every other element, in turns
            g = (g.flatten() * ((torch.arange(g.numel()) + step) % 2)).view(shape)
        elif kind == "spread":
            g = g * 10 ** (12 * torch.rand(shape, generator=generator) - 6)
        elif kind == "spike":
            g = torch.zeros(shape)
            if g.numel():
                g.view(-1)[rng.randrange(g.numel())] = rng.choice((-1, 1))
        g = g * size
        if kind == "largest":
            g = first.sign() * LARGEST
        elif kind == "denormal":
            g = first * 1e-41
        found.append(g)
    if rng.random() < 0.3 and found[at].numel():
        found[at] = found[at].clone()
        found[at].view(-1)[rng.randrange(found[at].numel())] = rng.choice(
            (math.nan, math.inf, -math.inf, -GRAD_LIMIT)
        )
    return found


def one(rng: random.Random) -> str:
    kind, options = draw_options(rng)
    shape = rng.choice(SHAPES)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.bfloat16, torch.float16))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    weight = torch.randn(shape, generator=generator) * rng.choice((0.0, 1e-3, 0.2, 1.0, 1e4, 1e30))
    if dtype is torch.float16:
        weight = weight.clamp(-6e4, 6e4)
    p = nn.Parameter(weight.to(DEVICE, dtype))
    optimizer = kind([p], **options)
    optimizer.ensure_states()
    fp8 = len(shape) > 1 and rng.random() < 0.5
    gradients = draw_gradients(rng, shape, rng.randrange(2, 9))
    what = f"{kind.__name__}({options}) on {dtype} {shape}"
    skips = 0
    for step, g in enumerate(gradients):
        g = g.to(DEVICE, dtype)
        p.grad = BlockScaledTensor.quantize(g) if fp8 else g
        before = Snapshot(optimizer, p)
        optimizer.step()
        skips += check(optimizer, p, before, f"{what}, step {step}")
        if int(optimizer.skipped_steps) != skips:
            raise Broken(f"{what}, step {step}: {optimizer.skipped_steps} skipped, not {skips}")
    return f"{kind.__name__}{' skips' * (skips > 0)}"


# --- one step in float64


class Snapshot:
    """The values that a step starts from, or that it left, in float64."""

    def __init__(self, optimizer: Any, p: nn.Parameter) -> None:
        state = optimizer.state[p]
        self.bits = {name: x.clone() for name, x in {**state, "weight": p.detach()}.items()}
        self.step = float(state.get("step", 0.0))
        self.w = optimizer.master_weight(p).double()
        self.moments = {
            name: torch.zeros_like(self.w) if value is None else value.double()
            for name in optimizer.moments
            for value in [decode_moment(name, state, p.shape)]
        }


def around(x: Tensor, size: Tensor | None = None) -> Interval:
    """Return what float32 may make of a sum `x` whose terms have the sum of sizes `size`."""
    error = SLACK * (x.abs() if size is None else size) + UNDERFLOW
    return x - error, x + error


def add(a: Interval, b: Interval) -> Interval:
    """Return what float32 may make of a sum."""
    error = SLACK * (magnitude(a) + magnitude(b)) + UNDERFLOW
    return a[0] + b[0] - error, a[1] + b[1] + error


def times(factor: float, a: Interval) -> Interval:
    low, high = sorted_pair(a[0] * factor, a[1] * factor)
    error = SLACK * magnitude((low, high)) + UNDERFLOW
    return low - error, high + error


def sorted_pair(a: Tensor, b: Tensor) -> Interval:
    return torch.minimum(a, b), torch.maximum(a, b)


def magnitude(a: Interval) -> Tensor:
    return torch.maximum(a[0].abs(), a[1].abs())


def square(a: Interval) -> Interval:
    crosses = (a[0] < 0) & (a[1] > 0)
    low = torch.where(crosses, 0.0, torch.minimum(a[0].abs(), a[1].abs())) ** 2
    return (low * (1 - SLACK) - UNDERFLOW).clamp(min=0), magnitude(a) ** 2 * (1 + SLACK) + UNDERFLOW


def adam_update(m: Interval, v: Interval, factor: float, eps: float) -> Interval:
    low, high = (x.clamp(min=0).sqrt() * factor + eps for x in v)
    low, high = low * (1 - SLACK), high * (1 + SLACK)
    smallest = torch.where(m[0] > 0, m[0] / high, m[0] / low)
    largest = torch.where(m[1] > 0, m[1] / low, m[1] / high)
    return (
        smallest - SLACK * smallest.abs() - UNDERFLOW,
        largest + SLACK * largest.abs() + UNDERFLOW,
    )


def gradient_of(p: nn.Parameter) -> Tensor:
    g = p.grad
    return (g.dequantize(torch.float32) if isinstance(g, BlockScaledTensor) else g).double()


def is_skipped(g: Tensor, clip: float | None) -> bool:
    if not g.numel():
        return False
    largest = g.abs().amax() if clip is None else g.square().sum().sqrt()
    return not float(largest.float()) < GRAD_LIMIT


def check(optimizer: Any, p: nn.Parameter, before: Snapshot, what: str) -> bool:
    """Hold what a step left to the bound of one step; return whether it had to be skipped."""
    (group,) = optimizer.param_groups
    after, g = Snapshot(optimizer, p), gradient_of(p)
    clip = optimizer.max_grad_norm
    if is_skipped(g, clip):
        assert_same_bits(after.bits, before.bits, f"{what}: skipped, but changed")
        return True
    if not g.numel():
        return False
    if clip is not None:
        g = g * min(1.0, clip / (float(g.square().sum().sqrt()) + 1e-6))
    if group.get("maximize"):
        g = -g
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    adam = optimizer.family_of(group) == "adam"
    coupled = isinstance(optimizer, SGD) or (type(optimizer) is Adam)
    gradient = around(g)
    if coupled and decay:
        gradient = add(gradient, times(decay, (before.w, before.w)))
        if adam:
            low, high = (x.clamp(-GRAD_LIMIT, GRAD_LIMIT) for x in gradient)
            gradient = low, high
    count = before.step + 1
    names = optimizer.moments_of(group)
    old = {name: (before.moments[name],) * 2 for name in names}
    new: dict[str, Interval] = {}
    step_size, u = lr, gradient
    if adam:
        one, two = group["betas"]
        eps = group["adamw_eps"] if isinstance(optimizer, Muon) else group["eps"]
        name_m, name_v = names
        m = new[name_m] = add(times(one, old[name_m]), times(1 - one, gradient))
        v = new[name_v] = add(times(two, old[name_v]), times(1 - two, square(gradient)))
        u = adam_update(m, v, (1 - two**count) ** -0.5, max(eps, TINY))
        step_size = lr / (1 - one**count)
    elif isinstance(optimizer, Lion):
        one, two = group["betas"]
        c = add(times(one, old["exp_avg"]), times(1 - one, gradient))
        u = c[0].sign(), c[1].sign()
        new["exp_avg"] = add(times(two, old["exp_avg"]), times(1 - two, gradient))
    elif names:
        momentum = group["momentum"]
        gain = 1 - momentum if isinstance(optimizer, Muon) else 1.0
        if isinstance(optimizer, SGD) and count > 1:
            gain = 1 - group["dampening"]
        u = add(times(momentum, old[names[0]]), times(gain, gradient))
        new[names[0]] = u
        if isinstance(optimizer, SGD) and group["nesterov"]:
            u = add(gradient, times(momentum, u))
    for name, exact in new.items():
        check_moment(name, optimizer.state[p], exact, after.moments[name], f"{what}: {name}")
    kept = times(1.0 if coupled else 1 - lr * decay, (before.w, before.w))
    if isinstance(optimizer, Muon) and not adam:
        # no singular value of its direction is above 1.3
        u = (torch.full_like(before.w, -1.3), torch.full_like(before.w, 1.3))
        step_size = lr * learning_rate_ratio(p.shape, group)
    moved = times(step_size, u)
    check_weight(optimizer, p, add(kept, (-moved[1], -moved[0])), after.w, f"{what}: weight")
    return False


# --- bounds


def largest_of_block(x: Tensor) -> Tensor:
    """Return, for each element, the largest of its block of 128."""
    blocks = as_blocks(x)
    return from_blocks(blocks.amax(-1, keepdim=True).expand(*blocks.shape[:-1], BLOCK), x.shape)


def hold(
    exact: Interval, error: Tensor, found: Tensor, what: str, dtype: torch.dtype = torch.float32
) -> None:
    """Raise Broken unless `found` is within `error` of an interval, where `dtype` can hold that."""
    low, high = exact[0] - error, exact[1] + error
    inside = (low <= found) & (found <= high)
    inside |= ~(torch.maximum(low.abs(), high.abs()) <= torch.finfo(dtype).max)  # it may overflow
    if not inside.all():
        i = int((~inside).flatten().int().argmax())
        at = [float(x.flatten()[i]) for x in (found, low, high, exact[0], exact[1])]
        raise Broken(f"{what}[{i}] is {at[0]!r}, not within {at[1:3]} of the exact {at[3:]}")


def check_moment(
    name: str, state: dict[str, Tensor], exact: Interval, found: Tensor, what: str
) -> None:
    kind, second = stored_kind(name, state, found.shape), is_second(name)
    if second:
        exact = exact[0].clamp(min=0), exact[1]
    if kind == "dense":
        dtype = state[name].dtype
        relative, least = DENSE[dtype], SMALLEST[dtype]
        if second and dtype is torch.bfloat16:
            relative = DITHERED
        hold(exact, relative * magnitude(exact) + least, found, what, dtype)
        return
    if kind == "tensor":
        relative, least = TENSOR_MOMENTS[state[f"{name}_code"].dtype]
        largest = magnitude(exact).amax()
    else:
        relative, least = BLOCK_MOMENTS[kind]
        if second:
            exact, found = (exact[0].sqrt(), exact[1].sqrt()), found.sqrt()
        largest = largest_of_block(magnitude(exact))
    size = magnitude(exact)
    error = torch.maximum(relative * size, least * largest) * (1 + 2.0**-7) + SLACK * size
    if kind == "tensor":
        error = error.clamp(min=2.0**-135)  # its scale is no less than TINY
    else:  # a scale below TINY makes a block of zeros
        error = torch.where(largest < 448 * TINY, 448 * TINY, error)
    hold(exact, error, found, what)
    # a second moment that vanishes makes Adam divide by epsilon
    floor = least * largest / 2
    vanished = second & (kind != "tensor") & (exact[0] > 0) & (found == 0) & (floor > 2.0**-74)
    if vanished.any():
        raise Broken(f"{what}: a positive second moment became zero")


def check_weight(
    optimizer: Any, p: nn.Parameter, exact: Interval, found: Tensor, what: str
) -> None:
    state, size, dtype = optimizer.state[p], magnitude(exact), torch.float32
    if "remainder" in state:
        relative, least = SPLIT[state["remainder"].dtype], 2.0**-141
    elif "master_scale" in state:
        relative, least = FLOAT16_MASTER
        least *= float(size.amax())
    elif "master" in state:
        relative, least = 0.0, 0.0
    else:
        dtype = p.dtype
        relative, least = DENSE[dtype], SMALLEST[dtype]
        if dtype is torch.bfloat16:
            relative = DITHERED  # with master="none"
    hold(exact, torch.clamp(relative * size, min=least), found, what, dtype)


if __name__ == "__main__":
    main(one)
