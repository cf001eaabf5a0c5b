"""The scalars of a step: the reference against formulas in Python's floats, the Triton kernel against the reference."""

import math

import pytest
import torch
from helpers import INF, NAN, assert_same_bits

from fp8stack.formats import GRAD_LIMIT
from fp8stack.kernels import step_scalars as triton_scalars
from fp8stack.kernels.pointer_table import COLUMN, WIDTH
from fp8stack.kernels.reference import step_scalars as reference
from fp8stack.kernels.reference.fp8 import noise
from fp8stack.kernels.reference.step import HYPER

ALGORITHMS = pytest.mark.parametrize("algorithm", ["adam", "sgd", "lion", "muon"])
GROUPS = [  # lr, beta1, beta2, eps, decoupled_decay, coupled_decay, sign, dampening
    (1e-3, 0.9, 0.999, 1e-8, 0.1, 0.0, 1.0, 0.0),
    (0.3, 0.95, 0.98, 0.0, 0.0, 0.2, -1.0, 0.5),
    (0.0, 0.0, 0.0, 1e-30, 0.5, 0.5, 1.0, 1.0),
    (1e-5, 0.5, 0.99999, 1.0, 0.0, 0.0, 1.0, 0.1),
]


def verdict_of(unscale=1.0, max_norm=INF, norm=0.0, largest=1.0, found_inf=0.0):
    return torch.tensor([unscale, max_norm, norm, largest, found_inf])


class Scalars:
    """The arguments of `scalars` for `count` parameters, drawn at random."""

    def __init__(self, count, first_step=False):
        self.group_of = torch.randint(len(GROUPS), (count,), dtype=torch.int32)
        self.active = torch.rand(count) < 0.8
        self.active[:1] = True
        steps = torch.randint(1, 10_000, (count,)) * (torch.rand(count) < 0.8)
        self.steps = torch.zeros(count) if first_step else steps.float()
        self.seed = torch.randperm(count + 7)[:count].int()
        self.groups = torch.tensor(GROUPS, dtype=torch.float64)

    def reference(self, algorithm, verdict, skipped=0.0):
        """Return hyper, steps and the count of skips."""
        steps, count = self.steps.clone(), torch.tensor(skipped)
        hyper = reference.scalars(
            algorithm, self.groups[self.group_of.long()], self.active, steps, verdict, count, self.seed
        )  # fmt: skip
        return hyper, steps, count

    def triton(self, algorithm, verdict, device, skipped=0.0):
        n = len(self.steps)
        steps, count = self.steps.clone().to(device), torch.tensor(skipped, device=device)
        table = torch.randint(1, 2**40, (n, WIDTH)).to(device)
        table[:, COLUMN["grad"]] *= self.active.to(device)
        hyper = torch.full((n + 1, 16), -7.0, device=device)
        triton_scalars.scalars(
            algorithm, table, self.groups.to(device), self.group_of.to(device), self.seed.to(device),
            steps, verdict.to(device), count, hyper[:n],
        )  # fmt: skip
        assert hyper[n].eq(-7).all(), "wrote beyond the last parameter"
        return hyper[:n].cpu(), steps.cpu(), count.cpu()


def by_hand(algorithm, group, step, verdict):
    """Return the columns of one parameter that has a gradient and was stepped to `step`, as Python floats."""
    lr, beta1, beta2, eps, decoupled, coupled, sign, dampening = group
    unscale, max_norm, norm = (float(x) for x in verdict[:3])
    clip = min(1.0, max_norm / (norm * unscale + 1e-6))
    adam, sgd = algorithm == "adam", algorithm == "sgd"
    return {
        "grad_mul": unscale * clip * sign, "decay": 1 - lr * decoupled,
        "step_size": lr / (1 - beta1**step) if adam else lr,
        "inv_sqrt_bc2": 1 / math.sqrt(1 - beta2**step) if adam else 1.0, "apply": 1.0, "beta1": beta1,
        "gain": (1.0 if step == 1 else 1 - dampening) if sgd else 1 - beta1, "beta2": beta2,
        "one_minus_beta2": 1 - beta2, "eps": max(eps, 2.0**-126), "weight_decay": coupled,
    }  # fmt: skip


# --- the reference


@ALGORITHMS
@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("step", [1, 2, 100, 100_000])
def test_scalars_are_those_of_the_definition(algorithm, group, step):
    verdict = verdict_of(unscale=1 / 1024, max_norm=0.5, norm=3000.0)
    steps, skipped = torch.tensor([float(step - 1)]), torch.tensor(0.0)
    hyper = reference.scalars(
        algorithm, torch.tensor([GROUPS[group]], dtype=torch.float64), torch.tensor([True]), steps,
        verdict, skipped, torch.tensor([3], dtype=torch.int32),
    )  # fmt: skip
    assert steps == step
    assert skipped == 0
    assert hyper.shape == (1, 16)
    for column, (name, value) in enumerate(
        by_hand(algorithm, GROUPS[group], step, verdict).items()
    ):
        assert HYPER[column] == name
        assert hyper[0, column].item() == pytest.approx(value, rel=2.0**-23), name


@pytest.mark.parametrize(
    ("verdict", "fine"),
    [
        ({}, True), ({"largest": GRAD_LIMIT * 0.99}, True), ({"largest": GRAD_LIMIT}, False), ({"largest": INF}, False),
        ({"largest": NAN}, False), ({"largest": 1e30, "unscale": 1e-20}, True),
        ({"largest": 1e30, "unscale": 1.0}, False), ({"found_inf": 1.0}, False), ({"largest": 0.0}, True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "triton"])
def test_steps_and_skips_are_counted(verdict, fine, kernel, kernel_device):
    x = Scalars(20)
    arguments = ("adam", verdict_of(**verdict))
    if kernel:
        hyper, steps, skipped = x.triton(*arguments, kernel_device, 5.0)
    else:
        hyper, steps, skipped = x.reference(*arguments, 5.0)
    assert skipped == (5 if fine else 6)
    assert torch.equal(hyper[:, 4], (x.active & fine).float())
    assert torch.equal(steps, x.steps + hyper[:, 4])


@pytest.mark.parametrize(
    ("max_norm", "norm", "unscale", "expected"),
    [(INF, 0, 1, 1), (1, 0.5, 1, 1), (1, 4, 1, 0.25), (1, 400, 0.01, 0.0025), (0.5, 0, 2, 2)],
)
def test_clipping_is_torchs(max_norm, norm, unscale, expected):
    x = Scalars(1)
    x.group_of[0] = 0
    hyper, _, _ = x.reference("sgd", verdict_of(unscale, max_norm, norm))
    assert hyper[0, 0].item() == pytest.approx(expected, rel=1e-5)


# --- the kernel


@ALGORITHMS
@pytest.mark.parametrize("count", [1, 5, 128, 129, 400])
@pytest.mark.parametrize("first_step", [False, True], ids=["later", "first"])
def test_kernel_gives_the_references_scalars(algorithm, count, first_step, kernel_device):
    """Powers in float64 differ in their last bits, so float32 may too; all that needs no power agrees."""
    for verdict in (
        verdict_of(),
        verdict_of(unscale=1 / 65536, max_norm=1.0, norm=1e6, largest=1e7),
        verdict_of(largest=NAN),
        verdict_of(found_inf=1.0),
    ):
        x = Scalars(count, first_step)
        hyper, steps, skipped = x.triton(algorithm, verdict, kernel_device)
        expected, expected_steps, expected_skipped = x.reference(algorithm, verdict)
        assert_same_bits(steps, expected_steps)
        assert_same_bits(skipped, expected_skipped)
        for column, name in enumerate(HYPER):
            if name in ("step_size", "inv_sqrt_bc2"):
                assert torch.allclose(
                    hyper[:, column], expected[:, column], rtol=2.0**-22, atol=0
                ), name
            elif name in ("seed", "phase"):
                seeds = hyper[:, column].contiguous().view(torch.int32)
                assert torch.equal(seeds, expected[:, column].contiguous().view(torch.int32))
            else:
                assert_same_bits(hyper[:, column], expected[:, column], name)


# --- noise of a step


def noise_of_steps(count, steps):
    """Return (seed, phase), int32 [count] both, of `count` parameters at each of `steps` steps."""
    x = Scalars(count, first_step=True)
    x.seed = torch.tensor([reference.seed_of(i, 0) for i in range(count)], dtype=torch.int32)
    x.active = torch.ones(count, dtype=torch.bool)
    found = []
    for _ in range(steps):
        hyper, x.steps, _ = x.reference("adam", verdict_of())
        found.append([hyper[:, i].contiguous().view(torch.int32) for i in (11, 12)])
    return found


def test_every_parameter_has_its_own_seed_and_every_step_its_phase():
    found = noise_of_steps(50, 100)
    assert all(torch.equal(seed, found[0][0]) for seed, _ in found)
    assert len(found[0][0].unique()) == 50
    assert len(torch.stack([phase[0] for _, phase in found]).unique()) == 100


@pytest.mark.parametrize(("shift", "width"), [(7, 16), (0, 6), (24, 8)], ids=["v", "m", "weight"])
def test_what_an_element_is_rounded_with_goes_around_in_equal_parts(shift, width):
    """In any run of steps each part of the circle has its share, to six steps; of white noise, to thirty."""
    words = [noise(torch.Size([300]), seed[0], phase[0]) for seed, phase in noise_of_steps(1, 400)]
    at = ((torch.stack(words) >> shift) % 2**width).double() / 2**width
    for start, count in ((0, 400), (100, 50), (7, 233)):
        for part in (0.1, 0.5, 0.75):
            below = (at[start : start + count] < part).sum(0)
            assert (below - part * count).abs().max() < 6, (
                f"{count} steps from {start}, below {part}"
            )


def test_noise_of_a_step_is_not_that_of_another_moved_by_a_few_elements():
    """A hash of index × constant + seed repeats itself, moved, where seeds differ by multiples of the constant."""
    words = torch.stack(
        [
            noise(torch.Size([300]), seed[i], phase[i])
            for seed, phase in noise_of_steps(3, 4)
            for i in range(3)
        ]
    )
    for i in range(len(words)):
        for j in range(len(words)):
            for lag in range(9):
                if i != j or lag:
                    same = words[i, lag:] == words[j, : 300 - lag]
                    assert not same.any(), f"seeds {i} and {j} are the same {lag} elements apart"
