"""`from msamp import deepspeed`: DeepSpeed with a config section "msamp", and all else of DeepSpeed.

    "msamp": {"enabled": true, "opt_level": "O1" | "O2" | "O3", "use_te": false}

becomes fp8stack's section, "fp8stack": {"opt_level": "O1" or, for O2 and O3, "O2"}, and goes to
`fp8stack.integrations.deepspeed.initialize`. Without the section, or with "enabled": false, DeepSpeed runs as it is;
called by accelerate, which leaves the section out if the level came with `MSAMPRecipeKwargs`, the level is that one.
An `LBAdam` or `LBAdamW` given at O2 is taken for its hyper-parameters, as torch's would be: the level has the formats.
Otherwise ZeRO's flat partitions get scales for 128 elements each, with a warning, where it has one for a tensor.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fp8stack.errors import ConfigError, warn
from fp8stack.integrations import deepspeed as adapter
from fp8stack.integrations.deepspeed.engine import import_deepspeed
from fp8stack.integrations.deepspeed.section import find_config, stage_of, with_config
from fp8stack.levels import check_choice

from .api import O3_IS_O2, calling_accelerator, opt_levels
from .optimizers import LBAdam, LBAdamW


def initialize(*args: Any, **kwargs: Any) -> Any:
    """As `deepspeed.initialize`: the same arguments, and (engine, optimizer, loader, scheduler).

    Raises:
        ConfigError: for a section "msamp" that is not valid, or contradicts one of "fp8stack".
    """
    accelerator = calling_accelerator()
    original = import_deepspeed().initialize
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    config = find_config(given)
    if config is None:
        return original(**given)  # which says what is missing
    level = translate(config)
    if level is None and accelerator is not None and "fp8stack" not in config:
        recipe = accelerator.msamp_recipe_handler or accelerator.fp8_recipe_handler
        level = recipe.opt_level if recipe is not None else None
    optimizer = given.get("optimizer")
    if isinstance(optimizer, LBAdam | LBAdamW):
        config["zero_allow_untested_optimizer"] = True
        if level in ("O2", "O3"):
            kind = torch.optim.AdamW if optimizer.decoupled else torch.optim.Adam
            given["optimizer"] = kind(optimizer.param_groups)
            given["optimizer"].param_groups = optimizer.param_groups  # which schedulers drive
        elif optimizer.states == "fp8-lm" and stage_of(config):
            told = 'ZeRO joins parameters to flat tensors, so states are states="8bit": fp8 with a scale for each 128'
            warn(f"msamp: {told}")
            optimizer.states = "8bit"
    given = with_config(given, config)
    if level is None and "fp8stack" not in config:
        return original(**given)
    if level is not None:
        level = "O1" if level == "O1" else "O2"
        section = config.setdefault("fp8stack", {})
        if section.setdefault("opt_level", level) != level:
            raise ConfigError(
                f'the DeepSpeed config says "fp8stack": {section} and, by "msamp", {level}. Leave "msamp" out.'
            )
    return adapter.initialize(**given)


def translate(config: dict[str, Any]) -> str | None:
    """Take the section "msamp" out of a DeepSpeed config; return its level, None if it is off or missing.

    Raises:
        ConfigError: for an unknown key or value.
    """
    section = config.pop("msamp", None) or {}
    if not isinstance(section, dict):
        raise ConfigError(f'"msamp": {section!r} in the DeepSpeed config must be an object.')
    where = '"msamp" in the DeepSpeed config: '
    for key in section:
        check_choice("key", key, ("enabled", "opt_level", "use_te"), where)
    enabled = check_choice("enabled", section.get("enabled", False), (False, True), where)
    level = check_choice("opt_level", section.get("opt_level", "O1"), tuple(opt_levels), where)
    if enabled and level == "O3":
        warn(f"msamp: {O3_IS_O2}", stacklevel=3)
    return str(level) if enabled else None


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_deepspeed(), name)
