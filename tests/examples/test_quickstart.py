"""The notebook's cells run in order, in one namespace, and show what their text says."""

import json
from pathlib import Path

import corpus

NOTEBOOK = json.loads((Path(corpus.__file__).parent / "quickstart.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_short_and_has_no_outputs():
    assert NOTEBOOK["nbformat"] == 4
    assert len(NOTEBOOK["cells"]) <= 12
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS)


def test_its_cells_run_and_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, cell in enumerate(CELLS):
        lines = [line for line in cell["source"] if not line.startswith(("%pip", "!"))]
        exec(compile("".join(lines), f"cell {number}", "exec"), names)

    def last(losses):
        return sum(losses[-20:]) / 20

    baseline, low = names["baseline"], names["low"]
    assert last(baseline) < 0.5 * baseline[0]
    assert abs(last(low) / last(baseline) - 1) < 0.02
    before, after = names["before"], names["after"]
    for part in ("m", "v"):
        assert 0 < after[part] < 0.3 * before[part], "8 bits, of 32"
    assert after["weight"] + after["master"] < 0.8 * before["weight"], "24 bits, of 32"
    assert after["grad"] < 0.3 * before["grad"]
    assert names["saved"] == {"step": 100}
    assert names["same"]
    printed = capsys.readouterr().out
    assert "multiplies 100 % of the matrix parameters" in printed
    assert "same loss: True" in printed
