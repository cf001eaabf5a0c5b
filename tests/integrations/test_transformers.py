"""fp8stack.integrations.transformers: the real Trainer on CPUs, as real processes."""

import pytest
import torch
from workers_transformers import check_gpu, check_one_process, check_two_processes

pytest.importorskip("accelerate")


@pytest.mark.slow
def test_one_process(tmp_path):
    torch.multiprocessing.spawn(check_one_process, (str(tmp_path),), nprocs=1)


@pytest.mark.slow
def test_two_processes(tmp_path):
    arguments = 2, str(tmp_path / "store"), str(tmp_path)
    torch.multiprocessing.spawn(check_two_processes, arguments, nprocs=2)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    torch.multiprocessing.spawn(check_gpu, (str(tmp_path),), nprocs=1)
