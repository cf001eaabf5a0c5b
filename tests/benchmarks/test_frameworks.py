"""benchmarks/frameworks.py on a CPU: what it writes down."""

import json

import pytest
from frameworks import VARIANTS, main


@pytest.mark.slow
def test_records_hold_a_framework_s_numbers(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    chosen = ["fsdp2 bf16", "fsdp2 O2 native"]
    arguments = ["--device", "cpu", "--model", "tiny", "--steps", "2", "--output", str(output)]
    assert main([*arguments, "--only", *chosen]) == 0
    plain, ours = (json.loads(line) for line in output.read_text().splitlines())
    assert [plain["variant"], ours["variant"]] == chosen
    assert ours["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert plain["state_bytes_per_parameter"] == pytest.approx(8, rel=0.01)
    # most of so small a model are vectors and small matrices, whose states are float32
    assert 3 < ours["state_bytes_per_parameter"] < 8
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"failed": []}


def test_variants_are_named_for_what_they_are():
    for variant in VARIANTS:
        assert variant.name.endswith(variant.compute or "bf16")
        assert ("O2" in variant.name) == bool(variant.compute)
