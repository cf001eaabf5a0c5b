"""How benchmarks come to their numbers: what is counted, compared and searched for, on cases with known answers."""

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import re
import signal
import sys
import time
from math import prod
from pathlib import Path
from types import SimpleNamespace

import ddp_step
import gradients
import layer_shapes
import memory
import models
import optimizer_step
import optimizer_stress
import pytest
import remeasure
import stability
import torch
import walks
from torch import nn

import fp8stack


def test_models_have_the_size_of_the_real_ones():
    for name, elements in (("llama", 1_134_596_096), ("gpt2", 124_475_904)):
        config = models.MODELS[name]
        with torch.device("meta"):
            model = {"llama": models.Llama, "gpt2": models.GPT2}[config.kind](config)
        assert sum(p.numel() for p in model.parameters()) == elements
    for name, elements in (("gpt2-124m", 124_475_904), ("llama-3-8b", 8_030_261_248)):
        assert sum(map(prod, optimizer_step.MODELS[name])) == elements


def test_a_configuration_that_fails_or_is_stopped_does_not_cost_the_others():
    def be_stopped():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    def fail(error, cause=None):
        raise error from cause

    attempt, handler = optimizer_step.attempt, signal.getsignal(signal.SIGTERM)
    too_large = torch.cuda.OutOfMemoryError("2 GiB")
    assert attempt(lambda: fail(too_large))["note"].startswith("skipped: does not fit")
    dumped = RuntimeError("no such kernel\nand a long dump")
    assert attempt(lambda: fail(dumped)) == {"note": "RuntimeError: no such kernel"}
    assert attempt(lambda: fail(dumped, KeyError("x")))["note"].endswith("kernel (KeyError: 'x')")
    with optimizer_step.stopping_in_order():
        assert attempt(lambda: {"step_ms": 1.0}) == {"step_ms": 1.0}
        assert attempt(be_stopped) == {"note": "the run was stopped"}
        assert attempt(lambda: {"step_ms": 1.0}) == {"note": "not begun: the run was stopped"}
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("way", layer_shapes.WAYS)
def test_layers_of_every_shape_and_way_can_be_timed(way, monkeypatch):
    """On a CPU, without a graph: both ways run, and FP8's is what is said."""
    kinds = []

    def run(step):
        with torch.profiler.profile() as profile:
            step()
        kinds.append({event.key for event in profile.key_averages()})
        return 1.0

    monkeypatch.setattr(layer_shapes, "time_graph", run)
    cell = layer_shapes.list_cells([8192], [way])[-1]._replace(rows=64, k=128, n=256)
    mlp = way in (layer_shapes.MLP, layer_shapes.COMPILED_MLP)
    found = (layer_shapes.measure_mlp if mlp else layer_shapes.measure)(cell, "cpu")
    assert found["gain_us"] == 0
    ours = [any("fp8" in key.lower() or "_MLP" in key for key in keys) for keys in kinds]
    assert ours == [False, True]


def test_bytes_are_of_the_tensors_inside_and_shared_ones_count_once():
    parameters = [nn.Parameter(torch.zeros(128, dtype=torch.bfloat16)) for _ in range(2)]
    table = torch.zeros(256)
    wrapper = SimpleNamespace(codes=torch.zeros(128, dtype=torch.uint8), dtype=torch.uint8)
    state = {"exp_avg": wrapper, "qmap": table, "error_bits": torch.zeros(128, dtype=torch.int8)}
    optimizer = SimpleNamespace(state={parameters[0]: state, parameters[1]: {"qmap": table}})
    expected = {"weight": 512, "master": 128, "grad": 0, "state": 1152, "total": 1792, "host": 0}
    sizes = optimizer_step.count_bytes(parameters, optimizer)
    assert sizes == {part: size / 256 for part, size in expected.items()}
    bucket = torch.zeros(1000, dtype=torch.bfloat16)
    assert ddp_step.count_bytes([bucket[:10], None, bucket[500:].view(50, 10)]) == 2000
    blocks = fp8stack.BlockScaledTensor.quantize(torch.ones(4, 256))
    assert ddp_step.count_bytes([blocks, bucket]) == 4 * 256 + 4 * 4 * 2 + 2000


@pytest.mark.parametrize("base", [0.0, 30.0, 99.5])
@pytest.mark.parametrize("slope", [0.3, 1.7, 40.0, 200.0])
def test_the_search_finds_the_last_that_fits(base, slope):
    tried = []

    def fits(count):
        tried.append(count)
        peak = base + slope * count
        return {"peak_gib": peak} if peak <= 100 * (0.98 if count > 20 else 1) else None

    count, numbers, failed = memory.find_most(fits, 100, most=400)
    assert tried.index(failed) < 14
    best = max((n for n in range(1, 401) if fits(n)), default=0)
    assert (count, failed) == (best, best + 1)
    assert numbers == (fits(best) if best else {})


def test_numbers_of_known_gradients():
    exact = 2.0, {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[1.0, 0.0]])}
    same = gradients.compare(exact, exact)
    assert (same["off"], same["cosine"], same["along"], same["norm"]) == (0, 1, 1, 1)
    found = 2.1, {"a": 1.5 * exact[1]["a"], "b": torch.tensor([[1.0, 1.0]])}
    n = gradients.compare(found, exact)
    assert n["least_in"] == "b"
    assert (n["off"], n["least_cosine"]) == pytest.approx(((0.5 + 1) / 2, 0.5**0.5))
    assert (n["cosine"], n["along"]) == pytest.approx(((1 + 0.5**0.5) / 2, (1.5 + 1) / 2))
    assert n["norm"] == pytest.approx(((7.5**2 + 2) / (5**2 + 1)) ** 0.5)
    assert n["loss_gap"] == pytest.approx(0.05)


def test_what_fails_a_short_run_and_the_median_of_its_layers():
    good = {"loss": 2.0, "finite": True, "skipped_steps": 0}
    assert stability.judge(good, good, 0.05) == ""
    assert "+10.00% off" in stability.judge({**good, "loss": 2.2}, good, 0.05)
    assert "not finite" in stability.judge({**good, "finite": False}, good, 0.05)
    assert "3 steps were skipped" in stability.judge({**good, "skipped_steps": 3}, good, 0.05)
    shares = {"a": 0.5, "b": 0.1, "c": 0.2}

    class Sample(contextlib.nullcontext):
        def read(self, wait):
            return {n: {"g": {"underflow": s}, "x": {"underflow": 0.9}} for n, s in shares.items()}

    assert stability.median_underflow(Sample()) == 0.2


@pytest.mark.usefixtures("mesh")
def test_weights_are_compared_by_their_bits(monkeypatch):
    weights = [torch.zeros(3, 5), torch.full((4,), torch.nan, dtype=torch.bfloat16)]
    assert ddp_step.same_everywhere(weights)

    def broadcast(tensor, source):
        if tensor.numel() == 60:
            tensor[3] = 128  # minus zero

    monkeypatch.setattr(ddp_step.dist, "broadcast", broadcast)
    assert not ddp_step.same_everywhere(weights)


# --- optimizers that explode


class Flushing(torch.optim.AdamW):
    """v below 2^-16 of its row's largest is lost, as in 8 bits of sqrt(v) with a zero."""

    @torch.no_grad()
    def step(self):
        super().step()
        for state in self.state.values():
            v = state["exp_avg_sq"]
            v[v < v.amax(-1, keepdim=True) * 2**-16] = 0


class Dividing(torch.optim.AdamW):
    """The scale of m is its largest magnitude, by which it divides even where that is zero."""

    @torch.no_grad()
    def step(self):
        super().step()
        for state in self.state.values():
            scale = state["exp_avg"].abs().max()
            state["exp_avg"].div_(scale).mul_(scale)


def test_a_v_that_flushes_to_zero_and_a_weight_that_is_not_finite_are_found(
    monkeypatch, tmp_path, capsys
):
    library = SimpleNamespace(Flushing=Flushing, Dividing=Dividing, __version__="1")
    monkeypatch.setitem(sys.modules, "broken", library)
    variants = [
        optimizer_stress.Variant(f"fp8stack {k}", "broken", k) for k in ("Flushing", "Dividing")
    ]
    monkeypatch.setattr(optimizer_stress, "VARIANTS", variants)
    given = ["--device", "cpu", "--size", "64", "--steps", "40", "--out", str(tmp_path / "x.jsonl")]
    assert optimizer_stress.main([*given, "--cases", "narrow", "wide", "zero first"]) == 1
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {"fp8stack Flushing": ["wide"], "fp8stack Dividing": ["zero first"]}
    assert verdict == {"ok": False, "explode": found, "not_measured": {}}


def test_a_walk_is_what_its_page_shows():
    files, steps = walks.steps_of((walks.ROOT / "docs" / "tutorial-script.md").read_text())
    assert list(files) == ["train.py"]
    commands = [command for command, typed in steps if not typed]
    assert commands[:2] == ["fp8stack doctor", "fp8stack plan train.py:build_model"]
    ((session, typed),) = (step for step in steps if step[1])
    assert session == "python -i train.py"
    assert typed.count("fp8stack.initialize(") == 3
    assert walks.steps_of(walks.page_of("readme").read_text()) == (
        {},
        [("fp8stack demo --open", "")],
    )
    files, steps = walks.steps_of((walks.ROOT / "docs" / "tutorial-deepspeed.md").read_text())
    assert json.loads(files["ds_config.json"])["fp8stack"]["opt_level"] == "O2"
    assert "deepspeed.initialize(" in files["train.py"]
    assert [command.split()[0] for command, _ in steps] == ["fp8stack", "torchrun"]


def test_a_walk_that_fails_says_where(tmp_path):
    (tmp_path / "train.py").write_text("x = 1\n")
    assert "2\n" in walks.run("python -i train.py", "print(x + 1)\n", tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)train.py failed.*ZeroDivisionError"):
        walks.run("python -i train.py", "x / 0\nprint(x)\n", tmp_path)


class Printing(remeasure.Job):
    """Prints its GPUs and fails if it is named so."""

    def words(self, options):
        code = "import os, sys, time; time.sleep(0.2 + 9 * sys.argv[1].startswith('slow')); "
        code += (
            "print(sys.argv[1], os.environ['CUDA_VISIBLE_DEVICES']); sys.exit('bad' in sys.argv[1])"
        )
        return [sys.executable, "-c", code, self.name]


@pytest.mark.slow
def test_jobs_are_taken_by_the_gpus_that_may(tmp_path, monkeypatch, capsys):
    jobs = [
        Printing("timed", 1, ""),
        Printing("bad, untimed", 1, "", timed=False),
        Printing("all", 1, "", together=True),
        Printing("long", 999, "", timed=False),
        Printing("slow", 1, "", timed=False),
        Printing("text", 1, "{shards}"),
    ]
    monkeypatch.setattr(remeasure, "list_jobs", lambda: jobs)
    monkeypatch.setattr(remeasure, "CHECK", Printing("check", 0, ""))
    given = ["--gpus", "0", "1", "1", "--seconds", "4", "--output", str(tmp_path)]
    assert remeasure.main(given) == 1
    logs = {path.stem: path.read_text().strip() for path in tmp_path.glob("*.log")}
    assert logs["all"] == "all 0,1"
    assert logs["timed"] == "timed 0"  # not on a GPU with two workers
    assert logs["slow"] == "", "it was stopped when the time was over"
    assert logs.keys() == {"check", "all", "timed", "bad-untimed", "slow"}
    printed = capsys.readouterr().out
    assert "long: not begun: 999 s are not left" in printed
    assert re.search(r"bad, untimed FAILED: bad, untimed [01]", printed)
    assert "text" not in printed, "it needs --shards"


def test_jobs_that_need_text_are_left_out_without_it(capsys):
    assert remeasure.main(["--list", "--only", "monitor", "*"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("monitor: "), "what is named first comes first"
    assert "real_models.py --model qwen3-moe --only bf16 O0 O2 'O2 graphed' --output" in printed
    assert "training.py" not in printed


class ParsedError(Exception):
    pass


def test_every_job_is_a_command_that_its_program_takes(monkeypatch, tmp_path):
    own = argparse.ArgumentParser.parse_args

    def parse(self, arguments):
        raise ParsedError(own(self, arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    options = SimpleNamespace(gpus=[0, 1], output=tmp_path, shards=tmp_path, wheels=tmp_path)
    jobs = [*remeasure.list_jobs(), remeasure.CHECK]
    assert len({job.name for job in jobs}) == len(jobs) > 30
    for job in jobs:
        program, *rest = job.words(options)[1:]
        assert str(tmp_path) not in rest, "records hold the command, and no folder of this machine"
        if program != "-m":
            module = importlib.import_module(Path(program).stem)
            with pytest.raises(ParsedError):
                module.main(rest)
            for pattern in job.variants:
                assert fnmatch.filter([v.name for v in module.VARIANTS], pattern), pattern
