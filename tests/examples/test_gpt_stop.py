"""Runs that are ended by signals: at the end of a step, with a checkpoint, on all ranks; and they go on as if not."""

import os
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
import train_gpt
from gpt.checkpoints import list_checkpoints
from gpt.stopping import NAMES, Signals
from workers_gpt import read, write_text
from workers_scripts import group_of, run_script

SCRIPT = Path(train_gpt.__file__)
SMALL = """--model tiny --seq-len 16 --steps 40 --target-effective-batch-size 4 --micro-batch 2 --checkpoint-freq 100
    --eval-freq 15 --eval-batches 2 --eval-batch-size 1 --log-freq 1 --device cpu --no-tensorboard"""
STOPPED = re.compile(r"stopped by (\w+) at step (\d+): --resume auto goes on")


@pytest.fixture
def flags(tmp_path):
    text = write_text(tmp_path)
    return [*SMALL.split(), "--data", str(text), "--out", str(tmp_path / "runs")]


@pytest.fixture
def start(ctrl_c):
    """Start a process, which does not outlive the test."""
    started = []

    def start(command, **variables):
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), **variables}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def start_ranks(start):
    """Start the ranks of a run without torchrun, whose agent would hand signals to all of them."""

    def start_ranks(flags, count):
        command = [sys.executable, str(SCRIPT), *flags]
        ranks = [{"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(count)]
        group = group_of(count)
        return [start(command, **rank, **group) for rank in ranks]

    return start_ranks


def begin(process):
    """Wait until a step was logged; return what came before."""
    said = ""
    for line in process.stdout:
        said += line
        if re.match(r"step \d+ \| epoch", line):
            return said
    raise AssertionError(process.stderr.read())


def end(process, timeout=240):
    """Return status, stdout that is left, and stderr of a process that ends."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def stopped_at(out, name):
    (found,) = STOPPED.findall(out)
    assert found[0] == name
    return int(found[1])


def losses_of(folder):
    return [r["loss"] for r in read(folder / "metrics.jsonl") if "loss" in r]


def test_a_run_that_signals_stop_three_times_ends_as_one_that_was_left_alone(
    start, flags, tmp_path
):
    runs, at = tmp_path / "runs", [0]
    for name in NAMES:
        process = start(
            [sys.executable, str(SCRIPT), *flags, "--run-name", "a", "--resume", "auto"]
        )
        begin(process)
        process.send_signal(getattr(signal, name))
        status, out, err = end(process)
        assert status == 128 + getattr(signal, name)
        assert "Traceback" not in err
        assert ("Ctrl-C again ends at once" in err) == (name == "SIGINT")
        at.append(stopped_at(out, name))
        assert out.splitlines()[-1].startswith("stopped by")  # nothing is evaluated any more
        newest = list_checkpoints([runs / "a-fp8-o2" / "checkpoints_fp8"])[-1]
        assert (newest.step, newest.manifest["val_loss"]) == (at[-1], None)
    assert at == sorted(set(at))
    assert at[-1] < 40
    assert train_gpt.main([*flags, "--run-name", "a", "--resume", "auto"]) == 0
    assert train_gpt.main([*flags, "--run-name", "alone"]) == 0
    assert losses_of(runs / "a-fp8-o2") == losses_of(runs / "alone-fp8-o2")
    assert len(losses_of(runs / "alone-fp8-o2")) == 40


def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_step(start_ranks, flags, tmp_path):
    flags, runs = (
        [*flags, "--opt-level", "off", "--parallel", "ddp", "--seq-len", "64"],
        tmp_path / "runs",
    )
    ranks = start_ranks([*flags, "--run-name", "a"], 2)
    begin(ranks[0])
    ranks[1].send_signal(signal.SIGTERM)
    (status, out, err), (other, _, errors) = map(end, ranks)
    assert status == other == 128 + signal.SIGTERM
    assert "Traceback" not in err + errors
    assert "FutureWarning" not in err + errors  # torch 2.13 deprecates DDP's broadcast_buffers
    step = stopped_at(out, "SIGTERM")
    assert list_checkpoints([runs / "a-bf16" / "checkpoints"])[-1].step == step < 40
    for name in ("a", "alone"):
        command = [str(SCRIPT), *flags, "--run-name", name, "--resume", "auto"]
        run_script(command, tmp_path / f"{name}.log")
    assert losses_of(runs / "a-bf16") == losses_of(runs / "alone-bf16")


def test_torchrun_hands_a_signal_to_its_ranks_which_stop(start, flags, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    process = start([*command, "2", str(SCRIPT), *flags])
    begin(process)
    process.send_signal(signal.SIGTERM)
    status, out, err = end(process)
    assert status != 0, err
    step = stopped_at(out, "SIGTERM")
    steps = read(tmp_path / "runs" / "tiny-fp8-o2" / "metrics.jsonl")
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, step + 1))  # once
    assert all(line["comm/bytes"] > 0 for line in steps if "loss" in line)
    folder = tmp_path / "runs" / "tiny-fp8-o2" / "checkpoints_fp8"
    assert list_checkpoints([folder])[-1].step == step


def test_a_second_ctrl_c_ends_a_run_at_once(start, flags, tmp_path):
    slow = ("--seq-len", "256", "--target-effective-batch-size", "60", "--micro-batch", "1")
    process = start([sys.executable, str(SCRIPT), *flags, *slow, "--opt-level", "off"])
    begin(process)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() + process.stderr.readline() == (
        "\ntrain_gpt: stopping at the end of this step, with a checkpoint; Ctrl-C again ends at once\n"
    )
    process.send_signal(signal.SIGINT)
    assert end(process, timeout=20)[::2] == (-signal.SIGINT, "")
    assert not list((tmp_path / "runs").glob("*/checkpoints/step_*"))


def test_a_run_is_gone_when_its_ranks_part(flags, monkeypatch):
    """DDP, freed after the process group, may wait for gloo's threads for ever."""
    seen, leave = [], dist.destroy_process_group

    class Noticed(train_gpt.Trainer):
        def __init__(self, config):
            super().__init__(config)
            seen.append((weakref.ref(self), weakref.ref(self.forward)))

    def part():
        seen.append([run() for run in seen[0]])
        leave()

    for name, value in {**group_of(1), "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_gpt, "Trainer", Noticed)
    monkeypatch.setattr(dist, "destroy_process_group", part)
    options = ["--parallel", "ddp", "--opt-level", "off", "--steps", "2"]
    assert train_gpt.main([*flags, *options]) == 0
    assert seen[1] == [None, None]
    assert not dist.is_initialized()


def test_handlers_are_put_back(ctrl_c):
    before = [signal.getsignal(getattr(signal, name)) for name in NAMES]
    with Signals() as signals:
        assert signals.received == 0
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGUSR1  # the first
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert [signal.getsignal(getattr(signal, name)) for name in NAMES] == before


def test_ctrl_c_before_a_run_begins_ends_it_without_a_traceback(start, flags):
    process = start([sys.executable, str(SCRIPT), *flags])
    assert "loading PyTorch" in process.stdout.readline()  # while it imports
    process.send_signal(signal.SIGINT)
    assert end(process)[::2] == (-signal.SIGINT, "")
