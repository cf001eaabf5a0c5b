"""Every fuzzer of this folder, with a fixed seed and few cases. By hand they run at length, see fuzzing.py."""

from importlib import import_module

import pytest
from fuzzing import run

CASES: dict[str, int] = {
    "checkpoints": 200, "options": 100, "collectives": 200, "formats": 12, "hard_gradients": 500, "writes": 24,
}  # of each: some seconds on one core  # fmt: skip


@pytest.mark.parametrize(("name", "cases"), CASES.items())
def test_no_promise_is_broken(name, cases):
    outcomes = run(import_module(name).one, 0, range(cases))
    assert outcomes.total() == cases, f"only {outcomes.total()} of {cases} in time"
    assert len(outcomes) > 1, "all came to the same: it draws too little"
