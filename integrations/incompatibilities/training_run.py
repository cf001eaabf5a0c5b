"""What is known of a run before it starts: DeepSpeed's configuration, model, optimizer and recipe.

Classes of other libraries are recognized by the modules that they come from, so no library is imported here.

Limits: the value "auto" in a configuration is unknown, and no detector takes an unknown value for a fault. Options that
are given during training (arguments of a forward, `torch.autocast`) are not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8stack.levels import Recipe
from fp8stack.optim import BlockwiseOptimizer

_FULL_STATES = {"keep", "fp32", "bf16"}


def zero_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of ZeRO; in DeepSpeed's older form it is True for stage 1, and False for none."""
    zero: Any = config.get("zero_optimization")
    return {"stage": int(zero)} if isinstance(zero, bool) else zero or {}


@dataclass(frozen=True)
class TrainingRun:
    """What is known of a run before it starts. All fields may be left out.

    config: DeepSpeed's configuration; empty without DeepSpeed.
    model, optimizer: as they will be given to the library.
    recipe: what fp8stack will do (`fp8stack.levels.recipe_for("O2")`); None where it does nothing.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    optimizer: Any = None
    recipe: Recipe | None = None

    # --- the configuration

    def at(self, key: str) -> Any:
        """Return the value of a dotted key such as "zero_optimization.stage", None where there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def stage(self) -> int | None:
        """ZeRO's stage; None without DeepSpeed, or where it is not known yet."""
        zero = zero_of(self.config)
        stage = zero.get("stage") if zero else 0
        return stage if self.config and isinstance(stage, int) else None

    @property
    def offload(self) -> str:
        """Where ZeRO keeps optimizer states: "cpu", "nvme", or "none"."""
        device = self.at("zero_optimization.offload_optimizer.device")
        old = "cpu" if self.at("zero_optimization.cpu_offload") is True else "none"
        return device if isinstance(device, str) else old

    @property
    def half(self) -> str:
        """The key that switches DeepSpeed to 16 bits, or an empty string."""
        keys = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
        return next((key for key in keys if self.at(key) is True), "")

    # --- what fp8stack does

    @property
    def fp8_gradients(self) -> bool:
        """Whether gradients will be reduced in FP8 (O1)."""
        return self.recipe is not None and self.recipe.gradients == "fp8"

    @property
    def quantized_states(self) -> bool:
        """Whether fp8stack (O2) or the given optimizer keeps states in fewer than 16 bits."""
        asked = "keep" if self.recipe is None else self.recipe.states
        given = self.optimizer.states if isinstance(self.optimizer, BlockwiseOptimizer) else "keep"
        low = not {asked, given} <= _FULL_STATES
        return low or comes_from(self.optimizer, "torchao.optim", "bitsandbytes")


def comes_from(thing: Any, *packages: str) -> bool:
    """Return whether the class of `thing`, or one that it derives from, is of one of the packages."""
    modules = [base.__module__ + "." for base in type(thing).__mro__]
    return any(module.startswith(package + ".") for module in modules for package in packages)
