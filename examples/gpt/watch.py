"""What FP8 does to the tensors of a run: a sample every so many steps, and advice on what its monitor finds.

Advice names flags of train_gpt.py. It is given once, and again when other layers come to break the same rule. Update
ratios are judged only where the learning rate is near its highest: in the warm-up weights are small and moments young,
and at the end steps are meant to be small.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fp8stack
from fp8stack.monitor import Finding, Monitor

from . import options
from .config import Config
from .model import GPT
from .schedule import learning_rate

MONITORED = 50  # steps between samples
WORDS = {"the learning rate": "--max-lr", "warm up longer": "raise --warmup-steps"}


class Watch:
    """The monitor of a run. The same steps are sampled in a run that is resumed."""

    def __init__(self, config: Config, model: GPT, optimizer: Any) -> None:
        self.config = config
        self.monitor = Monitor(model, optimizer, every=MONITORED, by_hand=True)
        self._told: dict[tuple[str, str, bool], set[str]] = {}

    def begin_step(self, step: int) -> None:
        """Sample the step that begins, counted from 0, if it is its turn."""
        self.monitor.begin_step(step)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the numbers of the step that was taken, counted from 1, if it was sampled."""
        return self.monitor.metrics(wait=True) if (step - 1) % MONITORED == 0 else {}

    def advice(self) -> list[str]:
        """Return what there is to say of the last sample, and was not said before."""
        return [in_flags(f.text) for f in self.monitor.findings() if self._is_news(f)]

    def _is_news(self, finding: Finding) -> bool:
        if finding.field == "update_ratio" and not self._steps_are_large():
            return False
        told = self._told.setdefault((finding.field, finding.operand, finding.above), set())
        new = set(finding.layers) - told
        told |= new
        return bool(new)

    def _steps_are_large(self) -> bool:
        """Was the last sample taken after the warm-up, at half of the highest learning rate or more?"""
        config, step = self.config, self.monitor.step or 0
        warm = step >= (config.warmup_steps or 0)
        return warm and learning_rate(config, step) >= config.max_lr / 2


def in_flags(text: str) -> str:
    """Return a sentence in which options of `fp8stack.initialize` and learning rates are flags of train_gpt.py."""
    says, found, remedy = text.partition("Remedy: ")
    for word, flag in WORDS.items():
        remedy = remedy.replace(word, flag)
    # there is no flag for a layer's single products
    remedy = re.sub(r'precision_for={("[^"]+"): "[^"]+"}', r"skip=[\1]", remedy)
    # fp8_recipe="current" is --fp8-recipe current, and skip=["blocks.3.fc1"] is --skip blocks.3.fc1
    remedy = re.sub(
        r'(\w+)=\[?"?([^\s\],":]+)"?\]?', lambda m: f"{options.as_flag(m[1])} {m[2]}", remedy
    )
    return says + found + remedy.replace("fp8_margin", options.as_flag("fp8_margin"))


def watch(config: Config, model: GPT, optimizer: Any) -> Watch | None:
    """Return what watches a model; None where no layers of fp8stack's own multiply, or none that a monitor sees."""
    native = config.opt_level != "off" and fp8stack.get_report(model).compute == "native"
    return Watch(config, model, optimizer) if native and not config.compile else None


@contextmanager
def sampling(config: Config, model: GPT) -> Iterator[None]:
    """Have passes take the memory of a sampled step, in which no layers are fused; their numbers are dropped."""
    sampled = watch(config, model, None)
    if sampled:
        sampled.begin_step(0)
    try:
        yield
    finally:
        if sampled:
            with warnings.catch_warnings():  # of passes that failed there is nothing to see
                warnings.simplefilter("ignore")
                sampled.monitor.remove()
