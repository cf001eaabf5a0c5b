"""Kill a run with SIGKILL again and again while it writes checkpoints, and let it go on: `kill_gpt.py FOLDER KILLS`.

Processes are forked from this one, which has imported everything and never ran a backward: torch allows that, and a
start takes a fraction of a second. It prints how many kills there were, how many of them left an unfinished checkpoint,
and whether the losses are those of a run that was left alone.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401 (every optimizer imports it, in two seconds)
from gpt.checkpoints import list_checkpoints
from workers_gpt import train, write_text

STEPS = 400


def fork(folder: Path, name: str, **options) -> int:
    """Start a run in a process of its own; return its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with open(folder / f"{name}.log", "a") as log:
            os.dup2(log.fileno(), 1)
            losses = train(folder, run_name=name, log_freq=1000, **options)
            (folder / f"{name}.json").write_text(json.dumps(losses))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def newest(checkpoints: Path) -> int:
    """Return the step of the last checkpoint, 0 without one."""
    found = list_checkpoints([checkpoints])
    return found[-1].step if found else 0


def main(folder: Path, kills: int) -> None:
    write_text(folder)
    draw = random.Random(0)
    checkpoints = folder / "runs" / "killed-fp8-o2" / "checkpoints_fp8"
    # a constant rate: where the run ends is known later
    options = {"steps": STEPS, "checkpoint_freq": 1, "resume": "latest", "min_lr_ratio": 1}
    unfinished = 0
    for _ in range(kills):
        before = newest(checkpoints)
        pid = fork(folder, "killed", **options)
        while newest(checkpoints) == before or not any(checkpoints.glob(".writing-*")):
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended by itself"
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        unfinished += any(checkpoints.glob(".writing-*"))
    steps = newest(checkpoints) + 2
    for name, more in (("killed", {}), ("alone", {"checkpoint_freq": 0, "resume": None})):
        status = os.waitpid(fork(folder, name, **{**options, "steps": steps, **more}), 0)[1]
        assert status == 0, name
    same = (folder / "killed.json").read_text() == (folder / "alone.json").read_text()
    print(json.dumps({"kills": kills, "unfinished": unfinished, "steps": steps, "same": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
