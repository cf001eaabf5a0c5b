"""Disks that are full or read-only while a run writes its records: one line that names the file, and status 2."""

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import train_gpt
from gpt import checkpoints, logs
from gpt.trainer import Trainer
from tensorboard.summary.writer.record_writer import RecordWriter
from workers_gpt import configure, write_text

from fp8stack.errors import ConfigError

ROOT = Path(train_gpt.__file__).parents[1]
SMALL = """--model tiny --seq-len 16 --steps 3 --warmup-steps 1 --target-effective-batch-size 2 --micro-batch 2
    --eval-freq 0 --checkpoint-freq 2 --device cpu --opt-level off --run-name disk"""
LIMIT = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit, sys.argv = int(sys.argv[1]), sys.argv[2:]
import torch.utils.tensorboard
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def flags(tmp_path):
    text = write_text(tmp_path)
    return [*SMALL.split(), "--data", str(text), "--out", str(tmp_path / "runs")]


class FullFile:
    """A file on a disk that has no room."""

    def __init__(self, file):
        self.file, self.name, self.closed_once = file, file.name, False

    def write(self, text):
        return len(text)

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        self.file.close()
        self.closed_once = True
        self.flush()


def test_a_record_that_finds_no_room_is_one_line(tmp_path, monkeypatch):
    write_text(tmp_path)
    trainer = Trainer(configure(tmp_path, opt_level="off"))
    trainer.log.file = full = FullFile(trainer.log.file)
    with pytest.raises(
        ConfigError, match=r"metrics.jsonl cannot be written \(No space left"
    ) as told:
        trainer.run()
    assert "Make room" in str(told.value)
    assert "--resume latest" in str(told.value)
    assert full.closed_once
    assert len(trainer.losses) == 1


def test_a_thread_of_tensorboard_that_finds_no_room_is_one_line(tmp_path, monkeypatch, capsys):
    write_text(tmp_path)
    trainer = Trainer(configure(tmp_path, opt_level="off", tensorboard=True))
    worker = trainer.log.board.file_writer.event_writer._async_writer._worker
    written = threading.Event()

    def refuse(*_):
        written.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "write", refuse)
    monkeypatch.setattr(threading, "excepthook", logs.forgive_thread)
    with pytest.raises(ConfigError, match=r"tensorboard cannot be written \(No space left"):
        trainer.run()
    worker.join(timeout=60)
    assert written.is_set()
    assert not worker.is_alive()
    assert "Traceback" not in capsys.readouterr().err
    thread = threading.Thread(target=lambda: 1 / 0)  # others are told as ever
    thread.start()
    thread.join()
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("board", "files"),
    [("--no-tensorboard", r"metrics\.jsonl"), ("--tensorboard", r"(tensorboard|metrics\.jsonl)")],
)
def test_files_that_cannot_grow_end_a_run_without_a_traceback(flags, board, files):
    """By a real limit, which run.json keeps and its records do not, TensorBoard's thread or this one first."""
    script = str(ROOT / "examples" / "train_gpt.py")
    command = [sys.executable, "-c", LIMIT, "4000", script, *flags, "--steps", "90"]
    command += ["--checkpoint-freq", "0", board]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert re.search(rf"/{files} cannot be written \(File too large\)", result.stderr)


@pytest.mark.parametrize("where", ["full", "pipe", "both closed"])
def test_a_run_goes_on_without_its_stdout(flags, where, tmp_path):
    redirect = {"full": "> /dev/full", "pipe": "| head -n 1", "both closed": ">&- 2>&-"}[where]
    arguments = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *flags, "--log-freq", "1"]
    script = f'{{ "$@"; echo $? > {tmp_path}/status; }} {redirect}'
    command = ["bash", "-c", script, "bash", *arguments, "--no-tensorboard"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (tmp_path / "status").read_text() == "0\n"
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 3
    assert list((tmp_path / "runs").rglob("step_00000003"))
    reason = {"full": "No space left on device", "pipe": "Broken pipe"}.get(where)
    told = (
        f"train_gpt: warning: stdout cannot be written ({reason}): nothing more is printed there."
    )
    assert result.stderr.startswith(told) if reason else result.stderr == ""
    assert len(result.stderr.splitlines()) == bool(reason)


def test_overwrite_on_a_read_only_disk_is_one_line(flags, monkeypatch, capsys):
    assert train_gpt.main([*flags, "--no-tensorboard"]) == 0
    capsys.readouterr()

    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(checkpoints.shutil, "rmtree", refuse)
    assert train_gpt.main([*flags, "--no-tensorboard", "--overwrite"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "disk-bf16/checkpoints cannot be emptied (Read-only file system)" in error
