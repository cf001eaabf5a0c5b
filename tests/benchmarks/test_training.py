"""benchmarks/training.py on a CPU: shards, what it writes down, runs that fail, and one that is interrupted."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import crossed
import pytest
import torch
import training
from gpt.model import GPT, SIZES
from workers_gpt import run_here


@pytest.fixture
def given(tmp_path):
    """Write shards of a small text; return the arguments of runs over them."""
    pytest.importorskip("tokenizers")
    shards = tmp_path / "shards"
    text = "".join(f"def f_{i}(x):\n    return x * {i} + {i * 7 % 13}\n" for i in range(400))
    (tmp_path / "book.txt").write_text(text)
    written = ["--device", "cpu", "--text", str(tmp_path / "book.txt"), "--shards", str(shards)]
    assert training.main([*written, "--max-tokens", "5000"]) == 0
    tokens = json.loads((shards / "tokenizer.json").read_text())
    last = tokens["added_tokens"][-1]  # as GPT-2's ends
    assert (last["content"], last["id"]) == ("<|endoftext|>", len(tokens["model"]["vocab"]))
    assert (shards / "train_000000.bin").stat().st_size == 2 * 5000
    common = ["--device", "cpu", "--shards", str(shards), "--runs", str(tmp_path / "runs")]
    return [*common, "--output", str(tmp_path / "records.jsonl"), "--eval-batches", "2"]


@pytest.mark.slow
def test_records_are_of_runs_that_ended_well(given, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "subprocess", SimpleNamespace(Popen=run_here, STDOUT=None))
    given += ["--steps", "6", "--lr", "1e-3", "--warmup", "2", "--eval-freq", "3", "--gpus", "0"]
    assert training.main([*given, "--model", "gpt2", "--levels", "off"]) == 1
    said = capsys.readouterr()
    assert '{"failed": ["gpt2, bf16, seed 0"]}' in said.out
    assert "no window of 1024" in said.err  # the text is too short
    given += ["--model", "tiny", "--levels", "off", "again", "O2"]
    assert training.main([*given, "--flag", "fp8-recipe=delayed", "--flag", "fuse=true"]) == 0
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    found = {r["variant"]: r for r in map(json.loads, lines)}
    base, again, ours = (found[v] for v in ("bf16", "bf16 again", "O2"))
    assert (base["precision"], ours["precision"], ours["compute"]) == ("bf16", "FP8 O2", "native")
    expected = {"model": "tiny", "batch": 4, "micro_batch": 4, "seq": 64, "steps": 6, "warmup": 2}
    assert expected.items() <= base["params"].items()
    assert again["params"] == {**base["params"], "micro_batch": 2}
    flags = {"fp8-recipe": "delayed", "fuse": True}
    assert ours["params"] == {**base["params"], "flags": flags}
    for record in (base, again, ours):
        assert [step for step, _ in record["validation"]] == [3, 6]
        assert record["value"] == record["validation"][-1][1]
        assert record["value"] == pytest.approx(base["value"], rel=0.02)
        assert record["skipped_steps"] == 0
        assert record["tokens_per_second"] == pytest.approx(256e3 / record["step_ms"], rel=1e-6)
    assert again["value"] != base["value"]  # the same run with sums in another order
    name = "tiny-seed0-lr0.001-warmup2-fp8-recipe-delayed-fuse-true-fp8-o2"
    told = json.loads((tmp_path / "runs" / name / "run.json").read_text())["config"]
    assert (told["fp8_recipe"], told["fuse"], told["max_lr"]) == ("delayed", True, 1e-3)
    own = training.Run("tiny", 0, "off")
    logs = {own.log(training.parse([*given, "--lr", lr])).name for lr in ("1e-3", "2e-3")}
    assert logs == {f"tiny-seed0-lr0.00{n}-warmup2-bf16.log" for n in "12"}


@pytest.mark.slow
def test_deterministic_runs_repeat_and_their_weights_are_evaluated_both_ways(
    given, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(training, "subprocess", SimpleNamespace(Popen=run_here, STDOUT=None))
    given += ["--model", "tiny", "--levels", "off", "O2", "--steps", "4", "--eval-freq", "2"]
    given += ["--eval-batches", "100", "--deterministic", "--crossed", "--missing"]
    assert training.main(given) == 0
    records = read(tmp_path / "records.jsonl")
    assert training.main([*given, "--output", str(tmp_path / "again" / "records.jsonl")]) == 0
    again = read(tmp_path / "again" / "records.jsonl")
    for field in ("validation", "train_loss_per_25_steps", "value"):
        assert [r[field] for r in records] == [r[field] for r in again]
    assert records[0]["params"]["deterministic"] is True
    both = read(tmp_path / "crossed.jsonl")
    assert [r["losses"] for r in both] == [
        r["losses"] for r in read(tmp_path / "again" / "crossed.jsonl")
    ]
    for trained, found in zip(records, both, strict=True):
        assert (found["variant"], found["params"]) == (trained["variant"], trained["params"])
        assert set(found["losses"]) == {"bf16", "FP8"}
        assert len(found["losses"]["bf16"]) == min(found["windows"], 128)
        assert fmean(found["losses"]["bf16"]) == pytest.approx(found["value"], rel=1e-4)
        assert found["value_fp8"] == pytest.approx(found["value"], rel=0.02)
        assert found["value_fp8"] != found["value"]
    # what a run evaluates itself: in bf16, and in FP8 from O2's 16 bits of a weight
    assert both[0]["value"] == pytest.approx(records[0]["value"], abs=2e-5)
    assert both[1]["value_fp8"] == pytest.approx(records[1]["value"], rel=1e-3)
    assert not list((tmp_path / "runs").glob("*/checkpoints*/step_*"))  # no weights stay
    capsys.readouterr()
    assert training.main(given) == 0  # all have a record
    assert capsys.readouterr().out.endswith('{"failed": []}\n')
    assert len(read(tmp_path / "records.jsonl")) == 2
    assert training.main([*given, "--seeds", "1", "--within", "0.001"]) == 0
    assert '{"failed": [], "left": ["tiny, O2, seed 1"]}' in capsys.readouterr().out
    assert [r["params"]["seed"] for r in read(tmp_path / "records.jsonl")] == [0, 0, 1]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_what_is_interrupted_leaves_records_and_no_processes(given, tmp_path, ctrl_c):
    given += ["--model", "tiny", "--levels", "off", "O2", "--steps", "20"]
    command, pipes = [sys.executable, training.__file__, *given], {"stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, **pipes, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "O2, seed 0: starts" in line:
            break
    time.sleep(1)
    assert len(find_processes(tmp_path)) == 2
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(30) == 130
    assert find_processes(tmp_path) == []
    records = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in records] == ["bf16"]


def find_processes(folder):
    """Return the numbers of those that were told of a folder, but not this one's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def test_what_does_not_go_together_is_said_before_any_run_starts(capsys):
    for given, said in (
        ("fp8-recipe=delay", "--fp8-recipe: got 'delay', must be one of"),
        ("max_lr=1", "--flag max-lr: this is the same in all runs, or has an option"),
    ):
        with pytest.raises(SystemExit, match="2"):
            training.parse(["--device", "cpu", "--shards", "none", "--flag", given])
        assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_layers_that_fp8_makes_slower_are_evaluated_in_fp8_too():
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"]).cuda().eval()
    tokens = torch.randint(320, (4, 64))
    windows, device = [(tokens, tokens.roll(-1, 1))], torch.device("cuda")
    plain, ours = (
        crossed.window_losses(m, windows, device) for m in (model, crossed.in_fp8(model, {}))
    )
    assert 0 < abs(ours - plain).max() < 0.1 * plain.mean()
