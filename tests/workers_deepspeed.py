"""What the tests of DeepSpeed run in processes of their own, on CPUs: the real engine, ZeRO of every stage."""

import logging
import os

import torch
import torch.distributed as dist
from helpers import assert_same_bits
from workers import leave_ranks

from fp8stack import optim

WIDTH = 64
NUMEL = 2 * (WIDTH * 256) + 3 * 256 + WIDTH  # of the model below


def enter(rank, world, store, device="cpu"):
    """Join a group of `world` ranks and return DeepSpeed, which then compiles nothing."""
    os.environ.update(DS_ACCELERATOR=device, LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    logging.disable(logging.WARNING)
    import deepspeed
    import deepspeed.ops

    # built with a compiler at the first call otherwise, and not used in training
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def leave():
    leave_ranks()
    os._exit(0)


def build():
    torch.manual_seed(0)
    layers = torch.nn.Linear(WIDTH, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, WIDTH))


def configure(stage, dtype, low_master=False, **more):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }
    if stage:
        config["zero_optimization"] = {"stage": stage}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if low_master:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return config


def start(deepspeed, config, make, groups=1):
    """Return an engine; the optimizer's parameters in `groups` groups."""
    model = build()
    parameters = list(model.parameters())
    parts = [{"params": parameters[i::groups], "flat": True} for i in range(groups)]
    return deepspeed.initialize(model=model, optimizer=make(parts), config=config)[0]


def train(engine, steps, rank, seed=1, accumulation=1):
    """Return the losses of some steps on a linear problem, each rank on its own part of the data."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(WIDTH, WIDTH, generator=generator) / 8
    generator = torch.Generator().manual_seed(100 * seed + rank)
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for _ in range(steps * accumulation):
        x = torch.randn(8, WIDTH, generator=generator)
        loss = (engine(x.to(dtype)).float() - x @ target).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def inner_of(engine):
    """Return the optimizer that the engine was given."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def make_ours(parts):
    return optim.AdamW(parts, lr=3e-3)


def make_torch_s(parts):
    return torch.optim.AdamW(parts, lr=3e-3)


def check_zero(rank, world, store, stage, folder):
    """States stay in 8 bits in every kind of partition, training is as good, and resumes bit for bit."""
    deepspeed = enter(rank, world, store)
    kinds = [("fp32", False), ("bf16", False), *([("bf16", True)] if stage else [])]
    for dtype, low_master in kinds:
        config = configure(stage, dtype, low_master)
        expected = train(start(deepspeed, config, make_torch_s), 40, rank)
        engine = start(deepspeed, config, make_ours)
        losses = train(engine, 40, rank)
        assert abs(losses[-10:].mean() / expected[-10:].mean() - 1) < 0.02
        inner = inner_of(engine)
        assert type(inner) is optim.AdamW
        if stage:
            check_bytes(inner, world, low_master)
        place = f"{folder}/{dtype}{low_master}"
        engine.save_checkpoint(place, tag="here")
        after = train(engine, 5, rank, seed=2)
        again = start(deepspeed, config, make_ours)
        again.load_checkpoint(place, tag="here")
        assert_same_bits(train(again, 5, rank, seed=2), after)
        for p, q in zip(engine.module.parameters(), again.module.parameters(), strict=True):
            assert_same_bits(p.detach(), q.detach())
    leave()


def check_bytes(inner, world, low_master):
    """8-bit moments, and 8 bits beside a bfloat16 partition; ZeRO pads a little."""
    state = [t for entry in inner.state.values() for t in entry.values()]
    nbytes = sum(t.nbytes for t in state if isinstance(t, torch.Tensor))
    assert 2 * NUMEL / world <= nbytes <= (3.1 if low_master else 2.1) * NUMEL / world + 64
    codes = [t for entry in inner.state.values() for k, t in entry.items() if k.endswith("_code")]
    assert all(t.dtype is torch.uint8 for t in codes)
    assert sum(t.numel() for t in codes) >= 2 * NUMEL // world


def check_groups_and_accumulation(rank, world, store):
    """Groups that ZeRO empties between calls, sub-groups of stage 3, micro-batches."""
    deepspeed = enter(rank, world, store)
    for stage in (1, 2, 3):
        config = configure(stage, "bf16", gradient_accumulation_steps=3)
        if stage == 3:
            config["zero_optimization"]["sub_group_size"] = 9000
        results = []
        for make in (make_torch_s, make_ours):
            engine = start(deepspeed, config, make, groups=2)
            results.append(train(engine, 30, rank, accumulation=3)[-20:].mean())
        assert abs(results[1] / results[0] - 1) < 0.02
        inner = inner_of(engine)
        assert len(inner.state) >= 2
        large = [e for p, e in inner.state.items() if p.numel() >= inner.min_numel]
        assert large
        assert all("exp_avg_code" in entry for entry in large)
        assert all(entry["step"] == 30 for entry in inner.state.values())
    leave()


def check_bad_gradients(rank, world, store):
    """A NaN on one rank: no rank's partition is stepped, and the next step is as good as ever."""
    deepspeed = enter(rank, world, store)
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            engine = start(deepspeed, configure(stage, dtype), make_ours)
            train(engine, 3, rank)
            inner = inner_of(engine)
            before = [p.detach().clone() for p in inner.state]
            x = torch.randn(8, WIDTH).to(next(engine.module.parameters()).dtype)
            loss = engine(x).float().square().mean() * (torch.nan if rank == 0 else 1.0)
            engine.backward(loss)
            engine.step()
            for p, old in zip(inner.state, before, strict=True):
                assert_same_bits(p.detach(), old)
            assert train(engine, 3, rank).isfinite().all()
            changed = [not torch.equal(p, old) for p, old in zip(inner.state, before, strict=True)]
            assert all(changed)
    leave()
