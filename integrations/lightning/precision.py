"""A precision plugin for Lightning's Trainer: layers, gradients and optimizers at a level of fp8stack.

The Trainer makes things in this order: the module is moved to its device, wrapped in DDP, and asked for its optimizers;
then `connect` gets all of them, and may give others back. That is where the level is applied. DDP has sorted gradients
into buckets by dtype by then, and O2 changes dtypes: the strategy is asked for a new wrapper.

What Lightning does to dtypes (32-true, bf16-mixed, bf16-true) is left to its own plugins, which this one asks.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack.api import session_of
from fp8stack.comm import register_fp8_hook
from fp8stack.errors import ConfigError, ModelError, did_you_mean
from fp8stack.integrations import fsdp
from fp8stack.levels import recipe_for
from fp8stack.session import Session
from fp8stack.tensor import is_sharded

from .package import check_strategy, find_lightning

plugins: Any = find_lightning().plugins

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
# options that say nothing of a forward, and so nothing to a module without an optimizer
_OF_TRAINING = {
    "gradients", "states", "master", "min_numel", "states_for", "step_in_backward", "offload", "optimizer_backend",
}  # fmt: skip

_REFUSED = {
    "offload": ("cpu", "the Trainer moves the states of optimizers to the device of the module"),
    "step_in_backward": (
        True,
        "the Trainer clips and accumulates gradients between backward and step",
    ),
}

# by plugins of this and earlier Trainers
_converted: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Fp8Precision(plugins.Precision):  # type: ignore[misc]  # of a package that mypy does not look into
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
        for name, (value, reason) in _REFUSED.items():
            if getattr(self.recipe, name) == value:
                raise ConfigError(f"{name}={value!r} is not for Lightning: {reason}. Leave it out.")
        if precision not in PRECISIONS:
            raise ConfigError(
                f"precision={precision!r} is none of {', '.join(PRECISIONS)}, which Fp8Precision can be combined with."
                f"{did_you_mean(str(precision), PRECISIONS)}"
            )
        self.precision = precision
        self.options = {"preset": preset, "strict": strict, **overrides}
        if precision == "bf16-mixed":
            self.inner = plugins.MixedPrecision(precision, "cuda")  # or where `connect` says
        elif precision == "bf16-true":
            self.inner = plugins.HalfPrecision(precision)
        else:
            self.inner = plugins.Precision()

    # --- what the inner plugin does

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()  # type: ignore[no-any-return]

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.module_init_context()  # type: ignore[no-any-return]

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.inner.forward_context()  # type: ignore[no-any-return]

    def convert_input(self, data: Any) -> Any:
        return self.inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self.inner.convert_output(data)

    # --- what fp8stack does

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
        check_strategy(trainer.strategy, "Fp8Precision")
        if trainer.state.fn == "fit":
            for part in _converted & sessions_in(module).keys():
                fp8stack.restore(part)
        converted: nn.Module = self.inner.convert_module(module)
        return converted

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Apply the level to what the strategy has made; return what it is to use instead."""
        module: Any = model.module if isinstance(model, DistributedDataParallel) else model
        strategy = module.trainer.strategy
        if self.precision == "bf16-mixed":
            self.inner.device = strategy.root_device.type
        if module.trainer.state.fn != "fit":
            if not sessions_in(module):
                self._initialize(module, None)
            return model, optimizers, lr_schedulers
        on_wire = self.recipe.gradients == "fp8"
        if not isinstance(model, DistributedDataParallel):
            return model, self._convert(module, optimizers), lr_schedulers
        if on_wire and getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise ConfigError(
                f"{type(strategy).__name__} has a ddp_comm_hook, and {self.recipe.level} registers its own, which "
                'reduces in FP8. Leave one of them out: ddp_comm_hook=None, or gradients="keep" in Fp8Precision.'
            )
        optimizers = self._convert(module, optimizers)
        strategy.model = module
        strategy.configure_ddp()
        if on_wire:
            register_fp8_hook(strategy.model)
        return strategy.model, optimizers, lr_schedulers

    def _convert(self, module: nn.Module, optimizers: list[Any]) -> list[Any]:
        """Bring the module to the level; return the optimizers to step."""
        if self.recipe.gradients == "keep" and self.recipe.states == "keep":
            self._initialize(module, None)
            return optimizers
        if len(optimizers) == 1:
            return [self._initialize(module, optimizers[0])]
        homes = [_home_of(optimizer, module) for optimizer in optimizers]
        pairs = zip(homes, optimizers, strict=True)
        return [self._initialize(home, optimizer) for home, optimizer in pairs]

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


def sessions_in(model: nn.Module) -> dict[nn.Module, Session]:
    """Return the parts of a model that are initialized, or the model itself, each with its record."""
    found = {}
    for part in model.modules():
        with suppress(ModelError):
            found[part] = session_of(part)
    return found


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
