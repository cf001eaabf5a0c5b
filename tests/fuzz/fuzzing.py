"""Run a fuzzer: draw cases from numbered seeds, and stop at the first that breaks a promise.

A fuzzer is a module of this folder with a function `one(rng)`. It draws one case from `rng` (random.Random), carries it
out, and returns in a word what came of it ("taken", "refused"), which is counted. It raises if a promise is broken.
Each case has a seed of its own, so that one can be repeated alone:

    PYTHONPATH=tests python tests/fuzz/checkpoints.py --seed 7 --count 10000 --seconds 900
    PYTHONPATH=tests python tests/fuzz/checkpoints.py --seed 7 --only 4711

`test_fuzz.py` runs all of them with a fixed seed and few cases. Limits: what is drawn depends on the versions of Python
and of this code, so a number repeats a case only on the commit that printed it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from fp8stack.errors import Fp8StackError


class Broken(AssertionError):
    """A promise that a case broke."""


def refused(call: Callable[[], object]) -> str:
    """Return "taken", or "refused" if `call` raises an error of fp8stack's own; any other error is a broken promise."""
    try:
        call()
    except Fp8StackError:
        return "refused"
    except Exception as error:
        raise Broken(f"a foreign error: {type(error).__name__}: {error}") from error
    return "taken"


def run(
    one: Callable[[random.Random], str], seed: int, cases: range, seconds: float = 60.0
) -> Counter[str]:
    """Carry out cases until they or `seconds` end; return how often each outcome came."""
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > end:
            break
        try:
            outcomes[one(random.Random(f"{seed}:{case}"))] += 1
        except Exception as error:
            raise Broken(f"case {case} of seed {seed}: {error}") from error
    return outcomes


def main(one: Callable[[random.Random], str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="cases")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so long")
    parser.add_argument("--only", type=int, help="this case alone")
    given = parser.parse_args()
    cases = range(given.count) if given.only is None else range(given.only, given.only + 1)
    began = time.monotonic()
    outcomes = run(one, given.seed, cases, given.seconds)
    print(f"{sum(outcomes.values())} cases in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    sys.exit(not outcomes)
