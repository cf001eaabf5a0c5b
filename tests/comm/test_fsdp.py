"""FSDP2's weights and replicas in FP8, between real processes."""

from types import SimpleNamespace

import pytest
import torch
from helpers import need_gpus
from ranks import start_ranks
from workers_fsdp import check_replicas, check_weights

from fp8stack.comm import fsdp
from fp8stack.errors import ConfigError


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_weights_over_gloo(world, tmp_path):
    start_ranks(check_weights, (world, str(tmp_path / "s"), "cpu"), nprocs=world)


@pytest.mark.slow
def test_replicas_over_gloo(tmp_path):
    start_ranks(check_replicas, (4, str(tmp_path / "s"), "cpu"), nprocs=4)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize(("check", "world"), [(check_weights, 2), (check_replicas, 4)])
def test_weights_and_replicas_over_nccl(check, world, tmp_path):
    need_gpus(world)
    start_ranks(check, (world, str(tmp_path / "s"), "cuda"), nprocs=world)


def unit(**state):
    return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))


def test_parameters_are_found_in_the_fsdp2_of_older_torch_too():
    size = torch.Size((3, 5))
    group = SimpleNamespace(
        fsdp_params=[SimpleNamespace(sharded_param="p", padded_sharded_param_size=size)]
    )
    for state in ({"_fsdp_param_groups": [group]}, {"_fsdp_param_group": group}):
        assert fsdp._parameters_of(unit(**state)) == [("p", 15)]
    for state in ({"_fsdp_param_groups": []}, {"_fsdp_param_group": None}):
        assert fsdp._parameters_of(unit(**state)) == []
    with pytest.raises(ConfigError, match=r"does not know where FSDP2 .* '_fsdp_param_group'"):
        fsdp._parameters_of(unit())
    with pytest.raises(ConfigError, match="over several meshes"):
        fsdp._parameters_of(unit(_fsdp_param_groups=[group, group]))


def test_an_fsdp2_without_the_hooks_is_refused(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    model = torch.nn.Linear(2, 2)
    model.__class__ = type("Sharded", (FSDPModule, torch.nn.Linear), {"__new__": object.__new__})
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    with pytest.raises(ConfigError, match=r"has no set_custom_all_gather.*update torch"):
        fsdp.register_fp8_all_gather(model)
    monkeypatch.delattr(FSDPModule, "set_all_reduce_hook")
    with pytest.raises(ConfigError, match=r"has no set_all_reduce_hook.*update torch"):
        fsdp.register_fp8_reduce_scatter(model, object())
