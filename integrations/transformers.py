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
from fp8stack.integrations import accelerate
from fp8stack.monitor import Monitor
from fp8stack.nn.linear import Fp8Layer


def fp8_trainer(trainer: type[Any], opt_level: str | None = None, **options: Any) -> type[Any]:
    """Return a subclass of a Trainer class that trains at a level; it is made and used as that class is.

    Its `train()` raises what `fp8stack.initialize` raises for a model or optimizer, and its constructor ConfigError for
    FP8 of Accelerate's own, nn.DataParallel and FSDP1.

    Args:
        trainer: `transformers.Trainer` or a subclass.
        opt_level, options: as in `fp8stack.initialize`; "O2" if not given. Under DeepSpeed they may be left out where
            its configuration has a section "fp8stack".

    Raises:
        ConfigError: an unknown level, option or value, or a class that is no Trainer.
    """
    bases = getattr(trainer, "__mro__", ())
    if not any(f"{c.__module__}.{c.__qualname__}".startswith("transformers.") for c in bases):
        raise ConfigError(
            f"fp8_trainer takes transformers.Trainer or a subclass, got {trainer!r}. Transformers is installed by "
            "pip install 'fp8stack[transformers]'."
        )
    accelerate.check_level(opt_level, options)
    own = {"_opt_level": opt_level, "_fp8_options": options, "__module__": __name__}
    return type(f"Fp8{trainer.__name__}", (_AtLevel, trainer), own)


_Trainer: Any = object


class _AtLevel(_Trainer):  # type: ignore[misc]  # it comes before a Trainer class in the subclass
    """What comes before a Trainer class in the subclass."""

    _opt_level: str | None
    _fp8_options: dict[str, Any]
    _begun = False  # to monitor
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._initialized: Any = None  # the model that is at the level
        self._attached: Any = None  # that model as the Trainer wrapped it
        self._monitor: Monitor | None = None
        super().__init__(*args, **kwargs)
        self._given = self.optimizer, self.lr_scheduler  # which DeepSpeed's set-up drops
        accelerate.kind_of(self.accelerator)
        if self.args.parallel_mode.value not in ("not_parallel", "distributed"):
            raise ConfigError(
                f"this Trainer runs in {self.args.parallel_mode}: fp8stack needs a process for each GPU. Launch it "
                "with torchrun or accelerate launch."
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, at the level."""
        self._begun = False
        try:
            if not self.is_deepspeed_enabled:
                return super().train(*args, **kwargs)
            given = self._given[0]
            with accelerate.sectioned(self.accelerator, given, self._opt_level, self._fp8_options):
                return super().train(*args, **kwargs)
        finally:
            if self._monitor is not None:
                self._monitor.remove()
                self._monitor = None

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the Trainer's optimizer; bring it and the model to the level, unless the model is yet to be sharded."""
        if self.optimizer is None and self.is_deepspeed_enabled:
            self.optimizer = self._given[0]
        super().create_optimizer(model)
        if accelerate.kind_of(self.accelerator) not in ("DEEPSPEED", "FSDP"):
            self._initialize()
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the Trainer's scheduler, unless one was given; by now FSDP2 has sharded, and nothing was loaded."""
        if accelerate.kind_of(self.accelerator) == "FSDP":
            self._initialize()
        if self.lr_scheduler is None and self.is_deepspeed_enabled:
            self.lr_scheduler = self._given[1]
        return super().create_scheduler(*args, **kwargs)

    def _initialize(self) -> None:
        """Bring the Trainer's model and optimizer to the level, unless it has been done."""
        if self._initialized is self.model:
            return
        level, options = self._opt_level or "O2", self._fp8_options
        if accelerate.kind_of(self.accelerator) == "FSDP":
            accelerate.initialize_sharded(self.model, self.optimizer, level, options)
        else:
            _, self.optimizer = initialize(self.model, self.optimizer, level, **options)
        self._initialized = self.model

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step; before the first one attach what is the wrapper's, verify, and begin to monitor."""
        if model is not self._attached:
            accelerate.attach(self.accelerator, model)
            self._attached = model
        if not self._begun:
            self._begun = True
            layers = any(isinstance(module, Fp8Layer) for module in self.model.modules())
            if layers and not self.args.torch_compile:
                every = self.state.logging_steps * self.args.gradient_accumulation_steps
                own = getattr(self.optimizer, "optimizer", None)  # under Accelerate's
                own = own if isinstance(own, torch.optim.Optimizer) else None  # not DeepSpeed's
                self._monitor = Monitor(self.model, own, every)
        return super().training_step(model, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the Trainer does, and with the training loss the model's FP8 numbers ("fp8/amax", ...)."""
        if self._monitor is not None and "loss" in logs:
            numbers = self._monitor.metrics()
            logs |= {name: value for name, value in numbers.items() if name.count("/") == 1}
        super().log(logs, *args, **kwargs)
