"""fp8stack's optimizers handed to DeepSpeed as they are: the real engine, on CPUs, as real processes."""

import pytest
import torch
from ranks import start_ranks
from workers_deepspeed import check_bad_gradients, check_groups_and_accumulation, check_zero

pytest.importorskip("deepspeed")


def spawn(work, world, store, *arguments):
    start_ranks(work, (world, str(store), *arguments), nprocs=world)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_stay_in_eight_bits_and_training_resumes(stage, tmp_path):
    spawn(check_zero, 2, tmp_path / "store", stage, str(tmp_path))


@pytest.mark.parametrize("world", [1, 2, 3, 40])
def test_parts_of_a_rank_lie_together_in_whole_blocks(world):
    from fp8stack.integrations.deepspeed.reduction import BLOCK, _by_rank

    lengths = [0, 1, 127, 128, 129, 1000, 128 * world, world * (world - 1) + 1, 39 * 39]
    tensors = [torch.randn(length) for length in lengths]
    parts = [-(-length // world) for length in lengths]
    sizes = [-(-part // BLOCK) * BLOCK for part in parts]
    together = _by_rank(tensors, parts, sizes, world).view(world, -1)
    for tensor, part, got in zip(tensors, parts, together.split(sizes, dim=1), strict=True):
        padded = torch.zeros(world, part)
        padded.view(-1)[: tensor.numel()] = tensor
        torch.testing.assert_close(got[:, :part], padded, rtol=0, atol=0)
        assert not got[:, part:].any()


def test_groups_that_come_and_go(tmp_path):
    spawn(check_groups_and_accumulation, 2, tmp_path / "store")


def test_a_bad_gradient_on_one_rank_steps_none(tmp_path):
    spawn(check_bad_gradients, 2, tmp_path / "store")


@pytest.mark.parametrize(
    ("given", "stage"), [(None, 0), (False, 0), (True, 1), ({}, 0), ({"stage": 3}, 3)]
)
def test_the_stage_is_found_in_older_forms_too(given, stage):
    from fp8stack.integrations.deepspeed.section import stage_of

    assert stage_of({"zero_optimization": given}) == stage
