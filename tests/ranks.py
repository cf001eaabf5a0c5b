"""Ranks that tests start as processes of their own, in a twentieth of a second instead of three.

Nearly all that starting one takes is the import of torch and of frameworks, again in every rank. Without a GPU, ranks
are forks of a server, one for each worker of pytest, that has imported those and done nothing else: it has no threads,
no process group and no random numbers drawn, whatever the tests before have done. With a GPU, ranks are spawned.
"""

import gc
import os
import sys
from multiprocessing import forkserver

import torch.multiprocessing

IMPORTED = [
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch._dynamo", "triton",
    "helpers", "fp8stack.checkpoint", "fp8stack.comm", "fp8stack.kernels.step",
]  # fmt: skip
DEEPSPEED = "deepspeed.runtime.zero.muon.muon_optimizer"  # which has torch import its compiler
ENVIRONMENT = dict(os.environ)  # that of the session, before any test changes it


def start_ranks(function, arguments=(), nprocs=1):
    """Run `function(rank, *arguments)` in processes as torch.multiprocessing.spawn does; raise what one of them raises.

    They see the environment and the path of this process at the time of the call.
    """
    if torch.cuda.is_available():
        torch.multiprocessing.spawn(function, arguments, nprocs)
        return
    _start_server()
    given = (dict(os.environ), list(sys.path), function, arguments)
    torch.multiprocessing.start_processes(_run, given, nprocs, start_method="forkserver")


def context_of_ranks():
    """Return the context of multiprocessing that ranks are started in."""
    if torch.cuda.is_available():
        return torch.multiprocessing.get_context("spawn")
    _start_server()
    return torch.multiprocessing.get_context("forkserver")


def _run(rank, environment, path, function, arguments):
    _set_environment(environment)
    sys.path[:] = path
    torch.seed()  # forks would draw the same numbers, and hide weights that nobody made equal
    gc.freeze()  # modules, which stay: frameworks collect garbage often, a quarter of a second each time
    function(rank, *arguments)


def _start_server():
    """Start the server unless it runs. Not every Python hands it the path: PYTHONPATH does."""
    now = dict(os.environ)
    _set_environment({**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)})
    # DeepSpeed where this session has tests of it, which import it to see that it is there
    forkserver.set_forkserver_preload(IMPORTED + [DEEPSPEED] * ("deepspeed" in sys.modules))
    try:
        forkserver.ensure_running()
    finally:
        _set_environment(now)


def _set_environment(values):
    os.environ.clear()
    os.environ.update(values)
