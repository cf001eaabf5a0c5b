"""Ranks begin as new processes do: with the environment of now, and with nothing of the tests before."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from helpers import need_gpus
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


def add_up(rank, x):
    if rank == 2:
        dist.all_reduce(x.add(rank))
        os._exit(0)
    x = x.add(rank).to("cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(x)
    return {"sum": x.cpu(), "rank": (dist.get_rank(), int(os.environ["LOCAL_RANK"]))}


@pytest.mark.gpus
def test_ranks_form_a_group_and_return_results(device):
    world = 2 if device == "cuda" else 3
    if device == "cuda":
        need_gpus(world)
    results = run_ranks(add_up, world, torch.tensor([1.0, 2.0]), device=device)
    for rank in range(2):
        assert results[rank]["rank"] == (rank, rank)
        assert results[rank]["sum"].tolist() == ([3.0, 5.0] if world == 2 else [6.0, 9.0])
    assert results[2:] == [None] * (world - 2)


def test_a_function_that_ranks_cannot_find_is_refused():
    with pytest.raises(TypeError, match="no function at the top"):
        run_ranks(lambda rank: None, 1)
