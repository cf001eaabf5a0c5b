"""Does FP8 on the wire train as well as bfloat16? The model of `convergence.py` on several ranks, over several seeds.

    python benchmarks/wire_parity.py --ranks 2 --seeds 0 1 2 --steps 2000            # 2 GPUs
    python benchmarks/wire_parity.py --ranks 2 --jobs 2                              # 4 GPUs, two runs at a time
    python benchmarks/wire_parity.py --device cpu --model tiny --steps 20            # gloo

Model, text, batches, schedule and clipping are those of `convergence.py`, the weights are bfloat16 and fp8stack's AdamW
steps them in every variant, so only what happens to gradients between backward and step differs: torch's
DistributedDataParallel, whose bfloat16 gradients are added up as they are, the same with fp8stack's hook, and
`fp8stack.comm.DataParallel`, whose gradients live in FP8.

Each (variant, seed) pair is one run, of a process a rank: job k has the GPUs from k × ranks on. All ranks draw the same
batches and take a part each, so that the same seed gives the same weights and text to every variant and number of
ranks, and differences are paired. The loss is the mean over ranks. A run appends its record when it ends. One that
fails, has a validation loss or a gradient that is not finite, or ranks that end with other bits of weights, has none:
it is named at the end, and the others go on. Exit status 1 if there is any, or if a variant's mean loss is further
than 0.3 % from stock DDP's.

The table is of all records of the same model, run, ranks, device and text that the file holds, so seeds may be run in
several calls; seeds without a run of stock DDP are left out. The last line of output is one JSON object.

Limits: as of `convergence.py`, and a GPU adds up some gradients in any order: two runs of one variant differ, too.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import ROOT, append_records, joined
from convergence import (
    MODELS,
    add_training,
    average,
    by_variant,
    corpus,
    params_of,
    show,
    summarize,
)
from ddp_step import BASE, Variant, same_everywhere
from demo import (
    VALIDATION_BATCHES,
    VALIDATIONS,
    build_optimizer,
    compute_loss,
    evaluate,
    scale_lr,
)
from gpt import GPT, ModelConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import fp8stack
from fp8stack import comm

RESULTS = ROOT / "benchmarks" / "results" / "wire_parity.jsonl"
TOLERANCE = 0.003  # of the mean loss
POINTS = 50  # of the curve in a record, at most
VARIANTS = [Variant(BASE, "ddp"), Variant("hook", "hook"), Variant("DataParallel", "parallel")]
Numbers = dict[str, Any]  # of one run

# --- what a rank does


def run_rank(
    rank: int, variant: Variant, seed: int, options: argparse.Namespace, first: int, folder: str
) -> None:
    """Train as one of the ranks, on the GPU `first + rank`; the first one writes down the numbers."""
    cuda = options.device == "cuda"
    device = torch.device("cuda", first + rank) if cuda else torch.device("cpu")
    with joined(rank, options.ranks, device, folder):
        numbers = train(variant, seed, options, device)
        if rank == 0:
            numbers_in(folder).write_text(json.dumps(numbers))


def numbers_in(folder: str) -> Path:
    return Path(folder) / "numbers.json"


def train(
    variant: Variant, seed: int, options: argparse.Namespace, device: torch.device
) -> Numbers:
    """Train one model, on all ranks together; return what a record holds. The loop of `examples/demo.py`."""
    config = MODELS[options.model]
    text = corpus.load(options.data, config.seq_len)
    windows = torch.Generator().manual_seed(seed)
    stream = corpus.batches(text.train, options.batch, config.seq_len, windows)
    spaced = corpus.spaced_batches(
        text.validation, options.batch, config.seq_len, VALIDATION_BATCHES
    )
    held_out = [own_part(batch) for batch in spaced]
    model = make_model(config, seed, device)
    optimizer = make_optimizer(model, options.lr)
    parallel = wrap(variant, model)
    scheduler = LambdaLR(optimizer, lambda step: scale_lr(step, options.steps))
    validations = {options.steps * (i + 1) // VALIDATIONS for i in range(VALIDATIONS)}
    losses, curve = torch.zeros(options.steps, device=device), []
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        loss = compute_loss(parallel, own_part(next(stream)), device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step - 1] = loss.detach()
        if step in validations:
            curve.append((step, mean(evaluate(model, held_out, device), device)))
            check(step, curve[-1][1], optimizer)
    seconds = time.perf_counter() - start
    if not same_everywhere(model.parameters()):
        raise RuntimeError("weights differ between ranks")
    dist.all_reduce(losses)
    each = math.ceil(options.steps / POINTS)
    return {
        "value": curve[-1][1],
        "unit": "nats/byte",
        "seconds": seconds,  # with validations
        "validation": curve,
        "train_loss": average((losses / dist.get_world_size()).tolist(), each),
        "steps_per_train_loss": each,
    }


def check(step: int, loss: float, optimizer: fp8stack.optim.AdamW) -> None:
    """Raise RuntimeError if training has gone wrong, on all ranks alike."""
    if not math.isfinite(loss):
        raise RuntimeError(f"the validation loss is {loss} after {step} steps")
    if skipped := int(optimizer.skipped_steps):  # weights and loss stay finite then
        raise RuntimeError(
            f"{skipped} of {step} steps were skipped, whose gradients are not finite"
        )


def own_part(batch: corpus.Batch) -> corpus.Batch:
    """Return this rank's windows of a batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, targets = (half.chunk(world)[rank] for half in batch)
    return tokens, targets


def mean(value: float, device: torch.device) -> float:
    """Return the mean over ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def make_model(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    """Return the model of `convergence.py` with its weights rounded to bfloat16, the same on all ranks."""
    torch.manual_seed(seed)
    model = GPT(config).to(device)
    rounded: list[Tensor] = list(model.parameters())
    if device.type == "cpu":  # without autocast, which lets the angles of positions be float32
        rounded += model.buffers()
    for tensor in rounded:
        tensor.data = tensor.data.bfloat16()
    return model


def make_optimizer(model: nn.Module, lr: float) -> fp8stack.optim.AdamW:
    """Return fp8stack's AdamW with the groups and numbers of torch's in `convergence.py`; it clips in the step."""
    plain = build_optimizer(model, lr)
    groups = [{key: g[key] for key in ("params", "weight_decay")} for g in plain.param_groups]
    return fp8stack.optim.AdamW(groups, lr, plain.defaults["betas"], max_grad_norm=1.0)


def wrap(variant: Variant, model: nn.Module) -> nn.Module:
    if variant.kind == "parallel":
        return comm.DataParallel(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if variant.kind == "hook":
        comm.register_fp8_hook(parallel)
    return parallel


# --- what the process that starts the ranks does


def run_all(options: argparse.Namespace, params: dict[str, Any]) -> dict[str, str]:
    """Run every pair, `options.jobs` at a time; return why some have no record."""
    failed: dict[str, str] = {}
    places: queue.SimpleQueue[int] = queue.SimpleQueue()  # first GPUs of jobs that are free
    for job in range(options.jobs):
        places.put(job * options.ranks)
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {
            pool.submit(run, variant, seed, options, places): (variant.name, seed)
            for seed in options.seeds
            for variant in options.variants
        }
        try:
            for future in as_completed(futures):
                name, seed = futures[future]
                try:
                    numbers = future.result()
                except Exception as error:  # whatever a rank died of; the others are worth running
                    failed[f"{name}, seed {seed}"] = reason = last_line(error)
                    print(f"{name} seed {seed}: FAILED: {reason}\n{error}", file=sys.stderr)
                    continue
                append_records(options.out, [to_record(name, seed, params, numbers)])
                print(f"{name:>28} seed {seed}: {numbers['value']:.4f}", flush=True)
        except BaseException:  # else an interrupt would begin the runs that wait
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def run(
    variant: Variant, seed: int, options: argparse.Namespace, places: queue.SimpleQueue[int]
) -> Numbers:
    """Spawn the ranks of one run where a job is free; return its numbers. Raises what the first rank to fail did."""
    first = places.get()
    try:
        with tempfile.TemporaryDirectory() as folder:
            given = (variant, seed, options, first, folder)
            torch.multiprocessing.spawn(run_rank, given, nprocs=options.ranks)
            numbers: Numbers = json.loads(numbers_in(folder).read_text())
            return numbers
    finally:
        places.put(first)


def last_line(error: Exception) -> str:
    """Return what a traceback ends with."""
    return next(iter(reversed(str(error).strip().splitlines())), type(error).__name__)


def to_record(name: str, seed: int, params: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    own = {"params": {**params, "seed": seed}, "metric": "validation_loss"}
    return {"name": "wire_parity", "variant": name, **own, **numbers}


def report(options: argparse.Namespace, params: dict[str, Any], failed: dict[str, str]) -> bool:
    """Print the table of the records like `params`, what failed, and one line of JSON; return whether all is well."""

    def alike(record: dict[str, Any]) -> bool:
        return {**record["params"], "seed": None} == {**params, "seed": None}

    table = by_variant(options.out, alike) if options.out.exists() else {}
    base = table.get(BASE, {})
    paired = {name: {s: r for s, r in runs.items() if s in base} for name, runs in table.items()}
    summary = summarize({name: runs for name, runs in paired.items() if runs}, BASE)
    show(summary, 28)
    for name, runs in table.items():
        if alone := sorted(runs.keys() - base.keys()):
            print(f"{name}: seeds {alone} are left out, which {BASE} has no record of")
    for pair, reason in failed.items():
        print(f"FAILED: {pair}: {reason}")
    near = all(abs(row["difference"]) <= TOLERANCE for row in summary.values())
    print(json.dumps({"ok": near and not failed, "variants": summary, "failed": failed}))
    return near and not failed


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training(parser)
    parser.set_defaults(model="126m", steps=2000, batch=16, lr=6e-4, data=None, out=RESULTS)
    add = parser.add_argument
    add("--only", nargs="+", default=["*"], metavar="NAME", help="globs of variants")
    add("--ranks", type=int, default=2, help="of each run, which share a batch")
    add("--jobs", type=int, default=1, help="runs at a time, of as many GPUs as ranks each")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    options.variants = [v for v in VARIANTS if any(fnmatch(v.name, o) for o in options.only)]
    for complaint in complaints(options):
        parser.error(complaint)
    return options


def complaints(options: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the options."""
    if not options.variants:
        yield f"--only matches none of: {'; '.join(v.name for v in VARIANTS)}"
    for name, least in (("ranks", 2), ("jobs", 1), ("steps", 1)):
        if (value := getattr(options, name)) < least:
            yield f"--{name} {value}: must be at least {least}"
    if options.batch < 1 or options.batch % options.ranks:
        yield f"--batch {options.batch}: must be a multiple of the {options.ranks} ranks"
    if options.device == "cuda" and options.seeds:
        there, needed = torch.cuda.device_count(), options.jobs * options.ranks
        if not there:
            yield "there is no GPU; use --device cpu --model tiny"
        if needed > there:
            yield f"{options.jobs} × {options.ranks} ranks need {needed} GPUs, there are {there}"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    text = corpus.load(
        options.data, MODELS[options.model].seq_len
    )  # what is wrong with it is said now
    said = f"{text.name}: {len(text.train)} bytes for training"
    params = {"ranks": options.ranks, "device": options.device, **params_of(0, options, said)}
    failed = run_all(options, params) if options.seeds else {}
    return int(not report(options, params, failed))


if __name__ == "__main__":
    sys.exit(main())
