"""The loss check on a CPU: short runs, also with optimizers of other libraries, their records, and skipped steps."""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import convergence
import pytest
import torch
from convergence import (
    PEERS,
    any_skipped,
    build_peer,
    by_variant,
    choose_peers,
    main,
    run,
    to_record,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question.\n" * 600)
    return path


def test_a_run_becomes_a_record_that_counts_skipped_steps(text, tmp_path, capsys):
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
def test_a_fallback_keeps_its_states_in_8_bits(backend, text):
    options = argparse.Namespace(model="tiny", steps=3, batch=2, lr=1e-3, skip=[], data=text)
    baseline, fallback = (run(v, 0, options) for v in ("baseline", f"fallback/{backend}"))
    assert fallback.final_loss == pytest.approx(baseline.final_loss, rel=0.005)
    assert fallback.bytes_per_parameter["m"] < 1.1
    assert fallback.bytes_per_parameter["grad"] >= 2


def test_no_recorded_run_skipped_steps():
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    for name in ("convergence", "optimizer_parity", "product_parity"):
        assert not any_skipped(by_variant(results / f"{name}.jsonl"))


def test_gradients_that_are_not_finite_are_counted(text, monkeypatch):
    import demo

    plain = demo.compute_loss
    monkeypatch.setattr(demo, "compute_loss", lambda *batch: plain(*batch) * torch.inf)
    options = argparse.Namespace(model="tiny", steps=3, batch=2, lr=1e-3, skip=[], data=text)
    assert run("O2", 0, options).skipped_steps == 3


# --- optimizers of other libraries


def skip_without(peer):
    """Skip where a library is missing, without importing TransformerEngine: see `import_peer`."""
    library = PEERS[peer].module.partition(".")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize(
    ("peer", "weight", "state"),
    [
        ("bitsandbytes 8bit", 4, 2.1),  # vectors stay float32
        ("torchao 8bit/bf16", 2, 2.2),
    ],
)
def test_a_peer_steps_the_baseline(peer, weight, state, text):
    skip_without(peer.partition("/")[0])
    options = argparse.Namespace(model="tiny", steps=3, batch=2, lr=1e-3, skip=[], data=text)
    with torch.compiler.set_stance("force_eager"):  # torchao's step is compiled, a minute on a CPU
        baseline, stepped = (run(v, 0, options) for v in ("baseline", f"peer/{peer}"))
    assert stepped.train_loss[0] == pytest.approx(baseline.train_loss[0], rel=0.01), "one start"
    assert stepped.train_loss[0] - stepped.final_loss > 0.5
    assert stepped.final_loss == pytest.approx(baseline.final_loss, rel=0.005)
    sizes = stepped.bytes_per_parameter
    assert sizes["weight"] == sizes["grad"] == weight
    assert 2 < sizes["state"] < state
    assert baseline.bytes_per_parameter["m"] == 4


ON_CPU = ("bitsandbytes 8bit", "torchao 8bit", "torchao 4bit", "torchao fp8")


@pytest.mark.parametrize(
    "peer", [p if p in ON_CPU else pytest.param(p, marks=pytest.mark.gpu) for p in PEERS]
)
def test_a_peer_s_rate_follows_its_schedule(peer):
    skip_without(peer)
    model = nn.Linear(64, 64, device="cpu" if peer in ON_CPU else "cuda")
    optimizer = build_peer(peer, model, 6e-4)
    schedule = LambdaLR(optimizer, lambda step: (step + 1) / 4)
    for step in range(4):
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == pytest.approx([6e-4 * (step + 1) / 4] * len(rates))
        schedule.step()


def test_peers_are_chosen_by_globs_and_by_the_dtype_of_weights(monkeypatch):
    monkeypatch.setattr(convergence, "find_spec", lambda library: library)
    assert choose_peers(["*"]) == [f"peer/{name}" for name in PEERS]
    assert {v.module.partition(".")[0] for v in PEERS.values()} == {
        "bitsandbytes", "torchao", "flashoptim", "transformer_engine",
    }  # fmt: skip
    chosen = choose_peers(["torchao [48]bit", "torchao 8bit/fp32", "torchao 8bit/bf16"])
    assert chosen == ["peer/torchao 8bit", "peer/torchao 4bit", "peer/torchao 8bit/bf16"]
    assert choose_peers(["flash*/bf16", "te remainders"]) == [
        "peer/flashoptim 24bit",
        "peer/te remainders",
    ]
    for wrong in ("torch fused bf16", "fp8stack", "torchao 8bit/fp16"):
        with pytest.raises(SystemExit, match="must be NAME or NAME/bf16"):
            choose_peers([wrong])


def test_a_missing_peer_is_named_and_a_broken_one_too(text, tmp_path, capsys, monkeypatch):
    present = {"bitsandbytes": True}
    monkeypatch.setattr(convergence, "find_spec", present.get)
    monkeypatch.setattr(convergence, "ProcessPoolExecutor", AtOnce)
    out = tmp_path / "records.jsonl"
    sizes = ["--model", "tiny", "--steps", "3", "--batch", "2", "--seeds", "0", "--data", str(text)]
    levels = ["--levels", "baseline", "--out", str(out)]
    peers = ["--peers", "te fp32", "bitsandbytes 8bit"]
    assert main([*sizes, *levels, *peers]) == 0
    assert "te fp32: not installed (transformer_engine)" in capsys.readouterr().err
    assert by_variant(out).keys() == {"baseline", "peer/bitsandbytes 8bit"}
    monkeypatch.setattr(convergence, "make_step", broken)
    assert main([*sizes, "--levels", "--out", str(out), *peers]) == 1
    assert "peer/bitsandbytes 8bit seed 0: RuntimeError: no step" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 2


def test_only_runs_of_one_model_are_compared(tmp_path, capsys):
    params = {"dim": 128, "steps": 3, "batch": 2, "lr": 1e-3, "seed": 0, "text": "x"}
    found = [("baseline", params, 2.0), ("O1", params, 2.5), ("O1", {**params, "dim": 512}, 9.0)]
    out = tmp_path / "records.jsonl"
    rows = ({"variant": v, "params": p, "value": x} for v, p, x in found)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--model", "tiny", "--steps", "3", "--batch", "2", "--lr", "1e-3", "--out", str(out)]
    assert main([*sizes, "--seeds"]) == 1, "O1 is off"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["O1"]["mean"] == 2.5
    out.write_text(out.read_text().replace("2.5", "NaN"))
    assert main([*sizes, "--seeds"]) == 1, "O1 is not finite"
    out.write_text(out.read_text().replace('"O1"', '"peer/te fp8-lm"'))
    assert main([*sizes, "--seeds"]) == 0, "a peer has no bound"
    assert main([*sizes, "--seeds", "--steps", "4"]) == 0
    assert "no baseline of such runs" in capsys.readouterr().err


def test_only_runs_over_one_text_and_of_the_baseline_s_seeds_are_compared(tmp_path, capsys):
    params = {"dim": 128, "steps": 3, "batch": 2, "lr": 1e-3}
    found = [
        ("baseline", 0, "torch", 9.0),
        ("O1", 0, "stdlib", 2.001),
        ("baseline", 0, "stdlib", 2.0),
        ("O1", 0, "torch", 9.9),
        ("O1", 1, "stdlib", 8.0),
        ("O2", 1, "stdlib", 8.0),
    ]
    out = tmp_path / "records.jsonl"
    rows = (
        {"variant": v, "params": {**params, "seed": seed, "text": text}, "value": x}
        for v, seed, text, x in found
    )
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--model", "tiny", "--steps", "3", "--batch", "2", "--lr", "1e-3", "--out", str(out)]
    assert main([*sizes, "--seeds"]) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out.splitlines()[-1])
    assert {v: row["mean"] for v, row in summary.items()} == {"O1": 2.001, "baseline": 2.0}
    assert "4 of 6 runs are left out" in shown.err


def test_a_picture_waits_until_every_level_has_the_baseline_s_seeds(tmp_path):
    params = {"dim": 128, "steps": 3, "batch": 2, "lr": 1e-3, "text": "x"}
    out, picture = tmp_path / "records.jsonl", tmp_path / "picture.svg"

    def add(level, seed):
        row = {"variant": level, "params": {**params, "seed": seed}, "value": 2.0}
        with out.open("a") as file:
            file.write(json.dumps({**row, "validation": [[1, 3.0], [3, 2.0]]}) + "\n")

    sizes = ["--model", "tiny", "--steps", "3", "--batch", "2", "--lr", "1e-3", "--out", str(out)]
    sum_up = [*sizes, "--seeds", "--picture", str(picture)]
    for level, seed in [("baseline", 0), ("baseline", 1), ("O0", 0), ("O1", 0), ("O2", 0)]:
        add(level, seed)
    assert main(sum_up) == 0
    assert not picture.exists()
    for level in ("O0", "O1", "O2"):
        add(level, 1)
    assert main(sum_up) == 0
    assert "<svg" in picture.read_text()


class AtOnce:
    """An executor of this process: what a test has replaced stays so."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        future = convergence.Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def broken(*_):
    raise RuntimeError("no step")
