"""The hooks of stock DistributedDataParallel and FSDP2, between real processes."""

import pytest
from helpers import need_gpus
from ranks import start_ranks
from torch import nn
from workers_ddp import check_hook, check_shards

from fp8stack import comm
from fp8stack.errors import ConfigError

BOTH = pytest.mark.parametrize("check", [check_hook, check_shards], ids=["DDP", "FSDP2"])


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("world", [2, 3])
def test_hooks_over_gloo(check, world, tmp_path):
    start_ranks(check, (world, str(tmp_path / "s"), "cpu"), nprocs=world)


@pytest.mark.gpu
@pytest.mark.gpus
@BOTH
def test_hooks_over_nccl(check, tmp_path):
    need_gpus(2)
    start_ranks(check, (2, str(tmp_path / "s"), "cuda"), nprocs=2)


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="DistributedDataParallel, got Linear"):
        comm.register_fp8_hook(nn.Linear(2, 2))
