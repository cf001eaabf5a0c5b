"""benchmarks/training.py on a CPU: shards, what it writes down, runs that fail, and one that is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import training
from gpt.build import architecture
from gpt.model import GPT, SIZES


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards of a small text; in a folder, with its text."""
    pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("shards")
    (root / "text").mkdir()
    text = "".join(f"def f_{i}(x):\n    return x * {i} + {i * 7 % 13}\n" for i in range(400))
    (root / "text" / "book.txt").write_text(text)
    given = ["--text", str(root / "text"), "--shards", str(root / "shards")]
    assert training.main([*given, "--max-tokens", "5000"]) == 0
    return root / "shards"


def arguments(shards, folder):
    common = ["--device", "cpu", "--shards", str(shards), "--runs", str(folder / "runs")]
    return [*common, "--output", str(folder / "records.jsonl"), "--eval-batches", "2"]


def test_shards_have_a_tokenizer_that_ends_like_gpt_2_s(shards):
    tokens = json.loads((shards / "tokenizer.json").read_text())
    ids = tokens["model"]["vocab"]
    last = tokens["added_tokens"][-1]
    assert (last["content"], last["id"]) == ("<|endoftext|>", len(ids))
    assert 256 < len(ids) < training.TOKENS
    assert (shards / "train_000000.bin").stat().st_size == 2 * 5000


@pytest.mark.slow
def test_records_are_of_runs_that_ended_well(shards, tmp_path, capsys):
    chosen = ["--model", "tiny", "gpt2", "--levels", "off", "--gpus", "0", "1"]
    given = [*arguments(shards, tmp_path), "--steps", "6", "--eval-freq", "3"]
    assert training.main([*given, *chosen]) == 1  # for GPT-2 the text is too short
    assert training.main([*given, "--model", "tiny", "--levels", "O2", "--seeds", "0"]) == 0
    base, ours = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert (base["variant"], ours["variant"]) == ("bf16", "O2")
    assert (base["precision"], ours["precision"]) == ("bf16", "FP8 O2")
    assert base["params"] == ours["params"]
    assert base["params"] | {"model": "tiny", "batch": 4, "seq": 64, "steps": 6} == base["params"]
    for record in (base, ours):
        assert [step for step, _ in record["validation"]] == [3, 6]
        assert record["value"] == record["validation"][-1][1]
        assert len(record["train_loss_per_25_steps"]) == 1
        assert record["skipped_steps"] == 0
        assert record["tokens_per_second"] == pytest.approx(256e3 / record["step_ms"], rel=1e-6)
        assert record["seconds"] > 6e-3 * record["step_ms"] / 2
    assert ours["value"] == pytest.approx(base["value"], rel=0.02)
    said = capsys.readouterr()
    assert '{"failed": ["gpt2, bf16, seed 0"]}' in said.out
    assert "no window of 1024" in said.err


@pytest.mark.slow
def test_what_is_interrupted_leaves_records_and_no_processes(shards, tmp_path):
    script = Path(training.__file__)
    given = [*arguments(shards, tmp_path), "--model", "tiny", "--levels", "off", "O2"]
    command = [sys.executable, str(script), *given, "--steps", "20"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
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
        try:
            told = str(folder).encode() in path.read_bytes()
        except OSError:  # it ended
            continue
        if told and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama-1b", "tiny"])
def test_what_is_estimated_is_the_model_that_trains(name):
    config = replace(SIZES[name], vocab=512, layers=2, seq_len=training.MODELS[name].seq)
    off, o2 = (
        training.estimate(training.Run(name, 0, level), architecture(config), "native")
        for level in ("off", "O2")
    )
    assert off.parameters == sum(p.numel() for p in GPT(config).parameters())
    assert o2.peak < off.peak
    assert off.parts["weights"] == 4 * off.parameters


def test_gpus_are_those_that_are_visible(tmp_path, monkeypatch, capsys):
    def ask(*gpus, device="cuda"):
        given = ["--shards", "none", "--runs", str(tmp_path), "--device", device]
        return training.parse([*given, "--compute", "te", "--gpus", *gpus])

    for visible, expected in ((None, "1"), ("4, GPU-7", "GPU-7")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert training.environment(*ask("1").gpus, "cuda")["CUDA_VISIBLE_DEVICES"] == expected
    assert ask("0", "2", device="cpu").gpus == [0, 2]
    with pytest.raises(SystemExit):
        ask("0", "2")
    assert (
        "--gpus 0 2: numbers count from 0, and CUDA_VISIBLE_DEVICES has 2"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        ask("-1")
    folders = [training.Run("tiny", 0, level).folder(ask("0")).name for level in ("off", "O2")]
    assert folders == ["tiny-seed0-bf16", "tiny-seed0-te-fp8-o2"]


def record(variant, seed, value, peak):
    numbers = {"tokens_per_second": 10.0 * peak, "peak_gib": peak, "estimate_gib": 1.1 * peak}
    params = {"model": "gpt2", "seed": seed, "steps": 5}
    return {"variant": variant, "params": params, "value": value, **numbers}


def test_gaps_are_paired_by_seed(capsys):
    records = [record("bf16", 0, 2.0, 4), record("bf16", 1, 4.0, 4)]
    records += [record("O2", 0, 2.2, 2), record("O2", 1, 4.0, 2)]
    training.report(records, training.Console(width=120))
    training.report(records[2:], training.Console(width=120))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "O2" in line]
    assert rows[0] == ["O2", "3.1000", "+5.00%", "20", "0.50", "2.00", "0.50", "2.20", "+10.0%"]
    assert rows[1] == ["O2", "3.1000", "-", "20", "-", "2.00", "-", "2.20", "+10.0%"]
