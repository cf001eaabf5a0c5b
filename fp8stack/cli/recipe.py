"""Options that are a level and fields of its recipe: --opt-level O2 --fp8-recipe delayed --skip '*head'.

They are made from `fp8stack.Recipe` itself, which also checks their values, so every field has its option.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from fp8stack.errors import ConfigError
from fp8stack.levels import CHOICES, LEVELS, OPTIONS, PRESETS, Recipe, recipe_for


def add_recipe(parser: argparse.ArgumentParser, levels: bool = True) -> None:
    """Add --preset and an option for each field of a recipe, and --opt-level if there are `levels`."""
    group = parser.add_argument_group("recipe", "see https://fp8stack.github.io/fp8stack/options/")
    if levels:
        group.add_argument("--opt-level", default="O2", metavar="|".join(LEVELS))
    group.add_argument("--preset", metavar="|".join(PRESETS))
    for field in fields(Recipe):
        flag = "--" + field.name.replace("_", "-")
        if field.default is False:
            group.add_argument(flag, action="store_true", default=None)
        elif True in CHOICES.get(field.name, ()):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        elif field.name in CHOICES:
            choices = "|".join(CHOICES[field.name])  # a long list would not fit a terminal
            group.add_argument(flag, metavar=choices if len(choices) < 45 else "NAME")
        elif field.default == ():
            values = {"states_for": "=STATES[,MASTER]", "precision_for": "=HOW"}
            group.add_argument(flag, nargs="+", metavar=f"PATTERN{values.get(field.name, '')}")
        elif isinstance(field.default, int):
            group.add_argument(flag, type=int, metavar="N")


def recipe_of(options: argparse.Namespace, opt_level: str | None = None) -> Recipe:
    """Return the recipe that the options describe, at their level or another one.

    Raises:
        ConfigError: for a level or value that is not one.
    """
    return recipe_for(opt_level or options.opt_level, **options_of(options))


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of a recipe's fields, and the preset, as `initialize` takes them."""
    names = ("preset", *OPTIONS)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if "states_for" in given:
        given["states_for"] = dict(map(_states_for, given["states_for"]))
    if "precision_for" in given:
        given["precision_for"] = [text.rpartition("=")[::2] for text in given["precision_for"]]
    return given


def _states_for(text: str) -> tuple[str, dict[str, Any]]:
    """Return "*embed*=8bit,none" as a pattern and its formats; either format may be empty."""
    pattern, equals, formats = text.rpartition("=")
    states, _, master = formats.partition(",")
    if not equals or not pattern or not (states or master):
        raise ConfigError(
            f"--states-for {text!r} must be PATTERN=STATES or PATTERN=STATES,MASTER, such as *embed*=fp32."
        )
    named = {"states": states, "master": master}
    return pattern, {name: value for name, value in named.items() if value}
