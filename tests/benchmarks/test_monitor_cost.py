"""benchmarks/monitor_cost.py on a CPU: what it writes down."""

import json

import monitor_cost
import pytest


@pytest.mark.slow
def test_records_hold_blocks_with_and_without_a_monitor(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    sizes = ["--steps", "2", "--blocks", "2", "--only", "O2"]
    arguments = ["--device", "cpu", "--model", "tiny", *sizes, "--output", str(output)]
    assert monitor_cost.main(arguments) == 0
    (record,) = map(json.loads, output.read_text().splitlines())
    assert (record["variant"], record["metric"]) == ("O2", "cost of every=2")
    plain, watched = record["blocks_s"]
    assert len(plain) == len(watched) == 2
    assert record["value"] == pytest.approx(sum(watched) / sum(plain) - 1)  # medians of two
    assert record["sampled_ms"] > 0
    assert "a Monitor, every=2" in capsys.readouterr().out
