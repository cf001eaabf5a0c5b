"""FP8-resident data parallelism, between real processes."""

import pytest
from helpers import need_gpus
from ranks import start_ranks
from workers_parallel import check_hosts, check_parallel


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_that_live_in_fp8_over_gloo(world, tmp_path):
    start_ranks(check_parallel, (world, str(tmp_path / "s"), "cpu"), nprocs=world)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_live_in_fp8_over_nccl(world, tmp_path):
    need_gpus(world)
    start_ranks(check_parallel, (world, str(tmp_path / "s"), "cuda"), nprocs=world)


@pytest.mark.slow
def test_gradients_that_live_in_fp8_by_way_of_hosts(tmp_path):
    start_ranks(check_hosts, (4, str(tmp_path / "s")), nprocs=4)
