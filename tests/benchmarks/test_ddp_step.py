"""The benchmark of data-parallel steps between two ranks on a CPU: its records, what it counts and what it refuses."""

import json

import ddp_step
import pytest
import torch
from ddp_step import BASE, VARIANTS, count_bytes, main, same_everywhere

import fp8stack

NAMES = [variant.name for variant in VARIANTS]
SIZES = ("--device", "cpu", "--gpus", "2", "--model", "tiny", "--steps", "2")
NUMBERS = {
    "step_ms": 2.0, "forward_backward_ms": 1.5, "no_sync_ms": 1.0, "exposed_ms": 0.5, "cpu_ms": 2.0,
    "gradient_bytes_per_parameter": 2.0, "peak_gib": None, "wire_mib": 0.1, "loss": 4.0, "steps": 2,
}  # fmt: skip


def load(path):
    lines = path.read_text().splitlines() if path.exists() else ()
    return {r["variant"]: r for r in map(json.loads, lines)}


@pytest.mark.slow
def test_two_ranks_measure_every_variant(tmp_path, capsys):
    path = tmp_path / "steps.jsonl"
    assert main([*SIZES, "--batch", "3", "--output", str(path)]) == 0
    rows = load(path)
    assert list(rows) == NAMES
    base = rows[BASE]
    for row in rows.values():
        assert (row["name"], row["metric"], row["unit"]) == ("ddp_step", "milliseconds", "ms")
        assert row["params"] == {"model": "tiny", "ranks": 2, "batch": 3, "seq": 16}
        assert row["exposed_ms"] == row["forward_backward_ms"] - row["no_sync_ms"]
        assert row["cpu_ms"] == row["value"] > 0  # without a GPU
        assert row["no_sync_ms"] > 0
        assert row["speedup"] == pytest.approx(base["value"] / row["value"])
        assert row["peak_gib"] is None
        assert row["loss"] == pytest.approx(base["loss"], rel=0.05)  # they train alike
        assert row["torch"] == torch.__version__
        if row["variant"].startswith("DataParallel"):  # 64 columns are padded to 128 on the wire
            assert 1.03 < row["gradient_bytes_per_parameter"] < 3.2
            assert 0.5 < row["wire_mib"] / base["wire_mib"] < 1.04
        else:
            assert row["gradient_bytes_per_parameter"] == 2
            share = 1 if row["variant"].startswith("ddp") else 132 / 256
            assert row["wire_mib"] == pytest.approx(share * base["wire_mib"], rel=0.05)
    printed = capsys.readouterr().out
    assert "tiny, ranks: 2, each with 3 sequences of 16" in printed
    assert list(json.loads(printed.splitlines()[-1])["tiny"]) == NAMES


def ranks_that(write, error=None):
    """Return what stands for torch's spawn: ranks that measure `write`, then fail."""

    def spawn(work, arguments, nprocs):
        for name, numbers in write.items():
            line = {"model": "tiny", "variant": name, "numbers": {**NUMBERS, **numbers}}
            with ddp_step.results_in(arguments[1]).open("a") as file:
                file.write(json.dumps(line) + "\n")
        if error:
            raise error

    return spawn


def test_weights_that_differ_are_no_record(tmp_path, capsys, monkeypatch):
    wrong = {"wrong": "weights differ between ranks"}
    spawn = ranks_that({BASE: {}, "hook": wrong, "DataParallel": {"step_ms": 1.0}})
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    assert main([*SIZES, "--output", str(tmp_path / "x.jsonl")]) == 1
    rows = load(tmp_path / "x.jsonl")
    assert list(rows) == [BASE, "DataParallel"]
    assert rows["DataParallel"]["speedup"] == 2
    printed = capsys.readouterr().out
    assert "hook: weights differ between ranks" in printed
    assert json.loads(printed.splitlines()[-1])["tiny"]["hook"]["wrong"] == wrong["wrong"]


def test_what_was_measured_before_a_rank_failed_counts(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    for write in ({}, {"hook": {}}):
        spawn = ranks_that(write, RuntimeError("rank 1"))
        monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
        with pytest.raises(RuntimeError, match="rank 1"):
            main([*SIZES, "--output", str(path)])
        assert list(load(path)) == list(write)
    assert load(path)["hook"]["speedup"] is None  # of nothing


def test_a_storage_counts_once_and_whole():
    bucket = torch.zeros(1000, dtype=torch.bfloat16)
    assert count_bytes([bucket[:10], None, bucket[500:].view(50, 10)]) == 2000
    blocks = fp8stack.BlockScaledTensor.quantize(torch.ones(4, 256))
    assert count_bytes([blocks, bucket]) == 4 * 256 + 4 * 4 * 2 + 2000


@pytest.mark.usefixtures("mesh")
def test_weights_are_compared_by_their_bits(monkeypatch):
    weights = [torch.zeros(3, 5), torch.full((4,), torch.nan, dtype=torch.bfloat16)]
    assert same_everywhere(weights)

    def broadcast(tensor, source):
        if tensor.numel() == 60:
            tensor[3] = 128  # minus zero

    monkeypatch.setattr(ddp_step.dist, "broadcast", broadcast)
    assert not same_everywhere(weights)
    assert same_everywhere(weights[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt5"), "--model gpt5: must be of gpt2, llama, tiny"),
        (("--only", "fsdp*"), "--only matches none of: ddp bf16"),
        (("--gpus", "0"), "--gpus 0: must be at least 1"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cpu", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_names_are_unique_and_stock_ddp_comes_first():
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES[0] == BASE
