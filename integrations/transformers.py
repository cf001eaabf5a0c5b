"""Transformers: a level for whatever a Trainer trains, on one process, under DDP, FSDP2 or DeepSpeed.

    from fp8stack.integrations.transformers import fp8_trainer

    trainer = fp8_trainer(Trainer, "O2")(model=model, args=args, train_dataset=data)
    trainer.train()

It makes a subclass, since a Trainer makes its optimizer late and wraps its model later: no argument of its constructor
and no callback sees both. The subclass overrides what the Trainer documents for that, and nothing else:
`create_optimizer` (the model, and the optimizer that TrainingArguments ask for with their weight-decay groups, go
through `fp8stack.initialize`), `create_scheduler`, `training_step` (the first one attaches DDP's FP8 hook and
verifies), `log` (numbers of `fp8stack.monitor`) and `train`. Under DeepSpeed the level goes into its configuration, and
an optimizer given as `optimizers=`, which the Trainer drops there, is used after all. Any subclass of Trainer will do.

Limits: optimizers that TrainingArguments build in ways of their own (Adafactor, GaLore, LOMO) are refused at O2, as
`fp8stack.initialize` refuses them.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8stack import initialize
from fp8stack.errors import ConfigError
from fp8stack.integrations.accelerate import (
    check_driver,
    finish,
    initialize_sharded,
    kind_of,
    options_given,
    sectioned,
)
from fp8stack.levels import recipe_for
from fp8stack.monitor import Monitor
from fp8stack.nn import Fp8Linear


def fp8_trainer(
    trainer: type[Any],
    opt_level: str | None = None,
    *,
    strict: bool = False,
    preset: str | None = None,
    **overrides: Any,
) -> type[Any]:
    """Return a subclass of a Trainer class that trains at a level; it is made and used as that class is.

    Its `train()` raises what `fp8stack.initialize` raises for a model or optimizer, and its constructor ConfigError for
    FP8 of Accelerate's own, nn.DataParallel and FSDP1.

    Args:
        trainer: `transformers.Trainer` or a subclass.
        opt_level, strict, preset, overrides: as in `fp8stack.initialize`; "O2" if not given. Under DeepSpeed they may
            be left out where its configuration has a section "fp8stack".

    Raises:
        ConfigError: an unknown level, option or value, or a class that is no Trainer.
    """
    bases = getattr(trainer, "__mro__", ())
    if not any(f"{c.__module__}.{c.__qualname__}".startswith("transformers.") for c in bases):
        raise ConfigError(
            f"fp8_trainer takes transformers.Trainer or a subclass, got {trainer!r}. Transformers is installed by "
            "pip install 'fp8stack[transformers]'."
        )
    recipe_for("O2" if opt_level is None else opt_level, preset, **overrides)
    options = options_given(strict, preset, overrides)
    own = {"_opt_level": opt_level, "_fp8_options": options, "__module__": __name__}
    return type(f"Fp8{trainer.__name__}", (_AtLevel, trainer), own)


class _AtLevel:
    """What comes before a Trainer class in the subclass."""

    _opt_level: str | None
    _fp8_options: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._initialized: Any = None  # the model that is at the level
        self._attached: Any = None  # that model as the Trainer wrapped it
        self._monitor: Monitor | None = None
        self._begun = False
        trainer: Any = self
        parent: Any = super()
        parent.__init__(*args, **kwargs)
        self._given = trainer.optimizer, trainer.lr_scheduler  # which DeepSpeed's set-up drops
        kind_of(trainer.accelerator)
        if trainer.args.parallel_mode.value not in ("not_parallel", "distributed"):
            raise ConfigError(
                f"this Trainer runs in {trainer.args.parallel_mode}: fp8stack needs a process for each GPU. Launch it "
                "with torchrun or accelerate launch."
            )
        if not trainer.is_deepspeed_enabled:
            check_driver(trainer.accelerator, trainer.model, trainer.optimizer, None)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, at the level."""
        trainer: Any = self
        parent: Any = super()
        self._begun = False
        try:
            if not trainer.is_deepspeed_enabled:
                return parent.train(*args, **kwargs)
            accelerator = trainer.accelerator
            with sectioned(accelerator, self._opt_level, self._fp8_options) as recipe:
                check_driver(accelerator, trainer.model, self._given[0], recipe)
                return parent.train(*args, **kwargs)
        finally:
            if self._monitor is not None:
                self._monitor.remove()
                self._monitor = None

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the Trainer's optimizer; bring it and the model to the level, unless the model is yet to be sharded."""
        trainer: Any = self
        parent: Any = super()
        if trainer.optimizer is None and trainer.is_deepspeed_enabled:
            trainer.optimizer = self._given[0]
        parent.create_optimizer(model)
        if kind_of(trainer.accelerator) in ("DEEPSPEED", "FSDP"):
            return trainer.optimizer
        if self._initialized is not trainer.model:
            level, options = self._opt_level or "O2", self._fp8_options
            _, trainer.optimizer = initialize(trainer.model, trainer.optimizer, level, **options)
            self._initialized = trainer.model
        return trainer.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the Trainer's scheduler, unless one was given; by now FSDP2 has sharded, and nothing was loaded."""
        trainer: Any = self
        parent: Any = super()
        if kind_of(trainer.accelerator) == "FSDP" and self._initialized is not trainer.model:
            level, options = self._opt_level or "O2", self._fp8_options
            initialize_sharded(trainer.model, trainer.optimizer, level, options)
            self._initialized = trainer.model
        if trainer.lr_scheduler is None and trainer.is_deepspeed_enabled:
            trainer.lr_scheduler = self._given[1]
        return parent.create_scheduler(*args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step; before the first one attach what is the wrapper's, verify, and begin to monitor."""
        parent: Any = super()
        if not self._begun or model is not self._attached:
            self._begin(model)
        return parent.training_step(model, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the Trainer does, and with the training loss the model's FP8 numbers ("fp8/amax", ...)."""
        parent: Any = super()
        if self._monitor is not None and "loss" in logs:
            numbers = self._monitor.metrics()
            logs |= {name: value for name, value in numbers.items() if name.count("/") == 1}
        parent.log(logs, *args, **kwargs)

    def _begin(self, model: Any) -> None:
        trainer: Any = self
        if model is not self._attached:
            finish(trainer.accelerator, model)
            self._attached = model
        layers = any(isinstance(module, Fp8Linear) for module in trainer.model.modules())
        if layers and self._monitor is None and not trainer.args.torch_compile:
            every = trainer.state.logging_steps * trainer.args.gradient_accumulation_steps
            own = getattr(trainer.optimizer, "optimizer", None)  # under Accelerate's
            own = own if isinstance(own, torch.optim.Optimizer) else None  # not DeepSpeed's
            self._monitor = Monitor(trainer.model, own, every)
        self._begun = True
