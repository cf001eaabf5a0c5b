"""Every benchmark, on a CPU: its records are valid and their numbers agree; what it refuses; what it cannot measure."""

import contextlib
import datetime
import gc
import io
import json
import re
import sys
from types import SimpleNamespace

import attention
import comm
import convergence
import ddp_step
import end_to_end
import frameworks
import gradients
import linear
import memory
import monitor_cost
import optimizer_step
import optimizer_stress
import pytest
import resume
import stability
import torch
import train_gpt
import train_step
import wire_parity
from ranks import context_of_ranks, start_ranks

CONDITIONS = ("gpu", "cc", "driver", "torch", "triton", "fp8stack", "git", "command", "time")
TINY = ["--device", "cpu", "--model", "tiny"]


class AtOnce:
    """An executor of this process: starting others takes longer than the work."""

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


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Spare the collection after every measurement the objects that exist already: torch's alone take 0.2 s."""
    gc.freeze()
    yield
    gc.unfreeze()


def run_here(command, **_):
    """Run the application in this process, as `subprocess.run` does in another."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = train_gpt.main(command[2:])
    torch.use_deterministic_algorithms(False)
    return SimpleNamespace(returncode=code, stdout=printed.getvalue())


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    monkeypatch.setattr(convergence, "ProcessPoolExecutor", AtOnce)
    monkeypatch.setattr(end_to_end, "get_context", lambda _: context_of_ranks())
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
    return records


# --- what the numbers of each benchmark say of each other


def check_attention(rows):
    for r in rows.values():
        assert 0 < r["off"] < 0.01  # bfloat16's own
        assert r["value"] == r["both_ms"] > 0


def check_convergence(rows):
    assert {r["skipped_steps"] for r in rows.values()} == {0}
    base, o2, peer = rows.values()
    assert o2["value"] == pytest.approx(base["value"], rel=0.01)
    sizes = o2["bytes_per_parameter"]
    assert 1 <= sizes["m"] < 1.3
    assert 1 <= sizes["grad"] < 2
    sizes = peer["bytes_per_parameter"]
    assert sizes["weight"] == sizes["grad"] == 4
    assert 2 < sizes["state"] < 2.1  # vectors stay float32


def check_ddp_step(rows):
    base = rows[ddp_step.BASE]
    for name, r in rows.items():
        assert r["exposed_ms"] == r["forward_backward_ms"] - r["no_sync_ms"]
        assert r["speedup"] == pytest.approx(base["value"] / r["value"])
        assert r["loss"] == pytest.approx(base["loss"], rel=0.05)  # they train alike
        share = r["wire_mib"] / base["wire_mib"]
        if name.startswith("DataParallel"):  # 64 columns are padded to 128 on the wire
            assert 1.03 < r["gradient_bytes_per_parameter"] < 3.2
            assert 0.5 < share < 1.04
        else:
            assert r["gradient_bytes_per_parameter"] == 2
            assert share == pytest.approx(1 if name.startswith("ddp") else 132 / 256, rel=0.05)


def check_end_to_end(rows):
    base = rows["bf16"]
    assert base["resident"]["total"] == pytest.approx(16, rel=0.01)
    for name in ("O2", "O2 fused"):
        assert rows[name]["loss"] == pytest.approx(base["loss"], rel=0.02)
        assert (
            6 < rows[name]["resident"]["total"] < 16
        )  # few matrices of so small a model are large
        assert rows[name]["speedup"] == pytest.approx(base["value"] / rows[name]["value"])


def check_frameworks(rows):
    plain, ours = rows.values()
    assert ours["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert plain["state_bytes_per_parameter"] == pytest.approx(8, rel=0.01)
    assert 3 < ours["state_bytes_per_parameter"] < 8


def check_gradients(rows):
    bf16, *others = rows.values()
    assert 0 < bf16["off"] < 0.01
    for r in rows.values():
        assert r["value"] == r["off"]
        assert r["least_cosine"] <= r["cosine"] < 1
        assert r["along"] == pytest.approx(1, abs=0.1)
        assert r["norm"] == pytest.approx(1, abs=0.1)
        assert abs(r["loss_gap"]) < 0.01
        assert r["float32_loss"] == bf16["float32_loss"]
    assert all(4 * bf16["off"] < r["off"] < 0.15 for r in others)


def check_linear(rows):
    for r in rows.values():
        extra = r["extra"]
        assert all(extra[key] > 0 for key in ("cpu_us", "gemms_alone_ms", "copy_tb_s"))
        assert extra["of_floor"] == pytest.approx(extra["floor_ms"] / r["value"])


def check_memory(rows):
    assert all((r["metric"], r["value"]) == ("micro-batch", 1) for r in rows.values())


def check_monitor_cost(rows):
    (r,) = rows.values()
    plain, watched = r["blocks_s"]
    assert r["value"] == pytest.approx(sum(watched) / sum(plain) - 1)  # medians of two
    assert r["sampled_ms"] > 0


def check_optimizer_step(rows):
    ours, full, _ = rows.values()  # no graph on a CPU
    assert (ours["params"]["states"], ours["params"]["grad"]) == ("8bit", "fp8")
    assert full["extra"]["bytes"]["total"] == pytest.approx(16, abs=0.01)
    assert ours["extra"]["bytes"]["total"] < 7
    moved = (2 * 12 + 4) * full["params"]["n_params"]
    assert full["extra"]["tb_s"] == pytest.approx(moved / full["value"] / 1e9, rel=0.01)


def check_resume(rows):
    for r in rows.values():
        assert (r["value"], r["of"], r["first_other_step"], r["last_loss_off"]) == (2, 2, None, 0)
        assert r["tokens_per_second"] > 0 < r["tokens_per_second_resumed"]


def check_stability(rows):
    assert {r["params"]["vocab"] for r in rows.values()} == {320}  # 317 before it
    for r in rows.values():
        assert r["value"] == pytest.approx(r["loss"] / r["bf16_loss"] - 1)
        assert 0 <= r["underflow"] < 0.3


def check_train_step(rows):
    extra, eager = rows["native current"]["extra"], rows["bf16 eager"]
    assert extra["of_eager"] == pytest.approx(eager["value"] / rows["native current"]["value"])
    assert 0 < abs(extra["loss_off"]) < 0.01
    assert abs(extra["grad_off"]) < 0.05
    assert extra["copy_tb_s"] > 0 < extra["fp8_tflop_s"]
    assert eager["extra"]["again_ms"] > 0  # bf16 is measured twice
    assert "again_ms" not in extra


def check_wire_parity(rows):
    base, *others = rows.values()
    for r in rows.values():
        assert [step for step, _ in r["validation"]] == [2, 4, 6, 8, 10, 12]
        assert r["value"] == r["validation"][-1][1] < r["validation"][0][1]
    for ours in others:
        assert ours["train_loss"][0] == base["train_loss"][0]  # the same weights and windows
        assert ours["value"] != base["value"] == pytest.approx(ours["value"], rel=0.005)


BENCHMARKS = {  # arguments besides TINY, the variants that are recorded, and what holds among their numbers
    attention: (["--steps", "2"], ["plain", "sdpa, its choice", "sdpa math"], check_attention),
    convergence: (
        ["--steps", "3", "--batch", "2", "--seeds", "0", "--levels", "baseline", "O2"],
        ["baseline", "O2", "peer/bitsandbytes 8bit"],
        check_convergence,
    ),
    ddp_step: (
        ["--gpus", "2", "--batch", "3", "--steps", "2"],
        [v.name for v in ddp_step.VARIANTS],
        check_ddp_step,
    ),
    end_to_end: (["--steps", "1"], ["bf16", "O2", "O2 fused"], check_end_to_end),
    frameworks: (["--steps", "2"], ["fsdp2 bf16", "fsdp2 O2 native"], check_frameworks),
    gradients: (
        ["--steps", "0"],
        ["bf16", "native current", "native delayed", "native blockwise"],
        check_gradients,
    ),
    linear: (["--iterations", "10", "--bursts", "1"], ["bf16", linear.NATIVE], check_linear),
    memory: (
        ["--most", "1"],
        ["fp32 AdamW", "bf16, torchao 8bit", "fp8stack O2, 4bit"],
        check_memory,
    ),
    monitor_cost: (["--steps", "2", "--blocks", "2"], ["O2"], check_monitor_cost),
    optimizer_step: (
        ["--steps", "2"],
        ["fp8stack", "torch fused fp32", "torch fused bf16"],
        check_optimizer_step,
    ),
    resume: (["--steps", "4"], ["default", "--deterministic"], check_resume),
    stability: (
        ["--steps", "4", "--grid", "formats"],
        ["current hybrid", "delayed e5m2, margin 2", "blockwise"],
        check_stability,
    ),
    train_step: (
        ["--steps", "2"],
        ["bf16 eager", "bf16 compile", "native current", "native O1"],
        check_train_step,
    ),
    wire_parity: (
        ["--steps", "12", "--batch", "4", "--seeds", "0", "--jobs", "2"],
        [wire_parity.BASE, "hook", "DataParallel, error feedback"],
        check_wire_parity,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__)
def test_records_are_valid_and_their_numbers_agree(benchmark, tmp_path, capsys):
    given, variants, check = BENCHMARKS[benchmark]
    text, path = tmp_path / "text.py", tmp_path / "records.jsonl"
    text.write_text("for x in range(10):\n    print(x)\n" * 200)
    tiny, only, output = TINY, ["--only", *variants], "--output"
    if benchmark in (convergence, wire_parity):
        given, output = [*given, "--data", str(text)], "--out"
    if benchmark is convergence:
        tiny, only = TINY[2:], ["--peers", "bitsandbytes 8bit"]
    if benchmark is resume:
        tiny, only = TINY[:2], ["--only", "tiny/O2"]
    assert benchmark.main([*tiny, *given, *only, output, str(path)]) == 0
    records = read(path)
    assert {r["name"] for r in records} == {benchmark.__name__}
    rows = {r["variant"]: r for r in records}
    assert rows.keys() - {"bf16 again"} == set(variants)
    check({variant: rows[variant] for variant in variants})
    assert not re.search(r'"failed": [\[{]"', capsys.readouterr().out)


def test_a_failure_of_the_application_is_shown(tmp_path):
    options = resume.parse([*TINY[:2], "--only", "tiny/O2", "--steps", "2"])
    with pytest.raises(RuntimeError, match=r"--model tiny .* failed:\n[^$]*nowhere"):
        resume.train(options.cases[0], options, tmp_path, "--data", "nowhere")


def test_collectives_of_two_ranks(tmp_path, capsys):
    path, given = tmp_path / "comm.jsonl", ["--device", "cpu", "--gpus", "2"]
    only = ["gloo*", "collective *", "nvlink fp8", "torch *"]
    sizes = ["--sizes", "1000", "64K", "--seconds", "0.01"]
    assert comm.main([*given, *sizes, "--output", str(path), "--only", *only]) == 0
    records = {(r["variant"], r["params"]["size"]): r for r in read(path)}
    row = records["collective fp32", 2**16]
    assert (row["params"]["ranks"], row["params"]["elements"], row["backend"]) == (2, 2**15, "gloo")
    for dtype, key in (("bf16", "speedup"), ("fp32", "speedup_fp32")):
        assert row[key] == pytest.approx(records[f"gloo {dtype}", 2**16]["value"] / row["value"])
    for name, factor in (("all_reduce", 1.0), ("reduce_scatter", 0.5), ("all_gather", 0.5)):
        row = records[f"collective {name} bf16".replace("all_reduce ", ""), 2**16]
        assert row["algbw_gb_s"] == pytest.approx(2**16 / row["value"] / 1e6)  # of bfloat16 bytes
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)
    row = records["collective bf16", 1000]  # filled up to whole blocks of every rank
    assert row["params"]["elements"] == 512
    assert row["algbw_gb_s"] == pytest.approx(1024 / row["value"] / 1e6)
    for dtype in ("bf16", "fp32", "fp8"):
        row = records[f"collective {dtype}", 2**16]
        assert 26 < row["snr_db"] < 35
        assert row["differing_bytes"] == 0
    assert "differing_bytes" not in records["collective reduce_scatter fp32", 2**16]  # other parts
    tables, last = capsys.readouterr().out, json.loads
    assert tables.count("nvlink fp8: CommError: ") == 1  # once, not for each size
    summary = last(tables.splitlines()[-1])
    assert summary.pop("ok")
    assert set(summary["collective fp8"]) == {"1000 B", "64 KiB"}


@pytest.mark.parametrize("fault", ["bytes", "death"])
def test_ranks_that_differ_or_die_fail_the_run_and_keep_its_records(
    fault, tmp_path, capsys, monkeypatch
):
    cell = {"variant": "collective fp8", "value": 1.0, "differing_bytes": 3 * (fault == "bytes")}
    cell |= {"name": "comm", "metric": "milliseconds", "unit": "ms", "snr_db": 30.0}
    cell["params"] = {"size": 2**16, "collective": "all_reduce", "ranks": 2, "elements": 2**15}

    def spawn(work, arguments, nprocs):
        with open(f"{arguments[1]}/cells", "w") as file:
            file.write(json.dumps(cell) + "\n")
        if fault == "death":
            raise comm.torch.multiprocessing.ProcessExitedException("rank 1 is gone", 1, 1, 9)

    monkeypatch.setattr(comm.torch.multiprocessing, "spawn", spawn)
    path = tmp_path / "x.jsonl"
    assert comm.main(["--device", "cpu", "--gpus", "2", "--output", str(path)]) == 1
    printed = capsys.readouterr().out
    said = {
        "bytes": "collective fp8, 65536 B: 3 bytes differ between ranks",
        "death": "rank 1 is gone",
    }
    assert said[fault] in printed
    assert json.loads(printed.splitlines()[-1])["ok"] is False
    assert len(path.read_text().splitlines()) == 1


STRESS = ("--device", "cpu", "--size", "64", "--steps", "40")
BOUNDED = {  # bytes of state
    "8bit": 2.125, "fp8": 2.125, "4bit": 1.625, "fp8-lm": 3, "bf16": 4, "fp32": 8,
}  # fmt: skip


def test_our_optimizer_states_explode_on_no_case(tmp_path, capsys):
    path, only = tmp_path / "stress.jsonl", [f"fp8stack {states}" for states in BOUNDED]
    assert optimizer_stress.main([*STRESS, "--out", str(path), "--only", *only]) == 0
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert verdict == {"ok": True, "explode": {}, "not_measured": {}}
    found = {(r["variant"], r["params"]["case"]): r["extra"] for r in read(path)}
    assert len(found) == len(BOUNDED) * len(optimizer_stress.CASES)
    for (variant, case), extra in found.items():
        assert extra["finite"], (variant, case)
        assert not extra["explodes"], (variant, case)
        assert extra["max_update"] < 4 * extra["max_reference"], (variant, case)
        # low-precision states are what was measured, with one scale for the 64 elements of a row
        assert extra["state_bytes"] == pytest.approx(BOUNDED[variant.split()[1]], abs=0.01)


# --- what cannot be measured, and what is refused


@pytest.mark.parametrize(
    ("benchmark", "given", "missing", "said"),
    [
        (attention, ["--only", "flash-attn"], "flash_attn", "flash_attn"),
        (gradients, ["--steps", "0", "--only", "te current"], "transformer_engine", "te current"),
        (linear, ["--only", "te current"], "transformer_engine.pytorch", "not installed (transf"),
        (optimizer_step, ["--only", "bitsandbytes*"], "bitsandbytes.optim", "not installed (bits"),
        (optimizer_step, ["--only", "fp8stack graph"], "no_module", "a CUDA graph needs a GPU"),
        (train_step, ["--only", "te current*"], "transformer_engine.pytorch", "not installed (tr"),
        (train_step, ["--only", "bf16 eager", "--limit", "0"], "no_module", "--limit 0 seconds"),
    ],
)
def test_what_cannot_be_measured_is_named_and_not_recorded(
    benchmark, given, missing, said, tmp_path, capsys, monkeypatch
):
    for name in {missing.partition(".")[0], missing} - {"bitsandbytes"}:
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "records.jsonl"
    benchmark.main([*TINY, *given, "--output", str(path)])
    assert said in "".join(capsys.readouterr())
    assert read(path) == []


def test_a_peer_that_is_missing_or_leaves_memory_does_not_stop_the_others(
    tmp_path, monkeypatch, capsys
):
    missing = memory.Method("a peer", optimizer=("no_such_library", "AdamW"))
    monkeypatch.setattr(memory, "METHODS", [missing, memory.METHODS[0]])
    path = tmp_path / "records.jsonl"
    assert memory.main([*TINY, "--most", "1", "--output", str(path)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"failed": ["a peer, tiny"]}
    assert [r["variant"] for r in read(path)] == ["fp32 AdamW"]

    def stay(*_, **__):
        raise memory.MemoryStayed("5 bytes stay allocated")

    monkeypatch.setattr(memory, "attempt", stay)
    assert memory.main([*TINY, "--most", "1", "--output", str(path)]) == 1
    assert "5 bytes stay allocated" in capsys.readouterr().err
    assert len(read(path)) == 1


@pytest.mark.parametrize(
    ("benchmark", "given", "message"),
    [
        (comm, ["--sizes", "huge"], "invalid size_of value: 'huge'"),
        (comm, ["--only", "apex*"], "--only matches none of: gloo bf16"),
        (comm, ["--gpus", "1"], "--gpus 1: must be 2 to 64 here"),
        (ddp_step, ["--model", "gpt5"], "--model gpt5: must be of gpt2, llama, tiny"),
        (ddp_step, ["--only", "fsdp*"], "--only matches none of: ddp bf16"),
        (ddp_step, ["--gpus", "0"], "--gpus 0: must be at least 1"),
        (ddp_step, ["--steps", "0"], "--steps 0: must be at least 1"),
        (gradients, ["--model", "tiny", "--steps", "-1"], "--steps -1: must be at least 0"),
        (linear, ["--model", "gpt5"], "--model gpt5: must be of llama"),
        (linear, ["--only", "apex*"], "--only matches none of: bf16"),
        (optimizer_step, ["--model", "gpt5"], "--model gpt5: must be of gpt2-124m"),
        (optimizer_step, ["--only", "apex*"], "--only matches none of: fp8stack"),
        (optimizer_stress, ["--cases", "mild"], "['mild'] matches none of: narrow, mid, wide"),
        (optimizer_stress, ["--size", "32"], "--size 32: must be at least 64"),
        (resume, ["--steps", "3"], "--steps"),
        (resume, ["--only", "bert/O2"], "--only"),
        (stability, ["--model", "tiny", "--steps", "0"], "--steps 0: must be at least 1"),
        (train_step, ["--model", "gpt5"], "--model gpt5: must be of llama"),
        (train_step, ["--only", "apex*"], "--only matches none of: bf16 eager"),
        (wire_parity, ["--only", "fsdp*"], "--only matches none of: ddp bf16; hook"),
        (wire_parity, ["--ranks", "1"], "--ranks 1: must be at least 2"),
        (wire_parity, ["--batch", "5"], "--batch 5: must be a multiple of the 2 ranks"),
    ],
)
def test_bad_options_are_refused(benchmark, given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--device", "cpu", *given])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "benchmark",
    [attention, ddp_step, end_to_end, frameworks, gradients, linear, optimizer_step, stability],
    ids=lambda module: module.__name__,
)
def test_names_of_variants_are_unique(benchmark):
    names = [variant.name for variant in benchmark.VARIANTS]
    assert len(set(names)) == len(names)
