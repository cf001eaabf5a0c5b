"""benchmarks/stability.py on a CPU: a small part of its grids, and what it calls a failure."""

import contextlib
import json

import pytest
import stability


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
