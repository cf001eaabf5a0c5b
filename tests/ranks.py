"""Ranks that tests start as processes of their own, in a twentieth of a second instead of three.

`run_ranks` is what a test calls: it starts the processes, has them join a process group, and runs a function of the
test's own file in each, so that what ranks do stands beside the test.

Nearly all that starting a process takes is the import of torch and of frameworks, again in every rank. Without a GPU,
ranks are therefore forks of a server, one for each worker of pytest, that has imported those and done nothing else: it
has no threads, no process group and no random numbers drawn, whatever the tests before have done. With a GPU, ranks are
spawned.
"""

import contextlib
import gc
import importlib.util
import inspect
import os
import sys
import tempfile
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from helpers import assert_same_bits, batch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

IMPORTED = [
    "helpers", "pytest", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch._dynamo", "triton",
    "workers_gpt", "fp8stack.checkpoint", "fp8stack.comm", "fp8stack.kernels.step",
]  # fmt: skip
# And what ranks import of those that this session has tests of, which import them to see that they are there.
# DeepSpeed's Muon has torch import its compiler.
MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
EXPERTS = "transformers.models.qwen3_moe.modeling_qwen3_moe"
FRAMEWORKS = [MUON, "transformers.trainer", EXPERTS, "lightning.pytorch"]
ENVIRONMENT = dict(os.environ)  # that of the session, before any test changes it


def run_ranks(function, world, *arguments, device="cpu", timeout=60, barrier=True):
    """Run `function(rank, *arguments)` in `world` processes that are the ranks of a group; return what each returned.

        def add_up(rank, size):
            x = torch.full((size,), rank + 1.0)
            dist.all_reduce(x)
            assert x.eq(3).all()
            return x.sum().item()

        def test_sums_over_ranks():
            assert run_ranks(add_up, 2, 10) == [30.0, 30.0]

    Before `function` is called, the rank joins the group and, with device="cuda", makes GPU `rank` the current one;
    RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set as torchrun sets them. Afterwards all ranks wait for each
    other, leave, and end. The environment and the path are those of the caller now; the random seed differs on every
    rank. Starting ranks takes longer than most checks: do several in one call.

    Args:
        function: a module-level function of a test file or of any other module; a rank loads the file by its path.
        world: the number of ranks.
        arguments: numbers, strings, dtypes, tensors and the like: no instances of classes of the test's own file.
        device: "cpu" joins a group over gloo, "cuda" over NCCL; None joins none, for frameworks that do it themselves.
        timeout: seconds that a collective waits for the other ranks before it raises.
        barrier: False: ranks end as soon as they return. For a group over NCCL that `function` leaves broken.

    Returns:
        A list of the results, by rank: None, numbers, strings, tensors on the CPU, and lists, tuples and dicts of them.
        None stands for a rank that `function` ended by `os._exit(0)`.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of a rank that raised; the others are ended.
    """
    if "<" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is no function at the top of its module")
    named = function.__module__, inspect.getfile(function), function.__qualname__
    with tempfile.TemporaryDirectory() as folder:
        group = (world, folder, device, timeout, barrier)
        start_ranks(_be_rank, (*group, named, arguments), nprocs=world)
        written = [Path(folder, f"result{rank}.pt") for rank in range(world)]
        return [torch.load(p, weights_only=True) if p.exists() else None for p in written]


def _be_rank(rank, world, folder, device, timeout, barrier, named, arguments):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    function = _function(*named)
    if device == "cuda":
        torch.cuda.set_device(rank)
    if device is not None:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
    torch.save(function(rank, *arguments), Path(folder, f"result{rank}.pt"))
    if barrier and device is not None:
        # A rank that left before the others are done would take connections with it. Where one has failed, its own
        # error is the one to report, not that of the barrier.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads sometimes abort a process that ends in order


def _function(module, path, name):
    """Return a function of a file, which is loaded under the name that pytest gave it."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        for folder in (module.rpartition(".")[0], module.partition(".")[0]):  # which pickle imports
            sys.modules.setdefault(folder, ModuleType(folder))
        spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)


# --- what ranks check


def own_device():
    """Return the device of this rank: its GPU in a group over NCCL, the CPU in one over gloo."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def drawn(rank, size, dtype=torch.float32):
    """Return the numbers of a rank, the same in every process."""
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def assert_equal_everywhere(tensor, group=None):
    """Fail unless all ranks hold the same bits."""
    mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    for other in theirs:
        assert_same_bits(other, mine)


def assert_same_on_all_ranks(model):
    """Compare the bits of weights (whole ones: a part of its own on each rank is another)."""
    for p in model.parameters():
        assert_equal_everywhere(p)


def assert_near(result, exact, decibels):
    """Check the signal-to-noise ratio, in dB."""
    exact = exact.double().to(result.device)
    noise = (result.double() - exact).square().sum()
    assert noise <= exact.square().sum() * 10 ** (-decibels / 10), (result, exact)


def train_part(model, optimizer, rank, world, device):
    """Take 12 steps on this rank's part of the batches of a TinyLM; return the losses."""
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        loss = model(*batch(world * step + rank, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def gather(x):
    """Return all of a tensor that may be sharded, as bytes where it is float8: gloo moves no others."""
    if not hasattr(x, "device_mesh"):
        return x
    if x.dtype is not torch.float8_e4m3fn:
        return x.full_tensor()
    part, size = x.to_local().view(torch.uint8), {"shape": x.shape, "stride": x.stride()}
    whole = DTensor.from_local(part, x.device_mesh, x.placements, **size)
    return whole.full_tensor().view(x.dtype)


def whole(model, optimizer):
    """Return every weight and state as whole tensors on the CPU, by name."""
    found = {}
    for name, p in model.named_parameters():
        for key, value in {"weight": p.data, **optimizer.state[p]}.items():
            found[f"{name}.{key}"] = gather(value).cpu().clone()
    return found


def states_of(model, optimizer):
    """Return what torch.distributed.checkpoint saves of both."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load_states(path, model, optimizer):
    """Fill both from what torch.distributed.checkpoint saved."""
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=path)
    loaded = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    set_state_dict(model, optimizer, **loaded)


# --- processes


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
    more = [name for name in FRAMEWORKS if name.partition(".")[0] in sys.modules]
    forkserver.set_forkserver_preload(IMPORTED + more)
    try:
        forkserver.ensure_running()
    finally:
        _set_environment(now)


def _set_environment(values):
    os.environ.clear()
    os.environ.update(values)
