"""The learning rate: up a line, then down a cosine to `min_lr_ratio` of the highest.

The rate of step s (from 0) is max_lr times

    (s + 1) / warmup_steps                          for s < warmup_steps
    m + (1 - m) × (1 + cos(π × done)) / 2           after, with m = min_lr_ratio and
                                                    done = (s - warmup_steps) / (steps - 1 - warmup_steps)

so the highest is reached with the last step of the warm-up, and the last step of the run has m, if the warm-up leaves
two steps or more.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from fp8stack.errors import Fp8StackWarning

if TYPE_CHECKING:
    from .config import Config

# the highest rate of a model where none is given: GPT-3's of these sizes (arXiv:2005.14165, table 2.1), Llama 3's
# (arXiv:2407.21783, table 3); the smallest models are for minutes of training
RATES = {
    "tiny": 3e-3,
    "demo": 3e-3,
    "gpt2": 6e-4,
    "gpt2-medium": 3e-4,
    "gpt2-large": 2.5e-4,
    "gpt2-xl": 2e-4,
    "llama-1b": 3e-4,
    "llama-8b": 3e-4,
}


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step, counted from 0; past the end of the run, the last one."""
    warmup, least = config.warmup_steps, config.min_lr_ratio
    if step < warmup:
        return config.max_lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, config.steps - 1 - warmup))
    return config.max_lr * (least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)


def default_warm_up(steps: int) -> int:
    """Return the steps of the warm-up where none are given: a tenth of all."""
    return max(1, steps // 10)


def check_warm_up(config: Config) -> None:
    """Warn of a warm-up that the run does not reach the end of."""
    if config.warmup_steps >= max(config.steps - 1, 2):
        share = min(1, config.steps / config.warmup_steps)
        warnings.warn(
            f"--warmup-steps {config.warmup_steps} leave none of --steps {config.steps} to decay in: the run ends at "
            f"{share:.0%} of --max-lr. Use a shorter warm-up, 2 to 10 % of the run, or more steps.",
            Fp8StackWarning,
            stacklevel=3,
        )
