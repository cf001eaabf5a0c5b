"""What a run is told whose steps do not stay finite: only what helps it, in flags that fit its own."""

import shlex

import pytest
from gpt.config import parse
from gpt.guard import advise


def told(flags, precision):
    """Return the flags advised, each of them checked beside the run's own, a word each (--name=value)."""
    own, found = shlex.split(flags), []
    for text in advise(parse(own), precision):
        advised, _, rest = text.partition(" (")
        named = rest.partition("), without ")[2]
        left_out = named.split(", ") if named else []
        kept = [flag for flag in own if flag.partition("=")[0] not in left_out]
        assert len(kept) == len(own) - len(left_out)
        assert parse([*kept, *advised.split()]).to_dict() != parse(own).to_dict()
        found.append(advised)
    return found


@pytest.mark.parametrize(
    ("flags", "precision", "advice"),
    [
        ("", "FP8 O2", ["--fp8-format e5m2", "--opt-level off"]),
        ("--use-fp8", "FP8 O2", ["--fp8-format e5m2", "--compute bf16"]),
        ("--compute=te", "FP8 O2", ["--compute bf16"]),
        ("--model=gpt2 --blocks=te", "FP8 O2", ["--opt-level off"]),
        ("--fp8-recipe=blockwise", "FP8 O2", ["--compute bf16"]),
        ("", "bf16 O2", []),  # a GPU without FP8
        ("--no-fp8 --optimizer-bits=8", "bf16 8bit", []),
    ],
)
def test_advice_is_what_applies_to_the_run(flags, precision, advice):
    expected = [*advice[:-1], "--max-lr 0.001", *advice[-1:]]
    assert told(f"{flags} --max-lr=2e-3", precision) == expected
