"""Ranks begin as new processes do: with the environment of now, and with nothing of the tests before."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

NAMES = ("FP8STACK_NOTED", "PYTHONPATH", "TRITON_INTERPRET", "HOME")


def note_itself(rank, failing=None):
    """Return what a rank begins with."""
    if rank == failing:
        raise ArithmeticError("on purpose")
    return {
        "environment": [os.environ.get(name) for name in NAMES],
        "threads": threading.active_count(),
        "group": dist.is_initialized(),
        "seed": torch.initial_seed(),
    }


def test_ranks_have_the_environment_of_now_and_nothing_of_before(mesh, monkeypatch):
    seeds = {torch.initial_seed()}
    for value in ("here", None):
        if value is None:
            monkeypatch.delenv("FP8STACK_NOTED")
        else:
            monkeypatch.setenv("FP8STACK_NOTED", value)
        for noted in run_ranks(note_itself, 2, device=None):
            assert noted.pop("environment") == [os.environ.get(name) for name in NAMES]
            seeds.add(noted.pop("seed"))
            assert noted == {"threads": 1, "group": False}
    assert len(seeds) == 5
    assert dist.is_initialized()


def test_what_a_rank_raises_is_raised():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="on purpose"):
        run_ranks(note_itself, 3, 2, device=None)
