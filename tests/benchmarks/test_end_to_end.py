"""benchmarks/end_to_end.py on a CPU: what it writes down."""

import json

import end_to_end
import pytest
from ranks import context_of_ranks


@pytest.mark.slow
def test_records_hold_a_step_s_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(end_to_end, "get_context", lambda _: context_of_ranks())
    output = tmp_path / "records.jsonl"
    chosen = ["bf16", "O2", "O2 fused", "O2 compiled"]
    arguments = ["--device", "cpu", "--model", "tiny", "--steps", "1", "--output", str(output)]
    assert end_to_end.main([*arguments, "--only", *chosen]) == 0
    records = {r["variant"]: r for r in map(json.loads, output.read_text().splitlines())}
    assert list(records) == [*chosen, "bf16 again"]
    base = records["bf16"]
    assert base["resident"]["total"] == pytest.approx(16, rel=0.01)
    assert base["speedup"] == 1
    for name in chosen[1:]:
        r = records[name]
        assert r["loss"] == pytest.approx(base["loss"], rel=0.02)
        # few of so small a model's matrices are large enough for 8-bit states
        assert 6 < r["resident"]["total"] < 16
        assert r["speedup"] == pytest.approx(base["value"] / r["value"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"failed": []}


def test_variants_say_what_they_are():
    names = [v.name for v in end_to_end.VARIANTS]
    assert len(names) == len(set(names))
    for v in end_to_end.VARIANTS:
        assert ("compiled" in v.name, "fused" in v.name) == (v.compiled, v.fused)
        assert v.name.startswith(v.level or ("te" if v.te else "bf16"))
