"""A run's records and checkpoints are not lost or mixed with another's: also on disks that are full or read-only."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import train_gpt
from gpt import checkpoints
from gpt.trainer import Trainer
from workers_gpt import configure, losses_of, read, train
from workers_scripts import Started

from fp8stack.errors import ConfigError, Fp8StackWarning

SCRIPT = Path(train_gpt.__file__)
ROOT = SCRIPT.parents[1]
LIMIT = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit, sys.argv = int(sys.argv[1]), sys.argv[2:]
import torch.utils.tensorboard
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HOLD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gpt.lock import lock
file = lock(Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_record_is_cut_where_the_run_goes_on(folder):
    options = {"run_name": "cut"}
    train(folder, **options)
    run = folder / "runs" / "cut-fp8-o2"
    whole, path = (run / "metrics.jsonl").read_bytes(), run / "checkpoints_fp8" / "step_00000002"
    trainer = Trainer(configure(folder, **options, resume=str(path)))
    kept = (run / "metrics.jsonl").read_bytes()  # now, where a kill would leave it so
    assert kept == b"".join(whole.splitlines(keepends=True)[:2])
    trainer.run()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('5\n{"loss": 3}\n{"step": 4, "lo')  # no steps, and half a line
    train(folder, **options, resume=str(path))
    assert [line["step"] for line in read(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == [".lock"]


def test_tokens_are_counted_over_a_resume_with_another_batch(folder):
    options = {"run_name": "tokens", "eval_freq": 2, "steps": 4}
    train(folder, **options)
    run = folder / "runs" / "tokens-fp8-o2"
    path = run / "checkpoints_fp8" / "step_00000002"
    with pytest.warns(Fp8StackWarning, match="--target-effective-batch-size was 4, is now 8"):
        train(folder, **options, resume=str(path), target_effective_batch_size=8)
    tokens = [(line["step"], line["tokens"]) for line in read(run / "metrics.jsonl")]
    assert tokens == [(1, 64), (2, 128), (2, 128), (3, 256), (4, 384), (4, 384)]


def test_a_folder_is_one_run_s_at_a_time_and_free_when_that_is_killed(folder):
    options = {"run_name": "two", "opt_level": "off"}
    losses = train(folder, **options)
    run = folder / "runs" / "two-bf16"
    before = (run / "metrics.jsonl").read_bytes()
    command = [sys.executable, "-c", HOLD, str(ROOT / "examples"), str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        expected = rf"in use by another run \(.*, process {other.pid}\)"
        # said at once: a second run that read a checkpoint first would go on from it when the first one has ended
        newest = max(run.glob("checkpoints/step_*"))
        newest.rename(run / "unreadable")
        newest.touch()
        for how in ({}, {"overwrite": True}, {"resume": "auto"}, {"resume": str(newest)}):
            with pytest.raises(ConfigError, match=expected):
                train(folder, **options, **how)
        newest.unlink()
        (run / "unreadable").rename(newest)
        assert (run / "metrics.jsonl").read_bytes() == before
        assert len(list(run.glob("checkpoints/step_*"))) == 2
        other.kill()
    assert train(folder, **options, resume="auto") == losses


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "checkpoints"])
def test_overwrite_deletes_nothing_where_the_new_run_cannot_begin(flags, tmp_path, name, capsys):
    pytest.importorskip("tensorboard")
    flags += ["--opt-level", "off", "--run-name", "whole"]
    assert train_gpt.main(flags) == 0
    run = tmp_path / "runs" / "whole-bf16"
    losses = losses_of(run)
    with pytest.MonkeyPatch.context() as patch:
        if name == "checkpoints":

            def refuse(path):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

            patch.setattr(checkpoints.shutil, "rmtree", refuse)
        else:
            (run / name).rename(run / "moved")
            (run / name).mkdir() if name == "metrics.jsonl" else (run / name).touch()
        capsys.readouterr()
        assert train_gpt.main([*flags, "--seed", "5", "--overwrite"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    what = "emptied (Read-only file system)" if name == "checkpoints" else "written"
    assert f"whole-bf16/{name} cannot be {what}" in error
    if name == "checkpoints":
        assert losses_of(run) == losses
    else:
        assert len(list(run.glob("checkpoints/step_*"))) == 2


@pytest.mark.parametrize("board", ["--no-tensorboard", "--tensorboard"])
def test_files_that_cannot_grow_end_a_run_without_a_traceback(flags, board, tmp_path):
    """By a real limit, which run.json keeps and its records do not, TensorBoard's thread or this one first."""
    (tmp_path / "limit.py").write_text(LIMIT)
    command = [tmp_path / "limit.py", "4000", SCRIPT, *flags, "--steps", "90", board]
    command += ["--opt-level", "off", "--eval-freq", "0", "--checkpoint-freq", "0"]
    status, _, errors = Started(command, "/dev/null", tmp_path / "errors").end()
    assert (status, errors.count("\n")) == (2, 1), errors
    expected = r"/(tensorboard|metrics\.jsonl) cannot be written \(File too large\). Make room"
    assert re.search(expected, errors)


def test_a_run_goes_on_without_its_stdout(flags, tmp_path):
    full = [*flags, "--no-tensorboard", "--run-name", "full"]
    status, _, errors = Started([SCRIPT, *full], "/dev/full", tmp_path / "errors").end()
    assert status == 0
    (line,) = errors.splitlines()
    told = "train_gpt: warning: stdout cannot be written (No space left on device): nothing more"
    assert line.startswith(told)
    # Python itself begins without streams that are closed
    closed = [sys.executable, str(SCRIPT), *flags, "--no-tensorboard", "--run-name", "closed"]
    run = subprocess.run(["bash", "-c", '"$@" >&- 2>&-', "bash", *closed], timeout=240)
    assert run.returncode == 0
    for name in ("full", "closed"):
        (run,) = (tmp_path / "runs").glob(f"{name}-*")
        assert len(losses_of(run)) == 4
        assert list(run.rglob("step_00000004"))
