"""The optimizer benchmark on a CPU: its lists, its bytes, its records and what it says of what it cannot measure."""

import json
import os
import signal
import sys
import time
from math import prod
from types import SimpleNamespace

import optimizer_step
import pytest
import torch
from optimizer_step import (
    MODELS,
    VARIANTS,
    count_bytes,
    main,
    make_parameters,
)
from timing import attempt, stopping_in_order
from torch import nn

NAMES = [variant.name for variant in VARIANTS]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "steps.jsonl"
    only = ("--only", "fp8stack", "fp8stack graph", "torch fused *")
    sizes = ("--device", "cpu", "--model", "tiny", "--steps", "2")
    assert main([*sizes, "--output", str(path), *only]) == 0
    return path


@pytest.mark.parametrize(
    ("model", "tensors", "elements"),
    [
        ("gpt2-124m", 148, 124_475_904),
        ("llama-3.2-1b", 146, 1_235_814_400),
        ("llama-3-8b", 291, 8_030_261_248),
        ("small-4000", 4000, 16_896_000),
    ],
)
def test_lists_have_the_size_of_the_real_models(model, tensors, elements):
    assert len(MODELS[model]) == tensors
    assert sum(map(prod, MODELS[model])) == elements


def test_records_follow_the_schema(records):
    rows = {r["variant"]: r for r in map(json.loads, records.read_text().splitlines())}
    assert list(rows) == ["fp8stack", "torch fused fp32", "torch fused bf16"]  # no graph on a CPU
    ours, full = rows["fp8stack"], rows["torch fused fp32"]
    assert (ours["name"], ours["metric"], ours["unit"]) == ("optimizer_step", "step_ms", "ms")
    assert ours["value"] > 0
    assert (ours["params"]["states"], ours["params"]["grad"]) == ("8bit", "fp8")
    assert full["params"]["library"] == f"torch {torch.__version__}"
    assert full["extra"]["bytes"]["total"] == pytest.approx(16, abs=0.01)
    assert ours["extra"]["bytes"]["total"] < 7
    assert (ours["extra"]["launches"], ours["extra"]["steps"]) == (None, 2)
    moved = (2 * 12 + 4) * full["params"]["n_params"]
    assert full["extra"]["tb_s"] == pytest.approx(moved / full["value"] / 1e9, rel=0.01)


def test_picture_shows_the_latest_run_only(records, tmp_path):
    picture, history = tmp_path / "steps.svg", tmp_path / "history.jsonl"
    old = json.loads(records.read_text().splitlines()[0]) | {"variant": "old", "time": "1999"}
    history.write_text(json.dumps(old) + "\n" + records.read_text())
    assert main(["--plot", str(picture), "--model", "tiny", "--output", str(history)]) == 0
    assert "torch fused fp32" in picture.read_text()
    assert ">old<" not in picture.read_text()
    with pytest.raises(SystemExit, match="holds no run over gpt2-124m"):
        main(["--plot", str(picture), "--model", "gpt2-124m", "--output", str(history)])


def test_what_cannot_be_measured_has_its_reason_in_the_output(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    only = ("--only", "bitsandbytes*", "fp8stack graph")
    main(["--device", "cpu", "--model", "tiny", "--output", str(tmp_path / "x.jsonl"), *only])
    printed = capsys.readouterr().out
    assert "bitsandbytes 8bit: not installed (bitsandbytes" in printed
    assert "fp8stack graph: not available: a CUDA graph needs a GPU" in printed


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.cuda.OutOfMemoryError("2 GiB"), "skipped: does not fit"),
        (RuntimeError("no such kernel\nand a long dump"), "RuntimeError: no such kernel"),
        (ValueError(), "ValueError: "),
    ],
)
def test_failure_of_one_configuration_is_a_note(error, note):
    def fail():
        raise error

    assert attempt(fail)["note"].startswith(note)
    assert "dump" not in attempt(fail)["note"]


def test_a_run_that_is_stopped_keeps_what_it_has_measured():
    def be_stopped():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    handler = signal.getsignal(signal.SIGTERM)
    with stopping_in_order():
        assert attempt(lambda: {"step_ms": 1.0}) == {"step_ms": 1.0}
        assert attempt(be_stopped) == {"note": "the run was stopped"}
        assert attempt(lambda: {"step_ms": 1.0}) == {"note": "not begun: the run was stopped"}
    assert attempt(lambda: {"step_ms": 1.0}) == {"step_ms": 1.0}
    assert signal.getsignal(signal.SIGTERM) is handler


def test_bytes_are_of_the_tensors_inside_and_shared_ones_count_once():
    parameters = [nn.Parameter(torch.zeros(128, dtype=torch.bfloat16)) for _ in range(2)]
    table = torch.zeros(256)
    wrapper = SimpleNamespace(codes=torch.zeros(128, dtype=torch.uint8), dtype=torch.uint8)
    state = {"exp_avg": wrapper, "qmap": table, "error_bits": torch.zeros(128, dtype=torch.int8)}
    optimizer = SimpleNamespace(state={parameters[0]: state, parameters[1]: {"qmap": table}})
    sizes = count_bytes(parameters, optimizer)
    expected = {
        "weight": 512,
        "master": 128,
        "grad": 0,
        "state": 128 + 1024,
        "total": 1792,
        "host": 0,
    }
    assert sizes == {part: size / 256 for part, size in expected.items()}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_as_the_configuration_says(name):
    variant = VARIANTS[NAMES.index(name)]
    matrix, vector, *_, small = make_parameters(MODELS["tiny"], variant, "cpu")
    kinds = {"fp8": "BlockScaledTensor", "bf16": "Tensor", "fp32": "Tensor"}
    assert type(matrix.grad).__name__ == kinds[variant.grad]
    assert type(vector.grad) is type(small.grad) is torch.Tensor
    assert str(matrix.dtype) == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[variant.weight]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt5"), "--model gpt5: must be of gpt2-124m"),
        (("--only", "apex*", "--device", "cpu"), "--only matches none of: fp8stack"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_names_are_unique_and_the_quick_ones_exist():
    assert len(set(NAMES)) == len(NAMES)
    options = optimizer_step.parse(["--quick", "--device", "cpu"])
    assert len(options.variants) == 6
    assert options.model == list(MODELS)[:4]
