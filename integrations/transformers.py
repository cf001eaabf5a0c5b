"""Transformers: a level for whatever a Trainer trains, on one process, under DDP or DeepSpeed.

    from fp8stack.integrations.transformers import Fp8TrainerMixin

    class Fp8Trainer(Fp8TrainerMixin, Trainer): ...

    Fp8Trainer(model=model, args=args, train_dataset=data, opt_level="O2").train()

It is a mixin, since a Trainer makes its optimizer late and wraps its model later: no argument of its constructor and no
callback sees both. It overrides what the Trainer documents for that, and nothing else: `create_optimizer` (the model and
the optimizer that TrainingArguments ask for, with their weight-decay groups, go through `fp8stack.initialize`),
`create_scheduler`, `training_step` (the first one attaches DDP's FP8 hook and verifies), `log` (numbers of
`fp8stack.monitor`) and `train`. Under DeepSpeed the level goes into its configuration, and an optimizer given as
`optimizers=`, which the Trainer drops there, is used after all. It fits subclasses of Trainer (TRL's) as well.

Limits: FSDP and other wrappers are refused, and optimizers that TrainingArguments build in ways of their own (GaLore,
LOMO) as `fp8stack.initialize` refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8stack import initialize
from fp8stack.errors import ConfigError
from fp8stack.integrations.accelerate import attach, check_driver, sectioned
from fp8stack.integrations.known.situation import comes_from
from fp8stack.levels import recipe_for
from fp8stack.monitor import Monitor
from fp8stack.nn import Fp8Linear


class Fp8TrainerMixin:
    """Put it before a Trainer: `class Fp8Trainer(Fp8TrainerMixin, Trainer): ...`.

    Args:
        args, kwargs: the Trainer's. With `optimizers=` that optimizer is brought to the level, else the one that the
            TrainingArguments ask for.
        opt_level: as in `fp8stack.initialize`; "O2" if not given. Under DeepSpeed the section "fp8stack" of its
            configuration may give it.
        fp8_options: other arguments of `fp8stack.initialize`, such as {"skip": ["*lm_head"], "strict": True}.

    Raises:
        ConfigError: an unknown level, option or value, FP8 of Accelerate's own, or a wrapper that is not supported.
        ModelError: in `train()`, for a model or optimizer that the level cannot be applied to.
    """

    def __init__(
        self,
        *args: Any,
        opt_level: str | None = None,
        fp8_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not comes_from(self, "transformers"):
            raise ConfigError(
                f"{type(self).__name__} has no Trainer behind the mixin: class Fp8Trainer(Fp8TrainerMixin, Trainer), "
                "with transformers' Trainer (pip install 'fp8stack[transformers]')."
            )
        self._opt_level, self._fp8_options = opt_level, dict(fp8_options or {})
        fields = {k: v for k, v in self._fp8_options.items() if k != "strict"}
        recipe = recipe_for(opt_level or "O2", **fields)
        self._initialized: Any = None  # the model that is at the level
        self._attached: Any = None  # that model as the Trainer wrapped it
        self._monitor: Monitor | None = None
        self._begun = False
        parent: Any = super()
        parent.__init__(*args, **kwargs)
        trainer: Any = self
        self._given = trainer.optimizer, trainer.lr_scheduler  # which DeepSpeed's set-up drops
        if trainer.args.parallel_mode.value not in ("not_parallel", "distributed"):
            raise ConfigError(
                f"this Trainer runs in {trainer.args.parallel_mode}: fp8stack needs a process for each GPU. Launch it "
                "with torchrun or accelerate launch."
            )
        if trainer.is_fsdp_enabled:
            raise ConfigError(
                f"TrainingArguments(fsdp={trainer.args.fsdp!r}): the Trainer loads its optimizer before FSDP2's states "
                "can be quantized. Use deepspeed=... (ZeRO), or fp8stack.integrations.accelerate.prepare in a loop of "
                "your own."
            )
        if not trainer.is_deepspeed_enabled:
            check_driver(trainer.accelerator, trainer.model, trainer.optimizer, recipe)

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
        """Make the Trainer's optimizer and bring it and the model to the level, unless DeepSpeed's adapter is to."""
        trainer: Any = self
        parent: Any = super()
        if trainer.optimizer is None and trainer.is_deepspeed_enabled:
            trainer.optimizer = self._given[0]
        parent.create_optimizer(model)
        if not trainer.is_deepspeed_enabled and self._initialized is not trainer.model:
            level, options = self._opt_level or "O2", self._fp8_options
            _, trainer.optimizer = initialize(trainer.model, trainer.optimizer, level, **options)
            self._initialized = trainer.model
        return trainer.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the Trainer's scheduler, unless one was given."""
        trainer: Any = self
        parent: Any = super()
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
            attach(trainer.accelerator, model)
            self._attached = model
        layers = any(isinstance(module, Fp8Linear) for module in trainer.model.modules())
        if layers and self._monitor is None and not trainer.args.torch_compile:
            every = trainer.state.logging_steps * trainer.args.gradient_accumulation_steps
            self._monitor = Monitor(trainer.model, every)
        self._begun = True
