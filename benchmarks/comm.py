"""How long do collectives take in FP8? `fp8stack.comm` next to NCCL and torch's symmetric memory, a process a GPU.

    python benchmarks/comm.py --gpus 4                                          # everything
    python benchmarks/comm.py --gpus 4 --sizes 16M 1G --only 'nccl *' '*fp8'    # some sizes, some variants
    python benchmarks/comm.py --gpus 4 --graphs --sizes 16K 1M                  # the GPU's time alone
    python benchmarks/comm.py --plot comm.svg                                   # draws the latest run only

Sizes are bytes of bfloat16; every variant has that number of elements, in its own dtype. They are what an all_reduce
or a reduce_scatter is given and what an all_gather returns. `nvlink` and `collective` are ours, over either transport:
bf16 and fp32 are tensors of that dtype, fp8 a BlockScaledTensor that is reduced in place. `nccl e4m3` adds up bare
codes, which saturates: a speed of light, no rival. Time is the median over iterations of the longest over the ranks,
between events on the current stream around each call, queued without waiting for the host, so that a call the host is
too slow to feed costs what the host costs; under `--graphs` calls are replayed from CUDA graphs of up to ten. On a GPU,
buffers take turns, of more than the L2 cache together.

| in a record             | of a call                                                                              |
|-------------------------|----------------------------------------------------------------------------------------|
| algbw_gb_s              | bytes that its elements have in bfloat16, whatever is sent, over the time              |
| busbw_gb_s              | that times 2 (N - 1) / N for an all_reduce, (N - 1) / N for the others                 |
| speedup, speedup_fp32   | time of the stock bf16 (of fp32) over the time, in the same run                        |
| snr_db, differing_bytes | of sums up to 64 MiB, against stock float32 ones; of all_reduce, between ranks (any of |
|                         | ours end the program with code 1)                                                      |

Limits: stock NCCL and ours average; codes, torch's two-shot and gloo add up, and values grow. NCCL runs as its
environment says: a record has its version and NCCL_NVLS_ENABLE as `backend`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from comm_tables import Numbers, draw, name_size, show
from common import ROOT, append_records, joined
from timing import time_steps
from torch import Tensor

from fp8stack import comm
from fp8stack.formats import BLOCK
from fp8stack.tensor import BlockScaledTensor

RESULTS = ROOT / "benchmarks" / "results" / "comm.jsonl"
STOCK, TRANSPORTS, TWO_SHOT = ("nccl", "gloo"), ("nvlink", "collective"), "torch two-shot"
AVERAGING = ("nccl", *TRANSPORTS)
BYTES = {"bf16": 2, "fp32": 4, "fp8": 1, "e4m3": 1}  # an element
SIZES = [2**power for power in range(16, 31, 2)]  # 64 KiB to 1 GiB; on a CPU, those up to 1 MiB
COMPARED = 2**26  # the largest size whose result is compared
ROTATED = 128e6  # bytes, more than a GPU's L2 cache
WARM_UP, FEWEST, MOST = 5, 5, 100  # iterations
Step = Callable[[int], Any]  # of the buffers whose turn it is
Buffers = list[tuple[Tensor, Tensor]]  # whole, and what of it is one rank's


class SkippedError(Exception):
    """What cannot run here, on any rank."""


class Variant(NamedTuple):
    """A collective of a dtype over stock NCCL or gloo, torch's two-shot, or a transport of ours."""

    way: str
    dtype: str
    collective: str = "all_reduce"

    @property
    def name(self) -> str:
        return f"{self.way} {self.collective} {self.dtype}".replace("all_reduce ", "")


def list_variants(stock: str) -> Iterator[Variant]:
    yield from (Variant(stock, dtype) for dtype in ("bf16", "fp32", "e4m3"))
    yield Variant(TWO_SHOT, "bf16")
    yield from (Variant(way, dtype) for way in TRANSPORTS for dtype in ("bf16", "fp32", "fp8"))
    for way in (stock, *TRANSPORTS):
        yield from (Variant(way, dtype, "reduce_scatter") for dtype in ("bf16", "fp32"))
    yield from (Variant(way, "bf16", "all_gather") for way in (stock, "collective"))


def together(call: Callable[[], Any]) -> Any:
    """Do what may fail; raise SkippedError on all ranks, with the reason, if it does on one."""
    result = reason = None
    try:
        result = call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:  # whatever a backend refuses; the others are still worth measuring
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {first[:160]}"
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for said in filter(None, reasons):
        raise SkippedError(said)
    return result


def make_buffers(variant: Variant, elements: int, device: torch.device) -> Buffers:
    """Choose the transport; return buffers of Gaussian numbers that take turns, cut from one allocation."""
    if variant.way in TRANSPORTS:
        comm.set_transport(variant.way)
    rotated = math.ceil(ROTATED / (elements * BYTES[variant.dtype]))
    count = max(3, rotated if device.type == "cuda" else 0)
    dtype = torch.float32 if variant.dtype == "fp32" else torch.bfloat16
    make: Any = symmetric_memory.empty if variant.way == TWO_SHOT else torch.empty
    pool = make(count, elements, dtype=dtype, device=device).normal_()
    if variant.way == TWO_SHOT:
        symmetric_memory.rendezvous(pool, dist.group.WORLD.group_name)
    if variant.collective != "all_reduce":
        part = pool.new_zeros(count, elements // dist.get_world_size()).normal_()
        return list(zip(pool, part, strict=True))
    wholes = list(pool.to(torch.float8_e4m3fn) if variant.dtype == "e4m3" else pool)
    if variant.dtype == "fp8":
        blocks = BlockScaledTensor.quantize(pool)
        pairs = zip(blocks.codes, blocks.scale, strict=True)
        wholes = [BlockScaledTensor(codes, scale[None], dtype) for codes, scale in pairs]
    return [(whole, whole) for whole in wholes]


def make_step(variant: Variant, buffers: Buffers) -> Step:
    """Return what runs the collective over the buffers in turn."""
    library: Any = comm if variant.way in TRANSPORTS else dist
    average = variant.way in AVERAGING and variant.dtype != "e4m3"
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    scatter, gather = library.reduce_scatter_tensor, library.all_gather_into_tensor
    scatter = getattr(library, "reduce_scatter_single", scatter)  # since torch 2.13 the others warn
    gather = getattr(library, "all_gather_single", gather)
    group, torch_own = dist.group.WORLD.group_name, torch.ops.symm_mem
    call: Any = {
        "all_reduce": lambda whole, part: library.all_reduce(whole, op),
        "reduce_scatter": lambda whole, part: scatter(part, whole, op),
        "all_gather": lambda whole, part: gather(whole, part),
        TWO_SHOT: lambda whole, part: torch_own.two_shot_all_reduce_(whole, "sum", group),
    }[TWO_SHOT if variant.way == TWO_SHOT else variant.collective]
    return lambda turn: call(*buffers[turn % len(buffers)])


def values_of(x: Tensor) -> Tensor:
    return (x.dequantize(torch.float32) if isinstance(x, BlockScaledTensor) else x.float()).view(-1)


def compare(variant: Variant, first: Callable[[], Any], whole: Tensor, part: Tensor) -> Numbers:
    """Run the first step; return the signal-to-noise ratio of its result and the bytes that differ between ranks."""
    world, scattered = dist.get_world_size(), variant.collective == "reduce_scatter"
    exact = values_of(whole).clone()
    dist.all_reduce(exact)
    first()
    exact = exact.chunk(world)[dist.get_rank()] if scattered else exact
    exact = exact.double() / (world if variant.way in AVERAGING else 1)
    sums = torch.stack([exact.square().sum(), (values_of(part) - exact).square().sum()])
    dist.all_reduce(sums)
    signal, noise = sums.tolist()
    numbers: Numbers = {"snr_db": 10 * math.log10(signal / noise) if signal > 0 < noise else None}
    differing = torch.zeros((), dtype=torch.int64, device=whole.device)
    for tensor in whole.parts() if isinstance(whole, BlockScaledTensor) else (whole,):
        mine = tensor.view(-1).view(torch.uint8)
        others = mine.clone()
        dist.broadcast(others, 0)
        differing += (others != mine).sum()
    dist.all_reduce(differing)
    return numbers if scattered else {**numbers, "differing_bytes": int(differing)}


def time_cell(step: Step, seconds: float, device: torch.device) -> tuple[float, int]:
    """Return the median ms of as many steps as take `seconds`, of each the longest over the ranks, and how many."""
    cuda = device.type == "cuda"
    settle = torch.cuda.synchronize if cuda else lambda: None
    event = partial(torch.cuda.Event, enable_timing=True)

    def mark() -> Any:
        return torch.cuda.current_stream().record_event(event()) if cuda else time.perf_counter()

    start = time.perf_counter()
    for turn in range(1, WARM_UP):
        step(turn)
    settle()
    wanted = int(seconds * (WARM_UP - 1) / (time.perf_counter() - start))
    count = torch.tensor(max(FEWEST, min(wanted, MOST)), device=device)
    dist.broadcast(count, 0)  # all ranks do as many
    dist.barrier()
    marks = []
    for turn in range(WARM_UP, WARM_UP + int(count)):
        begin = mark()
        step(turn)
        marks.append((begin, mark()))
    settle()
    mine = [b.elapsed_time(e) if cuda else 1e3 * (e - b) for b, e in marks]
    times = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.quantile(0.5)), len(times)


def capture(step: Step, calls: int) -> Step:
    """Return what replays the first steps."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            step(turn)
    return lambda turn: graph.replay()


def measure(
    variant: Variant, size: int, seconds: float, device: torch.device, graphs: bool
) -> Numbers:
    """Measure one cell, on all ranks alike."""
    world = dist.get_world_size()
    elements = math.ceil(size / 2 / BLOCK / world) * BLOCK * world  # whole blocks for every rank
    buffers = together(partial(make_buffers, variant, elements, device))
    step = make_step(variant, buffers)
    first, numbers = partial(together, partial(step, 0)), {}
    if size <= COMPARED and variant.collective != "all_gather" and variant.dtype != "e4m3":
        numbers = compare(variant, first, *buffers[0])
    else:
        first()
    calls = min(len(buffers), 10) if graphs else 1
    if graphs:
        step = together(partial(capture, step, calls))
    ms, count = time_cell(step, seconds, device)
    ms /= calls
    rate = 2 * elements / ms / 1e6
    sent = (2 if variant.collective == "all_reduce" else 1) * (world - 1) / world
    params = {"elements": elements, "collective": variant.collective, "graphs": graphs}
    numbers |= {"algbw_gb_s": rate, "busbw_gb_s": rate * sent, "iterations": count}
    return {"params": params, "metric": "milliseconds", "value": ms, "unit": "ms", **numbers}


def measure_all(options: argparse.Namespace, device: torch.device) -> Iterator[Numbers]:
    """Yield copies, then the cells of all variants and sizes, a stock one before what it is compared with."""
    if dist.get_rank() == 0:
        yield from measure_copies(device)
    dist.barrier()
    for size in options.sizes:
        times: dict[Variant, float] = {}
        for variant in options.variants:
            try:
                cell = measure(variant, size, options.seconds, device, options.graphs)
            except SkippedError as skipped:
                cell = {"note": str(skipped)}
            if device.type == "cuda":
                torch.cuda.empty_cache()
            ms = times[variant] = cell.get("value", 0.0)
            for dtype, key in (("bf16", "speedup"), ("fp32", "speedup_fp32")):
                base = times.get(variant._replace(way=dist.get_backend(), dtype=dtype))
                if base and ms and dtype in ("bf16", variant.dtype):
                    cell[key] = base / ms
            params = {"size": size, "ranks": options.gpus, **cell.pop("params", {})}
            yield {"name": "comm", "variant": variant.name, "params": params, **cell}


def measure_copies(device: torch.device) -> Iterator[Numbers]:
    """Yield the GB/s of copies from this GPU: within it, read plus written, and to the next one, sent."""
    cuda, places = device.type == "cuda", {"device": device}
    if cuda and torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1):
        places["peer"] = torch.device("cuda", 1)
    source = torch.randn(2**26 if cuda else 2**22, device=device)
    for name, place in places.items():
        copy = partial(torch.empty_like(source, device=place).copy_, source)
        rate = (2 if name == "device" else 1) * source.nbytes / time_steps(copy, 10, cuda)[0] / 1e6
        record = {"name": "comm", "variant": f"{name} copy", "params": {"size": source.nbytes}}
        yield {**record, "metric": f"{name}_copy_gb_s", "value": rate, "unit": "GB/s"}


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure everything as one of the ranks; the first writes each cell down at once."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # two-shot takes none
    cuda, backend = options.device == "cuda", "gloo"
    if cuda:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        backend = f"nccl {version}, NCCL_NVLS_ENABLE={os.environ.get('NCCL_NVLS_ENABLE', '')}"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(rank)
    with joined(rank, options.gpus, device, folder):
        if not cuda:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.gpus))
        for cell in measure_all(options, device):
            if rank == 0:
                with Path(folder, "cells").open("a") as file:
                    print(json.dumps({**cell, "backend": backend}), file=file)
                said = name_size(cell["params"]["size"]), cell["variant"], cell.get("value", "-")
                print(*said, file=sys.stderr)


def size_of(text: str) -> int:
    """Return the bytes that "65536", "64K", "64KiB" or "1G" stand for."""
    number = text.upper().removesuffix("B").removesuffix("I")
    power = {"K": 10, "M": 20, "G": 30}.get(number[-1:], 0)
    return int(number[:-1] if power else number) << power


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gpus", type=int, help="ranks; by default all GPUs, or 2 on a CPU")
    add("--sizes", nargs="+", type=size_of, metavar="SIZE", help="bytes of bfloat16: 64K, 1M, 1G")
    add("--only", nargs="+", default=["*"], metavar="NAME", help="globs of variants")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--seconds", type=float, default=0.3, help="about what the iterations of a cell take")
    add(
        "--graphs",
        action="store_true",
        help="replay CUDA graphs, which the host does not slow down",
    )
    add("--output", type=Path, default=RESULTS, help="JSON lines that records are added to")
    add("--plot", type=Path, metavar="PATH", help="only draw the latest run in --output")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    most = torch.cuda.device_count() if cuda else 64
    known = list(list_variants(STOCK[not cuda]))
    options.variants = [v for v in known if any(fnmatch(v.name, o) for o in options.only)]
    options.sizes = options.sizes or [s for s in SIZES if cuda or s <= 2**20]
    options.gpus = options.gpus or (most if cuda else 2)
    if not options.variants:
        parser.error(f"--only matches none of: {', '.join(v.name for v in known)}")
    if options.graphs and not cuda:
        parser.error("--graphs needs a GPU")
    if not options.plot and not 2 <= options.gpus <= most:
        parser.error(f"--gpus {options.gpus}: must be 2 to {most} here; or use --device cpu")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.plot:
        draw(options.output, options.plot)
        return 0
    cells, wrong, processes = [], [], torch.multiprocessing
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(work, (options, folder), nprocs=options.gpus)
        except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
            wrong.append(str(error).strip())  # what was measured before is kept
        for written in Path(folder).glob("cells"):
            cells = [json.loads(line) for line in written.read_text().splitlines()]
    records = [cell for cell in cells if "note" not in cell]
    append_records(options.output, records)
    show(cells, options.sizes)
    said = "{variant}, {params[size]} B: {differing_bytes} bytes differ between ranks"
    ours = [r for r in records if r["variant"].startswith(TRANSPORTS)]
    wrong += [said.format_map(r) for r in ours if r.get("differing_bytes")]
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    summary: dict[str, Numbers] = {}
    for r in records:
        summary.setdefault(r["variant"], {})[name_size(r["params"]["size"])] = r["value"]
    print(json.dumps({"ok": not wrong, **summary}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
