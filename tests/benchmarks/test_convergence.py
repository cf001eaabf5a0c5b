"""The loss check on a CPU: one short run of a level, its record, and what it says of steps that were skipped."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from convergence import any_skipped, by_variant, run, to_record


def test_a_run_becomes_a_record_that_counts_skipped_steps(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question.\n" * 600)
    options = argparse.Namespace(model="tiny", steps=5, batch=2, lr=1e-3, skip=[], data=text)
    record = to_record(run("O2", 0, options), "O2", 0, options)
    assert record["skipped_steps"] == 0
    assert 0 < record["value"] < 10
    bad = {**record, "params": {**record["params"], "seed": 1}, "skipped_steps": 3}
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(r) + "\n" for r in (record, bad)))
    assert any_skipped(by_variant(records))
    assert capsys.readouterr().out == "O2 seed 1: 3 steps were skipped\n"


@pytest.mark.parametrize("backend", ["fp8stack", "bitsandbytes"])
def test_a_fallback_keeps_its_states_in_8_bits(backend, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question.\n" * 600)
    options = argparse.Namespace(model="tiny", steps=3, batch=2, lr=1e-3, skip=[], data=text)
    baseline, fallback = (run(v, 0, options) for v in ("baseline", f"fallback/{backend}"))
    assert fallback.final_loss == pytest.approx(baseline.final_loss, rel=0.005)
    assert fallback.bytes_per_parameter["m"] < 1.1
    assert fallback.bytes_per_parameter["grad"] >= 2


def test_no_recorded_run_skipped_steps():
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    for name in ("convergence", "optimizer_parity", "product_parity"):
        assert not any_skipped(by_variant(results / f"{name}.jsonl"))


def test_gradients_that_are_not_finite_are_counted(tmp_path, monkeypatch):
    import demo

    plain = demo.compute_loss
    monkeypatch.setattr(demo, "compute_loss", lambda *batch: plain(*batch) * torch.inf)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question.\n" * 600)
    options = argparse.Namespace(model="tiny", steps=3, batch=2, lr=1e-3, skip=[], data=text)
    assert run("O2", 0, options).skipped_steps == 3
