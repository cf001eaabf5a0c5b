"""Without a GPU, Triton kernels run on CPU tensors in its interpreter, which must be chosen before Triton loads.

With `-m "not gpu"` a machine's GPUs are hidden, so that tests which mean a CPU do not get one.

With several GPUs, workers of pytest-xdist take turns on them; tests of several at once (`gpus`) run without workers.
"""

import atexit
import gc
import os
import re
import signal
import sys
import zlib
from importlib.util import find_spec

import pytest
import torch

worker = os.environ.get("PYTEST_XDIST_WORKER", "")
count = torch.cuda.device_count()  # which NVML counts: CUDA is not initialized yet
if count and any(re.search(r"\bnot +\(?gpu\b", word) for word in sys.argv):  # of -m
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for workers too
elif worker and count > 1:
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = given[int(worker.removeprefix("gw")) % count]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from interpreter import quicken  # imports Triton, which was told to interpret

        quicken()
if worker or not torch.cuda.is_available():
    # Small tensors and a worker per core: waiting for a second thread costs more than the work. Processes that tests
    # start look at the variable, and give the same bits then, however busy the machine is.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
os.environ.setdefault("FP8STACK_QUIET", "1")
gc.set_threshold(50_000)  # as in helpers.py, from here on


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        for item in items:
            if "kernel_device" in getattr(item, "fixturenames", ()):  # is on the GPU then
                item.add_marker(pytest.mark.gpu)
        return
    # Left out, not skipped, as they are a third of all and each skip is reported.
    config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
    items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_collection_finish():
    atexit.register(gc.unfreeze)  # behind pytest's own collections, of which it does five
    gc.freeze()  # modules and 10,000 tests, which nothing frees: looking through them takes half a second each time


@pytest.fixture(autouse=True)
def _seed(request):
    """Seed every test from its own name, so that neither order nor selection changes its numbers."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.split("::", 1)[-1].encode()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every device that the operators run on: the reference on cpu, Triton on cuda."""
    return request.param


@pytest.fixture
def kernel_device():
    """Where Triton kernels run in this session: on the GPU, or in the interpreter on CPU tensors."""
    if torch.cuda.is_available():
        return "cuda"
    pytest.importorskip("triton", "3.3")  # the interpreter of 3.2 computes otherwise
    return "cpu"


@pytest.fixture
def choose_kernels(monkeypatch):
    """Return a function that sets FP8STACK_KERNELS as if no kernel had been asked for before."""
    from fp8stack.kernels import ops

    def forget():
        ops.kernel_backend.cache_clear()
        ops.implementation.cache_clear()

    def choose(value):
        monkeypatch.setenv("FP8STACK_KERNELS", value)
        forget()

    yield choose
    monkeypatch.undo()
    forget()


@pytest.fixture
def by_size(monkeypatch):
    """Let select="auto" choose layers, which helpers.py takes away."""
    from fp8stack.nn import convert, select

    monkeypatch.setattr(convert, "least_rows_of", select.least_rows_of)


@pytest.fixture(scope="module")
def frozen():
    """Spare the many collections of a file what exists when it begins: torch's objects alone take 0.1 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mesh(tmp_path):
    """A process group of this rank alone, on the CPU."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def ctrl_c():
    """Let processes that the test starts be interrupted, where a shell ignores that for its jobs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
