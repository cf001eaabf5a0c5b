"""What `fp8stack doctor` runs to see that FP8 works here: a GEMM, an optimizer step, an all-reduce of two processes.

Each is compared with plain arithmetic within a bound that follows from the formats: rounding to E4M3 (3 bits of
mantissa) changes a normal number by at most 1/16 of it. Inputs are from 0.5 to 1.5, so none is subnormal and blocks
need no luck; what is summed has one sign, so relative errors bound the sum's. Each test runs in processes of its own,
which are killed at the time limit: neither a hanging driver nor a crash in a library stops the doctor.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes

import fp8stack
from fp8stack.capability import Answer, fp8_gemm

LIMIT = 120.0
"""Seconds for one test, the start of its processes and the compilation of kernels included."""
_E4M3 = 2.0**-4  # the largest relative error of one rounding
_BF16 = 2.0**-7  # of an output in bfloat16 (2^-8), and of sums in the few bits that FP8 GPUs keep

Test = Callable[[int, str, str], Answer]


def gemm(rank: int, device: str, folder: str) -> Answer:
    """Multiply in an FP8 layer at O0, and compare with float64."""
    layer = _layer(_numbers(128, 256, seed=1), device)
    x = _numbers(64, 256, seed=2).to(device)
    right = x.double() @ layer.weight.detach().double().T
    layer, _ = fp8stack.initialize(layer, opt_level="O0")
    bound = (1 + _E4M3) ** 2 * (1 + _BF16) - 1
    return compare("an FP8 GEMM", {"output": (layer(x), right, bound)}, "float64")


def step(rank: int, device: str, folder: str) -> Answer:
    """Take a step of AdamW at O2, and compare with torch's."""
    start, g = _numbers(128, 256, seed=3), _numbers(128, 256, seed=4)
    layers = [_layer(start, device) for _ in range(2)]
    both = [torch.optim.AdamW(n.parameters(), lr=0.01, weight_decay=0.1) for n in layers]
    options: dict[str, Any] = {"compute": "bf16", "optimizer_backend": "fp8stack"}
    layers[0], both[0] = fp8stack.initialize(layers[0], both[0], "O2", **options)
    for layer, optimizer in zip(layers, both, strict=True):
        (layer.weight * g.bfloat16().float().to(device)).sum().backward()
        optimizer.step()
    moments = fp8stack.checkpoint.torch_state_dict(both[0])["state"][0]
    right = both[1].state_dict()["state"][0]
    weight = fp8stack.checkpoint.master_state_dict(layers[0], both[0])["weight"]
    # split24 (16 bits of mantissa) rounds to nearest, then with dither, as moments are: up to the next code. A first
    # step is lr in each element, whatever the gradient.
    parts = {
        "weight": (weight, layers[1].weight.detach(), 2.0**-16 + 2.0**-15),
        "m": (moments["exp_avg"], right["exp_avg"], (1 + _E4M3) * (1 + 2.0**-4) - 1),
        "v": (moments["exp_avg_sq"], right["exp_avg_sq"], ((1 + _E4M3) * (1 + 2.0**-5)) ** 2 - 1),
    }
    return compare("a step of AdamW at O2", parts, "torch's")


def all_reduce(rank: int, device: str, folder: str) -> Answer:
    """Add up tensors of two processes in FP8, and compare with float64; both must end with the same bits."""
    backend, here = ("gloo", "cpu") if device == "cpu" else ("nccl", f"cuda:{rank}")
    if here != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=LIMIT),
    )  # fmt: skip
    given = [_numbers(256, 256, seed=seed) for seed in (1, 2)]
    x = given[rank].to(here, copy=True)
    fp8stack.comm.all_reduce(x)
    both = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(both, x)
    if not torch.equal(*both):
        return Answer(False, f"an all-reduce in FP8 over {backend} left the ranks with other bits")
    found = {"sum": (x.cpu(), given[0].double() + given[1].double(), (1 + _E4M3) ** 2 - 1)}
    return compare(f"an all-reduce in FP8 over {backend}", found, "float64")


def run_all(device: torch.device) -> dict[str, dict[str, Any]]:
    """Run all tests for `device`; return for each its status ("passed", "failed", "skipped"), a reason, and seconds."""
    ring = "cuda" if device.type == "cuda" and torch.cuda.device_count() > 1 else "cpu"
    multiplies = fp8_gemm(device)
    tests: list[tuple[Test, str, int, str]] = [
        (gemm, str(device), 1, "" if multiplies else multiplies.reason),
        (step, str(device), 1, ""),
        (all_reduce, ring, 2, "" if dist.is_available() else "torch has no torch.distributed"),
    ]
    results = {}
    for test, where, ranks, obstacle in tests:
        start = time.monotonic()
        answer = Answer(True, obstacle) if obstacle else run(test, where, ranks)
        status = "skipped" if obstacle else "passed" if answer else "failed"
        seconds = round(time.monotonic() - start, 2)
        results[test.__name__] = {"status": status, "reason": answer.reason, "seconds": seconds}
    return results


def run(test: Test, device: str, ranks: int = 1, limit: float = LIMIT) -> Answer:
    """Run a test in processes of its own; the first answer that is no, or the first rank's, or why there is none."""
    multiprocessing.set_forkserver_preload([__name__])  # torch is imported once, before the forks
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="fp8stack-doctor-") as folder:
        arguments = (test, device, folder)
        started = start_processes(_child, arguments, ranks, join=False, start_method="forkserver")
        try:
            while not started.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    what = f"{test.__name__} did not end within {limit:g} s, and was killed"
                    return Answer(False, what)
        except ProcessException as error:  # one raised or died, whatever is broken here
            return Answer(False, f"{test.__name__}: {str(error).strip().splitlines()[-1]}")
        finally:
            for process in started.processes:
                process.kill()
        told = [Path(folder, f"answer{rank}").read_text() for rank in range(ranks)]
    return min((Answer(*json.loads(text)) for text in told), key=bool)


def _child(rank: int, test: Test, device: str, folder: str) -> None:
    """Run in the process of a test: write the answer, and leave without the destructors of libraries."""
    os.dup2(2, 1)  # stdout is the doctor's
    os.environ["FP8STACK_QUIET"] = "1"
    Path(folder, f"answer{rank}").write_text(json.dumps(test(rank, device, folder)))
    os._exit(0)


def _numbers(*shape: int, seed: int) -> Tensor:
    """Return numbers from 0.5 to 1.5, the same on every machine."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def _layer(weight: Tensor, device: str) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=device)
    layer.weight.data.copy_(weight)
    return layer


def compare(what: str, parts: dict[str, tuple[Tensor, Tensor, float]], oracle: str) -> Answer:
    """Compare relative errors with their bounds: {name: (found, right, bound)}."""
    told, ok = [], True
    for name, (found, right, bound) in parts.items():
        right = right.double().to(found.device)
        error = ((found.detach().double() - right).abs() / right.abs()).max().item()
        ok = ok and error <= bound  # NaN is not
        told.append(f"{name} {error:.2g} (bound {bound:.2g})")
    return Answer(ok, f"{what}, largest relative error against {oracle}: {', '.join(told)}")
