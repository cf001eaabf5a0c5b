"""How long is a data-parallel training step, and how much of it is communication that nothing hides?

    python benchmarks/ddp_step.py --gpus 4                                   # GPT-2 124M and a Llama of 1.1B
    python benchmarks/ddp_step.py --gpus 4 --model llama --only 'ddp*' DataParallel
    python benchmarks/ddp_step.py --device cpu --gpus 2 --model tiny         # gloo

One process a GPU trains the models of `models.py`, bfloat16 weights, on random tokens that differ between ranks. The
optimizer is fp8stack's AdamW in all variants, so only communication differs: torch's DistributedDataParallel (gradients
are views of its buckets), the same with fp8stack's hook, and `fp8stack.comm.DataParallel`, whose gradients live in FP8.

Times are medians over steps of the slowest rank's, by device events around steps queued one behind the other: `step`
with optimizer and zero_grad, `f+b` of forward and backward alone, `no sync` of the same under `no_sync()`. `exposed` is
`f+b` less `no sync`. `CPU` is the host's time in a step with nothing queued before it. `B/param` are the bytes of the
storages that gradients look into after backward, `GiB` the peak within a step, `MiB sent` what a rank sends in a step:
as `Statistics` counts it, or 2 (N - 1) / N of the gradients for stock DDP. At the end all ranks must have the same bits
of weights and a finite loss; else there is no record, and the exit status is 1.

Limits: `no sync` of DataParallel holds the quantization of gradients, that of the hook does not: compare `step` first.
Memory of NCCL's own shows nowhere. Llama's buffers, half a MiB, are broadcast before forward and not counted as sent:
both wrappers do so by default.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from common import ROOT, add_choices, append_records, joined, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_step import undisturbed

import fp8stack
from fp8stack import comm
from fp8stack.tensor import BlockScaledTensor

RESULTS = ROOT / "benchmarks" / "results" / "ddp_step.jsonl"
MODELS = {
    "gpt2": replace(models.MODELS["gpt2"], batch=8, sequence=1024),  # of each rank
    "llama": replace(models.MODELS["llama"], batch=4, sequence=1024),
    "tiny": models.MODELS["tiny"],  # for tests on a CPU
}
BASE = "ddp bf16"  # what all others are compared with
WARM_UP = 5  # steps: DDP builds its buckets anew, kernels are compiled
HOST_STEPS = 10  # at most, with an idle device
COLUMNS = {"step ms": "step_ms", f"× {BASE}": "speedup", "f+b ms": "forward_backward_ms"}
COLUMNS |= {"no sync ms": "no_sync_ms", "exposed ms": "exposed_ms", "CPU ms": "cpu_ms"}
COLUMNS |= {"B/param": "gradient_bytes_per_parameter", "GiB": "peak_gib", "MiB sent": "wire_mib"}
Numbers = dict[str, Any]  # of one variant


@dataclass(frozen=True)
class Variant:
    """A wrapper of models: "ddp" and "hook" are torch's, "parallel" is fp8stack's."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)


VARIANTS = [
    Variant(BASE, "ddp"),
    Variant("ddp bf16, 100 MB buckets", "ddp", {"bucket_cap_mb": 100}),
    Variant("hook", "hook", {"bucket_cap_mb": 100}),
    Variant("hook, 25 MB", "hook"),
    Variant("DataParallel", "parallel"),
]

# --- what a rank does


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure all variants of all models as one of `options.gpus` ranks; the first one writes lines of JSON."""
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    with joined(rank, options.gpus, device, folder):
        for model, variant in product(options.model, options.variants):
            numbers = measure(variant, resize(MODELS[model], options), options)
            gc.collect()
            torch.cuda.empty_cache()  # does nothing without CUDA
            if rank == 0:
                line = {"model": model, "variant": variant.name, "numbers": numbers}
                with results_in(folder).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{model}, {variant.name}: {numbers['step_ms']:.2f} ms", file=sys.stderr)


def wrap(variant: Variant, model: nn.Module) -> nn.Module:
    if variant.kind == "parallel":
        return comm.DataParallel(model, **variant.options)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, **variant.options)
    if variant.kind == "hook":
        comm.register_fp8_hook(parallel)
    return parallel


class Trainer:
    """One variant's model, optimizer and batch, and the pieces of its steps."""

    def __init__(self, variant: Variant, config: models.Config, device: str) -> None:
        model, _ = models.make_model(config, device)  # the same weights on all ranks
        self.parallel, self.parameters = wrap(variant, model), list(model.parameters())
        self.batch = draw_batch(config, device)
        self.optimizer = fp8stack.optim.AdamW(self.parameters)
        self.loss = torch.zeros(())

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.zero_grad()

    def forward_backward(self) -> None:
        loss = self.parallel(*self.batch)
        loss.backward()
        self.loss = loss.detach()

    def synchronized(self) -> None:
        self.forward_backward()
        self.zero_grad()

    def alone(self) -> None:
        with self.parallel.no_sync():
            self.forward_backward()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def draw_batch(config: models.Config, device: str) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of this rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (config.batch, config.sequence + 1)
    ids = torch.randint(config.vocab, shape, generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def measure(variant: Variant, config: models.Config, options: argparse.Namespace) -> Numbers:
    """Measure one variant, on all ranks together; return what a record holds, and `wrong` if it must not be one."""
    cuda = options.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    trainer = Trainer(variant, config, options.device)
    elements = sum(p.numel() for p in trainer.parameters)
    for _ in range(WARM_UP):
        trainer.step()
    sent = measure_sent(variant, trainer)
    trainer.forward_backward()
    gradient_bytes = count_bytes(p.grad for p in trainer.parameters)
    trainer.zero_grad()
    peak = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        peak = slowest([float(torch.cuda.max_memory_allocated() - before)], "cuda")[0] / 2**30

    def median(work: Callable[[], None], count: int = options.steps, idle: bool = False) -> float:
        slowest([0.0], options.device)  # all ranks begin together
        times = undisturbed(partial(time_each, work, count, cuda, idle))
        return statistics.median(slowest(times, options.device))

    step_ms = median(trainer.step)
    cpu_ms = median(trainer.step, min(options.steps, HOST_STEPS), True) if cuda else step_ms
    loss = trainer.loss.item()
    both_ms, alone_ms = median(trainer.synchronized), median(trainer.alone)
    numbers: Numbers = {
        "step_ms": step_ms,
        "forward_backward_ms": both_ms,
        "no_sync_ms": alone_ms,
        "exposed_ms": both_ms - alone_ms,
        "cpu_ms": cpu_ms,
        "gradient_bytes_per_parameter": gradient_bytes / elements,
        "peak_gib": peak,
        "wire_mib": sent / 2**20,
        "loss": loss,  # of the first rank, in the last step
        "steps": options.steps,
    }
    if not same_everywhere(trainer.parameters):
        numbers["wrong"] = "weights differ between ranks"
    elif not math.isfinite(loss):
        numbers["wrong"] = f"the loss is {loss}"
    return numbers


def time_each(work: Callable[[], None], count: int, cuda: bool, idle: bool) -> list[float]:
    """Return ms of each call: of the device, calls queued without waiting; of the host without CUDA or if `idle`."""
    if idle or not cuda:
        host = []
        for _ in range(count):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            host.append(1e3 * (time.perf_counter() - start))
        return host
    torch.cuda.synchronize()
    events = []
    for _ in range(count):
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()
        work()
        events[-1][1].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def slowest(values: list[float], device: str) -> list[float]:
    """Return the largest of all ranks, of each value."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def measure_sent(variant: Variant, trainer: Trainer) -> float:
    """Return the bytes that a rank sends in a step, which is taken."""
    with comm.Statistics() as counted:
        trainer.step()
    if variant.kind != "ddp":
        return sum(row["bytes"] for row in counted.collect().values())
    world = dist.get_world_size()
    return 2 * (world - 1) / world * sum(p.nbytes for p in trainer.parameters)


def count_bytes(gradients: Iterable[Tensor | None]) -> int:
    """Return the bytes of the storages that gradients look into: those of buckets, where they are parts of such."""
    held: dict[int, int] = {}
    for gradient in gradients:
        if gradient is None:
            continue
        fp8 = isinstance(gradient, BlockScaledTensor)
        for part in gradient.parts() if fp8 else (gradient,):
            storage = part.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


@torch.no_grad()
def same_everywhere(tensors: Iterable[Tensor]) -> bool:
    """Return, on all ranks alike, whether they hold the same bits."""
    differing = 0.0
    for tensor in tensors:
        own = tensor.detach().contiguous().view(-1).view(torch.uint8)
        first = own.clone()
        dist.broadcast(first, 0)
        differing += not torch.equal(own, first)
    return slowest([differing], own.device.type) == [0.0]


# --- output, of the process that started the ranks


def results_in(folder: str) -> Path:
    return Path(folder) / "results.jsonl"


def load(folder: str) -> dict[str, dict[str, Numbers]]:
    """Return what the first rank wrote, by model and variant, and add how much faster than stock DDP that is."""
    results: dict[str, dict[str, Numbers]] = {}
    path = results_in(folder)
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        of_model = results.setdefault(row["model"], {})
        of_model[row["variant"]] = numbers = row["numbers"]
        base = of_model.get(BASE)
        numbers["speedup"] = base and base["step_ms"] / numbers["step_ms"]
    return results


def report(results: dict[str, dict[str, Numbers]], options: argparse.Namespace) -> None:
    """Add records, print a table for each model, and one line of JSON."""
    for model, of_model in results.items():
        config = resize(MODELS[model], options)
        right = {name: n for name, n in of_model.items() if "wrong" not in n}
        records = [to_record(name, model, config, options.gpus, n) for name, n in right.items()]
        append_records(options.output, records)
        show(of_model, model, config, options.gpus)
    keys = ("step_ms", "speedup", "exposed_ms", "gradient_bytes_per_parameter", "wrong")
    print(json.dumps({
        model: {name: {k: n[k] for k in keys if k in n} for name, n in of_model.items()}
        for model, of_model in results.items()
    }))  # fmt: skip


def show(results: dict[str, Numbers], model: str, config: models.Config, ranks: int) -> None:
    title = f"{model}, ranks: {ranks}, each with {config.batch} sequences of {config.sequence:,}"
    table = Table("variant", title=title, box=box.SIMPLE, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, numbers in results.items():
        values = [numbers[key] for key in COLUMNS.values()]
        table.add_row(name, *("-" if v is None else f"{v:,.2f}" for v in values))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for name, numbers in results.items():
        if "wrong" in numbers:
            console.print(f"  {name}: {numbers['wrong']}", highlight=False, markup=False)


def to_record(
    name: str, model: str, config: models.Config, ranks: int, numbers: Numbers
) -> dict[str, Any]:
    params = {"model": model, "ranks": ranks, "batch": config.batch, "seq": config.sequence}
    record = {"name": "ddp_step", "variant": name, "params": params, "metric": "milliseconds"}
    rest = {key: value for key, value in numbers.items() if key != "step_ms"}
    return {**record, "value": numbers["step_ms"], "unit": "ms", **rest}


def resize(config: models.Config, options: argparse.Namespace) -> models.Config:
    batch, sequence = options.batch or config.batch, options.seq or config.sequence
    return replace(config, batch=batch, sequence=sequence)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add = parser.add_argument
    add("--gpus", type=int, help="ranks, one a GPU; by default all GPUs, 2 with --device cpu")
    add("--batch", type=int, help="sequences of each rank, instead of the model's")
    add("--seq", type=int, help="tokens of each sequence, instead of the model's")
    add("--steps", type=int, default=20, help=f"timed steps, after {WARM_UP} others")
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["gpt2", "llama"])
    there = torch.cuda.device_count() if options.device == "cuda" else None
    if options.gpus is None:
        options.gpus = there or 2
    for name in ("gpus", "steps"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    if there is not None and options.gpus > there:
        parser.error(f"--gpus {options.gpus}: there are {there}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(run_rank, (options, folder), nprocs=options.gpus)
        finally:  # what was measured before a rank failed counts
            results = load(folder)
            report(results, options)
    return int(any("wrong" in n for of_model in results.values() for n in of_model.values()))


if __name__ == "__main__":
    sys.exit(main())
