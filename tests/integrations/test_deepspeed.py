"""fp8stack's optimizers handed to DeepSpeed as they are: the real engine, on CPUs, as real processes."""

import pytest
import torch
from workers_deepspeed import check_bad_gradients, check_groups_and_accumulation, check_zero

pytest.importorskip("deepspeed")


def spawn(work, world, store, *arguments):
    torch.multiprocessing.spawn(work, (world, str(store), *arguments), nprocs=world)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_stay_in_eight_bits_and_training_resumes(stage, tmp_path):
    spawn(check_zero, 2, tmp_path / "store", stage, str(tmp_path))


def test_groups_that_come_and_go(tmp_path):
    spawn(check_groups_and_accumulation, 2, tmp_path / "store")


def test_a_bad_gradient_on_one_rank_steps_none(tmp_path):
    spawn(check_bad_gradients, 2, tmp_path / "store")
