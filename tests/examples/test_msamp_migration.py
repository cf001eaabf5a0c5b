"""The two scripts of the migration from MS-AMP: short, hardly different, and of the same numbers."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest
from workers_scripts import run_script

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "09_msamp_migration"
BEFORE, AFTER = FOLDER / "train_msamp.py", FOLDER / "train_fp8stack.py"


def test_they_differ_in_five_lines():
    before, after = (path.read_text().splitlines() for path in (BEFORE, AFTER))
    assert max(len(before), len(after)) <= 80
    changes = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    removed = [line[2:] for line in changes if line.startswith("- ")]
    added = [line[2:] for line in changes if line.startswith("+ ")]
    assert 0 < len(added) < len(removed) <= 5
    # what is left of the first without the two lines that enable it is a script for MS-AMP alone
    assert [line for line in removed if "fp8stack" in line or "enable" in line] == [
        "from fp8stack.integrations.msamp import enable",
        "enable()",
    ]
    assert not any("fp8stack" in line for line in before[12:])


def run_processes(options, folder):
    """Return what each of the scripts prints that are run as a stranger runs them."""
    running = [
        subprocess.Popen(
            [sys.executable, str(path), *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for path in (BEFORE, AFTER)
    ]
    outputs = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outputs.append(out)
    return outputs


def run_forks(options, folder):
    return [
        run_script([str(path), *options], folder / path.stem, count=1) for path in (BEFORE, AFTER)
    ]


@pytest.mark.parametrize(("level", "run"), [("O1", run_forks), ("O2", run_processes)])
def test_they_train_alike(level, run, tmp_path):
    outputs = run(["--steps", "30", "--opt-level", level], tmp_path)
    assert outputs[0] == outputs[1]
    losses = [float(line.split()[-1]) for line in outputs[0].splitlines()]
    assert losses[-1] < 0.2 * losses[0]
