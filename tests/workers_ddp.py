"""What the tests of data parallelism run in processes of their own."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import TinyLM, assert_same_bits, batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers_comm import assert_equal_everywhere, enter, leave

import fp8stack
from fp8stack import comm
from fp8stack.errors import ConfigError

MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.05},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class WithUnused(TinyLM):
    """Has a layer that every second call leaves out."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, *args):
        self.calls += 1
        loss = super().forward(*args)
        if self.calls % 2:
            return loss
        return loss + self.extra(torch.ones_like(self.extra.bias)).sum() * 1e-3


def make(device, mode, level=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = (WithUnused() if mode == "unused" else TinyLM()).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if level is not None:
        model, optimizer = fp8stack.initialize(model, optimizer, level, compute="bf16")
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, **MODES[mode]), optimizer


def inputs(number, device):
    return [t.to(device) for t in batch(number)]


def train_part(model, optimizer, rank, world, device):
    """Take 25 steps on this rank's part of the batches; return the losses."""
    losses = []
    for step in range(25):
        optimizer.zero_grad()
        loss = model(*inputs(world * step + rank, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_hook(rank, world, store, device):
    """Gradients are the mean to 28 dB, of the same bits on all ranks, in every mode of DDP; training stays together."""
    device = enter(rank, world, store, device)
    for dtype in (torch.float32, torch.bfloat16):
        for mode in MODES:
            check_gradients(rank, world, device, mode, dtype)
    check_small_buckets_go_as_they_are(rank, world, device)
    check_one_bad_rank_stops_all(rank, world, device)
    check_errors_are_fed_back(rank, world, device)
    for level in (None, "O1", "O2") if world == 2 or device == "cuda" else ("O2",):
        check_training(rank, world, device, level)
    leave()


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
                    model(*inputs(100 + rank, device)).backward()
            model(*inputs(10 * step + rank, device)).backward()
        gradients[hooked] = [p.grad for p in model.parameters()]
    for given in gradients[True]:
        assert given.dtype is dtype
        assert_equal_everywhere(given)
    exact, given = (torch.cat([g.flatten().double() for g in gradients[h]]) for h in (False, True))
    noise = (given - exact).square().sum()
    assert 0 < noise <= exact.square().sum() * 10 ** -(2.7 if dtype is torch.float32 else 2.6)


def check_small_buckets_go_as_they_are(rank, world, device):
    gradients = {}
    for min_bytes in (None, 10**9):
        model, _ = make(device, "plain")
        if min_bytes:
            comm.register_fp8_hook(model, min_bytes)
        model(*inputs(rank, device)).backward()
        gradients[min_bytes] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(*gradients.values(), rtol=1e-6, atol=1e-9)


def check_one_bad_rank_stops_all(rank, world, device):
    """A gradient that is not finite on one rank is not on any, and O2's step is skipped by all."""
    model, optimizer = make(device, "plain", "O2")
    comm.register_fp8_hook(model)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(*inputs(rank, device))
    (loss * (torch.inf if rank == 0 else 1.0)).backward()
    optimizer.step()
    for p, same in zip(model.parameters(), before, strict=True):
        assert_same_bits(p.detach(), same)


def check_errors_are_fed_back(rank, world, device):
    """The mean over many equal steps nears the exact one, by the hook and in FP8-resident gradients."""
    exact, _ = make(device, "plain")
    exact(*inputs(rank, device)).backward()
    exact = torch.cat([p.grad.flatten().double() for p in exact.parameters()])
    for resident in (False, True):
        errors = {}
        for feedback in ("none", "shard"):
            model, _ = make(device, "plain")
            if resident:
                model = comm.DataParallel(model.module, error_feedback=feedback)
            else:
                comm.register_fp8_hook(model, error_feedback=feedback)
            total = 0.0
            for step in range(13):
                model.zero_grad()
                model(*inputs(rank, device)).backward()
                if step:  # DDP builds its buckets anew after the first
                    total += torch.cat(
                        [(p.grad + 0).flatten().double() for p in model.parameters()]
                    )
            errors[feedback] = (total / 12 - exact).norm()
            assert_equal_everywhere(total)
        # the first quantization, of each rank, is the same every time and stays
        assert errors["shard"] < 0.9 * errors["none"], errors
    with pytest.raises(ConfigError, match=r'got "shards"\. Did you mean "shard"'):
        comm.Fp8CommState(error_feedback="shards")


def check_training(rank, world, device, level):
    losses = {}
    for hooked in (False, True):
        model, optimizer = make(device, "plain", level)
        if hooked:
            comm.register_fp8_hook(model)
        losses[hooked] = train_part(model, optimizer, rank, world, device)
        for p in model.parameters():
            assert_equal_everywhere(p.detach())
    for sums in losses.values():
        dist.all_reduce(sums)
    assert losses[True][-1] < 0.5 * losses[True][0]
    assert torch.allclose(losses[True], losses[False], rtol=0.05)


# --- FSDP2


def check_shards(rank, world, store, device):
    """Gradients of FSDP2's shards are the mean to 30 dB, whatever is reduced in, and training goes on as without."""
    device = enter(rank, world, store, device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    for reduce_dtype in (None, torch.float32, torch.bfloat16):
        for factor in (None, 3.0):
            check_sharded_gradients(rank, world, device, mesh, reduce_dtype, factor)
    losses = {}
    for hooked in (False, True):
        model = shard(device, mesh, None, hooked)
        optimizer = fp8stack.optim.AdamW(model.parameters(), lr=3e-3)
        losses[hooked] = train_part(model, optimizer, rank, world, device)
    assert losses[True][-1] < 0.5 * losses[True][0]
    assert torch.allclose(losses[True], losses[False], rtol=0.06)
    with pytest.raises(ConfigError, match="no module sharded by fully_shard in TinyLM"):
        comm.register_fp8_reduce_scatter(TinyLM())
    leave()


def shard(device, mesh, reduce_dtype, hooked):
    torch.manual_seed(0)
    model = TinyLM().to(device)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)][:1]
    for name in names:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if hooked:
        assert comm.register_fp8_reduce_scatter(model) == ["", *names]
    return model


def check_sharded_gradients(rank, world, device, mesh, reduce_dtype, factor):
    gradients = {}
    for hooked in (False, True):
        model = shard(device, mesh, reduce_dtype, hooked)
        if factor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(True)  # gloo needs it
        for step in range(2):  # accumulates
            model(*inputs(10 * step + rank, device)).backward()
        gradients[hooked] = torch.cat(
            [p.grad.full_tensor().flatten().double() for p in model.parameters()]
        )
    noise = (gradients[True] - gradients[False]).square().sum()
    assert 0 < noise <= gradients[False].square().sum() * 1e-3


# --- stock DDP


def check_stock(rank, world, folder, level):
    """Train under DDP without a hook of ours; write the losses, and whether the weights of all ranks are the same."""
    torch.set_num_threads(1)
    enter(rank, world, f"{folder}/rendezvous", "cpu")
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if level != "baseline":
        model, optimizer = fp8stack.initialize(model, optimizer, level)
    parallel = DistributedDataParallel(model)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        if step % 5 == 3:
            with parallel.no_sync():
                parallel(*batch(1000 + 2 * step + rank)).backward()
        loss = parallel(*batch(2 * step + rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(both, weights)
    result = {"losses": losses, "same": torch.equal(*both)}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    leave()
