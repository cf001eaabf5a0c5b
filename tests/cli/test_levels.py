"""`fp8stack levels`."""

import json
import subprocess
import sys

from fp8stack.__main__ import main
from fp8stack.levels import CHOICES, LEVELS, recipe_for


def test_the_table_says_what_the_recipes_say(capsys):
    assert main(["levels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for level in LEVELS:
        recipe = recipe_for(level)
        cells = next(line.split() for line in lines if line.split()[:1] == [level])
        assert cells[1:4] == [recipe.gradients, recipe.states, recipe.master]
        assert cells[4] == f"{recipe.bytes_per_parameter:.2f}"
    text = "\n".join(lines)
    for name, known in CHOICES.items():
        assert name in text
        assert ", ".join(map(str, known)) in text


def test_the_module_prints_json_and_nothing_else():
    command = [sys.executable, "-m", "fp8stack", "levels", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    data = json.loads(result.stdout)
    named = {(level["level"], level["preset"]): level for level in data["levels"]}
    assert named.keys() == {("O0", None), ("O1", None), ("O2", None), ("O2", "fp8-lm")}
    assert named["O2", "fp8-lm"]["master"] == "fp16"
    assert named["O2", None]["bytes_per_parameter"] == recipe_for("O2").bytes_per_parameter
    assert named["O0", None]["here"]["runs"]
    assert named["O0", None]["here"]["optimizer"] == "as given"
    assert named["O2", None]["here"]["compute"] in ("te", "native", "bf16")
