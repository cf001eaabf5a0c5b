"""Levels on models that FSDP2 shards, between real processes."""

import pytest
import torch
from helpers import TinyLM, need_gpus, train
from ranks import start_ranks
from torch.distributed.fsdp import FSDPModule, fully_shard
from workers_fsdp_levels import check_checkpoints, check_levels

from fp8stack.errors import ConfigError, Fp8StackWarning, UnsupportedDeviceError
from fp8stack.integrations import fsdp


def spawn(function, world, *arguments):
    start_ranks(function, (world, *arguments), nprocs=world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_levels_over_gloo(world, tmp_path):
    spawn(check_levels, world, str(tmp_path / "s"), "cpu")


@pytest.mark.slow
def test_checkpoints_resume_bit_for_bit_and_change_ranks(tmp_path):
    for world, theirs in ((2, 0), (1, 2), (2, 1)):
        spawn(check_checkpoints, world, str(tmp_path / f"{world}{theirs}"), str(tmp_path), theirs)


@pytest.mark.gpu
@pytest.mark.gpus
def test_levels_over_nccl(tmp_path):
    need_gpus(2)
    spawn(check_levels, 2, str(tmp_path / "s"), "cuda")


# --- in a process group of one rank


def test_an_fsdp2_without_hooks_of_its_collectives_reduces_as_it_can(mesh, monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    model = fully_shard(TinyLM(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=r"has no set_custom_all_gather.*update torch"):
        fsdp.attach(model, optimizer, "O0", fp8_all_gather=True)
    with pytest.raises(UnsupportedDeviceError, match=r"no set_custom_reduce_scatter.*strict=True"):
        fsdp.attach(model, optimizer, "O1", strict=True)
    with pytest.warns(Fp8StackWarning, match="gradients are reduced without FP8"):
        model, optimizer = fsdp.attach(model, optimizer, "O1")
    assert fsdp.verify(model, optimizer).gradients == "as given"
    losses = train(model, optimizer, 10)
    assert losses[-1] < losses[0]


def test_blocks_are_the_elements_of_the_outermost_lists(mesh):
    model = torch.nn.ModuleDict(
        {
            "stem": torch.nn.Linear(8, 8),
            "layers": torch.nn.ModuleList(
                [
                    torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(8, 8)])),
                    torch.nn.ModuleList([torch.nn.Linear(8, 8)]),
                    torch.nn.GELU(),
                ]
            ),
        }
    )
    outer = torch.nn.Sequential(model)
    fsdp.fully_shard_fp8(outer, None, "O0", mesh=mesh)
    sharded = [name for name, m in outer.named_modules() if isinstance(m, FSDPModule)]
    assert sharded == ["", "0.layers.0", "0.layers.1.0"]
