"""What the tests of MS-AMP's names run in processes of their own: accelerate, DeepSpeed, and two ranks on CPUs."""

import functools
import json
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers_comm import assert_equal_everywhere, assert_near, drawn, enter, leave

from fp8stack import BlockScaledTensor
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.integrations.msamp import enable
from fp8stack.nn import Fp8Linear


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))


def inputs(number):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


def train(model, optimizer, steps, backward=torch.Tensor.backward, rank=0, after=lambda: None):
    """Return the losses of learning the identity."""
    losses = []
    for step in range(steps):
        x = inputs(1000 * rank + step)
        loss = (model(x) - x).square().mean()
        backward(loss)
        after()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


# --- two ranks


def check_ranks(rank, world, store):
    """Everything of MS-AMP's that exchanges something between ranks, beginning from other weights on each."""
    enter(rank, world, store, "cpu")
    enable()
    check_gradients(rank, world)
    check_wrapped(rank)
    check_replacer(rank)
    check_tensors(rank, world)
    check_codes(rank)
    check_fsdp(rank)
    leave()


def check_gradients(rank, world):
    """The mean of equal gradients is that gradient, where MS-AMP's sums of codes saturated; others are near theirs."""
    import msamp

    model = build(seed=rank)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "O2")
    for parameter in model.parameters():
        assert_equal_everywhere(parameter.detach())
    weight = model[0].weight
    model(inputs(5)).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    assert isinstance(weight.grad, BlockScaledTensor)
    optimizer.all_reduce_grads(model)
    assert_same_bits(weight.grad.codes, before[0].codes)
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert torch.allclose(parameter.grad + 0, expected + 0, rtol=1e-6)

    optimizer.zero_grad()
    parts = []
    for r in range(world):
        model(inputs(100 + r)).square().mean().backward()
        parts.append([p.grad + 0 for p in model.parameters()])
        optimizer.zero_grad()
    model(inputs(100 + rank)).square().mean().backward()
    optimizer.all_reduce_grads(model)
    for index, parameter in enumerate(model.parameters()):
        exact = torch.stack([part[index].double() for part in parts]).mean(0)
        assert_near(parameter.grad + 0, exact, 28)
        assert_equal_everywhere(parameter.grad + 0)
    optimizer.zero_grad()
    reduce = functools.partial(optimizer.all_reduce_grads, model)
    losses = train(model, optimizer, 40, rank=rank, after=reduce)
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    for parameter in model.parameters():
        assert_equal_everywhere(parameter.detach())


def check_wrapped(rank):
    """DistributedDataParallel after initialize, torch's and MS-AMP's, stays together; its gradients are left alone."""
    import msamp
    from msamp.nn.distributed import FP8DistributedDataParallel

    for kind in (DistributedDataParallel, FP8DistributedDataParallel):
        model = build(seed=rank)
        model, optimizer = msamp.initialize(model, torch.optim.Adam(model.parameters(), lr=3e-3))
        wrapped = kind(model)
        losses = train(wrapped, optimizer, 20, rank=rank)
        assert losses[-5:].mean() < losses[:5].mean()
        wrapped(inputs(rank)).square().mean().backward()
        before = model[0].weight.grad
        codes = before.codes.clone()
        optimizer.all_reduce_grads(wrapped)
        assert model[0].weight.grad is before
        assert_same_bits(before.codes, codes)
        for parameter in model.parameters():
            assert_equal_everywhere(parameter.detach())
    with pytest.raises(RuntimeError, match=r"register_comm_hook"):
        wrapped.register_comm_hook(None, lambda state, bucket: None)  # FP8's is there


def check_replacer(rank):
    """The weights of the rank that is named are everybody's, and the group is that of all_reduce_grads."""
    import msamp

    group = dist.new_group([0, 1])
    model = msamp.nn.LinearReplacer.replace(build(seed=rank), src_rank=1, group=group)
    for parameter, expected in zip(model.parameters(), build(seed=1).parameters(), strict=True):
        assert_same_bits(parameter.detach(), expected.detach())
    optimizer = msamp.LBAdamW(model.parameters(), lr=3e-3)
    model(inputs(rank)).square().mean().backward()
    optimizer.all_reduce_grads(model)
    optimizer.step()
    for parameter in model.parameters():
        assert_equal_everywhere(parameter.detach())


def check_tensors(rank, world):
    from msamp.common.dtype import Dtypes
    from msamp.common.tensor import TensorDist, cast

    same = drawn(7, (33, 50))
    for qtype, decibels in ((Dtypes.kfloat8_e4m3, 25), (Dtypes.kfloat16, 28)):
        scaled = cast(same, qtype)
        expected = scaled.float()
        TensorDist.all_reduce_avg([scaled])
        assert_near(scaled.float(), expected, decibels)
        largest = expected.abs().max()
        assert abs(scaled.float().abs().max() / largest - 1) < 0.04  # MS-AMP's: half of it
        TensorDist.all_reduce([scaled], dist.ReduceOp.SUM)
        assert_near(scaled.float(), world * expected, decibels - 3)
        assert_equal_everywhere(scaled.value)

    mine, plain = cast(drawn(rank, 20) * 10.0**rank, Dtypes.kfloat8_e5m2), drawn(rank, 5)
    TensorDist.broadcast([mine, plain], src=1)
    assert_same_bits(mine.float(), cast(drawn(1, 20) * 10, Dtypes.kfloat8_e5m2).float())
    assert_same_bits(plain, drawn(1, 5))

    synced = cast(drawn(rank, 20) * 100.0**rank, Dtypes.kfloat8_e4m3, sync=True)
    assert_equal_everywhere(synced.meta.scale)
    assert synced.meta.amax[0] == (drawn(1, 20) * 100).abs().max()


def check_codes(rank):
    """Sums of bare codes: in range they are sums, beyond it they are clipped and said to be."""
    from msamp.common.dtype import Dtypes
    from msamp.operators.dist_op import DistOp

    values = torch.tensor([[1.0, 6.0, -0.5, 448.0], [2.0, 10.0, -1.5, 448.0]])
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)[rank]
    for order in ((codes.clone(), Dtypes.kfloat8_e4m3), (Dtypes.kfloat8_e4m3, codes.clone())):
        with pytest.warns(Fp8StackWarning, match=r"1 of 4 sums .* are beyond 448 and are clipped"):
            DistOp.all_reduce(*order)
        total = next(t for t in order if isinstance(t, torch.Tensor)).view(torch.float8_e4m3fn)
        assert_near(total.float(), torch.tensor([3.0, 16, -2, 448]), 20)
    kept = codes[:3].clone()
    DistOp.reduce(kept, 1, Dtypes.kfloat8_e4m3)
    changed = not torch.equal(kept, codes[:3])
    assert changed is (rank == 1)
    dense = torch.full((3,), float(rank))
    DistOp.all_reduce(dense, Dtypes.kfloat32)
    assert dense.tolist() == [1, 1, 1]


def check_fsdp(rank):
    """MS-AMP's FSDP example: sharded by size, FP8 layers, 8-bit states; accumulates, which MS-AMP's did not."""
    from msamp.fsdp import FP8FullyShardedDataParallel, FsdpReplacer
    from msamp.optim import FSDPAdam
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    model = FsdpReplacer.replace(build(seed=rank))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10_000)
    model = FP8FullyShardedDataParallel(model, use_orig_params=True, auto_wrap_policy=policy)
    sharded = [isinstance(m, FSDPModule) for m in (model, *model)]
    assert sharded == [True, True, False, False, True]
    assert isinstance(model[0], Fp8Linear)
    optimizer = FSDPAdam(model.parameters(), lr=3e-3)
    train(model, optimizer, 1, rank=rank)
    losses = train(model, optimizer, 40, rank=rank)
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    state = optimizer.state[model[0].weight]
    assert {"exp_avg_code", "exp_avg_sq_code"} <= state.keys()
    assert state["exp_avg_code"].to_local().numel() == 256 * 64 // dist.get_world_size()
    with pytest.raises(ConfigError, match="use_orig_params=False"):
        FP8FullyShardedDataParallel(build(), use_orig_params=False)


# --- accelerate


def pretend_torchrun(rank, world):
    """Say in the environment what accelerate reads there. The group exists, so nobody connects to the address."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(world))


def check_accelerate(rank, world, store):
    """Stock accelerate's MS-AMP backend gives the bits of msamp.initialize, and unscaled gradients."""
    pretend_torchrun(rank, world)
    enter(rank, world, store, "cpu")
    enable()
    import msamp
    from accelerate import Accelerator
    from accelerate.utils import MSAMPRecipeKwargs, is_msamp_available

    assert is_msamp_available()
    for level in ("O1", "O2"):
        model = build(seed=rank)
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), level)
        forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        model.forward = lambda x, f=forward: f(x).float()  # as accelerate does
        wrapped = DistributedDataParallel(model) if world > 1 else model
        expected = train(wrapped, optimizer, 10, rank=rank)

        handler = MSAMPRecipeKwargs(opt_level=level)
        accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
        assert accelerator.fp8_backend.value == "MSAMP"
        accelerator.scaler = torch.amp.GradScaler("cpu")  # as on a GPU: here it is disabled
        model = build(seed=rank)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            with pytest.warns(Fp8StackWarning, match="accelerate's GradScaler is taken away"):
                prepared = accelerator.prepare(model, optimizer, scheduler)
        wrapped, optimizer, _ = prepared
        assert isinstance(optimizer.optimizer, msamp.LBAdamW)
        assert isinstance(accelerator.unwrap_model(wrapped)[0], Fp8Linear)
        norms = []

        def clip(accelerator=accelerator, wrapped=wrapped, norms=norms):
            norms.append(accelerator.clip_grad_norm_(wrapped.parameters(), 1e9))

        losses = train(wrapped, optimizer, 10, accelerator.backward, rank, clip)
        assert_same_bits(losses, expected)
        assert max(norms) < 10  # 65536 times more with accelerate's scale
        accelerator.free_memory()
        type(accelerator.state)._reset_state()
    leave()


# --- DeepSpeed


def check_deepspeed(rank, world, store, folder):
    """`from msamp import deepspeed`: the section gives the level, and accelerate's handler does."""
    import engines as ds

    real = ds.enter(rank, world, store)
    enable()
    import msamp
    from msamp import deepspeed

    assert deepspeed.init_distributed is real.init_distributed
    optimizer = {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}
    config = ds.configure(3, "bf16", optimizer=optimizer)  # MS-AMP had stages 1 and 2
    path = os.path.join(folder, f"{rank}.json")
    for level, quantized in (("O1", False), ("O2", True)):
        with open(path, "w") as file:
            json.dump({**config, "msamp": {"enabled": True, "opt_level": level}}, file)
        args = type("Arguments", (), {"deepspeed_config": path})()
        engine = start(deepspeed, ds, args=args)
        assert isinstance(engine.module.up, Fp8Linear)
        check_states(ds.inner_of(engine), quantized, engine, ds, rank)
        assert args.deepspeed_config == path

    with open(path, "w") as file:
        json.dump({**config, "msamp": {"enabled": False}}, file)
    engine = start(deepspeed, ds, args=args)
    assert type(engine.module.up) is nn.Linear
    check_states(ds.inner_of(engine), False, engine, ds, rank)

    config = ds.configure(2, "bf16")
    model = ds.build()
    optimizer = msamp.LBAdamW(model.parameters(), lr=3e-3, exp_avg_dtype=torch.uint8)
    on = {**config, "msamp": {"enabled": True, "opt_level": "O2"}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=on)[0]
    check_states(ds.inner_of(engine), True, engine, ds, rank)
    assert ds.inner_of(engine).param_groups[0]["lr"] == 3e-3
    model = ds.build()
    optimizer = msamp.LBAdamW(model.parameters(), lr=3e-3)  # one scale a tensor
    on["msamp"]["opt_level"] = "O1"
    with pytest.warns(Fp8StackWarning, match="a scale for each 128"):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=on)[0]
    check_states(ds.inner_of(engine), True, engine, ds, rank)
    if world == 1:  # on CPUs, accelerate has no DeepSpeed of several ranks
        check_accelerate_with_deepspeed(ds)
    leave()


def start(deepspeed, ds, **how):
    model = ds.build()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), **how)[0]


def check_states(optimizer, quantized, engine, ds, rank):
    losses = ds.train(engine, 30, rank)
    assert losses[-5:].mean() < 0.9 * losses[:5].mean()
    keys = {key for state in optimizer.state.values() for key in state}
    assert ("exp_avg_code" in keys) is quantized, keys


def check_accelerate_with_deepspeed(ds):
    """The level of accelerate's handler, which reaches no config, and that of its plugin, which does."""
    pretend_torchrun(0, 1)
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, MSAMPRecipeKwargs

    for by_plugin in (False, True):
        more = {"enable_msamp": True, "msamp_opt_level": "O2"} if by_plugin else {}
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1, **more)
        handlers = [] if by_plugin else [MSAMPRecipeKwargs(opt_level="O2")]
        accelerator = Accelerator(
            mixed_precision="fp8", deepspeed_plugin=plugin, kwargs_handlers=handlers
        )
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
        model = ds.build()
        prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        engine = prepared[0]
        assert isinstance(engine.module.up, Fp8Linear)
        assert engine.zero_optimization_stage() == 2
        check_states(ds.inner_of(engine), True, engine, ds, 0)
        accelerator.free_memory()
        type(accelerator.state)._reset_state(True)
