"""Losses beside fallbacks and peers: which runs are compared, their table, and their picture."""

import json
import runpy

import peer_tables
import pytest
import record_tables
import report
import report_pictures
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

HEAD = [
    "| | mean | difference to the baseline | seed by seed | bytes/parameter |",
    "|---|---|---|---|---|",
]


def row(variant, value=2.0, seed=0, text="stdlib", **params):
    """Return a record of the larger model."""
    return {
        "variant": variant,
        "params": {**peer_tables.RECIPE, "seed": seed, "text": text, **params},
        "value": value,
        "unit": "nats/byte",
        "bytes_per_parameter": {"total": 6.1254},
        "validation": [[250, 3.0], [1500, value]],
        "time": "2026",
    }


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Return a function that replaces all records."""
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)

    def write(rows):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "convergence.jsonl").write_text(text)

    return write


@pytest.fixture
def peers():
    return next(section for section in report.SECTIONS if section.key == "peers")


def test_the_table_has_what_is_recorded_of_the_larger_model(records):
    found = {
        "8bit/split24": (2.02, 2.0),
        "peer/torchao 8bit/bf16": (2.2, 2.0),
        "peer/torchao 4bit/bf16 skip=head": (2.2, 2.0),
        "peer/te fp8-lm": (float("nan"), 2.0),
        "O0 skip=head": (2.0, 2.0),
        "fallback/bitsandbytes": (2.0, 2.0),
        "native/current": (2.0, 2.02),
        "baseline": (2.0, 2.0),
        "O2": (1.99, 2.0),
    }
    rows = [row(v, x, seed) for v, values in found.items() for seed, x in enumerate(values)]
    records([*rows, row("O2", 9.0, dim=record_tables.SMALL)])
    assert peer_tables.peer_parity() == [
        *HEAD,
        "| baseline | 2.0000 | | | 6.13 |",
        "| O2 | 1.9950 | −0.25 % | −0.50, +0.00 % | 6.13 |",
        "| fallback, bitsandbytes | 2.0000 | +0.00 % | +0.00, +0.00 % | 6.13 |",
        "| torchao 8bit, bfloat16 weights | 2.1000 | +5.00 % | +10.00, +0.00 % | 6.13 |",
        "| torchao 4bit, bfloat16 weights, skip=head | 2.1000 | +5.00 % | +10.00, +0.00 % | 6.13 |",
        "| te fp8-lm | not finite | | | 6.13 |",
        "| 8bit/split24 | 2.0100 | +0.50 % | +1.00, +0.00 % | 6.13 |",
        "| O0 skip=head | 2.0000 | +0.00 % | +0.00, +0.00 % | 6.13 |",
        "| native/current | 2.0100 | +0.50 % | +0.00, +1.00 % | 6.13 |",
    ]


@pytest.mark.parametrize("found", [[], [row("peer/te fp32")], [row("baseline", dim=512)]])
def test_without_a_baseline_there_is_no_table(found, records, peers):
    assert runpy.run_path(peer_tables.__file__)["TABLES"] == {}, "without a file, too"
    records(found)
    assert peer_tables.peer_parity() == ["Not recorded yet."]
    assert peers.choose(found) == []
    assert runpy.run_path(peer_tables.__file__)["TABLES"] == {}
    records([*found, row("baseline")])
    assert runpy.run_path(peer_tables.__file__)["TABLES"].keys() == {"peer-parity"}


def test_runs_are_compared_over_the_last_baseline_s_text_and_its_seeds(records, peers):
    rows = [
        row("baseline", 9.0, text="torch"),
        row("O0", 9.9, text="torch"),
        row("O1", 2.02),
        row("baseline", 2.0),
        row("baseline", 3.0, 1),
        row("O1", 7.0, 2),
        row("O2", 3.03, 1),
        row("peer/te fp32", 7.0, 2),
        row("O1", 9.9, text="torch"),
    ]
    records(rows)
    assert peer_tables.peer_parity() == [
        *HEAD,
        "| baseline | 2.5000 | | | 6.13 |",
        "| O1, seed 0 | 2.0200 | +1.00 % | +1.00 % | 6.13 |",
        "| O2, seed 1 | 3.0300 | +1.00 % | +1.00 % | 6.13 |",
    ]
    assert [r["value"] for r in peers.choose(rows)] == [2.02, 2.0, 3.0, 3.03]


def test_each_line_of_the_picture_has_a_color_of_its_own_and_its_kind_s_style(peers):
    levels = ["baseline", "O0", "O1", "O2"]
    fallbacks = ["fallback/fp8stack", "fallback/bitsandbytes"]
    others = [f"peer/p{i}" for i in range(12)] + ["8bit/split24", "O0 skip=head"]
    figure = Figure(layout="constrained")
    peers.draw(
        figure, [row(v, seed=seed) for v in (*others, *fallbacks, *levels) for seed in (0, 1)]
    )
    above, below = figure.axes
    lines = {line.get_label(): line for line in above.lines}
    assert len(lines) == 20
    assert len({to_hex(line.get_color()) for line in lines.values()}) == 20
    assert {to_hex(lines[v].get_color()) for v in levels} == {
        to_hex(report_pictures.LEVELS[v]) for v in levels
    }
    styles = [
        {lines[v.removeprefix("peer/")].get_linestyle() for v in kind}
        for kind in (levels, fallbacks, others[:12], others[12:])
    ]
    assert [len(style) for style in styles] == [1] * 4
    assert len(set.union(*styles)) == 4
    drawn = {(to_hex(line.get_color()), line.get_linestyle()) for line in below.lines}
    assert drawn == {(to_hex(line.get_color()), line.get_linestyle()) for line in lines.values()}
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown == lines.keys()
