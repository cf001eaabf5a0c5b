"""The two scripts of the migration from MS-AMP: short, hardly different, and of the same numbers."""

import difflib
from pathlib import Path

import pytest
from workers_scripts import run_script

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "09_msamp_migration"
SCRIPTS = FOLDER / "train_msamp.py", FOLDER / "train_fp8stack.py"


def test_they_differ_in_five_lines():
    before, after = (path.read_text().splitlines() for path in SCRIPTS)
    assert max(len(before), len(after)) <= 80
    changes = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    removed, added = ([line[2:] for line in changes if line[0] == sign] for sign in "-+")
    assert 0 < len(added) < len(removed) <= 5
    # what is left of the first without the two lines that enable it is a script for MS-AMP alone
    assert [line for line in removed if "fp8stack" in line or "enable" in line] == [
        "from fp8stack.integrations.msamp import enable",
        "enable()",
    ]
    assert not any("fp8stack" in line for line in before[12:])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_they_train_alike(level, tmp_path):
    given = ["--steps", "30", "--opt-level", level]
    before, after = (run_script([str(p), *given], tmp_path / p.stem, count=1) for p in SCRIPTS)
    assert before == after
    losses = [float(line.split()[-1]) for line in before.splitlines()]
    assert losses[-1] < 0.2 * losses[0]
