"""What a rank raises is raised: without that, tests of ranks would pass whatever they find."""

import pytest
import torch
from ranks import run_ranks


def fail(rank, failing):
    if rank == failing:
        raise ArithmeticError("on purpose")


def test_what_a_rank_raises_is_raised():
    assert run_ranks(fail, 2, None, device=None) == [None] * 2
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="on purpose"):
        run_ranks(fail, 3, 2, device=None)
