"""FP8 on the wire of stock DistributedDataParallel and FSDP2, between real processes."""

import pytest
import torch
import torch.distributed as dist
from helpers import TinyLM, TinyLMWithUnused, assert_same_bits, batch, build, need_gpus
from ranks import assert_equal_everywhere, own_device, run_ranks, train_part
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack import comm
from fp8stack.errors import ConfigError

MODES = {
    "plain": {}, "views": {"gradient_as_bucket_view": True}, "small buckets": {"bucket_cap_mb": 0.05},
    "unused": {"find_unused_parameters": True}, "static": {"static_graph": True, "gradient_as_bucket_view": True},
}  # fmt: skip


TRAININGS = ((None, "plain"), ("O1", "plain"), ("O2", "plain"), ("O1", "views"), ("O2", "static"))


def check_all(rank):
    world, device = dist.get_world_size(), own_device()
    for dtype in (torch.float32, torch.bfloat16) if world == 2 else (torch.float32,):
        for mode in MODES:
            check_gradients(rank, world, device, mode, dtype)
    check_shards(rank, world, device)
    if world == 2:
        check_one_bad_rank_stops_all(rank, device)
        for level, mode in TRAININGS:
            check_training(rank, device, level, mode)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_over_gloo(world):
    run_ranks(check_all, world)


@pytest.mark.gpu
@pytest.mark.gpus
def test_over_nccl():
    need_gpus(2)
    run_ranks(check_all, 2, device="cuda")


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="DistributedDataParallel, got Linear"):
        comm.register_fp8_hook(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="no module sharded by fully_shard in TinyLM"):
        comm.register_fp8_reduce_scatter(TinyLM())


# --- the hook of DDP


def make(device, mode, level=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = (TinyLMWithUnused() if mode == "unused" else TinyLM()).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if level is not None:
        model, optimizer = fp8stack.initialize(model, optimizer, level, compute="bf16")
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, **MODES[mode]), optimizer


def check_gradients(rank, world, device, mode, dtype):
    gradients = {}
    for hooked in (False, True):
        model, _ = make(device, mode, dtype=dtype)
        if hooked and mode == "views":
            model.register_comm_hook(None, comm.fp8_compress_hook)
        elif hooked:
            comm.register_fp8_hook(model)
        for step in range(4):  # buckets are built anew after the first
            model.zero_grad()
            if step == 3 and mode != "static":
                with model.no_sync():
                    model(*batch(100 + rank, device)).backward()
            model(*batch(10 * step + rank, device)).backward()
        gradients[hooked] = [p.grad for p in model.parameters()]
    for given in gradients[True]:
        assert given.dtype is dtype
        assert_equal_everywhere(given)
    exact, given = (torch.cat([g.flatten().double() for g in gradients[h]]) for h in (False, True))
    noise = (given - exact).square().sum()
    assert 0 < noise <= exact.square().sum() * 10 ** -(2.7 if dtype is torch.float32 else 2.6)


def check_one_bad_rank_stops_all(rank, device):
    """A gradient that is not finite on one rank is not on any, and O2's step is skipped by all."""
    model, optimizer = make(device, "plain", "O2")
    comm.register_fp8_hook(model)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(*batch(rank, device))
    (loss * (torch.inf if rank == 0 else 1.0)).backward()
    optimizer.step()
    assert_same_bits(model.parameters(), before)


def check_training(rank, device, level, mode):
    losses = {}
    for hooked in (False, True):
        model, optimizer = make(device, mode, level)
        if hooked:
            comm.register_fp8_hook(model)
        losses[hooked] = train_part(model, optimizer, rank, 2, device)
        for p in model.parameters():
            assert_equal_everywhere(p)
    for sums in losses.values():
        dist.all_reduce(sums)
    assert losses[True][-1] < 0.5 * losses[True][0]
    assert torch.allclose(losses[True], losses[False], rtol=0.05)


# --- FSDP2


def check_shards(rank, world, device):
    """Gradients of FSDP2's shards are the mean to 30 dB, whatever is reduced in."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    for reduce_dtype in (None, torch.float32, torch.bfloat16):
        for factor in (None, 3.0):
            check_sharded_gradients(rank, device, mesh, reduce_dtype, factor)


def shard(device, mesh, reduce_dtype, hooked):
    model, _ = build(device=device)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)][:1]
    for name in names:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if hooked:
        assert comm.register_fp8_reduce_scatter(model) == ["", *names]
    return model


def check_sharded_gradients(rank, device, mesh, reduce_dtype, factor):
    gradients = {}
    for hooked in (False, True):
        model = shard(device, mesh, reduce_dtype, hooked)
        if factor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(True)  # gloo needs it
        for step in range(2):  # accumulates
            model(*batch(10 * step + rank, device)).backward()
        gradients[hooked] = torch.cat(
            [p.grad.full_tensor().flatten().double() for p in model.parameters()]
        )
    noise = (gradients[True] - gradients[False]).square().sum()
    assert 0 < noise <= gradients[False].square().sum() * 1e-3
