"""fp8stack.integrations.lightning: the real Trainer and Fabric on CPUs, and real processes where there are two."""

import csv
import runpy
import sys

import pytest
import torch
from engines import import_deepspeed
from helpers import TinyLM, assert_same_bits, batch, build
from ranks import assert_same_on_all_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

import fp8stack
from fp8stack import BlockScaledTensor, comm
from fp8stack.conflicts import LIGHTNING, RULES
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.integrations import deepspeed
from fp8stack.levels import OPTIONS

pl = pytest.importorskip("lightning.pytorch")
Fabric = pytest.importorskip("lightning.fabric").Fabric
FabricModelParallel = pytest.importorskip("lightning.fabric.strategies").ModelParallelStrategy

from fp8stack.integrations import lightning as adapter  # noqa: E402
from fp8stack.integrations.lightning import Fp8Callback, Fp8Precision, setup  # noqa: E402

strategies = pl.strategies
LR = 3e-3
QUIET = {
    "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
}  # fmt: skip


class Module(pl.LightningModule):
    """A TinyLM that notes its losses, with AdamW and a schedule."""

    scheduled = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses = TinyLM(), []

    def forward(self, tokens, targets):  # a monitor must not count this call too
        return self.model(tokens, targets)

    def training_step(self, parts, index):
        loss = self(*parts)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, parts, index):
        self.log("loss", self(*parts), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        schedulers = [{"scheduler": schedule(optimizer), "interval": "step"}] * self.scheduled
        return [optimizer], schedulers


def schedule(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)


def loader(steps, rank=0):
    return DataLoader([batch(100 * rank + step) for step in range(steps)], batch_size=None)


def trainer(level="O2", precision="32-true", callbacks=(), **more):
    """Return a quiet Trainer; without a plugin at level None."""
    plugins = [Fp8Precision(level, precision)] if level else []
    return pl.Trainer(**QUIET | {"plugins": plugins, "callbacks": list(callbacks)} | more)


def fit(module, *arguments, epochs=1, steps=4, rank=0, callbacks=(), path=None, **more):
    run = trainer(*arguments, max_epochs=epochs, callbacks=[Fp8Callback(), *callbacks], **more)
    run.fit(module, loader(steps, rank), ckpt_path=path, weights_only=True if path else None)
    return run


def by_hand(level, steps, wrap=None, clip=None, accumulate=1, rank=0, precision="32-true"):
    """Train as the Trainer does, in the loop of fp8stack's documentation; return the losses."""
    bare, optimizer = build(dtype=torch.bfloat16 if precision == "bf16-true" else torch.float32)
    scheduler = schedule(optimizer)
    bare, optimizer = fp8stack.initialize(bare, optimizer, level)
    model, losses = (wrap(bare) if wrap else bare), []
    for step, parts in enumerate(loader(steps, rank), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
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


# --- the Trainer on one device


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_trainer_does_what_a_loop_does(level, precision):
    module = Module()
    run = fit(module, level, precision)
    assert module.losses == by_hand(level, 4, precision=precision)
    assert isinstance(run.optimizers[0], fp8stack.optim.AdamW) == (level != "O0")
    bf16 = level == "O2" or precision == "bf16-true"
    assert (module.model.up.weight.dtype is torch.bfloat16) == bf16


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_level_on_a_gpu(precision):
    plain = Module()
    trainer(None, precision=precision, accelerator="gpu").fit(plain, loader(20))
    for level in ("O0", "O1", "O2"):
        module = Module()
        fit(module, level, precision, steps=20, accelerator="gpu")
        assert not fp8stack.get_report(module).device.startswith("CPU")
        assert module.losses[-1] < 0.9 * module.losses[0]
        assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_and_accumulation_are_those_of_torch(algorithm):
    limit, clip = {"norm": (0.1, clip_grad_norm_), "value": (1e-3, clip_grad_value_)}[algorithm]
    module, clipping = Module(), {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    fit(module, steps=6, accumulate_grad_batches=2, **clipping)
    clipped = by_hand("O2", 6, clip=lambda p: clip(p, limit), accumulate=2)
    assert module.losses == clipped
    assert clipped != by_hand("O2", 6, accumulate=2)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_goes_on_with_the_same_bits(level, tmp_path):
    whole, first, second = Module(), Module(), Module()
    end = fit(whole, level, epochs=2)
    fit(first, level).save_checkpoint(tmp_path / "one.ckpt")
    resumed = fit(second, level, epochs=2, path=tmp_path / "one.ckpt")
    assert first.losses + second.losses == whole.losses
    again = fit(first, level, epochs=2, path=tmp_path / "one.ckpt")  # the same module once more
    assert first.losses == whole.losses
    states = [run.optimizers[0].state_dict()["state"] for run in (end, resumed, again)]
    for index, entry in states[0].items():
        for key, value in entry.items():
            for other in states[1:] if isinstance(value, torch.Tensor) else ():
                assert_same_bits(other[index][key], value, key)


def test_a_module_that_is_tested_before_it_is_fitted_and_restored_in_the_end():
    module = Module()
    exact = trainer(None).test(module, loader(2), verbose=False)[0]["loss"]
    for _ in range(2):  # the second finds it converted
        loss = trainer("O2").test(module, loader(2), verbose=False)[0]["loss"]
        assert loss == pytest.approx(exact, rel=0.02)
        assert loss != exact
    assert module.model.up.weight.dtype is torch.float32
    fit(module, steps=8)
    before = module.losses[-1]
    run = fit(module, steps=8)  # a new optimizer, from the weights that there are
    assert module.losses[-1] < module.losses[8] < before
    masters = run.optimizers[0].master_weight(module.model.up.weight)
    fp8stack.restore(module)
    assert type(module.model.up) is nn.Linear
    assert_same_bits(module.model.up.weight.detach(), masters)
    fit(module, steps=2)


class Two(pl.LightningModule):
    """Two models in turns, as a GAN has them."""

    automatic_optimization = False

    def __init__(self, split=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.split, self.losses = TinyLM(), TinyLM(), split, []

    def training_step(self, parts, index):
        for model, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
            loss = model(*parts)
            self.manual_backward(loss)
            assert isinstance(model.up.weight.grad, BlockScaledTensor) != self.split
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.item())

    def configure_optimizers(self):
        parts = [list(self.a.parameters()), list(self.b.parameters())]
        if self.split:
            parts[1].append(parts[0].pop())
        return [torch.optim.AdamW(p, lr=LR) for p in parts]


def test_optimizers_of_their_own_submodules():
    module = Two()
    run = fit(module, steps=10)
    assert all(isinstance(o, fp8stack.optim.AdamW) for o in run.optimizers)
    assert max(module.losses[-2:]) < 0.6 * min(module.losses[:2])
    with pytest.raises(ModelError, match=r"no part of Two has exactly .* parameters of one AdamW"):
        fit(Two(split=True))
    split = Two(split=True)
    fit(split, "O0", steps=1)
    assert type(split.a.up) is not nn.Linear


# --- the callback


def test_metrics_are_logged(tmp_path):
    module, logger = Module(), pl.loggers.CSVLogger(tmp_path)
    run = trainer(callbacks=[Fp8Callback(every=2)], logger=logger, log_every_n_steps=1)
    run.fit(module, loader(5))
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["fp8/amax"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    assert all(float(row["fp8/model.up/g_amax"]) > 0 for row in rows)
    assert all(float(row["fp8/update_ratio"]) > 0 for row in rows)
    run = trainer(callbacks=[Fp8Callback()], logger=logger)
    with pytest.raises(TypeError, match="targets"):
        run.fit(module, DataLoader([[1]], batch_size=None))
    fp8stack.monitor.Monitor(module).remove()  # the callback's are gone


def undo(run, module):
    module.model.up = nn.Linear(128, 256)


def replace(run, module):
    run.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]


def test_fp8_that_is_off_raises():
    left_out = {"plugins": [Fp8Precision("O2", skip=["*"])]}
    before = pl.callbacks.LambdaCallback
    for words, level, options in (
        (r"Module has no FP8 layers: nobody has initialized it", None, {}),
        ("no FP8 layers: all were left out", None, left_out),
        (r"model\.up was converted and is an ordinary layer again", "O2", {"callbacks": [before(on_fit_start=undo)]}),
        ("SGD is stepped, and not the AdamW that fp8stack", "O2", {"callbacks": [before(on_fit_start=replace)]}),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=words):
            fit(Module(), level, **options)


# --- Fabric


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_on_one_device(precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    _, losses = train_by_fabric(fabric, 0, 10, clip=True)
    assert losses[-1] < 0.5 * losses[0]
    inference = setup(fabric, TinyLM(), None, "O0")
    assert type(inference.module.up) is not nn.Linear
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[Fp8Precision()])
    with pytest.raises(ConfigError, match=r"Fabric does not show plugins.*lightning\.setup"):
        fabric.setup(TinyLM())


def train_by_fabric(fabric, seed, steps, rank=0, clip=False):
    torch.manual_seed(seed)
    model, losses = TinyLM(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = schedule(optimizer)
    model, optimizer = setup(fabric, model, optimizer, "O2")
    assert isinstance(optimizer, fp8stack.optim.AdamW)
    for parts in loader(steps, rank):
        loss = model(*parts)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return model, losses


# --- two ranks


def use_two_ranks(rank, folder):
    train_in_ddp(rank)
    use_fabric(rank)
    shard_and_resume(rank, folder)
    use_deepspeed(rank)


def in_ddp(model):
    parallel = DistributedDataParallel(model)
    comm.register_fp8_hook(parallel)
    return parallel


def train_in_ddp(rank):
    """The Trainer's losses are those of DDP with the hook, bit for bit, and gradients go in FP8."""
    for level in ("O1", "O2"):
        module = Module()
        expected = by_hand(level, 4, in_ddp, rank=rank)
        run = trainer(level, strategy="ddp", devices=2, callbacks=[Fp8Callback()])
        with comm.Statistics() as statistics:
            run.fit(module, loader(4, rank), loader(1))
        assert module.losses == expected
        assert statistics.collect()["all_reduce"]["calls"] >= 4
        assert_same_on_all_ranks(module)
    strategy = strategies.DDPStrategy(ddp_comm_hook=comm.fp8_compress_hook)
    with pytest.raises(ConfigError, match="has a ddp_comm_hook, and O2 registers its own"):
        trainer(strategy=strategy, devices=2).fit(Module(), loader(1))


def use_fabric(rank):
    """Ranks that begin with other weights than rank 0 train as if they had not."""
    expected = by_hand("O2", 4, in_ddp, rank=rank)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, losses = train_by_fabric(fabric, rank, 4, rank)
    assert losses == expected
    assert_same_on_all_ranks(model)
    sharding = Fabric(accelerator="cpu", devices=2, strategy=FabricModelParallel(shard, 1, 1))
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


def shard_and_resume(rank, folder):
    """Sharded models come to the level, and a distributed checkpoint goes on with the same losses."""

    def fit(module, epochs, **options):
        strategy = strategies.ModelParallelStrategy(2, 1)
        run = trainer(strategy=strategy, devices=2, max_epochs=epochs, callbacks=[Fp8Callback()],
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
    run = trainer(strategy=strategies.ModelParallelStrategy(2, 1), devices=2)
    assert run.test(Sharded(), loader(1), verbose=False)[0]["loss"] == pytest.approx(6.07, abs=0.01)


class CpuDeepSpeed(strategies.DeepSpeedStrategy):
    """Lightning lets DeepSpeed run on CUDA only, which only its checks need."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self):
        super(strategies.DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        self.set_world_ranks()


class Unscheduled(Module):
    scheduled = False


def use_deepspeed(rank):
    """`install` and a section of the config do what the plugin does elsewhere; the callback looks at the engine."""
    import_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True, "fp8stack": {"opt_level": "O2"},
    }  # fmt: skip

    def fit_engine(level=None):
        module = Unscheduled()
        strategy = CpuDeepSpeed(config=dict(config))
        fit(module, level, rank=rank, strategy=strategy, devices=2)
        return module

    with pytest.raises(ConfigError, match=r"not go with Lightning: .*deepspeed\.install\(\)"):
        fit_engine("O2")
    with deepspeed.install():
        losses = fit_engine().losses
    assert losses[-1] < losses[0]
    with pytest.raises(ModelError, match=r'a section "fp8stack", and nobody has read it'):
        fit_engine()


@pytest.mark.slow
def test_two_ranks(tmp_path):
    run_ranks(use_two_ranks, 2, str(tmp_path))


# --- bad input, and no Lightning


RULES_OF_LIGHTNING = [
    ({rule.option: value}, f"{rule.option}={value!r} does not go with Lightning")
    for rule in RULES for value in rule.values
    if LIGHTNING in rule.contexts and rule.option in OPTIONS
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "02"}, 'opt_level must be one of "O0"'),
        (
            {"precision": "16-mixed"},
            r"precision must be one of \"32-true\".*'16-mixed' is not a choice. Did you mean",
        ),
        ({"state": "8bit"}, r'option=\'state\' is not a choice. Did you mean "states"'),
        ({"enabled": False}, "option='enabled' is not a choice"),
        *RULES_OF_LIGHTNING,
    ],
)
def test_bad_options_are_refused_when_the_plugin_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        Fp8Precision(**options)


class Partial(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.up.parameters(), lr=LR)


def test_strict_raises_and_fallbacks_warn():
    strict = trainer(None, plugins=[Fp8Precision("O2", strict=True)])
    with pytest.raises(UnsupportedDeviceError, match="not in the optimizer"):
        strict.fit(Partial(), loader(1))
    with pytest.warns(Fp8StackWarning, match="not in the optimizer"):
        fit(Partial(), steps=1)


def test_lightning_under_its_other_name(monkeypatch):
    other = pytest.importorskip("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    made = runpy.run_module(adapter.__name__)
    assert isinstance(made["Fp8Precision"]("O2", "bf16-mixed"), other.plugins.Precision)
    assert isinstance(Fp8Precision("O2"), pl.plugins.Precision)
