"""How far from its floor is one Linear layer? Forward and backward of every shape of Llama-3-8B and GPT-2, with peers.

    python benchmarks/linear.py                                  # everything
    python benchmarks/linear.py --model small --only 'native*'   # kernels and CPU time, where the GPU never is behind

| measured    | of forward and backward of one layer without a bias, in bfloat16                                   |
|-------------|----------------------------------------------------------------------------------------------------|
| ms          | on the GPU: queued behind a sleep, so that the host is never waited for                            |
| GEMM, rest  | ms in kernels that multiply and in all others, casts mostly, as a profiler saw them                  |
| GEMMs alone | ms of the three products by themselves: torch.mm for bf16, else torch._scaled_mm with one scale    |
| floor       | ms of the flops at the rate of a large product and of the casts' bytes at the rate of a copy, summed |
| of floor    | floor over ms                                                                                      |
| CPU µs      | of the host until all is queued: in a chain of 16 such layers, for one; by itself, one waits for     |
|             | autograd's thread too (`alone_cpu_us` in a record, and CPU µs where sizes do not chain)              |
| kernels     | launched, memcpy and memset aside (a record has both)                                              |

Bytes of a cast, an element: read once (2, twice with current scaling, which needs the maximum first) and written in
both layouts (2); of the input, the output's gradient and the weight. A user who runs such layers in eager mode waits
for the larger of ms and CPU µs. Every iteration bumps the version of the input and of the gradient, as new tensors
would: no codes of theirs are found again.

Limits: floors ignore the L2 cache, which small shapes fit into, and what products write. Kernels are profiled later,
in another process: a profiler slows all launches that follow it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import ROOT, add_choices, append_records, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Numbers, attempt, stopping_in_order
from torch import nn
from train_step import (
    Variant,
    convert,
    make_gemm,
    measure_device,
    undisturbed,
)

RESULTS = ROOT / "benchmarks" / "results" / "linear.jsonl"
Shape = tuple[int, int, int]  # tokens, in features, out features
SHAPES: dict[str, list[Shape]] = {
    "llama": [(8192, k, n) for k, n in ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))],
    "gpt2": [(8192, k, n) for k, n in ((768, 2304), (768, 768), (768, 3072), (3072, 768))],
    "small": [(512, 1024, 1024)],
    "tiny": [(32, 64, 48)],  # for tests on a CPU
}
NATIVE = "native current"
BARS = {"launches": 9, "cpu_us": 120}  # of NATIVE, over the small shape
VARIANTS = [
    Variant("bf16"),
    *(Variant(f"native {recipe}", "fp8stack", recipe, options={"compute": "native", "select": "all"})
      for recipe in ("tokenwise", "current", "delayed", "blockwise")),
    Variant("te current", "transformer_engine", "current"),
    Variant("torchao tensorwise", "torchao", "tensorwise"),
]  # fmt: skip
BURST = 10  # iterations; no more kernels than a GPU's queue takes without blocking the host
CHAIN = 16
MULTIPLIES = re.compile("gemm|nvjet|cutlass|splitk|cublas", re.IGNORECASE)  # names of kernels
COLUMNS = {"ms": "ms", "GEMM": "gemm_ms", "rest": "rest_ms"}
COLUMNS |= {"GEMMs alone": "gemms_alone_ms", "floor": "floor_ms", "of floor": "of_floor"}
COLUMNS |= {"CPU µs": "cpu_us", "kernels": "launches"}


def make_step(
    variant: Variant, shape: Shape, device: str, scopes: ExitStack, layers: int = 1
) -> Callable[[], None]:
    """Return what runs forward and backward."""
    tokens, inner, outer = shape
    torch.manual_seed(0)
    kind = {"bias": False, "device": device, "dtype": torch.bfloat16}
    plain = [nn.Linear(inner, outer, **kind) for _ in range(layers)]
    model, scope = convert(nn.Sequential(*plain), variant, device)
    layer = model if layers > 1 else model[0]
    scopes.enter_context(scope())  # once, as a model would, not once a layer
    scopes.callback(id, model)  # keeps it alive, and with it what initialize holds for it
    x = torch.randn(tokens, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, outer, device=device, dtype=torch.bfloat16)
    bump, weights = torch.autograd.graph.increment_version, list(model.parameters())

    def step() -> None:
        for leaf in (x, *weights):
            leaf.grad = None
        bump([x, gradient])
        layer(x).backward(gradient)

    return step


def time_host(work: Callable[[], Any], iterations: int, cuda: bool, burst: int = BURST) -> float:
    """Return the µs of the host in one call: the median of bursts that nothing is queued before."""
    means = []
    for _ in range(max(1, iterations // burst)):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(burst):
            work()
        means.append(1e6 * (time.perf_counter() - start) / burst)
    return statistics.median(means)


def time_queued(work: Callable[[], Any], bursts: int, cuda: bool) -> float:
    """Return the ms of the device in one call; on a CPU, that of the host."""
    host = time_host(work, BURST, cuda)
    if not cuda:
        return host / 1e3
    cycles = int(max(1e-6 * host * BURST * 2, 1e-3) * 2e9)  # at 2 GHz, longer than the host takes
    times = []
    for _ in range(bursts):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(BURST):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / BURST)
    return statistics.median(times)


def time_gemms(variant: Variant, shape: Shape, options: argparse.Namespace) -> float:
    """Return the ms of the three products, forward's with fast accumulation, without anything around them."""
    tokens, inner, outer = shape
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    total = 0.0
    for m, n, k, left in (
        (tokens, outer, inner, e4m3),
        (tokens, inner, outer, e5m2),
        (outer, inner, tokens, e5m2),
    ):
        formats = None if variant.library == "torch" else (left, e4m3)
        gemm = make_gemm(m, n, k, options.device, formats, fast=left is e4m3)
        total += time_queued(gemm, options.bursts, options.device == "cuda")
    return total


def find_floor(variant: Variant, shape: Shape, rates: Numbers) -> float:
    """Return the ms that flops and the casts' bytes take at the rates of this run."""
    tokens, inner, outer = shape
    fp8 = variant.library != "torch"
    rate = rates["fp8_tflop_s"] if fp8 else rates["bf16_tflop_s"]
    elements = tokens * inner + tokens * outer + inner * outer
    current = variant.recipe in ("current", "tensorwise")
    moved = (6 if current else 4) * elements if fp8 else 0
    return 6e-9 * tokens * inner * outer / rate + 1e-9 * moved / rates["copy_tb_s"]


def measure(variant: Variant, shape: Shape, rates: Numbers, options: argparse.Namespace) -> Numbers:
    """Measure one configuration of one shape; return ms and what a record's `extra` holds, but for the kernels."""
    cuda = options.device == "cuda"
    with ExitStack() as scopes:
        step = make_step(variant, shape, options.device, scopes)
        time_host(step, 2 * BURST, cuda)  # compiles
        numbers: Numbers = {"ms": time_queued(step, options.bursts, cuda)}
        numbers["alone_cpu_us"] = numbers["cpu_us"] = time_host(step, options.iterations, cuda)
    if shape[1] == shape[2]:
        with ExitStack() as scopes:
            chain = make_step(variant, shape, options.device, scopes, CHAIN)
            time_host(chain, 3, cuda, 1)
            numbers["cpu_us"] = time_host(chain, options.iterations, cuda, 1) / CHAIN
    numbers["gemms_alone_ms"] = time_gemms(variant, shape, options)
    numbers["floor_ms"] = find_floor(variant, shape, rates)
    numbers["of_floor"] = numbers["floor_ms"] / numbers["ms"]
    return numbers


def profile(variant: Variant, shape: Shape, calls: int = 4) -> Numbers:
    """Return what one call launches and how long its kernels take; for a process that measures no time."""
    with ExitStack() as scopes:
        step = make_step(variant, shape, "cuda", scopes)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(calls):
                step()
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            return summarize(json.loads(Path(file.name).read_text()), calls)


def summarize(trace: dict[str, Any], calls: int) -> Numbers:
    """Return counts and ms of a call from a profiler's trace of `calls`."""
    events = trace["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = sum(event.get("cat") in ("gpu_memcpy", "gpu_memset") for event in events)
    times = {"gemm_ms": 0.0, "rest_ms": 0.0}
    for event in kernels:
        part = "gemm_ms" if MULTIPLIES.search(event["name"]) else "rest_ms"
        times[part] += event["dur"] / 1e3 / calls
    names = sorted({event["name"][:80] for event in kernels})
    return {"launches": len(kernels) / calls, "copies": copies / calls, **times, "names": names}


def add_profiles(results: dict[tuple[Variant, Shape], Numbers]) -> None:
    """Profile all that was measured, in one other process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for (variant, shape), numbers in results.items():
            if "ms" in numbers:
                work = partial(attempt, partial(profile, variant, shape))
                numbers.update(attempt(lambda w=work: pool.submit(w).result()))


def name_of(shape: Shape) -> str:
    return "×".join(map(str, shape))


def show(results: dict[tuple[Variant, Shape], Numbers]) -> None:
    """Print a table of what was measured, a line for everything that was not, and the bars."""
    table = Table("tokens×in×out", "configuration", box=box.SIMPLE)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for (variant, shape), numbers in results.items():
        if "ms" in numbers:
            values = {key: numbers.get(key) for key in COLUMNS.values()}
            form = {"of_floor": "{:.0%}", "cpu_us": "{:.0f}", "launches": "{:g}"}
            cells = (
                form.get(k, "{:.3f}").format(v) if v is not None else "-" for k, v in values.items()
            )
            table.add_row(name_of(shape), variant.name, *cells)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for (variant, shape), numbers in results.items():
        if "note" in numbers:
            line = f"  {name_of(shape)} {variant.name}: {numbers['note']}"
            console.print(line, highlight=False, markup=False)
        if variant.name == NATIVE and shape in SHAPES["small"] and "ms" in numbers:
            for key, bar in BARS.items():
                value = numbers.get(key)
                verdict = "not measured" if value is None else "met" if value <= bar else "missed"
                print(f"{NATIVE} {name_of(shape)}: {key} {value} of at most {bar}: {verdict}")


def to_record(variant: Variant, shape: Shape, numbers: Numbers) -> dict[str, Any]:
    library = f"{variant.library} {sys.modules[variant.library].__version__}"
    params = dict(zip(("tokens", "in", "out"), shape, strict=True))
    params |= {"library": library, "recipe": variant.recipe, **variant.options}
    record = {"name": "linear", "variant": variant.name, "metric": "ms", "unit": "ms"}
    record |= {"params": params, "value": numbers["ms"]}
    return {**record, "extra": {k: value for k, value in numbers.items() if k != "ms"}}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, SHAPES, RESULTS)
    add = parser.add_argument
    add("--iterations", type=int, default=200, help="calls that CPU time is averaged over")
    add("--bursts", type=int, default=5, help=f"of {BURST} calls, whose median is the GPU's time")
    default = ["small", "llama", "gpt2"]
    return read_choices(parser, arguments, SHAPES, VARIANTS, lambda given: default)


@stopping_in_order()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    rates = measure_device(options.device)
    results: dict[tuple[Variant, Shape], Numbers] = {}
    for shape in (shape for model in options.model for shape in SHAPES[model]):
        for variant in options.variants:
            work = partial(measure, variant, shape, rates, options)
            numbers = results[variant, shape] = attempt(partial(undisturbed, work))
            said = numbers.get("ms") or numbers["note"]
            print(name_of(shape), variant.name, said, file=sys.stderr)
    if options.device == "cuda":
        add_profiles(results)
    done = {key: {**n, **rates} for key, n in results.items() if "ms" in n}
    append_records(options.output, [to_record(*key, n) for key, n in done.items()])
    show(results)
    summary: dict[str, Numbers] = {}
    for (variant, shape), numbers in done.items():
        values = {key: numbers.get(key) for key in ("ms", "of_floor", "cpu_us", "launches")}
        summary.setdefault(name_of(shape), {})[variant.name] = values
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
