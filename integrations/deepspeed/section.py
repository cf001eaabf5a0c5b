"""The "fp8stack" section of a DeepSpeed config: found, validated, and turned into a recipe.

    "fp8stack": {"opt_level": "O2", "skip": ["*head"], "checkpoint_format": "portable"}

DeepSpeed ignores top-level keys that it does not know, so a typo in here would be silent: every key and value is
checked. Keys are the fields of `fp8stack.Recipe` and those of `Section`.
"""

from __future__ import annotations

import base64
import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8stack.conflicts import DEEPSPEED, ZERO, ZERO_FLOAT32, check_option, refuse_conflicts
from fp8stack.errors import ConfigError
from fp8stack.integrations.incompatibilities import TrainingRun
from fp8stack.levels import OPTIONS, Recipe, check_choice, recipe_for

_CHOICES: dict[str, tuple[Any, ...]] = {
    "enabled": (True, False),
    "strict": (False, True),
    "checkpoint_format": ("native", "portable"),
}
"""Keys of this section alone, with their values; "allow" is a list. `recipe_for` checks all others."""


@dataclass(frozen=True)
class Section:
    """What the user asked for."""

    recipe: Recipe
    given: frozenset[str] = frozenset()  # the fields of the recipe that the user set
    strict: bool = False
    allow: tuple[str, ...] = ()  # rows of the table of incompatibilities that are to be warnings
    checkpoint_format: str = "native"


def find_config(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a copy of the config among the arguments of `deepspeed.initialize`; None if there is none.

    Raises:
        ConfigError: for a file or text that holds no JSON object.
    """
    of_arguments = getattr(arguments.get("args"), "deepspeed_config", None)
    for given in (arguments.get("config"), arguments.get("config_params"), of_arguments):
        if given is not None:
            return copy.deepcopy(given) if isinstance(given, dict) else _read(given)
    return None


def with_config(arguments: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `deepspeed.initialize` with another config in the place of theirs."""
    changed = {**arguments, "config": config, "config_params": None}
    if arguments.get("config") is None and arguments.get("config_params") is None:
        changed["args"] = copy.copy(arguments["args"])
        changed["args"].deepspeed_config = None  # else DeepSpeed finds two
    return changed


def _read(given: Any) -> dict[str, Any]:
    """Read a file, or JSON in base 64, as DeepSpeed does."""
    import hjson  # what DeepSpeed reads configs with: JSON with comments
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    is_file = isinstance(given, (str, os.PathLike)) and os.path.isfile(given)
    try:
        text = Path(given).read_text() if is_file else base64.urlsafe_b64decode(given).decode()
        config = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (ValueError, TypeError, OSError) as error:
        what = "is not JSON" if is_file else "is neither a file nor JSON in base 64"
        raise ConfigError(f"DeepSpeed config {str(given)[:200]!r} {what}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"DeepSpeed config {str(given)[:200]!r} is not a JSON object.")
    return config


def find_section(config: Mapping[str, Any], opt_level: str | None = None) -> Section | None:
    """Return the validated section of a config, or None if it is absent or not enabled.

    `opt_level` is one that was given as an argument, which stands for a section where there is none.

    Raises:
        ConfigError: for a key or value that is not known, or two levels that differ.
    """
    if "fp8stack" not in config and opt_level is None:
        return None
    raw = config.get("fp8stack", {})
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f'"fp8stack": {raw!r} in the DeepSpeed config must be an object, such as {{"opt_level": "O2"}}.'
        )
    where = '"fp8stack" in the DeepSpeed config: '
    for key, value in raw.items():
        check_choice("key", key, ("opt_level", "preset", "allow", *_CHOICES, *OPTIONS), where)
        if key in _CHOICES:
            check_choice(key, value, _CHOICES[key], where)
        if key == "allow" and not isinstance(value, list):
            raise ConfigError(f"{where}allow={value!r} must be a list of names.")
    level = raw.get("opt_level", opt_level)
    if opt_level is not None and level != opt_level:
        raise ConfigError(
            f'opt_level={opt_level!r} was passed, and the DeepSpeed config says "fp8stack": {{"opt_level": '
            f"{level!r}}}. Give it in one place."
        )
    if not raw.get("enabled", True):
        return None
    overrides = {key: value for key, value in raw.items() if key in OPTIONS}
    recipe = recipe_for("O2" if level is None else level, raw.get("preset"), **overrides)
    allow, kept = tuple(raw.get("allow", ())), raw.get("checkpoint_format", "native")
    return Section(recipe, frozenset(overrides), raw.get("strict", False), allow, kept)


def fit_to_zero(section: Section, config: dict[str, Any]) -> Section:
    """Return the section as ZeRO can have it and what this DeepSpeed lacks; put into `config` what it is to be told.

    ZeRO hands the optimizer flat partitions, so formats with one scale a tensor cannot be used. The master is what
    ZeRO keeps: float32, or, with `bf16_master_weights_and_grads`, bfloat16 beside which our optimizer keeps 8 bits.

    Raises:
        ConfigError: for formats that were asked for and cannot be had.
    """
    recipe, stage = section.recipe, stage_of(config)
    check_recipe(recipe, stage)
    if recipe.master not in ("keep", "fp32") and not _keeps_bf16(config, stage):
        if "master" in section.given:
            check_option("master", recipe.master, ZERO_FLOAT32)
        recipe = replace(recipe, master="keep")
    if recipe.states != "keep":
        recipe = replace(recipe, optimizer_backend="fp8stack")
    return replace(section, recipe=recipe)


def check_recipe(recipe: Recipe, stage: int) -> None:
    """Raise ConfigError for options that have no place in DeepSpeed, at any stage or at this one."""
    refuse_conflicts(recipe, *([DEEPSPEED, ZERO] if stage else [DEEPSPEED]))


def allow_ours(config: dict[str, Any]) -> None:
    """Let DeepSpeed take an optimizer of fp8stack's, also with `offload_optimizer`."""
    config["zero_allow_untested_optimizer"] = True
    if TrainingRun(config).offload != "none":
        config["zero_force_ds_cpu_optimizer"] = False


def stage_of(config: Mapping[str, Any]) -> int:
    """Return ZeRO's stage, 0 where it is off or not known yet."""
    return TrainingRun(config).stage or 0


def _keeps_bf16(config: dict[str, Any], stage: int) -> bool:
    """Let ZeRO keep bfloat16 partitions, if it can; return whether it does. Where DeepSpeed cannot, say so."""
    run, bf16 = TrainingRun(config), config.get("bf16") or {}
    accumulates = run.at("data_types.grad_accum_dtype") in (None, "bf16")
    if not (stage and bf16.get("enabled") and accumulates) or run.offload != "none":
        return False
    for flag in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        bf16.setdefault(flag, True)
    return bool(bf16["bf16_master_weights_and_grads"] and bf16["bf16_optimizer_states"])
