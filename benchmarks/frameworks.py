"""What a step costs inside the frameworks that people train with: time and memory in bf16, and at O2.

    python benchmarks/frameworks.py --gpus 2                                  # a Llama of 1.1 B parameters
    python benchmarks/frameworks.py --gpus 2 --only 'zero2*'
    python benchmarks/frameworks.py --device cpu --gpus 2 --model tiny --steps 3

Each variant is a run of its own, of a process a GPU, on random tokens that differ between ranks. "bf16" is what the
framework's users have: DeepSpeed with bfloat16 weights and float32 masters, FSDP2 with float32 parameters that are
gathered in bfloat16, DistributedDataParallel through Accelerate with float32 weights under bf16 autocast, each with
torch's fused AdamW. "O2" is the same script with fp8stack's one line, its products by TransformerEngine ("te") or
fp8stack ("native"), the head's included.

`step` is the median of the slowest rank's, by device events around steps queued one behind the other: forward,
backward, reduction of gradients and optimizer. `GiB` is the peak of allocated memory on the first rank, without NCCL's
own. `B/param` are the bytes of optimizer states (of DeepSpeed, without its masters), of all ranks together, over the
model's parameters. A variant that fails is named at the end and has no record, and
the exit status is 1; the others go on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from common import ROOT, add_choices, append_records, joined, read_choices
from ddp_step import MODELS, draw_batch, resize, slowest
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fp8stack

RESULTS = ROOT / "benchmarks" / "results" / "frameworks.jsonl"
WARM_UP = 10
LR = 1e-4
Numbers = dict[str, Any]
Step = Callable[[Tensor, Tensor], Tensor]  # a whole training step; returns the loss
States = Callable[[], Iterator[Tensor]]  # what the optimizer keeps on this rank
Made = tuple[Step, States]


def tensors_of(states: dict[Any, dict[str, Any]]) -> Iterator[Tensor]:
    """Yield what this rank keeps of an optimizer's states."""
    for entry in states.values():
        for value in entry.values():
            if isinstance(value, Tensor):
                yield value.to_local() if hasattr(value, "to_local") else value


@dataclass(frozen=True)
class Variant:
    """A framework, and what multiplies at O2; "" is bf16."""

    name: str
    start: Callable[[nn.Module, str, argparse.Namespace], Made]
    compute: str = ""


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    cuda = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=cuda or None)


def start_zero(model: nn.Module, compute: str, options: argparse.Namespace, stage: int) -> Made:
    import deepspeed
    import deepspeed.ops

    from fp8stack.integrations import deepspeed as fp8_deepspeed

    # compiled at the first call otherwise, and not used in training
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name, buffer in model.named_buffers():  # DeepSpeed casts parameters alone
        setattr(model, name, buffer.bfloat16())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": True},
    }
    arguments = {"model": model, "optimizer": make_adamw(model), "config": config}
    if compute:
        config["fp8stack"] = {"opt_level": "O2", "compute": compute}
        engine = fp8_deepspeed.initialize(**arguments)[0]
    else:
        engine = deepspeed.initialize(**arguments)[0]

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    def states() -> Iterator[Tensor]:
        if compute:
            fp8_deepspeed.verify(engine)
        return tensors_of(engine.optimizer.optimizer.state)

    return step, states


def start_fsdp(model: nn.Module, compute: str, options: argparse.Namespace) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from fp8stack.integrations import fsdp

    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = make_adamw(model)
    if compute:
        model, optimizer = fsdp.attach(model, optimizer, "O2", compute=compute)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        return take(model, optimizer, tokens, targets, torch.Tensor.backward)

    def states() -> Iterator[Tensor]:
        if compute:
            fsdp.verify(model, optimizer)
        return tensors_of(optimizer.state)

    return step, states


def start_accelerate(model: nn.Module, compute: str, options: argparse.Namespace) -> Made:
    from accelerate import Accelerator

    from fp8stack import comm

    optimizer = make_adamw(model)
    if compute:
        model, optimizer = fp8stack.initialize(model, optimizer, "O2", compute=compute)
    accelerator = Accelerator(mixed_precision="bf16", cpu=options.device == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer)
    if compute:
        comm.register_fp8_hook(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        return take(model, optimizer, tokens, targets, accelerator.backward)

    return step, lambda: tensors_of(optimizer.optimizer.state)


def take(
    model: nn.Module,
    optimizer: Any,
    tokens: Tensor,
    targets: Tensor,
    backward: Callable[[Tensor], None],
) -> Tensor:
    loss: Tensor = model(tokens, targets)
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


STARTS = {
    "zero2": partial(start_zero, stage=2),
    "zero3": partial(start_zero, stage=3),
    "fsdp2": start_fsdp,
    "accelerate ddp": start_accelerate,
}
VARIANTS = [
    Variant(f"{name} {what}", start, what.removeprefix("bf16").removeprefix("O2 "))
    for name, start in STARTS.items()
    for what in ("bf16", "O2 te", "O2 native")
]


# --- what a rank does


def run_rank(rank: int, index: int, name: str, options: argparse.Namespace, folder: str) -> None:
    """Train as one of the ranks; the first one writes down the numbers."""
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.gpus),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(29600 + index),
        DS_ACCELERATOR=options.device,
    )
    with joined(rank, options.gpus, device, folder):
        numbers = measure(options.variants[index], resize(MODELS[name], options), options)
        if rank == 0:
            Path(folder, "numbers.json").write_text(json.dumps(numbers))


def measure(variant: Variant, config: models.Config, options: argparse.Namespace) -> Numbers:
    cuda = options.device == "cuda"
    torch.manual_seed(0)
    model = (models.Llama if config.kind == "llama" else models.GPT2)(config).to(options.device)
    elements = sum(p.numel() for p in model.parameters())
    step, states = variant.start(model, variant.compute, options)
    tokens, targets = draw_batch(config, options.device)
    first = step(tokens, targets).item()
    for _ in range(WARM_UP - 1):
        step(tokens, targets)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    slowest([0.0], options.device)  # all ranks begin together
    loss, events = torch.zeros(()), [mark(cuda)]
    for _ in range(options.steps):
        loss = step(tokens, targets)
        events.append(mark(cuda))
    if cuda:
        torch.cuda.synchronize()
    times = [1e3 * (b - a) if not cuda else a.elapsed_time(b) for a, b in pairwise(events)]
    held = torch.tensor([float(sum(t.nbytes for t in states()))], device=options.device)
    dist.all_reduce(held)
    return {
        "step_ms": statistics.median(slowest(times, options.device)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "state_bytes_per_parameter": held.item() / elements,
        "first_loss": first,
        "loss": loss.item(),
        "parameters": elements,
    }


def mark(cuda: bool) -> Any:
    """Return the time: an event of the device's, or without one the host's clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# --- output, of the process that started the ranks


def compare(variant: str, n: Numbers, results: dict[str, Numbers]) -> None:
    """Add what a variant is beside its framework's bf16, where that was measured before it."""
    base = results.get(f"{variant.split(' O2')[0].removesuffix(' bf16')} bf16")
    n["speedup"] = base and base["step_ms"] / n["step_ms"]
    if base and base["peak_gib"]:
        n["memory_ratio"] = n["peak_gib"] / base["peak_gib"]


def to_record(variant: str, n: Numbers, name: str, options: argparse.Namespace) -> dict[str, Any]:
    config = resize(MODELS[name], options)
    params = {"model": name, "ranks": options.gpus, "batch": config.batch, "seq": config.sequence}
    record = {"name": "frameworks", "variant": variant, "params": params, "metric": "step"}
    rest = {k: v for k, v in n.items() if k != "step_ms"}
    return {**record, "value": n["step_ms"], "unit": "ms", **rest}


def report(results: dict[str, Numbers], name: str, ranks: int) -> None:
    table = Table("variant", title=f"{name}, ranks: {ranks}", box=box.SIMPLE)
    for column in ("step ms", "× bf16", "GiB", "of bf16", "B/param"):
        table.add_column(column, justify="right", no_wrap=True)
    for variant, n in results.items():
        keys = (
            "step_ms",
            "speedup",
            "peak_gib",
            "memory_ratio",
            "state_bytes_per_parameter",
        )
        table.add_row(variant, *("-" if n.get(k) is None else f"{n[k]:,.2f}" for k in keys))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add = parser.add_argument
    add("--gpus", type=int, default=2, help="ranks, one a GPU")
    add("--batch", type=int, help="sequences of each rank, instead of the model's")
    add("--seq", type=int, help="tokens of each sequence, instead of the model's")
    add("--steps", type=int, default=50, help=f"timed steps, after {WARM_UP} others")
    return read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["llama"])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    failed = []
    for name in options.model:
        results: dict[str, Numbers] = {}
        for index, variant in enumerate(options.variants):
            with tempfile.TemporaryDirectory() as folder:
                work = (index, name, options, folder)
                try:
                    torch.multiprocessing.spawn(run_rank, work, nprocs=options.gpus)
                    numbers = json.loads(Path(folder, "numbers.json").read_text())
                except Exception as error:
                    print(f"{variant.name}: {error}", file=sys.stderr)
                    failed.append(variant.name)
                    continue
            if math.isfinite(numbers["loss"]):
                results[variant.name] = numbers  # recorded at once: the next may be stopped
                compare(variant.name, numbers, results)
                append_records(options.output, [to_record(variant.name, numbers, name, options)])
                print(f"{variant.name}: {numbers['step_ms']} ms", file=sys.stderr)
            else:
                failed.append(variant.name)
        report(results, name, options.gpus)
    print(json.dumps({"failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
