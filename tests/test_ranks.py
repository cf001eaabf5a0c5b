"""Ranks begin as new processes do: with the environment of now, and with nothing of the tests before."""

import json
import os

import pytest
import torch
from ranks import start_ranks
from workers import note_itself

NAMES = ("FP8STACK_NOTED", "PYTHONPATH", "TRITON_INTERPRET", "HOME")


def test_ranks_have_the_environment_of_now_and_nothing_of_before(mesh, monkeypatch, tmp_path):
    seeds = {torch.initial_seed()}
    for value in ("here", None):
        if value is None:
            monkeypatch.delenv("FP8STACK_NOTED")
        else:
            monkeypatch.setenv("FP8STACK_NOTED", value)
        start_ranks(note_itself, (str(tmp_path), NAMES), nprocs=2)
        for rank in range(2):
            noted = json.loads((tmp_path / f"{rank}.json").read_text())
            assert noted.pop("environment") == [os.environ.get(name) for name in NAMES]
            seeds.add(noted.pop("seed"))
            assert noted == {"threads": 1, "group": False}
    assert len(seeds) == 5
    assert torch.distributed.is_initialized()


def test_what_a_rank_raises_is_raised(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="on purpose"):
        start_ranks(note_itself, (str(tmp_path), NAMES), nprocs=3)
