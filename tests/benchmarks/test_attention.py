"""benchmarks/attention.py on a CPU: all that is installed computes the same attention, and is recorded."""

import json

import attention
import pytest


def test_implementations_agree_and_are_recorded(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    arguments = ["--device", "cpu", "--model", "tiny", "--steps", "2", "--output", str(output)]
    assert attention.main([*arguments, "--only", "plain", "sdpa*"]) == 0
    records = {r["variant"]: r for r in map(json.loads, output.read_text().splitlines())}
    assert {"plain", "sdpa, its choice", "sdpa math"} <= records.keys()
    for r in records.values():
        assert 0 < r["off"] < 0.01  # bfloat16's own
        assert r["value"] == r["both_ms"] > 0
    failed = json.loads(capsys.readouterr().out.splitlines()[-1])["failed"]
    assert not any(name.removeprefix("tiny, ") in records for name in failed)


def test_it_fails_where_nothing_ran(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    arguments = ["--device", "cpu", "--model", "tiny", "--output", str(tmp_path / "r.jsonl")]
    assert attention.main([*arguments, "--only", "flash-attn"]) == 1
    assert "flash_attn" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plain", "sdpa, its choice"])
def test_no_token_sees_a_later_one(name):
    (variant,) = (v for v in attention.VARIANTS if v.name == name)
    shape = attention.MODELS["tiny"]
    q, k, v = attention.make_inputs(shape, "cpu")
    before = variant.make(shape)(q, k, v).detach()
    k.data[:, :, 40:], v.data[:, :, 40:] = 9, -9
    after = variant.make(shape)(q, k, v)
    assert (before[:, :, :40] == after[:, :, :40]).all()
    assert not (before[:, :, 40:] == after[:, :, 40:]).all()
