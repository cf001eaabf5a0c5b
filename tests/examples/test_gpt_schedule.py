"""The learning rate over a run."""

import itertools

import pytest
from gpt.config import Config, parse
from gpt.schedule import learning_rate

RUN = Config(steps=100, max_lr=2e-3, warmup_steps=10, min_lr_ratio=0.1)


def test_it_rises_on_a_line_and_falls_on_a_cosine_to_its_least():
    rates = [learning_rate(RUN, step) for step in range(100)]
    assert rates[:10] == pytest.approx([2e-4 * (step + 1) for step in range(10)])
    assert rates[10] == max(rates) == RUN.max_lr
    assert all(before > after for before, after in itertools.pairwise(rates[10:]))
    # half-way down, between steps 54 and 55: the mean of highest and least
    assert (rates[54] + rates[55]) / 2 == pytest.approx(2e-3 * (1 + 0.1) / 2)
    assert rates[99] == learning_rate(RUN, 5000) == pytest.approx(2e-4)


def test_a_warm_up_longer_than_the_run_is_warned_of():
    with pytest.warns(UserWarning, match=r"--warmup-steps 400 leave none of --steps 300.*75%"):
        parse(["--warmup-steps", "400"])
