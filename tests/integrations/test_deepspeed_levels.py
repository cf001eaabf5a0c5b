"""fp8stack.integrations.deepspeed: levels in the real engine, on CPUs, as real processes."""

import subprocess
import sys

import pytest
from helpers import need_gpus
from ranks import start_ranks
from workers_deepspeed_groups import check_groups, check_reductions
from workers_deepspeed_levels import (
    check_gpus,
    check_matrix,
    check_portable_checkpoints,
    check_refusals,
    check_ways_in,
    check_zero_variants,
)

from fp8stack import capability_te

pytest.importorskip("deepspeed")


def spawn(work, world, store, *arguments):
    start_ranks(work, (world, str(store), *arguments), nprocs=world)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_levels_train_verify_and_resume(stage, world, tmp_path):
    spawn(check_matrix, world, tmp_path / "store", stage, str(tmp_path))


def test_every_way_in_gives_the_same_engine(tmp_path):
    spawn(check_ways_in, 1, tmp_path / "store")


def test_what_else_zero_does(tmp_path):
    spawn(check_zero_variants, 2, tmp_path / "store")


def test_reduces_what_deepspeed_reduces(tmp_path):
    spawn(check_reductions, 2, tmp_path / "store")


def test_groups_of_parameters(tmp_path):
    spawn(check_groups, 1, tmp_path / "store")


def test_refusals_and_verification(tmp_path):
    spawn(check_refusals, 1, tmp_path / "store")


def test_universal_checkpoints_change_the_number_of_ranks(tmp_path):
    spawn(check_portable_checkpoints, 2, tmp_path / "first", str(tmp_path), True)
    for stage in (1, 2, 3):
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        folders = ["--input_folder", f"{tmp_path}/{stage}/here"]
        folders += ["--output_folder", f"{tmp_path}/{stage}/universal", "--inject_missing_state"]
        subprocess.run([*convert, *folders], check=True, capture_output=True)
    spawn(check_portable_checkpoints, 1, tmp_path / "second", str(tmp_path), False)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("compute", ["native", "te"])
def test_levels_on_gpus(compute, world, tmp_path):
    need_gpus(world)
    if compute == "te" and not (installed := capability_te.installation()):
        pytest.skip(installed.reason)
    spawn(check_gpus, world, tmp_path / "store", compute)
