"""Scripts that several ranks run, as forks (see ranks.py): for tests in which it is not their start that counts."""

import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
from helpers import free_port
from ranks import context_of_ranks, start_ranks


def group_of(count):
    """Return the variables by which ranks meet."""
    return {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def run_script(command, output, count=2, **variables):
    """Run a script and its arguments as torchrun does, if it ends in order; return what the first rank printed.

    count: of ranks; 0 is one process that is no rank.
    """
    group = group_of(count) if count else {}
    start_ranks(_run, (command, str(output), {**variables, **group}), nprocs=max(count, 1))
    return output.read_text()


class Started:
    """A script that runs as a fork, with what it prints in two files: a `subprocess.Popen` that starts at once.

    command: the script and its arguments.
    stdout, stderr: paths, or "" for a stream that is closed.
    """

    def __init__(self, command, stdout, stderr, **variables):
        self._printed, self._errors = stdout, stderr
        if stdout:
            Path(stdout).touch()
        given = (dict(os.environ, **variables), list(sys.path), list(map(str, command)))
        streams = str(stdout), str(stderr)
        self._process = context_of_ranks().Process(target=_be_script, args=(*given, *streams))
        self._process.start()

    def lines(self):
        """Yield whole lines of stdout as they come, until the process ends."""
        with open(self._printed) as file:
            begun = ""
            while True:
                ended = not self._process.is_alive()
                *whole, begun = (begun + file.read()).split("\n")
                yield from whole
                if ended:
                    return
                time.sleep(0.01)

    def send_signal(self, number):
        os.kill(self._process.pid, number)

    def end(self, timeout=60):
        """Return status, stdout and stderr of a process that ends."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it has not ended"
        files = Path(self._printed), Path(self._errors)  # or devices, of which /dev/full has no end
        return self._process.exitcode, *(p.read_text() if p.is_file() else "" for p in files)

    def kill(self):
        self._process.kill()
        self._process.join()


def _be_script(environment, path, command, stdout, stderr):
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.manual_seed(0)
    for number, name in ((1, stdout), (2, stderr)):
        if name:
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        else:
            os.close(number)
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    with contextlib.suppress(OSError):  # a full disk, which the script has told
        sys.stdout.flush()
    os._exit(status)


def _run(rank, command, output, variables):
    if "WORLD_SIZE" in variables:
        variables = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(variables)
    with open(output if rank == 0 else os.devnull, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    sys.argv = list(command)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    sys.stdout.flush()
    os._exit(0)  # torch's threads sometimes abort a process that ends in order
