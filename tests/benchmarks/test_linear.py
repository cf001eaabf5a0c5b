"""The benchmark of one Linear on a CPU: its floors, its records, its reading of a profile and what it refuses."""

import json
import sys
from contextlib import ExitStack

import linear
import pytest
from layers import count_casts
from linear import NATIVE, SHAPES, VARIANTS, find_floor, main, make_step, summarize

BY_NAME = {variant.name: variant for variant in VARIANTS}
SIZES = ("--device", "cpu", "--model", "tiny", "--iterations", "10", "--bursts", "1")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "linear.jsonl"
    assert main([*SIZES, "--output", str(path), "--only", "bf16", NATIVE]) == 0
    return {r["variant"]: r for r in map(json.loads, path.read_text().splitlines())}


def test_records_follow_the_schema(records):
    assert list(records) == ["bf16", NATIVE]
    row = records[NATIVE]
    assert (row["name"], row["metric"], row["unit"]) == ("linear", "ms", "ms")
    assert {k: row["params"][k] for k in ("tokens", "in", "out")} == {
        "tokens": 32,
        "in": 64,
        "out": 48,
    }
    assert row["params"]["recipe"] == "current"
    extra = row["extra"]
    for key in ("cpu_us", "gemms_alone_ms", "floor_ms", "copy_tb_s"):
        assert extra[key] > 0
    assert extra["of_floor"] == pytest.approx(extra["floor_ms"] / row["value"])


def test_floor_is_of_flops_and_of_the_bytes_that_casts_move():
    rates = {"copy_tb_s": 4.0, "fp8_tflop_s": 1000.0, "bf16_tflop_s": 500.0}
    shape = (8192, 4096, 4096)
    flops, elements = 6 * 8192 * 4096 * 4096, 2 * 8192 * 4096 + 4096 * 4096
    expected = {"bf16": flops / 500, NATIVE: flops / 1000 + 6 * elements / 4}
    expected["native delayed"] = flops / 1000 + 4 * elements / 4
    for name, value in expected.items():
        assert find_floor(BY_NAME[name], shape, rates) == pytest.approx(value * 1e-9)


@pytest.mark.parametrize("layers", [1, 3])
def test_every_step_casts_inputs_gradients_and_weights(layers, monkeypatch):
    seen = count_casts(monkeypatch)
    with ExitStack() as scopes:
        step = make_step(BY_NAME[NATIVE], (32, 64, 64), "cpu", scopes, layers)
        for _ in range(2):
            seen.clear()
            step()
            assert seen.count((64, 64)) == layers
            assert len(seen) == 3 * layers


def test_profile_is_divided_into_products_and_the_rest():
    kernels = {"nvjet_qqtst_128x128": 40.0, "sm90_xmma_gemm_e4m3": 20.0, "_cast_kernel": 10.0}
    events = [{"cat": "kernel", "name": n, "dur": d} for n, d in kernels.items()]
    events += [{"cat": "gpu_memset", "name": "Memset"}, {"ph": "M", "name": "process_name"}]
    numbers = summarize({"traceEvents": events * 2}, calls=2)
    assert numbers["launches"] == 3
    assert numbers["copies"] == 1
    assert numbers["gemm_ms"] == pytest.approx(0.06)
    assert numbers["rest_ms"] == pytest.approx(0.01)
    assert numbers["names"] == sorted(kernels)


def test_bars_are_judged_over_the_small_shape(capsys):
    key = (BY_NAME[NATIVE], SHAPES["small"][0])
    linear.show({key: {"ms": 0.1, "launches": 9.0, "cpu_us": 130.0}})
    printed = capsys.readouterr().out
    assert f"{NATIVE} 512×1024×1024: launches 9.0 of at most 9: met" in printed
    assert "cpu_us 130.0 of at most 120: missed" in printed


def test_what_cannot_be_measured_has_its_reason_in_the_output(tmp_path, capsys, monkeypatch):
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    main([*SIZES, "--output", str(tmp_path / "x.jsonl"), "--only", "te current"])
    printed = capsys.readouterr().out
    assert "32×64×48 te current: not installed (transformer_engine" in printed
    assert json.loads(printed.splitlines()[-1]) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt5"), "--model gpt5: must be of llama"),
        (("--only", "apex*", "--device", "cpu"), "--only matches none of: bf16"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
