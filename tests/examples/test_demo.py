"""The demo end to end: its command as a stranger runs it, its report, and the loop that benchmarks use."""

import json
import math
import re
import webbrowser
from types import SimpleNamespace

import corpus
import demo
import demo_report
import pytest
from browser import measure_overflow
from gpt import ModelConfig
from helpers import refused_in_a_line
from ranks import context_of_ranks
from record import LEAST_STEPS, Record, find_problems, judge

from fp8stack.__main__ import main

TINY = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, ffn=64, seq_len=32)
SIZES = {"weight": 2.0, "master": 1.0, "grad": 1.03, "m": 1.03, "v": 1.03, "total": 6.09}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(30):
        line = f"for x in range({index}):\n    print(x)\n"
        (folder / f"loop_{index}.py").write_text(line * 20)
    return folder


def make_records(steps, **losses):
    """Return records of levels that end at these losses, with all that makes a page wide."""
    records = []
    for level, loss in losses.items():
        validation = [(steps // 2, 1.1 * loss), (steps, loss)]
        conditions = {"model": "GPT", "path": "a_name_without_any_space_in_it" * 5}
        train = [5.0 - 3 * i / steps for i in range(steps)]
        records.append(Record(level, train, validation, 12_345.6, SIZES, 2**27, conditions))
    records[-1].sample = "class Sample:  # of a line that is longer than any window is wide\n" * 3
    records[-1].sample += "x" * 300
    return records


def test_demo_trains_says_what_came_of_it_and_opens_its_report(data, tmp_path, monkeypatch, capsys):
    forks = SimpleNamespace(get_context=lambda _: context_of_ranks())  # which have imported torch
    monkeypatch.setattr(demo, "multiprocessing", forks)
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    model = ModelConfig(dim=128, layers=2, heads=4, kv_heads=2, ffn=256)
    monkeypatch.setitem(demo.SIZES, "demo", demo.Settings(model=model))
    monkeypatch.chdir(tmp_path)
    given = ["demo", "--open", "--json", "--device", "cpu", "--steps", "3", "--batch", "1"]
    given += ["--levels", "O2", "baseline"]
    assert main([*given, "--seq-len", "32", "--data", str(data), "--skip", "*head"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == "runs/demo/report.html"
    page = (tmp_path / told["report"]).read_text()
    assert opened == [(tmp_path / told["report"]).as_uri()]
    assert list(told["levels"]) == ["O2", "baseline"]
    o2, baseline = (
        json.loads((tmp_path / f"runs/demo/{n}.json").read_text()) for n in told["levels"]
    )
    assert len(baseline["train_loss"]) == 3
    assert baseline["train_loss"][0] == pytest.approx(o2["train_loss"][0], rel=0.01)
    assert baseline["bytes_per_parameter"]["total"] == pytest.approx(16, abs=0.1)
    assert 6.2 < o2["bytes_per_parameter"]["total"] < 8, "the head was skipped"
    assert baseline["sample"], "the last level writes it"
    assert not o2["sample"]
    printed = list(demo.draw(told))
    for expected in ("bytes/parameter", "Too few steps to compare losses"):
        assert any(expected in line for line in printed)
    assert printed[-3:-1] == ["report: runs/demo/report.html", "written by the baseline model:"]
    assert str(tmp_path) not in page


def test_a_level_that_fails_is_told(data, tmp_path, monkeypatch, capsys):
    class Process(SimpleNamespace):
        exitcode = 1
        start = join = lambda self: None

    forks = SimpleNamespace(get_context=lambda _: SimpleNamespace(Process=Process))
    monkeypatch.setattr(demo, "multiprocessing", forks)
    given = ["--seq-len", "32", "--data", str(data), "--levels", "O1", "--out", str(tmp_path)]
    assert main(["demo", "--open", *given]) == 1
    assert capsys.readouterr().out == "FAILED: O1 failed: its process ended with status 1\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--steps 1", "--steps 1: must be 2 or more"),
        ("--data nowhere", "there is no such file or folder"),
        ("--levels O1 --preset fp8-lm", "preset='fp8-lm' names states"),
        ("--levels O9", "invalid choice: 'O9'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(given, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert message in refused_in_a_line(capsys, "demo", *given.split(), "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("level", demo.LEVELS)
def test_training_lowers_the_loss_and_repeats_bit_for_bit(data, level):
    text = corpus.load(data, TINY.seq_len)
    settings = demo.Settings(level, TINY, steps=40, batch=2)
    first, second = (demo.train(settings, text, show_progress=False)[1] for _ in range(2))
    assert first.train_loss == second.train_loss
    assert first.validation == second.validation
    assert first.train_loss[-1] < first.train_loss[0] - 1
    assert first.validation[-1][0] == 40


def test_losses_are_compared_after_enough_steps_only(tmp_path):
    """Before, neither the table nor the page has a verdict or a difference; a loss that is no number is a failure."""
    few, enough = (make_records(n, baseline=2.0, O2=2.04) for n in (LEAST_STEPS - 1, LEAST_STEPS))
    assert find_problems(few) == []
    told = (
        f"Too few steps to compare losses: {LEAST_STEPS - 1}, and it takes {LEAST_STEPS} (--steps)."
    )
    assert judge(few) == told
    (line,) = find_problems(enough)
    assert line.startswith(
        "O2 ends at a validation loss of 2.0400, +2.00% from the baseline's 2.0000"
    )
    assert judge(make_records(LEAST_STEPS, baseline=2.0, O2=2.01)).startswith(
        "Every level ends within 1%"
    )
    assert judge(enough[1:]).startswith("Trained without a baseline")
    assert judge(enough[:1]) == "Trained the baseline alone."
    assert find_problems(make_records(2, baseline=2.0, O2=math.nan)) == [
        "O2 ends at a validation loss of nan"
    ]
    for records, pictures in ((few, 1), (enough, 2)):
        problems = find_problems(records)
        data = demo_report.summarize(records) | {"problems": problems}
        page = demo_report.write_html(records, problems, tmp_path).read_text()
        for shown in ("\n".join(demo_report.draw(data)), page[page.index("<body>") :]):
            assert ("+2.00%" in shown) is (records is enough)
            assert (told in shown) is (records is few)
        assert page.count("<svg") == pictures
        assert ("Distance from the baseline" in page) is (records is enough)


def test_the_report_fits_a_phone_and_follows_the_theme(tmp_path):
    losses = {"baseline": 2.0, "O0": 2.001, "O1": math.nan, "O2": 2.002}
    records = make_records(300, **losses)
    page = demo_report.write_html(records, find_problems(records), tmp_path).read_text()
    assert "nan" not in page[page.index("<svg") : page.rindex("</svg>")], "it cannot be drawn"
    assert not re.search(r'(src|href)="|url\(|<script', page), "it needs nothing from elsewhere"
    assert '<meta name="viewport" content="width=device-width' in page
    dark = page[page.index("@media (prefers-color-scheme: dark)") :]
    assert set(re.findall(r"--(?:baseline|O\d)(?=:)", dark)) == {f"--{level}" for level in losses}
    assert not re.search(r'(fill|stroke|color)="#', page), "pictures have the colours of the theme"
    *_, last = re.findall(r"<h2>(.*?)</h2>", page)
    assert last == "A sample written by the O2 model"
    beyond = measure_overflow(tmp_path, ["report.html"], tmp_path / "profile")
    assert len(beyond) == 2
    assert max(beyond.values()) <= 0, beyond
