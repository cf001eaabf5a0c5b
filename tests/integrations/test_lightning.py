"""Lightning's Trainer and Fabric with fp8stack: the real library on CPUs, and real processes where there are two."""

import csv
import subprocess
import sys

import pytest
import torch
from helpers import TinyLM, assert_same_bits
from ranks import start_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from workers_lightning import LR, Module, by_hand, check_ranks, loader, trainer  # noqa: E402

import fp8stack  # noqa: E402
from fp8stack import BlockScaledTensor  # noqa: E402
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError  # noqa: E402
from fp8stack.integrations import lightning  # noqa: E402
from fp8stack.integrations.lightning import Fp8Callback, Fp8Precision, sessions_in  # noqa: E402


def fit(module, *arguments, epochs=1, steps=4, callbacks=(), path=None, **more):
    run = trainer(*arguments, max_epochs=epochs, callbacks=[Fp8Callback(), *callbacks], **more)
    run.fit(module, loader(steps), ckpt_path=path, weights_only=True if path else None)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_ranks(world, tmp_path):
    arguments = (world, str(tmp_path / "s"), str(tmp_path))
    start_ranks(check_ranks, arguments, nprocs=world)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_trainer_does_what_a_loop_does(level, precision):
    module = Module()
    run = fit(module, level, precision)
    assert module.losses == by_hand(level, 4, autocast=precision == "bf16-mixed")
    assert isinstance(run.optimizers[0], fp8stack.optim.AdamW) == (level != "O0")
    assert (module.model.up.weight.dtype is torch.bfloat16) == (level == "O2")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_level_on_a_gpu(precision):
    plain = Module()
    trainer(None, precision=precision, accelerator="gpu").fit(plain, loader(20))
    for level in ("O0", "O1", "O2"):
        module = Module()
        fit(module, level, precision, steps=20, accelerator="gpu")
        (session,) = sessions_in(module).values()
        assert not session.report.device.startswith("CPU")
        assert module.losses[-1] < 0.9 * module.losses[0]
        assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_and_accumulation_are_those_of_torch(algorithm):
    limit, clip = {"norm": (0.1, clip_grad_norm_), "value": (1e-3, clip_grad_value_)}[algorithm]
    module = Module()
    fit(module, steps=6, gradient_clip_val=limit, gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=2)  # fmt: skip
    clipped = by_hand("O2", 6, clip=lambda p: clip(p, limit), accumulate=2)
    assert module.losses == clipped
    assert clipped != by_hand("O2", 6, accumulate=2)


def test_everything_is_bfloat16_if_that_is_asked_for():
    module = Module()
    fit(module, "O2", "bf16-true", steps=20)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.losses[-1] < 0.5 * module.losses[0]


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
            if isinstance(value, torch.Tensor):
                for other in states[1:]:
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


class Late(Module):
    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(0)
            self.model = TinyLM()


def test_a_model_that_is_made_late():
    module = Late()
    fit(module)
    assert module.losses == by_hand("O2", 4)


# --- several optimizers


class Two(pl.LightningModule):
    """Two models in turns, as a GAN has them."""

    automatic_optimization = False
    seen = None

    def __init__(self, split=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.split, self.losses = TinyLM(), TinyLM(), split, []

    def training_step(self, parts, index):
        for model, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = model(*parts)
            self.manual_backward(loss)
            self.seen = model.up.weight.grad
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
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
    assert isinstance(module.seen, BlockScaledTensor)
    assert max(module.losses[-2:]) < 0.6 * min(module.losses[:2])
    with pytest.raises(ModelError, match=r"no part of Two has exactly .* parameters of one AdamW"):
        fit(Two(split=True))
    split = Two(split=True)
    fit(split, "O0", steps=1)
    assert type(split.a.up) is not nn.Linear


# --- the callback


class Plain(Module):
    """Calls itself, which the monitor must not count twice."""

    def forward(self, tokens, targets):
        return self.model(tokens, targets)

    def training_step(self, parts, index):
        return self(*parts)


def test_metrics_are_logged(tmp_path):
    module, logger = Plain(), CSVLogger(tmp_path)
    run = trainer(callbacks=[Fp8Callback(every=2)], logger=logger, log_every_n_steps=1)
    run.fit(module, loader(5))
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["fp8/amax"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    assert all(float(row["fp8/model.up/g_amax"]) > 0 for row in rows)
    assert all(float(row["fp8/update_ratio"]) > 0 for row in rows)
    with pytest.raises(TypeError, match="targets"):
        trainer(callbacks=[Fp8Callback()], logger=logger).fit(
            module, DataLoader([[1]], batch_size=None)
        )
    fp8stack.monitor.Monitor(module).remove()  # the callback's are gone


def test_fp8_that_is_off_raises():
    with pytest.raises(ModelError, match=r"Module has no FP8 layers: nobody has initialized it"):
        fit(Module(), None)
    run = trainer(None, callbacks=[Fp8Callback()], plugins=[Fp8Precision("O2", skip=["*"])])
    with pytest.raises(ModelError, match="no FP8 layers: all were left out"):
        run.fit(Module(), loader(1))

    class Undone(pl.Callback):
        def on_fit_start(self, trainer, module):
            module.model.up = nn.Linear(128, 256)

    class Replaced(pl.Callback):
        def on_fit_start(self, trainer, module):
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]

    with pytest.raises(ModelError, match=r"model\.up was converted and is an ordinary layer again"):
        fit(Module(), callbacks=[Undone()])
    with pytest.raises(ModelError, match="SGD is stepped, and not the AdamW that fp8stack"):
        fit(Module(), callbacks=[Replaced()])


# --- Fabric


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_on_one_device(precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = lightning.setup(fabric, model, optimizer, "O2")
    losses = []
    for parts in loader(10):
        loss = model(*parts)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(optimizer, fp8stack.optim.AdamW)
    inference = lightning.setup(fabric, TinyLM(), None, "O0")
    assert type(inference.module.up) is not nn.Linear


def test_a_plugin_for_the_trainer_is_refused_by_fabric():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[Fp8Precision()])
    with pytest.raises(ConfigError, match=r"Fabric does not show plugins.*lightning\.setup"):
        fabric.setup(TinyLM())


# --- bad input, and no Lightning


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "02"}, 'opt_level must be one of "O0"'),
        ({"precision": "16-mixed"}, r"precision='16-mixed' is none of 32-true.*Did you mean"),
        ({"state": "8bit"}, r'no option \'state\'. Did you mean "states"'),
        ({"enabled": False}, "no option 'enabled'"),
        (
            {"offload": "cpu"},
            "offload='cpu' does not go with Lightning: the Trainer moves the states",
        ),
        ({"step_in_backward": True}, "step_in_backward=True does not go with Lightning"),
    ],
)
def test_bad_options_are_refused_when_the_plugin_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        Fp8Precision(**options)


def test_strict_raises_and_fallbacks_warn():
    class Partial(Module):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.up.parameters(), lr=LR)

    strict = trainer(None, plugins=[Fp8Precision("O2", strict=True)])
    with pytest.raises(fp8stack.errors.UnsupportedDeviceError, match="not in the optimizer"):
        strict.fit(Partial(), loader(1))
    with pytest.warns(Fp8StackWarning, match="not in the optimizer"):
        fit(Partial(), steps=1)


SCRIPT = """
import sys

for name in ("lightning", "pytorch_lightning"):
    sys.modules[name] = None
import fp8stack.integrations.lightning as adapter

try:
    adapter.Fp8Precision
except ImportError as error:
    assert "pip install 'fp8stack[lightning]'" in str(error), error
else:
    raise AssertionError
del sys.modules["lightning"], sys.modules["pytorch_lightning"]

import pytorch_lightning as pl
import torch


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(128, 128)

    def training_step(self, x, index):
        return self.layer(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

trainer = pl.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
    plugins=[adapter.Fp8Precision("O2")], callbacks=[adapter.Fp8Callback()],
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(16, 128), batch_size=16))
print(type(trainer.optimizers[0]).__module__)
"""


@pytest.mark.slow
def test_without_lightning_and_under_its_other_name():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("fp8stack.optim")
