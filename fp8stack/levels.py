"""The levels O0, O1 and O2: one table of recipes that code, card and documentation read.

| level | GEMMs of Linear layers | gradients of matrices | weights        | Adam's m and v |
|-------|------------------------|-----------------------|----------------|----------------|
| O0    | FP8                    | the user's            | the user's     | the user's     |
| O1    | FP8                    | E4M3, block 128       | the user's     | the user's     |
| O2    | FP8                    | E4M3, block 128       | bf16 + 8 bits  | 8-bit blocks   |

A `Recipe` is frozen; `recipe_for("O2", skip=["*head"])` returns the level's recipe with fields overridden, and
refuses names and values it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from .errors import ConfigError, did_you_mean
from .formats import BLOCK

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "compute": ("auto", "native", "bf16"),
        "fp8_format": ("hybrid", "e4m3"),
        "gradients": ("keep", "fp8"),
        "states": ("keep", "8bit", "fp8-lm"),
        "master": ("keep", "split24", "fp16"),
    }
)


@dataclass(frozen=True)
class Recipe:
    """What a level does. Every field can be overridden in `fp8stack.initialize(...)`.

    compute: GEMMs of Linear layers. "native": FP8 through torch._scaled_mm. "bf16": bfloat16. "auto": native where
        the device can, else bf16 with a warning.
    fp8_format: "hybrid" (E4M3 forward, E5M2 for the gradients of activations) or "e4m3" (E4M3 for both).
    gradients: "fp8" turns the gradient of every quantized matrix into E4M3 blocks as it arrives.
    states: "8bit" (m as S1E3M4, sqrt(v) as UE3M5, blocks of 128), "fp8-lm" (m E4M3, v float16, one scale a tensor).
    master: "split24" (bfloat16 weight + 8 bits), "fp16" (a float16 master with one scale, FP8-LM's).
    skip: fnmatch patterns of module names to leave entirely as they are, e.g. ("*head",).
    min_numel: matrices with fewer elements, and all vectors, keep full-precision gradients and states.
    """

    level: str
    brief: str
    compute: str = "auto"
    fp8_format: str = "hybrid"
    gradients: str = "keep"
    states: str = "keep"
    master: str = "keep"
    skip: tuple[str, ...] = ()
    min_numel: int = 4096

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                choices = ", ".join(f'"{k}"' for k in known)
                raise ConfigError(
                    f"{name}={value!r} is not a choice; use one of {choices}.{did_you_mean(str(value), known)}"
                )
        if not isinstance(self.skip, (list, tuple)) or any(
            not isinstance(p, str) for p in self.skip
        ):
            raise ConfigError(
                f'skip={self.skip!r} must be a list of patterns (strings), such as skip=["*head"].'
            )
        object.__setattr__(self, "skip", tuple(self.skip))
        if (
            isinstance(self.min_numel, bool)
            or not isinstance(self.min_numel, int)
            or self.min_numel < 0
        ):
            raise ConfigError(f"min_numel={self.min_numel!r} must be an integer >= 0.")
        pairs = {("keep", "keep"), ("8bit", "split24"), ("8bit", "keep"), ("fp8-lm", "fp16")}
        if (self.states, self.master) not in pairs:
            allowed = "; ".join(f"states={s!r} with master={m!r}" for s, m in sorted(pairs))
            raise ConfigError(
                f"states={self.states!r} does not go with master={self.master!r}. These do: {allowed}."
            )

    @property
    def bytes_per_parameter(self) -> float:
        """Resident bytes of weight, master, gradient, m and v of a float32 matrix under AdamW at this recipe."""
        weight = {"keep": 4.0, "split24": 2.0, "fp16": 2.0}[self.master]
        master = {"keep": 0.0, "split24": 1.0, "fp16": 2.0}[self.master]
        gradient = 1 + 4 / BLOCK if self.gradients == "fp8" else weight
        moments = {"keep": 8.0, "8bit": 2 * (1 + 4 / BLOCK), "fp8-lm": 3.0}[self.states]
        return weight + master + gradient + moments


LEVELS: Mapping[str, Recipe] = MappingProxyType(
    {
        "O0": Recipe("O0", "FP8 GEMMs"),
        "O1": Recipe("O1", "O0 and FP8 gradients", gradients="fp8"),
        "O2": Recipe(
            "O2",
            "O1 and 8-bit optimizer states, 24-bit master weights",
            gradients="fp8",
            states="8bit",
            master="split24",
        ),
    }
)

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"fp8-lm": MappingProxyType({"states": "fp8-lm", "master": "fp16"})}
)
"""Named sets of overrides for O2. "fp8-lm" keeps the state formats of the FP8-LM paper."""


def recipe_for(opt_level: str, preset: str | None = None, **overrides: Any) -> Recipe:
    """Return the recipe of a level with a preset and single fields overridden.

    Raises:
        ConfigError: for an unknown level, preset, field or value; the message names the nearest known one.
    """
    if not isinstance(opt_level, str) or opt_level not in LEVELS:
        known = ", ".join(f'"{level}"' for level in LEVELS)
        raise ConfigError(
            f"opt_level must be one of {known} (a capital letter O and a digit), got {opt_level!r}."
        )
    recipe = LEVELS[opt_level]
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            known = ", ".join(f'"{name}"' for name in PRESETS)
            raise ConfigError(
                f"preset must be one of {known}, got {preset!r}.{did_you_mean(str(preset), PRESETS)}"
            )
        if opt_level != "O2":
            raise ConfigError(
                f'preset={preset!r} names optimizer states, which only opt_level="O2" converts.'
            )
        recipe = replace(recipe, **PRESETS[preset])
    settable = [f.name for f in fields(Recipe) if f.name not in ("level", "brief")]
    for name in overrides:
        if name not in settable:
            raise ConfigError(
                f"initialize() has no option {name!r}.{did_you_mean(name, settable)} Options: {', '.join(settable)}."
            )
    return replace(recipe, **overrides)
