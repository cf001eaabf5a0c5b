"""Tables and summaries that documents quote: which records they compare, and what they make of known numbers."""

import json
import math
import runpy

import convergence
import gradients
import memory
import peer_tables
import pytest
import record_tables
import report
import stability
import stability_tables
import tables
import training
import training_tables

from fp8stack.levels import recipe_for


def cells(rows):
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


# --- documents


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Let a temporary page be all documents, and a table of one number all tables."""
    path = tmp_path / "page.md"
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", [path])
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: ["| ms |", "|---|", "| 2.50 |"]})
    return path


def test_a_table_is_written_between_its_marks_and_nothing_else(page, capsys):
    marks = "before\n\n<!-- table: one -->\n{}<!-- /table -->\n\nafter | 2.51 |\n"
    page.write_text(marks.format("| old |\n"))
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out == "differ from their records: page.md\n"
    assert "old" in page.read_text()
    assert tables.main([]) == 0
    assert page.read_text() == marks.format("| ms |\n|---|\n| 2.50 |\n")
    assert tables.main(["--check"]) == 0
    page.write_text(page.read_text().replace("2.50", "2.40"))
    assert tables.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("<!-- table: two -->\n<!-- /table -->\n", 2, "there is no table 'two'; known: one"),
        ("<!-- table: one -->\n| ms |\n", 2, "a place for a table is"),
        ("nothing\n", 1, "in no document: one\n"),
    ],
)
def test_a_place_without_a_table_or_a_table_without_a_place_is_an_error(
    page, capsys, text, code, said
):
    page.write_text(text)
    assert tables.main(["--check"] if code == 1 else []) == code
    assert said in capsys.readouterr().err
    assert page.read_text() == text


# --- losses beside fallbacks and peers

HEAD = [
    "| | mean | difference to the baseline | seed by seed | bytes/parameter |",
    "|---|---|---|---|---|",
]


def short(variant, value=2.0, seed=0, text="stdlib", **params):
    """Return a record of convergence.py's larger model."""
    return {
        "variant": variant,
        "params": {**peer_tables.RECIPE, "seed": seed, "text": text, **params},
        "value": value,
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


def test_peers_are_compared_seed_by_seed(records):
    found = {
        "8bit/split24": (2.02, 2.0),
        "peer/torchao 8bit/bf16": (2.2, 2.0),
        "peer/torchao 4bit/bf16 skip=head": (2.2, 2.0),
        "peer/te fp8-lm": (math.nan, 2.0),
        "O0 skip=head": (2.0, 2.0),
        "fallback/bitsandbytes": (2.0, 2.0),
        "native/current": (2.0, 2.02),
        "baseline": (2.0, 2.0),
        "O2": (1.99, 2.0),
    }
    rows = [short(v, x, seed) for v, values in found.items() for seed, x in enumerate(values)]
    records([*rows, short("O2", 9.0, dim=record_tables.SMALL)])
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


def test_without_a_baseline_there_is_no_table_of_peers(records):
    for found in ([], [short("peer/te fp32")], [short("baseline", dim=512)]):
        records(found)
        assert peer_tables.peer_parity() == ["Not recorded yet."]
        assert runpy.run_path(peer_tables.__file__)["TABLES"] == {}
        records([*found, short("baseline")])
        assert runpy.run_path(peer_tables.__file__)["TABLES"].keys() == {"peer-parity"}


def test_peers_are_compared_over_the_last_baseline_s_text_and_its_seeds(records):
    rows = [
        short("baseline", 9.0, text="torch"),
        short("O0", 9.9, text="torch"),
        short("O1", 2.02),
        short("baseline", 2.0),
        short("baseline", 3.0, 1),
        short("O1", 7.0, 2),
        short("O2", 3.03, 1),
        short("peer/te fp32", 7.0, 2),
        short("O1", 9.9, text="torch"),
    ]
    records(rows)
    assert peer_tables.peer_parity() == [
        *HEAD,
        "| baseline | 2.5000 | | | 6.13 |",
        "| O1, seed 0 | 2.0200 | +1.00 % | +1.00 % | 6.13 |",
        "| O2, seed 1 | 3.0300 | +1.00 % | +1.00 % | 6.13 |",
    ]
    (peers,) = (section for section in report.SECTIONS if section.key == "peers")
    assert [r["value"] for r in peers.choose(rows)] == [2.02, 2.0, 3.0, 3.03]


# --- the loss check's own summary

SIZES = ["--model", "tiny", "--steps", "3", "--batch", "2", "--lr", "1e-3", "--seeds"]


def summed_up(rows, out, *more):
    """Write records of (level, seed, text, loss, model's width), and sum them up."""
    out.write_text("".join(
        json.dumps({
            "variant": v, "value": x, "validation": [[1, 3.0], [3, 2.0]],
            "params": {"dim": dim, "steps": 3, "batch": 2, "lr": 1e-3, "seed": seed, "text": text},
        }) + "\n"
        for v, seed, text, x, dim in rows
    ))  # fmt: skip
    return convergence.main([*SIZES, "--out", str(out), *more])


def test_only_runs_of_one_model_over_one_text_with_the_baseline_s_seeds_are_compared(
    tmp_path, capsys
):
    out = tmp_path / "records.jsonl"
    base, wide = ("baseline", 0, "x", 2.0, 128), ("O1", 0, "x", 9.0, 512)
    for level, loss, code in (("O1", 2.5, 1), ("O1", math.nan, 1), ("peer/te fp8-lm", 2.5, 0)):
        assert summed_up([base, (level, 0, "x", loss, 128), wide], out) == code, (level, loss)
    others = [
        ("baseline", 0, "torch", 9.0, 128),
        ("O1", 0, "x", 2.001, 128),
        base,
        ("O1", 0, "torch", 9.9, 128),
        ("O1", 1, "x", 8.0, 128),
        ("O2", 1, "x", 8.0, 128),
    ]
    capsys.readouterr()
    assert summed_up(others, out) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out.splitlines()[-1])
    assert {v: row["mean"] for v, row in summary.items()} == {"O1": 2.001, "baseline": 2.0}
    assert "4 of 6 runs are left out" in shown.err
    assert convergence.main([*SIZES, "--out", str(out), "--steps", "4"]) == 0
    assert "no baseline of such runs" in capsys.readouterr().err


def test_a_picture_waits_until_every_level_has_the_baseline_s_seeds(tmp_path):
    picture, levels = tmp_path / "picture.svg", ("O0", "O1", "O2")
    found = [("baseline", 0), ("baseline", 1), *((level, 0) for level in levels)]
    for more, there in (([], False), ([(level, 1) for level in levels], True)):
        rows = [(level, seed, "x", 2.0, 128) for level, seed in [*found, *more]]
        assert summed_up(rows, tmp_path / "r.jsonl", "--picture", str(picture)) == 0
        assert picture.exists() == there


def test_skipped_steps_are_told_and_no_recorded_run_has_any(tmp_path, capsys):
    record = {**short("O2", seed=1), "skipped_steps": 3}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    assert convergence.any_skipped(convergence.by_variant(tmp_path / "records.jsonl"))
    assert capsys.readouterr().out == "O2 seed 1: 3 steps were skipped\n"
    for name in ("convergence", "optimizer_parity", "product_parity"):
        found = convergence.by_variant(record_tables.RESULTS / f"{name}.jsonl")
        assert not convergence.any_skipped(found)


# --- long runs


def long(variant, seed, value, peak, model="gpt2", **params):
    """Return a record of training.py."""
    numbers = {"tokens_per_second": 10.0 * peak, "peak_gib": peak, "estimate_gib": 1.1 * peak}
    params = {"model": model, "seed": seed, "steps": 5, **params}
    compute = None if variant.startswith("bf16") else "native"
    return {"variant": variant, "params": params, "value": value, "compute": compute, **numbers}


def runs_of(model, seeds, **params):
    """Return records of all levels: O0 2 % off, O1 and O2 further with each seed."""
    values = {"bf16": 2.0, "O0": 2.04, "O1": 2.06, "O2": 1.98}
    return [
        long(v, s, x + 0.02 * s * (v in ("O1", "O2")), 4 if v == "bf16" else 3, model, **params)
        for v, x in values.items()
        for s in seeds
    ]


def show(records, capsys):
    """Return the rows of what training.py prints, by level, as words."""
    training.report(records, training.Console(width=120))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_gaps_are_paired_by_seed(capsys):
    base = [long("bf16", 0, 2.0, 4), long("bf16", 1, 4.0, 4)]
    ours = [long("O2", 0, 2.2, 2), long("O2", 1, 4.0, 2)]
    rest = ["20", "0.50", "2.00", "0.50", "2.20", "+10.0%"]
    both = show([*base, *ours], capsys)
    assert both["O2"] == ["3.1000", "+5.00%", "±", "5.00%", *rest]
    assert both["bf16"] == ["3.0000", "-", "40", "1.00", "4.00", "1.00", "4.40", "+10.0%"]
    assert show([*base, *ours[:1]], capsys)["O2"] == ["2.2000", "+10.00%", *rest], "one seed"
    without = ["3.1000", "-", "20", "-", "2.00", "-", "2.20", "+10.0%"]
    assert show(ours, capsys)["O2"] == without
    again = show([long("bf16", 0, 2.0, 4), long("bf16 again", 0, 2.01, 2)], capsys)["bf16"]
    assert again == ["again", "2.0100", "+0.50%", "20", "-", "2.00", "-", "2.20", "+10.0%"]


def test_the_table_of_long_runs():
    harder = [
        r
        for data in ("python-tts", "python-17m")
        for r in runs_of("gpt2", (0,), lr=6e-4, data=data)
        if r["variant"] in ("bf16", "O2")
    ]
    flags = {"fp8-recipe": "delayed", "fuse": True}
    found = [
        *harder,
        *(long("bf16 again", s, 2.0 + 0.02 * s, 2, lr=1e-3) for s in (0, 1)),
        *runs_of("gpt2", (0, 1, 2), lr=1e-3),
        long("O2", 0, 2.02, 3, lr=1e-3, flags=flags),
        long("O2", 0, 9.0, 3, lr=1e-3, flags={"fuse": True}),  # of no row
        {**long("O0", 0, 2.1, 3, lr=1e-3), "compute": "te"},
        *runs_of("llama-1b", (0,)),
        *(r for r in runs_of("llama-1b", (0,), data="python-16m") if r["variant"] != "O0"),
    ]
    rows = {row[0]: row[1:] for row in cells(training_tables.training(found)[2:])}
    names = [f"GPT-2 124M, {v}" for v in ("bf16", "bf16 again", "O0", "O1", "O2")]
    names += ["GPT-2 124M, O2, fused, delayed", "GPT-2 124M, O0, TransformerEngine"]
    harder = "GPT-2 124M at 6e-4", "GPT-2 124M at 6e-4 on another text"
    names += [f"{title}, {v}" for title in harder for v in ("bf16", "O2")]
    names += [f"Llama 1B, {v}" for v in ("bf16", "O0", "O1", "O2")]
    names += [f"Llama 1B on another text, {v}" for v in ("bf16", "O1", "O2")]
    assert sorted(rows) == sorted(names)
    rest = ["30", "0.75", "3.00", "0.75", "+10.0 %"]
    assert rows["GPT-2 124M at 6e-4, O2"] == ["1.9800", "−1.00 %", "1", *rest]
    assert rows["GPT-2 124M, bf16"] == ["2.0000", "", "3", "40", "1.00", "4.00", "1.00", "+10.0 %"]
    noise = ["2.0100", "+0.50 ± 0.50 %", "2", "20", "", "2.00", "", "+10.0 %"]
    assert rows["GPT-2 124M, bf16 again"] == noise
    assert rows["GPT-2 124M, O0"] == ["2.0400", "+2.00 ± 0.00 %", "3", *rest]
    assert rows["GPT-2 124M, O1"] == ["2.0800", "+4.00 ± 0.58 %", "3", *rest]
    assert rows["GPT-2 124M, O2, fused, delayed"][:2] == ["2.0200", "+1.00 %"]
    assert rows["GPT-2 124M, O0, TransformerEngine"][:2] == ["2.1000", "+5.00 %"]
    assert rows["Llama 1B, O2"] == ["1.9800", "−1.00 %", "1", *rest]


def test_long_runs_are_compared_where_settings_are_those_of_the_last_bf16_run():
    old, new = runs_of("gpt2", (0, 1), lr=1e-3), runs_of("gpt2", (0,), lr=1e-4, warmup=500)
    flagged = long("O2", 0, 9.0, 3, lr=1e-4, warmup=500, flags={"fuse": True})
    repeated = long("O2", 0, 1.9, 3, lr=1e-4, warmup=500)
    others = [{**repeated, "compute": "te", "value": 9.0}, long("O2", 0, 9.0, 3, "tiny"), flagged]
    found = training_tables.comparable_runs([*new[:-1], *old, *new, repeated, *others], "gpt2")
    assert sorted((r["variant"], r["value"]) for r in found) == [
        ("O0", 2.04), ("O0", 2.04), ("O1", 2.06), ("O1", 2.06), ("O2", 1.9), ("O2", 1.98), ("bf16", 2.0), ("bf16", 2.0),
    ]  # fmt: skip
    assert training_tables.comparable_runs([*new[1:], flagged], "gpt2") == []


def test_seeds_count_once_however_often_they_ran():
    same = {"compute": None, "git": "a", "gpu": "x"}
    params = {"model": "gpt2", "lr": 1e-3, "data": "d", "seed": 1}
    runs = [{"variant": "bf16", "value": v, "params": params, **same} for v in (1.0, 1.02, 1.04)]
    others = [{**runs[0], "git": "b"}, {**runs[0], "params": {**params, "seed": 2}}]
    (row,) = cells(training_tables.repeats([*others, *runs])[2:])
    assert row == ["GPT-2 124M, bf16, seed 1", "1.0000, 1.0200, 1.0400", "3.92 %", "1.96 %"]
    base = [long("bf16", 0, x, 4) for x in (1.9, 2.1)] + [long("bf16", 1, 4.0, 4)]
    ours = [long("O2", 0, x, 2) for x in (2.0, 2.1, 2.2)] + [long("O2", 1, 4.4, 2)]
    other = {**long("O2", 1, 4.4, 1), "git": "b"}  # no run of bf16 to compare its speed with
    bf16, o2 = training_tables.summarize([*base, *ours, other])
    assert (bf16.seeds, bf16.runs, o2.seeds, o2.runs) == (2, 3, 2, 5)
    assert (bf16.loss, o2.loss) == pytest.approx((3.0, 3.25))
    assert (o2.gap, o2.error) == pytest.approx((0.075, 0.025))
    assert (o2.faster, o2.estimate) == pytest.approx((0.5, 1.1)), "the estimate of the last run"
    assert training_tables.training_cells(o2)[:3] == ("3.2500", "+7.50 ± 2.50 %", "2 (5 runs)")
    runs = [long("bf16", 0, 2.0, 4), long("bf16", 1, 9.0, 4), long("O2", 0, 2.02, 2)]
    assert [row[:4] for row in cells(training_tables.training(runs)[2:])] == [
        ["GPT-2 124M, bf16", "2.0000", "", "1"],  # with the seeds that levels have
        ["GPT-2 124M, O2", "2.0200", "+1.00 %", "1"],
    ]


# --- other tables


def test_the_table_of_micro_batches():
    assert {m.name for m in memory.METHODS} <= set(training_tables.METHODS.values())
    counts = {"1b": 14, "3b": 6, "7b": 2, "13b": 0}
    rows = [
        {"variant": "bf16 AdamW", "count": n, "parameters": 10**9, "tokens_per_second": 1234.5 * n,
         "params": {"model": model, "gib": None}} for model, n in counts.items()
    ]  # fmt: skip
    del rows[3]["parameters"]  # of what does not fit
    rows.append({**rows[0], "variant": "fp8stack O2", "params": {"model": "13b", "gib": None}})
    most = {"count": 9, "parameters": 12.345e9, "params": {"model": "largest", "gib": None}}
    rows.append({**rows[0], **most})
    limited = {**rows[2], "count": 9, "params": {"model": "7b", "gib": 80.0}}
    found = {row[0]: row[1:] for row in cells(training_tables.micro_batches([*rows, limited]))}
    heads = [*(["1.0 B"] * 4), "largest model"]
    assert found["sequences of 4,096 tokens that fit, tokens/s"] == heads
    numbers = ["14, 17,283", "6, 7,407", "2, 2,469", "none", "12.35 B, 17,283 tokens/s"]
    assert found["bf16 autocast, torch's fused AdamW"] == numbers
    assert found["fp8stack O1"] == ["not measured"] * 5


def test_a_case_of_resuming_that_ended_half_way_has_no_row():
    rows = [
        {
            "params": {"model": "gpt2", "level": "O2", "flags": flags}, "variant": variant, "value": 3, "of": 4,
            "tokens_per_second": speed, "tokens_per_second_resumed": speed + 10,
        }
        for flags, variant, speed in (("", "default", 90), ("", "--deterministic", 80), ("--compile", "default", 99))
    ]  # fmt: skip
    expected = ["gpt2, O2", "3 of 4", "90", "3 of 4", "80", "11.1 and 10.0 %"]
    assert cells(training_tables.resumed(rows)[2:]) == [expected]


def test_the_table_of_formats():
    def run(variant, vocabulary, loss, bf16, **params):
        params = {
            "model": f"formats: gpt2, {vocabulary}",
            "steps": 200,
            "compute": "native",
        } | params
        numbers = {"loss": loss, "bf16_loss": bf16, "finite": True, "skipped_steps": 0}
        return {"variant": variant, "params": params, **numbers}

    rows = stability_tables.formats([
        run("delayed", 50304, 2.2, 2.0),
        run("delayed", 50257, 9.0, 1.9),
        {**run("delayed", 50257, 2.1, 1.9), "skipped_steps": 3},  # the last one counts
        {**run("current", 50257, math.nan, 2.1), "finite": False},
        run("delayed", 50257, 9.0, 9.0, compute="te"),
        run("delayed", 50257, 9.0, 9.0, steps=4),
        run("delayed", 50257, 9.0, 9.0, model="shapes: even"),
    ])  # fmt: skip
    head, _, *rows = cells(rows)
    assert head[1:3] == ["vocabulary of 50,257", "vocabulary of 50,304"]
    assert rows == [
        ["bf16, 2 runs", "−5.00 to +5.00 %", "+0.00 to +0.00 %", ""],
        ["current", "+nan %", "not measured", "1"],
        ["delayed", "+5.00 %", "+10.00 %", "1"],
    ]
    names = [v.name for v in stability.VARIANTS]
    assert len(set(names)) == len(names) == 3 + 3 * 3 * 2 + 1


def test_the_table_of_gradients(tmp_path, monkeypatch):
    recipes = [recipe_for("O0", **(v.options or {})) for v in gradients.VARIANTS]
    assert len(set(recipes)) == len(recipes)
    assert [v.name for v in gradients.VARIANTS] == list(training_tables.GRADIENTS.values())
    rows = [
        {"variant": v.name, "value": i / 100, "along": 0.9876, "params": {"model": model, "after": after}}
        for model in ("gpt2", "llama-1b")
        for after in (0, training_tables.TRAINED)
        for i, v in enumerate(gradients.VARIANTS)
    ]  # fmt: skip
    (tmp_path / "gradients.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)
    found = training_tables.gradients()[2:]
    assert len(found) == len(gradients.VARIANTS)
    assert found[0].startswith("| bf16 autocast | 0.0 % (0.988) |")
    assert found[-1].count(f"{len(found) - 1}.0 % (0.988)") == 4


# --- sentences that repeat numbers of records


def test_what_is_said_of_attention_is_in_its_records():
    found = {(r["variant"], r["params"]["model"]): r for r in record_tables.read("attention")}
    assert len({(r["git"], r["command"], r["gpu"]) for r in found.values()}) == 1, "one run"
    heads, chosen = training_tables.HEADS, "sdpa, its choice"

    def times(variant):
        pairs = [(found.get((variant, m)), found[chosen, m]) for m in heads]
        return [r["value"] / base["value"] for r, base in pairs if r]

    said = " ".join((training.ROOT / "docs" / "training.md").read_text().split())
    fastest = {m: min(r["value"] for (_, of), r in found.items() if of == m) for m in heads}
    worst = max(found[chosen, m]["value"] / fastest[m] for m in heads) - 1
    assert f"within {100 * worst:.1f} % of the fastest" in said
    for model in heads:  # it is cuDNN's kernel: the same bits and bytes
        ours, theirs = found[chosen, model], found["sdpa cudnn", model]
        assert (ours["off"], ours["peak_gib"]) == (theirs["off"], theirs["peak_gib"])
    flash, plain, te, by_hand = map(
        times, ("sdpa flash", "plain", "TransformerEngine", "sdpa math")
    )
    assert f"FlashAttention takes {min(flash):.1f} to {max(flash):.1f} times as long" in said
    assert f"{min(plain):.0f} to {max(plain):.0f} times as long" in said
    assert f"{max(r['peak_gib'] for r in found.values()):.0f} GiB" in said
    assert f"`--attention math`, {min(by_hand):.0f} to {max(by_hand):.0f} times" in said
    level = (
        f"TransformerEngine's is level with it on Llama's heads and takes {te[0]:.1f} times as long"
    )
    assert level in said
    assert max(abs(x - 1) for x in te[1:]) < 0.01


def test_a_table_of_attention_needs_its_records(monkeypatch):
    rows = [r for r in record_tables.read("attention") if r["variant"] != "sdpa cudnn"]
    monkeypatch.setattr(training_tables, "read", lambda name: rows)
    with pytest.raises(KeyError, match="sdpa cudnn"):
        training_tables.attention()


def test_what_is_said_of_a_monitor_s_cost_is_in_its_record():
    page = (training.ROOT / "docs" / "monitoring.md").read_text()
    found = record_tables.read("monitor_cost")
    assert {r["params"]["model"] for r in found} == {"gpt2", "llama-1b"}
    for r in found:
        times = f"a step that is sampled {r['sampled_ms']:.0f} ms instead of {r['plain_ms']:.0f}"
        said = f"`every=100` takes {100 * r['value']:.2f} % of the time of steps, and {times}"
        assert said in " ".join(page.split())
