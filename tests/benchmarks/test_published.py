"""Tables that documents quote compare like with like; tests/test_readme.py compares them all with their records."""

import json
import math

import convergence
import pytest
import record_tables
import tables
import training
import training_tables


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("<!-- table: one -->\n| old |\n<!-- /table -->\n", 1, "differ from their records: page.md"),
        ("<!-- table: two -->\n<!-- /table -->\n", 2, "there is no table 'two'; known: one"),
        ("nothing\n", 1, "in no document: one\n"),
    ],
)  # fmt: skip
def test_a_table_is_written_between_its_marks(tmp_path, monkeypatch, capsys, text, code, said):
    page = tmp_path / "page.md"
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", [page])
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: ["| ms |", "|---|", "| 2.50 |"]})
    page.write_text(text)
    assert tables.main(["--check"]) == code
    assert said in "".join(capsys.readouterr())
    assert page.read_text() == text
    if "old" in text:
        assert tables.main([]) == 0
        assert page.read_text() == text.replace("| old |", "| ms |\n|---|\n| 2.50 |")
        assert tables.main(["--check"]) == 0


def short(variant, value=2.0, seed=0, text="stdlib", **params):
    """Return a record of convergence.py."""
    return {
        "variant": variant,
        "params": {"seed": seed, "text": text, **params},
        "value": value,
        "bytes_per_parameter": {"total": 6.1254},
        "validation": [[250, 3.0], [1500, value]],
        "time": "2026",
    }


def test_a_level_that_is_off_fails_the_loss_check_beside_its_own_baseline_only(tmp_path, capsys):
    sizes = ["--model", "tiny", "--steps", "3", "--batch", "2", "--lr", "1e-3", "--seeds"]
    out = tmp_path / "records.jsonl"

    def summed_up(*rows):
        """Write records of (level, seed, text, loss), and sum them up."""
        shared = {"dim": 128, "steps": 3, "batch": 2, "lr": 1e-3}
        rows = [short(v, x, seed, text, **shared) for v, seed, text, x in rows]
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return convergence.main([*sizes, "--out", str(out)])

    base = ("baseline", 0, "x", 2.0)
    for level, loss, code in (("O1", 2.5, 1), ("O1", math.nan, 1), ("peer/te fp8-lm", 2.5, 0)):
        assert summed_up(base, (level, 0, "x", loss)) == code, (level, loss)
    others = [("baseline", 0, "torch", 9.0), ("O1", 0, "torch", 9.9), ("O1", 1, "x", 8.0)]
    capsys.readouterr()
    assert summed_up(others[0], ("O1", 0, "x", 2.001), base, *others[1:]) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out.splitlines()[-1])
    assert {v: row["mean"] for v, row in summary.items()} == {"O1": 2.001, "baseline": 2.0}
    assert "3 of 5 runs are left out" in shown.err


def test_skipped_steps_are_told(tmp_path, capsys):
    record = {**short("O2", seed=1), "skipped_steps": 3}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    assert convergence.any_skipped(convergence.by_variant(tmp_path / "records.jsonl"))
    assert capsys.readouterr().out == "O2 seed 1: 3 steps were skipped\n"


# --- long runs


def long(variant, seed, value, peak, **params):
    """Return a record of training.py."""
    params = {"model": "gpt2", "seed": seed, "steps": 5, **params}
    compute = None if variant.startswith("bf16") else "native"
    numbers = {"tokens_per_second": 10.0 * peak, "peak_gib": peak, "estimate_gib": 1.1 * peak}
    losses = {"value": value, "validation": [[5, value]]}
    return {"variant": variant, "params": params, "compute": compute, **losses, **numbers}


def test_gaps_are_paired_by_seed_and_a_seed_counts_once_however_often_it_ran():
    base = [long("bf16", 0, x, 4) for x in (1.9, 2.1)] + [long("bf16", 1, 4.0, 4)]
    ours = [long("O2", 0, x, 2) for x in (2.0, 2.1, 2.2)] + [long("O2", 1, 4.4, 2)]
    other = {**long("O2", 1, 4.4, 1), "git": "b"}  # no run of bf16 to compare its speed with
    alone = long("bf16", 2, 9.0, 9)  # a seed that no level has
    bf16, o2 = training_tables.summarize([*base, alone, *ours, other])
    assert (bf16.seeds, bf16.runs, o2.seeds, o2.runs) == (2, 3, 2, 5)
    assert (bf16.loss, o2.loss) == pytest.approx((3.0, 3.25))
    assert (o2.gap, o2.error) == pytest.approx((0.075, 12.706 * 0.025))
    assert (o2.faster, o2.estimate) == pytest.approx((0.5, 1.1)), "the estimate of the last run"
    assert training_tables.training_cells(o2, "")[:3] == ("3.2500", "+7.50 ± 31.77 %", "2 (5 runs)")
    rest = [long("O2", 0, 2.3, 2, flags={"select": "all"}), long("O0", 0, 2.3, 2, batch=7)]
    shown = training_tables.training([*rest, *ours, *base])
    assert [row.split(" | ")[0] for row in shown[2:]] == [
        f"| GPT-2 124M, {name}" for name in ("bf16", "O2", "O2, all in FP8", "another seed")
    ]
    (without,) = training_tables.summarize(ours)
    assert (without.gap, without.faster, without.part) == (None, None, None)


# --- sentences that repeat numbers of records


def test_what_is_said_of_attention_is_in_its_records():
    found = {(r["variant"], r["params"]["model"]): r for r in record_tables.read("attention")}
    assert len({(r["git"], r["command"], r["gpu"]) for r in found.values()}) == 1, "one run"
    heads, chosen = ("gpt2-1k", "llama-2k", "llama-4k", "llama-16k"), "sdpa, its choice"

    def times(variant):
        pairs = [(found.get((variant, m)), found[chosen, m]) for m in heads]
        return [r["value"] / base["value"] for r, base in pairs if r]

    said = " ".join((training.ROOT / "docs" / "models.md").read_text().split())
    fastest = {m: min(r["value"] for (_, of), r in found.items() if of == m) for m in heads}
    worst = max(found[chosen, m]["value"] / fastest[m] for m in heads) - 1
    flash, plain, te = map(times, ("sdpa flash", "plain", "TransformerEngine"))
    for sentence in (
        f"within {100 * worst:.1f} % of the fastest",
        f"FlashAttention takes {min(flash):.1f} to {max(flash):.1f} times as long",
        f"{min(plain):.0f} to {max(plain):.0f} times as long",
        f"{max(r['peak_gib'] for r in found.values()):.0f} GiB",
        f"TransformerEngine's is level with it on Llama's heads and takes {te[0]:.1f} times as long",
    ):
        assert sentence in said
    for model in heads:  # it is cuDNN's kernel: the same bits and bytes
        ours, theirs = found[chosen, model], found["sdpa cudnn", model]
        assert (ours["off"], ours["peak_gib"]) == (theirs["off"], theirs["peak_gib"])
    assert max(abs(x - 1) for x in te[1:]) < 0.01


def test_what_is_said_of_deterministic_runs_is_in_their_records():
    speeds = {}
    for r in record_tables.read("resume"):
        case = speeds.setdefault((r["params"]["model"], r["params"]["level"]), {})
        case[r["variant"]] = r["tokens_per_second"], r["tokens_per_second_resumed"]
        assert r["variant"] == "default" or r["value"] == r["of"] == 20
    pairs = (zip(c["--deterministic"], c["default"], strict=True) for c in speeds.values())
    slower = [100 * (1 - ordered / plain) for pair in pairs for ordered, plain in pair]
    said = (training.ROOT / "docs" / "training.md").read_text()
    assert f"{int(min(slower))} to {max(slower):.0f} % slower" in said


def test_what_is_said_of_a_monitor_s_cost_is_in_its_record():
    page = " ".join((training.ROOT / "docs" / "troubleshooting.md").read_text().split())
    o2 = (r for r in record_tables.read("monitor_cost") if r["variant"] == "O2")
    found = {r["params"]["model"]: r for r in o2}  # the last of each
    for r in (found["gpt2"], found["llama-1b"]):
        assert f"{100 * r['value']:.2f} % of the time of steps" in page
