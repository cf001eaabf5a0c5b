"""Modules and loops for the tests of Lightning, and what they run in processes of their own."""

import os

import lightning.pytorch as pl
import pytest
import torch
from helpers import TinyLM, batch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from workers_comm import assert_equal_everywhere, enter, leave

import fp8stack
from fp8stack import comm
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations import deepspeed
from fp8stack.integrations.lightning import Fp8Callback, Fp8Precision, setup

LR = 3e-3


class Module(pl.LightningModule):
    """A TinyLM that notes its losses, with AdamW and a schedule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses = TinyLM(), []

    def training_step(self, parts, index):
        loss = self.model(*parts)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, parts, index):
        self.log("loss", self.model(*parts), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]


def schedule(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)


def loader(steps, rank=0):
    return DataLoader([batch(100 * rank + step) for step in range(steps)], batch_size=None)


def trainer(level="O2", precision="32-true", callbacks=(), **more):
    """Return a quiet Trainer; without a plugin at level None."""
    options = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
        "plugins": [Fp8Precision(level, precision)] if level else [], "callbacks": list(callbacks),
    }  # fmt: skip
    return pl.Trainer(**options | more)


def by_hand(level, steps, wrap=None, clip=None, accumulate=1, rank=0, autocast=False):
    """Train as the Trainer does, in the loop of fp8stack's documentation; return the losses."""
    torch.manual_seed(0)
    model = bare = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = schedule(optimizer)
    bare, optimizer = fp8stack.initialize(bare, optimizer, level)
    model, losses = (wrap(bare) if wrap else bare), []
    for step, parts in enumerate(loader(steps, rank), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*parts)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if step % accumulate:
            continue
        if clip:
            clip(bare.parameters())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


# --- several ranks


def check_ranks(rank, world, store, folder):
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")  # processes are made outside
    enter(rank, world, store, "cpu")
    check_ddp(rank, world)
    check_fabric(rank, world)
    check_fsdp2(rank, world, folder)
    check_deepspeed(rank, world)
    leave()


def in_ddp(model):
    parallel = DistributedDataParallel(model)
    comm.register_fp8_hook(parallel)
    return parallel


def check_ddp(rank, world):
    """The Trainer's losses are those of DDP with the hook, bit for bit, and gradients go in FP8."""
    for level in ("O1", "O2"):
        module = Module()
        expected = by_hand(level, 4, in_ddp, rank=rank)
        run = trainer(level, strategy="ddp", devices=world, callbacks=[Fp8Callback()])
        with comm.Statistics() as statistics:
            run.fit(module, loader(4, rank), loader(1))
        assert module.losses == expected
        assert world == 1 or statistics.collect()["all_reduce"]["calls"] >= 4
        for parameter in module.parameters():
            assert_equal_everywhere(parameter.detach())
    strategy = DDPStrategy(ddp_comm_hook=comm.fp8_compress_hook)
    with pytest.raises(ConfigError, match="has a ddp_comm_hook, and O2 registers its own"):
        trainer(strategy=strategy, devices=world).fit(Module(), loader(1))


def check_fabric(rank, world):
    """Ranks that begin with other weights than rank 0 train as if they had not."""
    expected = by_hand("O2", 4, in_ddp, rank=rank)
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
    fabric.launch()
    torch.manual_seed(rank)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = schedule(optimizer)
    model, optimizer = setup(fabric, model, optimizer)
    losses = []
    for parts in loader(4, rank):
        loss = model(*parts)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert losses == expected
    for parameter in model.parameters():
        assert_equal_everywhere(parameter.detach())
    sharding = Fabric(accelerator="cpu", devices=world, strategy=FabricModelParallel(shard, 1, 1))
    with pytest.raises(ConfigError, match=r"'ModelParallelStrategy' does not go.*fsdp.attach"):
        setup(sharding, TinyLM(), None, "O0")


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    for part in (model.up, model):
        fully_shard(part, mesh=mesh["data_parallel"], mp_policy=policy)
    return model


class Sharded(Module):
    def configure_model(self):
        if not hasattr(self.model, "unshard"):  # it is called by every fit, test, ...
            shard(self.model, self.device_mesh)


def check_fsdp2(rank, world, folder):
    """Sharded models come to the level, and a distributed checkpoint goes on with the same losses."""

    def fit(module, epochs, **options):
        strategy = ModelParallelStrategy(world, 1)
        run = trainer(strategy=strategy, devices=world, max_epochs=epochs, callbacks=[Fp8Callback()],
                      gradient_clip_val=1.0)  # fmt: skip
        run.fit(module, loader(3, rank), **options)
        return run

    whole, first, second = Sharded(), Sharded(), Sharded()
    run = fit(whole, 2)
    assert isinstance(run.optimizers[0], fp8stack.optim.AdamW)
    assert whole.losses[-1] < whole.losses[0]
    fit(first, 1).save_checkpoint(f"{folder}/sharded")
    fit(second, 2, ckpt_path=f"{folder}/sharded")
    assert first.losses + second.losses == whole.losses
    with pytest.raises(ModelError, match="was sharded by FSDP2 before it was initialized"):
        fit(second, 1)
    run = trainer(strategy=ModelParallelStrategy(world, 1), devices=world)
    assert run.test(Sharded(), loader(1), verbose=False)[0]["loss"] == pytest.approx(6.07, abs=0.01)


class CpuDeepSpeed(DeepSpeedStrategy):
    """Lightning lets DeepSpeed run on CUDA only, which only its checks need."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        self.set_world_ranks()


class Unscheduled(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR)


def check_deepspeed(rank, world):
    """`install` and a section of the config do what the plugin does elsewhere; the callback looks at the engine."""
    import deepspeed.ops as ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at the first call otherwise
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True, "fp8stack": {"opt_level": "O2"},
    }  # fmt: skip

    def fit(module, level=None):
        strategy = CpuDeepSpeed(config=dict(config))
        trainer(level, strategy=strategy, devices=world, callbacks=[Fp8Callback()]).fit(
            module, loader(4, rank)
        )

    with pytest.raises(
        ConfigError,
        match=r"DeepSpeedStrategy. does not go with Lightning: .*deepspeed\.install\(\)",
    ):
        fit(Unscheduled(), "O2")
    module = Unscheduled()
    with deepspeed.install():
        fit(module)
    assert module.losses[-1] < module.losses[0]
    with pytest.raises(ModelError, match=r'a section "fp8stack", and nobody has read it'):
        fit(Unscheduled())
