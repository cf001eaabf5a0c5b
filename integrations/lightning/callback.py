"""A callback for Lightning's Trainer: raise where FP8 is silently off, and log what the monitor sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8stack.checks import find_converted
from fp8stack.errors import ModelError
from fp8stack.integrations import deepspeed, fsdp
from fp8stack.monitor import Monitor
from fp8stack.tensor import is_sharded

from .package import find_lightning
from .precision import sessions_in

Callback: Any = find_lightning().Callback


class Fp8Callback(Callback):  # type: ignore[misc]  # of a package that mypy does not look into
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
    for part, session in sessions.items():
        plain = [n for n in session.report.converted if not find_converted(part.get_submodule(n))]
        if plain:
            raise ModelError(f"{plain[0]} was converted and is an ordinary layer again.")
        if session.returned is not None and session.returned not in optimizers:
            raise ModelError(
                f"the Trainer steps {', '.join(type(o).__name__ for o in optimizers)}, and not the optimizer that "
                "fp8stack returned."
            )
        if any(is_sharded(p) for p in part.parameters()):
            fsdp.verify(part, session.returned)
