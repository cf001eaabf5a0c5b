"""benchmarks/stability.py on a CPU: a small part of its grids, and what it calls a failure; its table of formats."""

import contextlib
import json
import math

import pytest
import stability
import stability_tables


@pytest.mark.slow
def test_records_hold_the_gap_to_bf16(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    arguments = ["--device", "cpu", "--model", "tiny", "--steps", "4", "--output", str(output)]
    chosen = ["current hybrid", "delayed e5m2, margin 2", "blockwise"]
    assert stability.main([*arguments, "--grid", "formats", "--only", *chosen]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["variant"] for r in records] == chosen * 2
    assert [r["params"]["vocab"] for r in records] == [317] * 3 + [320] * 3
    for r in records:
        assert r["value"] == pytest.approx(r["loss"] / r["bf16_loss"] - 1)
        assert len(r["losses"]) == 4
        assert 0 <= r["underflow"] < 0.3
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"runs": 6, "failed": []}


@pytest.mark.slow
def test_odd_sizes_train(tmp_path):
    arguments = ["--device", "cpu", "--steps", "2", "--output", str(tmp_path / "records.jsonl")]
    assert stability.main([*arguments, "--grid", "shapes", "--only", "current hybrid"]) == 0


def test_the_median_of_the_layers_is_recorded():
    shares = {"a": 0.5, "b": 0.1, "c": 0.2}

    class Sample(contextlib.nullcontext):
        def read(self, wait):
            assert wait
            return {n: {"g": {"underflow": s}, "x": {"underflow": 0.9}} for n, s in shares.items()}

    assert stability.median_underflow(Sample()) == 0.2
    assert stability.median_underflow(None) is None


def test_no_steps_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        stability.main(["--device", "cpu", "--model", "tiny", "--steps", "0"])
    assert stop.value.code == 2
    assert "--steps 0: must be at least 1" in capsys.readouterr().err


def test_what_fails():
    good = {"loss": 2.0, "finite": True, "skipped_steps": 0}
    assert stability.judge(good, good, 0.05) == ""
    assert "+10.00% off" in stability.judge({**good, "loss": 2.2}, good, 0.05)
    assert "not finite" in stability.judge({**good, "finite": False}, good, 0.05)
    assert "3 steps were skipped" in stability.judge({**good, "skipped_steps": 3}, good, 0.05)


def test_the_grid_is_whole():
    names = [v.name for v in stability.VARIANTS]
    assert len(names) == len(set(names)) == 3 + 3 * 3 * 2 + 1
    for v in stability.VARIANTS:
        assert v.options.get("amax_history_len", 1024) == (16 if "history 16" in v.name else 1024)
    assert stability.of_grid("formats: gpt2, 50304", stability.VARIANTS) == stability.VARIANTS
    assert len(stability.of_grid("shapes: even", stability.VARIANTS)) == 3 + 3 * 3 + 1
    odd = stability.ODD["all"]
    for name, sizes in stability.ODD.items():
        assert sizes.items() <= odd.items(), name
    assert all(size % 16 for size in odd.values())


def short_run(variant, vocabulary, loss, bf16, **params):
    """Return a record of stability.py's."""
    params = {"model": f"formats: gpt2, {vocabulary}", "steps": 200, "compute": "native", **params}
    numbers = {"loss": loss, "bf16_loss": bf16, "finite": True, "skipped_steps": 0}
    return {"variant": variant, "params": params, **numbers}


def test_the_table_of_formats():
    records = [
        short_run("delayed", 50304, 2.2, 2.0),
        short_run("delayed", 50257, 9.0, 1.9),
        {**short_run("delayed", 50257, 2.1, 1.9), "skipped_steps": 3},  # the last one counts
        {**short_run("current", 50257, math.nan, 2.1), "finite": False},
        short_run("delayed", 50257, 9.0, 9.0, compute="te"),
        short_run("delayed", 50257, 9.0, 9.0, steps=4),
        short_run("delayed", 50257, 9.0, 9.0, model="shapes: even"),
    ]
    table = stability_tables.formats(records)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert rows[0][1:3] == ["vocabulary of 50,257", "vocabulary of 50,304"]
    assert rows[2:] == [
        ["bf16, 2 runs", "−5.00 to +5.00 %", "+0.00 to +0.00 %", ""],
        ["current", "+nan %", "not measured", "1"],
        ["delayed", "+5.00 %", "+10.00 %", "1"],
    ]
