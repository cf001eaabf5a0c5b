"""Lightning: a level of fp8stack as a precision plugin of the Trainer, and one call for Fabric.

    trainer = Trainer(plugins=[Fp8Precision("O2", precision="bf16-mixed")], callbacks=[Fp8Callback()])
    model, optimizer = setup(fabric, model, optimizer, "O2")         # instead of fabric.setup(model, optimizer)

The Trainer makes things in this order: it moves the module to its device, wraps it in DDP, asks it for optimizers, and
then hands all of them to the plugin's `connect`, which may return others. That is where the level is applied. DDP has
sorted gradients into buckets by dtype by then, and O2 changes dtypes, so the strategy is asked for a new wrapper. What
"32-true", "bf16-mixed" and "bf16-true" do to dtypes is left to Lightning's own plugins, which ours calls.
`Fp8Callback` raises where FP8 is silently off, and logs the monitor's numbers. Fabric shows no plugin the optimizers,
which is why it has a function.

Lightning is not patched. `lightning` and `pytorch_lightning`, two copies that know no classes of each other's, both
will do: the classes here are derived from those of the one that the program has imported before this module.

Limits: one device, DDP and ModelParallelStrategy (FSDP2). Lightning lets no plugin into DeepSpeedStrategy: use
`fp8stack.integrations.deepspeed.install()` there.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack.api import sessions_in
from fp8stack.comm import register_fp8_hook
from fp8stack.comm.transport import broadcast
from fp8stack.conflicts import FABRIC, LIGHTNING, check_option, refuse_conflicts
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations import deepspeed, fsdp
from fp8stack.integrations.verification import verify_initialized
from fp8stack.levels import check_choice, recipe_for
from fp8stack.monitor import Monitor
from fp8stack.tensor_kinds import is_sharded

__all__ = ["Fp8Callback", "Fp8Precision", "setup"]

# options that say nothing of a forward, and so nothing to a module without an optimizer
_OF_TRAINING = {
    "gradients", "states", "master", "min_numel", "states_for", "step_in_backward", "offload", "optimizer_backend",
}  # fmt: skip
_INNER = (
    "tensor_init_context", "module_init_context", "forward_context", "convert_input", "convert_output",
)  # fmt: skip
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

# by plugins of this and earlier Trainers
_converted: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _find_lightning() -> Any:
    """Return the package that the program has imported, or else the first that can be.

    Raises:
        ImportError: if there is none.
    """
    reasons = []
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError(
        f"fp8stack.integrations.lightning needs Lightning, which cannot be imported ({'; '.join(reasons)}). "
        "Install it: pip install 'fp8stack[lightning]'."
    )


_lightning = _find_lightning()


class Fp8Precision(_lightning.plugins.Precision):  # type: ignore[misc, name-defined]
    """`Trainer(plugins=[Fp8Precision("O2", precision="bf16-mixed")])`.

    In `fit` the module and its optimizers come to the level, and stay there: a second `fit` restores and converts anew,
    `fp8stack.restore(module)` gives plain layers back. `validate`, `test` and `predict` of a module that was not fitted
    change its layers only.

    With several optimizers (manual optimization), each has to own the trainable parameters of one submodule exactly.

    Args:
        opt_level, strict, preset, overrides: as in `fp8stack.initialize`.
        precision: what else the Trainer's `precision` would be: "32-true", "bf16-mixed" or "bf16-true".

    Raises:
        ConfigError: an unknown level, preset, option or value, here; in `fit`, a communication hook of the user's.
        ModelError: in `fit`, a module or optimizer that the level cannot be applied to.
    """

    def __init__(
        self,
        opt_level: str = "O2",
        precision: str = "32-true",
        *,
        strict: bool = False,
        preset: str | None = None,
        **overrides: Any,
    ) -> None:
        self.recipe = recipe_for(opt_level, preset, **overrides)
        refuse_conflicts(self.recipe, LIGHTNING)
        plugins = _lightning.plugins
        kinds = {
            "32-true": plugins.Precision,
            # `connect` replaces "cuda" by the type of the strategy's device
            "bf16-mixed": partial(plugins.MixedPrecision, precision, "cuda"),
            "bf16-true": partial(plugins.HalfPrecision, precision),
        }
        check_choice("precision", precision, tuple(kinds))
        self.precision, self.inner = precision, kinds[precision]()
        self.options = {"preset": preset, "strict": strict, **overrides}
        for name in _INNER:  # what the inner plugin does
            setattr(self, name, getattr(self.inner, name))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Change dtypes, before the module is moved; for a second `fit`, restore what the first one converted.

        States of the first are where the Trainer has left the module, so it is done here and not in `connect`.
        """
        trainer: Any = getattr(module, "_trainer", None)
        if trainer is None:
            raise ConfigError(
                "Fp8Precision is a plugin for the Trainer: Fabric does not show plugins the optimizers. Use "
                "fp8stack.integrations.lightning.setup(fabric, model, optimizer, opt_level=...) instead."
            )
        _check_strategy(trainer.strategy)
        if trainer.state.fn == "fit":
            for part in _converted & sessions_in(module).keys():
                fp8stack.restore(part)
        return self.inner.convert_module(module)  # type: ignore[no-any-return]

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Apply the level to what the strategy has made; return what it is to use instead."""
        parallel = isinstance(model, DistributedDataParallel)
        module: Any = model.module if parallel else model
        strategy = module.trainer.strategy
        if self.precision == "bf16-mixed":
            self.inner.device = strategy.root_device.type
        if module.trainer.state.fn != "fit":
            if not sessions_in(module):
                self._initialize(module, None)
            return model, optimizers, lr_schedulers
        on_wire = parallel and self.recipe.gradients == "fp8"
        if on_wire and getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise ConfigError(
                f"{type(strategy).__name__} has a ddp_comm_hook, and {self.recipe.level} registers its own, which "
                'reduces in FP8. Leave one of them out: ddp_comm_hook=None, or gradients="keep" in Fp8Precision.'
            )
        if self.recipe.gradients == "keep" and self.recipe.states == "keep":
            self._initialize(module, None)
        else:
            homes = [module] if len(optimizers) == 1 else [_home_of(o, module) for o in optimizers]
            pairs = zip(homes, optimizers, strict=True)
            optimizers = [self._initialize(home, optimizer) for home, optimizer in pairs]
        if parallel:
            strategy.model = module
            strategy.configure_ddp()
            model = strategy.model
        if on_wire:
            register_fp8_hook(strategy.model)
        return model, optimizers, lr_schedulers

    def _initialize(self, module: nn.Module, optimizer: Any) -> Any:
        """Call `initialize`, or `attach` where FSDP2 has sharded the module; return the optimizer to step."""
        level, options = self.recipe.level, self.options
        if optimizer is None:
            options = {k: v for k, v in options.items() if k not in _OF_TRAINING}
            level, options["preset"] = "O0", None
        sharded = any(is_sharded(p) for p in module.parameters())
        start = fsdp.attach if sharded else fp8stack.initialize
        _, returned = start(module, optimizer, level, **options)
        _converted.add(module)
        return returned


def _home_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> nn.Module:
    """Return the submodule whose trainable parameters are those of an optimizer."""
    owned = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    for part in module.modules():
        if owned and owned == {p for p in part.parameters() if p.requires_grad}:
            return part
    names = [name for name, p in module.named_parameters() if p in owned]
    raise ModelError(
        f"configure_optimizers returned several optimizers, and no part of {type(module).__name__} has exactly the "
        f"trainable parameters of one {type(optimizer).__name__}: {len(owned)}, {', '.join(names[:3])} among them. "
        'Gather what an optimizer steps in one submodule, or use opt_level="O0".'
    )


class Fp8Callback(_lightning.Callback):  # type: ignore[misc, name-defined]
    """`Trainer(callbacks=[Fp8Callback()])`: look before the first batch, then log metrics named fp8/...

    It changes nothing. Metrics are those of `fp8stack.monitor.Monitor`, of this rank, under the optimizer step at which
    they were read; on a GPU that is a sample after they were counted. With several optimizers there are no
    update/weight ratios.

    Args:
        every: sample one batch in so many. None: the Trainer's `log_every_n_steps`.

    Raises:
        ModelError: at the start of training, if the module has no FP8 layers, some that were converted are there no
            more, or the Trainer does not step the optimizer that fp8stack returned.
    """

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self.monitor: Monitor | None = None
        self._batches = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(trainer.model, "zero_optimization_stage"):
            deepspeed.verify(trainer.model)
        else:
            _verify(pl_module, trainer.optimizers)
        self._batches = 0
        if trainer.loggers:
            every = trainer.log_every_n_steps if self.every is None else self.every
            stepped = [o for o in trainer.optimizers if isinstance(o, torch.optim.Optimizer)]
            optimizer = stepped[0] if len(stepped) == 1 else None
            self.monitor = Monitor(pl_module, optimizer, every, by_hand=True)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.monitor is not None:
            self.monitor.begin_step()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.monitor is None:
            return
        if self._batches % self.monitor.every == 0:
            metrics = self.monitor.metrics()
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, step=trainer.global_step)
        self._batches += 1

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.monitor is not None:
            self.monitor.remove()
            self.monitor = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # which the Trainer leaves out then


def _verify(model: nn.Module, optimizers: list[Any]) -> None:
    """Raise ModelError unless a module is what `initialize` or `attach` made of it or of its parts."""
    sessions = sessions_in(model)
    if not any(session.report.converted for session in sessions.values()):
        raise ModelError(
            f"{type(model).__name__} has no FP8 layers: "
            + ("all were left out." if sessions else "nobody has initialized it.")
            + " Give the Trainer plugins=[Fp8Precision(...)], and look at its card for the layers that are skipped."
        )
    for part in sessions:
        sharded = any(is_sharded(p) for p in part.parameters())
        (fsdp.verify if sharded else verify_initialized)(part, optimizers)


def setup(
    fabric: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    strict: bool = False,
    preset: str | None = None,
    **overrides: Any,
) -> Any:
    """Bring a model and its optimizer to a level, and set them up with Fabric; return what `fabric.setup` returns.

    Under DDP all ranks begin with the weights of rank 0, as always, and gradients are averaged in FP8 from O1 on.

    Args:
        fabric: launched, on one device or with DDP; its precision may be 32-true, bf16-mixed or bf16-true.
        model: bare. It is moved to the device of this rank.
        optimizer: built from the model's parameters. May be None at O0: the model alone is returned then.
        opt_level, strict, preset, overrides: as in `fp8stack.initialize`.

    Raises:
        ConfigError: for another strategy, with what to do instead, or an option that is not valid.
        ModelError, UnsupportedDeviceError: as `fp8stack.initialize`.
    """
    recipe, strategy = recipe_for(opt_level, preset, **overrides), fabric.strategy
    _check_strategy(strategy, FABRIC)
    model = fabric.to_device(strategy.precision.convert_module(model))
    if fabric.world_size > 1:  # as DDP will; the lower bits of weights are kept before it does
        broadcast([*model.parameters(), *model.buffers()], dist.group.WORLD)
    model, optimizer = fp8stack.initialize(
        model, optimizer, opt_level, strict=strict, preset=preset, **overrides
    )
    if optimizer is None:
        return fabric.setup(model)
    made = fabric.setup(model, optimizer)
    if recipe.gradients == "fp8":
        for part in made[0].modules():
            if isinstance(part, DistributedDataParallel):
                register_fp8_hook(part)
    return made


def _check_strategy(strategy: Any, *more: str) -> None:
    """Raise ConfigError for a strategy with which a level is applied in another way."""
    for kind in type(strategy).__mro__:
        check_option("strategy", kind.__name__, LIGHTNING, *more)
