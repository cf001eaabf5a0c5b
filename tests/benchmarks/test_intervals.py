"""Intervals, steps to an equal loss, and the tables of runs over seeds, on numbers that are known."""

import accuracy
import gradient_noise
import numpy as np
import pytest
import seed_tables
import torch
import training_tables
from intervals import extra_steps, over_seeds, steps_to


def test_student_s_interval_is_the_known_one():
    mean, half = over_seeds([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5, rel=1e-4))
    assert over_seeds([1.5]) == (1.5, None)
    many = [float(i % 2) for i in range(61)]  # 60 degrees of freedom: 2.0003
    assert over_seeds(many)[1] == pytest.approx(2.0003 * np.std(many, ddof=1) / 61**0.5, rel=1e-3)


CURVE = [(100, 5.0), (200, 4.0), (300, 4.2), (400, 3.0)]


def test_steps_are_those_from_which_a_curve_stays_below():
    assert steps_to(CURVE, 4.5) == 150
    assert steps_to(CURVE, 4.1) == pytest.approx(
        300 + 100 * 0.1 / 1.2
    )  # not at 190, where it does not stay
    assert steps_to(CURVE, 3.0) == 400
    assert steps_to(CURVE, 2.9) is None
    assert steps_to(CURVE, 6.0) == 100
    assert steps_to([], 1.0) is None


def test_extra_steps_are_to_the_loss_that_both_have_reached():
    base = [(100, 4.0), (200, 3.0)]
    assert extra_steps(base, base) == 0
    assert extra_steps([(100, 4.2), (200, 3.2)], base) == pytest.approx(200 / 180 - 1)
    assert extra_steps([(100, 3.8), (200, 2.8)], base) == pytest.approx(180 / 200 - 1)


def record(variant, seed, bf16, fp8, end, **params):
    own = {"model": "gpt2", "seed": seed, "batch": 32, "steps": 200, "deterministic": True}
    return {
        "variant": variant, "compute": None if variant == "bf16" else "native", "params": {**own, **params},
        "value": bf16, "value_fp8": fp8,
        "validation": [[100, 4.0 + end], [200, 3.0 + end]],
    }  # fmt: skip


RECORDS = [
    record("bf16", 0, 4.0, 4.04, 0), record("bf16", 1, 4.1, 4.141, 0),
    record("O0", 0, 4.02, 4.04, 0.2), record("O0", 1, 4.1, 4.141, 0.0),
    record("O0", 0, 9.0, 9.0, 1.0, steps=100),  # of another run
    record("O0", 0, 9.0, 9.0, 1.0, deterministic=None),
    record("O2", 2, 4.0, 4.0, 0.0),  # without a run in bf16 yet
]  # fmt: skip


def test_a_level_is_compared_with_bf16_of_its_seed():
    rows = seed_tables.crossed(RECORDS)[2:]
    assert rows[0].startswith("| GPT-2 124M, bf16 | 2 | 4.0500 | | 4.0905 | +1.00 ± 0.00 % |")
    # +.5 % and 0: Student's 12.706 times the standard error of .25 %
    assert rows[1].startswith("| GPT-2 124M, O0 | 2 | 4.0600 | +0.25 ± 3.18 % |")
    assert "2.47 % apart, standard deviation 1.75 %" in rows[2]
    assert len(rows) == 3


def test_steps_to_an_equal_loss_are_beside_those_of_another_seed():
    more = training_tables.more_steps(training_tables.comparable(RECORDS, "gpt2"))
    assert more == {"O0": "+5.56 ± 70.59 %", "another seed": "+0.00 to +0.00 %"}


def test_noise_is_told_from_what_is_the_same_in_all_batches():
    generator = torch.Generator().manual_seed(0)
    signal, steady = torch.randn(2, 1000, generator=generator).double()
    exact, errors = gradient_noise.Noise(), gradient_noise.Noise()
    for _ in range(200):
        noise, rounding = torch.randn(2, 1000, generator=generator).double()
        exact.add({"w": signal + 2 * noise})
        errors.add({"w": 0.3 * steady + 0.4 * rounding})
    found = gradient_noise.compare(exact, errors, "other")
    assert found["error"] == pytest.approx(0.25, rel=0.05)  # sqrt(.09 + .16) / 2
    assert found["steady"] == pytest.approx(0.15, rel=0.05)
    assert found["times_batch"] == pytest.approx((1 / 0.15) ** 2, rel=0.1)
    assert found["noise_of_gradient"] == pytest.approx(2 / 5**0.5, rel=0.05)
    assert gradient_noise.compare(exact, exact, gradient_noise.ALL)["of_gradient"] == 1


def test_kinds_are_those_of_the_layers():
    assert set(accuracy.KINDS) == set(gradient_noise.KINDS)
    assert gradient_noise.kind_of("model.layers.3.self_attn.k_proj.weight") == "q + k"
    assert gradient_noise.kind_of("model.embed_tokens.weight") == "head"
    assert gradient_noise.kind_of("model.layers.0.mlp.up_proj.weight") == "gate + up"
    assert gradient_noise.kind_of("position.weight") == "other"


def test_a_fine_tuning_is_compared_with_one_of_as_many_steps_and_the_same_parameters():
    def run(variant, steps, train, loss):
        curve = [[1, 4.0], [steps, loss]]
        params = {"seed": 0, "steps": steps, "train": train}
        return {
            "variant": variant, "params": params, "loss_in_bf16": loss, "loss_in_own": loss, "validation": curve
        }  # fmt: skip

    whole, part = (200, ["*"]), (75, ["*.0.*", "*.1.*"])
    rows = seed_tables.fine_tuning([
        run("bf16", *whole, 2.0), run("bf16", *part, 3.0), run("O0", *part, 3.25), run("O0", *whole, 2.5),
    ])  # fmt: skip
    assert [row.split(" | ")[:3] for row in rows[2:]] == [
        ["| O0, 200 steps", "1", "+0.5000"], ["| O0, 75 steps of `*.0.* *.1.*`", "1", "+0.2500"],
    ]  # fmt: skip
