"""The demo end to end: its command line as a stranger runs it, and the loop that benchmarks use."""

import json
from dataclasses import replace
from types import SimpleNamespace

import corpus
import demo
import pytest
from gpt import ModelConfig
from helpers import run_python
from record import find_deviations
from workers_scripts import run_script

TINY = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, ffn=64, seq_len=32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(30):
        line = f"for x in range({index}):\n    print(x)\n"
        (folder / f"loop_{index}.py").write_text(line * 20)
    return folder


def test_demo_writes_table_sample_records_and_report(data, tmp_path, monkeypatch, capsys):
    def fork(command, check):  # of a process that has imported torch
        return SimpleNamespace(returncode=0, stdout=run_script(command[1:], tmp_path / "log", 0))

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=fork))
    model = ModelConfig(dim=128, layers=2, heads=4, kv_heads=2, ffn=256)
    monkeypatch.setitem(demo.SIZES, "demo", demo.Settings(model=model))
    given = ["--device", "cpu", "--levels", "O2", "baseline", "--steps", "3", "--batch", "1"]
    given += ["--seq-len", "32", "--data", str(data), "--out", str(tmp_path)]
    assert demo.main(given) == 0
    printed = capsys.readouterr().out
    for expected in ("val loss", "tokens/s", "master", "by the baseline model", "report.html"):
        assert expected in printed
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert str(tmp_path) not in page
    baseline, o2 = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("baseline", "O2"))
    assert len(baseline["train_loss"]) == 3
    assert baseline["train_loss"][0] == pytest.approx(o2["train_loss"][0], rel=0.01)
    assert baseline["bytes_per_parameter"]["total"] == pytest.approx(16, abs=0.1)
    assert o2["bytes_per_parameter"]["total"] < 7
    assert baseline["sample"]  # the last level writes it


def test_it_is_a_script_that_refuses_bad_options_before_anything_runs(tmp_path, capsys):
    result = run_python(demo.__file__, "--device", "cpu", "--steps", "1")
    assert result.returncode == 2
    assert "--steps 1: must be 2 or more" in result.stderr
    with pytest.raises(SystemExit) as stop:
        demo.main(["--data", "nowhere", "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "there is no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("level", demo.LEVELS)
def test_training_lowers_the_loss_and_repeats_bit_for_bit(data, level):
    text = corpus.load(data, TINY.seq_len)
    settings = demo.Settings(level, TINY, steps=40, batch=2)
    first, second = (demo.train(settings, text)[1] for _ in range(2))
    assert first.train_loss == second.train_loss
    assert first.validation == second.validation
    assert first.train_loss[-1] < first.train_loss[0] - 1
    assert first.validation[-1][0] == 40
    worse = replace(first, level="O9", validation=[(40, 1.02 * first.final_loss)])
    (line,) = find_deviations([replace(first, level="baseline"), worse])
    assert line.startswith("O9 ends at")
