"""Gradient release: each parameter is stepped as soon as its gradient is there, which then is freed.

No gradient outlives its layer's backward, so the largest one replaces the sum of all in memory (LOMO, Lv et al.,
"Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023, section 3.1). What needs all
gradients at once is impossible: a global norm to clip by, several micro-batches, a reduction over ranks, a loss
scale. A gradient that is not finite skips its own parameter only.

The hooks refer to this object weakly: Python's garbage collector does not see what hooks of this kind refer to, so
parameters and optimizer would keep each other alive for good. The optimizer keeps it; without the optimizer, gradients
stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8stack.conflicts import SEVERAL_PROCESSES, check_option
from fp8stack.errors import GradientError
from fp8stack.tensor_kinds import renew_hooks


class GradientRelease:
    """The hooks that step parameters in backward; `remove()` takes them off.

    Args:
        optimizer: a `BlockwiseOptimizer`, whose `release` this is.
    """

    def __init__(self, optimizer: Any) -> None:
        check_single_process()
        self._optimizer = optimizer
        self._stepped: set[Tensor] = set()
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Step these parameters in backward from now on."""
        step = partial(_step_weakly, weakref.ref(self))
        for p in parameters:
            if p.requires_grad and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(step)

    def finish(self) -> None:
        """The user calls `optimizer.step()`: the next backward may step every parameter again."""
        self._stepped.clear()
        renew_hooks(self._hooks)

    def remove(self) -> None:
        """Take the hooks off: gradients stay, and `optimizer.step()` uses them."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self._optimizer.release is self:  # not one that was made since
            self._optimizer.release = None

    def step(self, parameter: Tensor) -> None:
        """Step `parameter`, whose gradient has arrived, and free the gradient."""
        if parameter in self._stepped:
            raise GradientError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient before optimizer.step(): with "
                "step_in_backward every backward() is a step, so gradients cannot be accumulated. Call "
                "optimizer.step() after each backward(), or initialize without step_in_backward."
            )
        check_single_process()
        self._stepped.add(parameter)
        self._optimizer.step_parameters([parameter], parameter)
        parameter.grad = None


def _step_weakly(own: weakref.ref[GradientRelease], parameter: Tensor) -> None:
    if (release := own()) is not None:
        release.step(parameter)


def check_single_process() -> None:
    """Raise ConfigError where gradients would have to be reduced over ranks first."""
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    if initialized and distributed.get_world_size() > 1:
        check_option("step_in_backward", True, SEVERAL_PROCESSES)
