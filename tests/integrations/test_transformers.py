"""fp8stack.integrations.transformers: the real Trainer on CPUs, as real processes."""

import pytest
from ranks import start_ranks
from workers_transformers import check_gpu, check_one_process, check_two_processes

pytest.importorskip("accelerate")


@pytest.mark.slow
def test_one_process(tmp_path):
    start_ranks(check_one_process, (str(tmp_path),), nprocs=1)


@pytest.mark.slow
def test_two_processes(tmp_path):
    arguments = 2, str(tmp_path / "store"), str(tmp_path)
    start_ranks(check_two_processes, arguments, nprocs=2)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    start_ranks(check_gpu, (str(tmp_path),), nprocs=1)
