"""`fp8stack levels`: what each level does, what it costs, and what it comes to on this machine.

Everything is read from `fp8stack/levels.py` and asked of this machine; bytes per parameter are of float32 matrices
under AdamW: weight, master, gradient and both moments.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fp8stack.levels import CHOICES, LEVELS, PRESETS, recipe_for

from . import machine
from .output import add_command, show, table
from .recipe import FIELDS

if TYPE_CHECKING:
    from rich.console import Console

    from .output import Commands


def add_parser(commands: Commands) -> None:
    add_command(commands, "levels", "what each level does, and what it comes to on this machine")


def run(options: argparse.Namespace) -> int:
    device = machine.device()
    named: list[tuple[str, str | None]] = [(level, None) for level in LEVELS]
    named += [("O2", preset) for preset in PRESETS]
    levels = []
    for level, preset in named:
        recipe = recipe_for(level, preset)
        here = machine.outcome(recipe, device)
        size = recipe.bytes_per_parameter
        levels.append(
            {**asdict(recipe), "preset": preset, "bytes_per_parameter": size, "here": here}
        )
    data = {
        "device": machine.name_of(device),
        "levels": levels,
        "choices": {name: list(known) for name, known in CHOICES.items()},
    }
    show(options, data, draw)
    return 0


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show a line for each level, then what may be chosen."""
    levels = data["levels"]
    header = (
        "level",
        "gradients",
        "states",
        "master",
        "bytes/parameter",
        "GEMMs here",
        "optimizer here",
    )
    rows = []
    for level in levels:
        here = level["here"]
        name = (
            f'{level["level"]}, preset="{level["preset"]}"' if level["preset"] else level["level"]
        )
        runs = (here["compute"], here["optimizer"]) if here["runs"] else ("does not run", "")
        row = (name, level["gradients"], level["states"], level["master"])
        rows.append((*row, f"{level['bytes_per_parameter']:.2f}", *runs))
    console.print(table(header, rows, right="bytes/parameter"))
    for level in levels:
        if not level["preset"]:
            console.print(f"{level['level']}: {level['brief']}")
    told = {level["here"]["reason"] for level in levels}
    told.update(line for level in levels for line in level["here"].get("fallbacks", ()))
    console.print(f"\nOn {data['device']}: {'; '.join(sorted(told))}")
    top = next(level for level in levels if level["level"] == "O2")
    fields = [(name, top[name], ", ".join(data["choices"].get(name, ()))) for name in FIELDS]
    console.print("\nFields that initialize(...) takes, with the values of O2:")
    console.print(table(("field", "at O2", "choices"), fields))
