"""`fp8stack levels`: what each level does, what it costs, and what it comes to on this machine.

Everything is read from `fp8stack/levels.py` and asked of this machine; bytes per parameter are of float32 matrices
under AdamW: weight, master, gradient and both moments.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from fp8stack.levels import CHOICES, LEVELS, OPTIONS, PRESETS, recipe_for

from . import machine
from .output import Commands, Console, add_command, show, table


def add_parser(commands: Commands) -> None:
    add_command(commands, "levels", "what each level does, and what it comes to on this machine")


def run(options: argparse.Namespace) -> int:
    device, levels = machine.device(), []
    for level, preset in [
        *((level, None) for level in LEVELS),
        *(("O2", name) for name in PRESETS),
    ]:
        recipe = recipe_for(level, preset)
        nbytes, here = recipe.bytes_per_parameter, machine.outcome(recipe, device)
        levels.append(
            {**asdict(recipe), "preset": preset, "bytes_per_parameter": nbytes, "here": here}
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
    rows, told = [], set()
    for level in data["levels"]:
        here = level["here"]
        preset = f', preset="{level["preset"]}"' if level["preset"] else ""
        runs = (here["compute"], here["optimizer"]) if here["runs"] else ("does not run", "")
        row = (level["level"] + preset, level["gradients"], level["states"], level["master"])
        rows.append((*row, f"{level['bytes_per_parameter']:.2f}", *runs))
        told.update([here["reason"], *here.get("fallbacks", ())])
    header = ("level", "gradients", "states", "master", "bytes/parameter")
    console.print(table((*header, "GEMMs here", "optimizer here"), rows, right="bytes/parameter"))
    for level in data["levels"]:
        if not level["preset"]:
            console.print(f"{level['level']}: {level['brief']}")
    console.print(f"\nOn {data['device']}: {'; '.join(sorted(told))}")
    top = next(level for level in data["levels"] if level["level"] == "O2")
    fields = [
        (name, top[name], ", ".join(map(str, data["choices"].get(name, ())))) for name in OPTIONS
    ]
    console.print("\nFields that initialize(...) takes, with the values of O2:")
    console.print(table(("field", "at O2", "choices"), fields))
