"""Scripts that several ranks run, as forks (see ranks.py): for tests in which it is not their start that counts."""

import os
import runpy
import sys

from helpers import free_port
from ranks import start_ranks


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
