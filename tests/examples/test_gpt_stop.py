"""Runs that are ended by signals: at the end of a step, with a checkpoint, on all ranks; and they go on as if not."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_gpt
from gpt.checkpoints import list_checkpoints
from gpt.stopping import NAMES
from workers_gpt import losses_of
from workers_scripts import Started, group_of, run_script

SCRIPT = Path(train_gpt.__file__)
LONGER = "--steps 24 --checkpoint-freq 100 --eval-freq 9 --no-tensorboard"
SLOW = "--seq-len 256 --target-effective-batch-size 60 --micro-batch 1 --opt-level off"


@pytest.fixture
def start(tmp_path):
    """Start a script, which does not outlive the test."""
    started = []

    def start(command, **variables):
        streams = (tmp_path / f"{name}{len(started)}.txt" for name in ("out", "err"))
        started.append(Started(command, *streams, **variables))
        return started[-1]

    yield start
    for script in started:
        script.kill()


def begin(started):
    """Wait until a step was logged."""
    if not any(re.match(r"step \d+ \| epoch", line) for line in started.lines()):
        raise AssertionError(started.end())


def stopped_at(out, name):
    (found,) = re.findall(r"stopped by (\w+) at step (\d+): --resume auto goes on", out)
    assert found[0] == name
    return int(found[1])


def test_a_run_that_signals_stop_twice_ends_as_one_that_was_left_alone(start, flags, tmp_path):
    """By SIGTERM it is stopped below."""
    flags, runs, at = [*flags, *LONGER.split(), "--resume", "auto"], tmp_path / "runs", [0]
    for name in sorted({*NAMES} - {"SIGTERM"}):
        process = start([str(SCRIPT), *flags, "--run-name", "a"])
        begin(process)
        process.send_signal(getattr(signal, name))
        status, out, err = process.end()
        assert status == 128 + getattr(signal, name)
        assert "Traceback" not in err
        assert ("Ctrl-C again ends at once" in err) == (name == "SIGINT")
        at.append(stopped_at(out, name))
        assert out.splitlines()[-1].startswith("stopped by")  # nothing is evaluated any more
        newest = list_checkpoints([runs / "a-fp8-o2" / "checkpoints_fp8"])[-1]
        assert (newest.step, newest.manifest["val_loss"]) == (at[-1], None)
    assert at == sorted(set(at))
    assert at[-1] < 24
    for name in ("a", "alone"):
        assert train_gpt.main([*flags, "--run-name", name]) == 0
    assert losses_of(runs / "a-fp8-o2") == losses_of(runs / "alone-fp8-o2")
    assert len(losses_of(runs / "alone-fp8-o2")) == 24


def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_step(start, flags, tmp_path):
    """Without torchrun, whose agent would hand signals to all of them."""
    more = ["--opt-level", "off", "--parallel", "ddp", "--seq-len", "64", "--resume", "auto"]
    flags, runs, group = [*flags, *LONGER.split(), *more], tmp_path / "runs", group_of(2)
    ranks = [
        start([str(SCRIPT), *flags, "--run-name", "a"], RANK=n, LOCAL_RANK=n, **group) for n in "01"
    ]
    begin(ranks[0])
    ranks[1].send_signal(signal.SIGTERM)
    (status, out, err), (other, _, errors) = (rank.end() for rank in ranks)
    assert status == other == 128 + signal.SIGTERM
    assert "Traceback" not in err + errors
    assert "FutureWarning" not in err + errors  # torch 2.13 deprecates DDP's broadcast_buffers
    step = stopped_at(out, "SIGTERM")
    assert list_checkpoints([runs / "a-bf16" / "checkpoints"])[-1].step == step < 24
    for name in ("a", "alone"):
        run_script([str(SCRIPT), *flags, "--run-name", name], tmp_path / f"{name}.log")
    assert losses_of(runs / "a-bf16") == losses_of(runs / "alone-bf16")


def test_ctrl_c_ends_a_run_at_once_before_it_begins_and_the_second_time(
    start, flags, ctrl_c, tmp_path
):
    command = [str(SCRIPT), *flags, *f"{LONGER} {SLOW}".split()]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    early = subprocess.Popen([sys.executable, *command], env=environment, **pipes)
    with early:
        assert "loading PyTorch" in early.stdout.readline()  # while it imports
        early.send_signal(signal.SIGINT)
        assert early.communicate(timeout=60)[1] == ""
        assert early.returncode == -signal.SIGINT
    late, errors = start(command), tmp_path / "err0.txt"
    begin(late)
    late.send_signal(signal.SIGINT)
    told = "\ntrain_gpt: stopping at the end of this step, with a checkpoint; Ctrl-C again ends at once\n"
    while errors.read_text() != told:
        assert told.startswith(errors.read_text())
        time.sleep(0.001)
    late.send_signal(signal.SIGINT)
    status, _, err = late.end()
    assert (status, err) == (-signal.SIGINT, told)
    assert not list((tmp_path / "runs").glob("*/checkpoints/step_*"))
