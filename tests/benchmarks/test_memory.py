"""benchmarks/memory.py: the search finds what fits in few tries, and every method that is installed trains."""

import json

import memory
import pytest
import torch
import training_tables


@pytest.mark.parametrize("base", [0.0, 30.0, 99.5])
@pytest.mark.parametrize("slope", [0.3, 1.7, 40.0, 200.0])
def test_the_search_finds_the_last_that_fits(base, slope):
    tried = []

    def fits(count):
        tried.append(count)
        peak = base + slope * count
        return {"peak_gib": peak} if peak <= 100 * (0.98 if count > 20 else 1) else None

    count, numbers, failed = memory.find_most(fits, 100, most=400)
    best = max((n for n in range(1, 401) if fits(n)), default=0)
    assert (count, failed) == (best, best + 1)
    assert numbers == (fits(best) if best else {})
    assert tried[0] == 1
    assert tried.index(failed) < 14


def test_nothing_more_is_tried_than_was_asked_for():
    assert memory.find_most(lambda n: {"peak_gib": None}, None, most=5)[::2] == (5, None)


def test_methods_train_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)  # torchao's takes half a minute
    names = ["fp32 AdamW", "bf16, torchao 8bit", "fp8stack O2, 4bit"]
    output = tmp_path / "records.jsonl"
    arguments = ["--device", "cpu", "--model", "tiny", "--most", "1", "--output", str(output)]
    assert memory.main([*arguments, "--only", *names]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["variant"] for r in records] == names
    assert all(r["metric"] == "micro-batch" and r["value"] == 1 for r in records)
    assert "1 × 16" in capsys.readouterr().out


def test_a_missing_peer_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    missing = memory.Method("a peer", optimizer=("no_such_library", "AdamW"))
    monkeypatch.setattr(memory, "METHODS", [missing, memory.METHODS[0]])
    arguments = ["--device", "cpu", "--model", "tiny", "--most", "1"]
    assert memory.main([*arguments, "--output", str(tmp_path / "records.jsonl")]) == 1
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == {"failed": ["a peer, tiny"]}
    assert "fp32 AdamW" in out


def test_the_table_of_micro_batches():
    assert list(training_tables.METHODS.values()) == [m.name for m in memory.METHODS]
    counts = {"1b": 14, "3b": 6, "7b": 2, "13b": 0}
    records = [
        {"variant": "bf16 AdamW", "count": n, "parameters": 10**9, "tokens_per_second": 1234.5 * n,
         "params": {"model": model, "gib": None}} for model, n in counts.items()
    ]  # fmt: skip
    del records[3]["parameters"]  # of what does not fit
    records.append(
        {**records[0], "variant": "fp8stack O2", "params": {"model": "13b", "gib": None}}
    )
    most = {"count": 9, "parameters": 12.345e9, "params": {"model": "largest", "gib": None}}
    records.append({**records[0], **most})
    limited = {**records[2], "count": 9, "params": {"model": "7b", "gib": 80.0}}
    table = training_tables.micro_batches([*records, limited])
    rows = {row[0]: row[1:] for row in ([c.strip() for c in r.split("|")[1:-1]] for r in table)}
    assert rows["sequences of 4,096 tokens that fit, tokens/s"] == [
        *(["1.0 B"] * 4),
        "largest model",
    ]
    cells = ["14, 17,283", "6, 7,407", "2, 2,469", "none", "12.35 B, 17,283 tokens/s"]
    assert rows["bf16 autocast, torch's fused AdamW"] == cells
    assert rows["fp8stack O1"] == ["not measured"] * 5


def test_nothing_is_measured_beside_what_stayed(tmp_path, monkeypatch, capsys):
    def stay(method, *_):
        if method is memory.METHODS[1]:
            raise memory.MemoryStayed("5 bytes stay allocated")
        return {"peak_gib": None, "parameters": 1, "tokens_per_second": 1.0}

    monkeypatch.setattr(memory, "attempt", lambda method, *_, **__: stay(method))
    output = tmp_path / "records.jsonl"
    arguments = ["--device", "cpu", "--model", "tiny", "--most", "1", "--output", str(output)]
    assert memory.main(arguments) == 1
    assert [json.loads(line)["variant"] for line in output.read_text().splitlines()] == [
        memory.METHODS[0].name
    ]
    printed = capsys.readouterr()
    failed = json.loads(printed.out.splitlines()[-1])
    assert failed == {"failed": [f"{memory.METHODS[1].name}, tiny"]}
    assert "5 bytes stay allocated" in printed.err


@pytest.mark.gpu
def test_memory_that_stays_is_told():
    memory.free("cuda")
    kept = torch.empty(memory.LIBRARIES + 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(memory.MemoryStayed, match="bytes stay allocated"):
        memory.free("cuda")
    del kept
    memory.free("cuda")
