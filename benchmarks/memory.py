"""What trains on one GPU: the largest Llama-style model, and the largest micro-batch of four sizes, by method.

    python benchmarks/memory.py                                    # every method, all of the GPU
    python benchmarks/memory.py --gib 80 --model 7b --only 'bf16 AdamW' 'fp8stack O2*'
    python benchmarks/memory.py --device cpu --model tiny --most 3 # a look at the machinery, without a limit

Nothing is computed from a formula: each answer is a model that was built and took three steps, beside one that ran out
of memory. `largest` has blocks of Llama-3-8B's size (d 4096, ffn 14336), as many as fit with one sequence and with the
activations of a block recomputed in backward, as anyone would who is short of memory. `1b` to `13b` are Llama's shapes,
nothing recomputed, as many sequences as fit. A try that fits tells how the next one is chosen: memory grows by the
same amount with each block and each sequence. A try begins with a GPU that is empty: where memory stays allocated after
one, nothing more is measured.

Methods differ in weights, optimizer and what multiplies; all compute in bfloat16 or FP8, except the first. "bf16 AdamW"
is what most people have: float32 weights, autocast, torch's fused AdamW. With --gib the process may allocate so much.

Limits: the peak of allocated memory is torch's, without the CUDA context and cuBLAS' workspaces beside it; what the
caching allocator cannot use for fragmentation counts against a method, as it does in training.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import models
import torch
from common import ROOT, add_choices, append_records, import_peer, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack import capability

RESULTS = ROOT / "benchmarks" / "results" / "memory.jsonl"
LARGEST = "largest"
Shape = models.Config
MODELS = {
    LARGEST: Shape("llama", 32_000, 4096, 1, 32, 8, 14_336, batch=1, sequence=4096),
    "1b": Shape("llama", 32_000, 2048, 16, 32, 8, 8192, batch=1, sequence=4096),
    "3b": Shape("llama", 32_000, 3072, 28, 24, 8, 8192, batch=1, sequence=4096),
    "7b": Shape("llama", 32_000, 4096, 32, 32, 32, 11_008, batch=1, sequence=4096),
    "13b": Shape("llama", 32_000, 5120, 40, 40, 40, 13_824, batch=1, sequence=4096),
    "tiny": models.MODELS["tiny"],
}
STEPS = 3  # the first makes states, the second is the first with them, the third is timed
LIBRARIES = 2**29  # bytes that libraries' workspaces may keep; models hold more
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """How a model is trained; a library is named, not imported, so that a peer may be missing."""

    name: str
    weights: torch.dtype = torch.bfloat16
    optimizer: tuple[str, str] = ("torch.optim", "AdamW")
    hyper: dict[str, Any] = field(default_factory=dict, hash=False)  # more of the optimizer's
    autocast: bool = False
    te: bool = False  # Linear layers of TransformerEngine's, in FP8
    level: str = ""  # of fp8stack
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of fp8stack.initialize


def list_methods() -> list[Method]:
    single = {"weights": torch.float32, "hyper": {"fused": True}}
    ao = {"bf16_stochastic_round": True}
    level = {"compute": "native"}
    half = torch.bfloat16
    return [
        Method("fp32 AdamW", **single),
        Method("bf16 AdamW", autocast=True, **single),
        Method("bf16, bitsandbytes 8bit", half, ("bitsandbytes.optim", "AdamW8bit")),
        Method("bf16, torchao 8bit", half, ("torchao.optim", "AdamW8bit"), ao),
        Method("bf16, torchao 4bit", half, ("torchao.optim", "AdamW4bit"), ao),
        Method("bf16, flashoptim 24bit", half, ("flashoptim", "FlashAdamW"), {"master_weight_bits": 24}),
        Method("TransformerEngine, AdamW", autocast=True, te=True, **single),
        Method("fp8stack O0", autocast=True, level="O0", options=level, **single),
        Method("fp8stack O1", autocast=True, level="O1", options=level, **single),
        Method("fp8stack O2", level="O2", options=level),
        Method("fp8stack O2, 4bit", level="O2", options={**level, "states": "4bit"}),
        Method("fp8stack O2, step in backward", level="O2", options={**level, "step_in_backward": True}),
        Method("fp8stack O2, te", level="O2", options={"compute": "te"}),
    ]  # fmt: skip


METHODS = list_methods()


# --- one try


def build(method: Method, shape: Shape, device: str, recompute: bool) -> tuple[nn.Module, Any, Any]:
    """Return a model made on the device in the dtype of its weights, its optimizer, and what its forward runs in."""
    torch.manual_seed(0)
    torch.set_default_dtype(method.weights)
    try:
        with torch.device(device):
            model: nn.Module = models.Llama(shape)
    finally:
        torch.set_default_dtype(torch.float32)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    if method.autocast:
        scope = partial(torch.autocast, device, torch.bfloat16)
    if method.te:
        scope = use_te(model, scope)
    kind = getattr(import_peer(method.optimizer[0]), method.optimizer[1])
    optimizer = kind(model.parameters(), **HYPER, **method.hyper)
    if method.level:
        options = {"skip": models.PLAIN, **method.options}
        model, optimizer = fp8stack.initialize(model, optimizer, method.level, **options)
    if recompute:
        # TransformerEngine's enters its FP8 scope again, where torch's would recompute a block in bf16
        again = capability.load_te().te.checkpoint if method.te else checkpoint
        for block in model.blocks:
            block.forward = partial(again, block.forward, use_reentrant=False)
    return model, optimizer, scope


def use_te(model: nn.Module, outer: Callable[[], Any]) -> Callable[[], Any]:
    library = capability.load_te()
    te, recipe = library.te, library.recipe.Float8CurrentScaling()
    models.swap_te(model, te)

    @contextmanager
    def scope() -> Iterator[None]:
        with outer(), te.autocast(enabled=True, recipe=recipe):
            yield

    return scope


class MemoryStayed(RuntimeError):
    """A try left memory allocated, which would decide on every later one."""


def attempt(method: Method, shape: Shape, device: str, recompute: bool) -> Numbers | None:
    """Train for a few steps; return the peak and the time of the last one, or None where memory ran out."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        numbers = _train(method, shape, device, recompute)
    except (torch.OutOfMemoryError, MemoryError):
        numbers = None
    except RuntimeError as error:  # cuBLAS, Triton and bitsandbytes say it in words
        if "out of memory" not in str(error).lower() and "ALLOC_FAILED" not in str(error):
            raise
        numbers = None
    free(device)
    return numbers


def free(device: str) -> None:
    """Give unused memory back; raise MemoryStayed where a model is still allocated."""
    gc.collect()
    if device != "cuda":
        return
    for _ in range(20):  # autograd's thread may be busy with what is left of a backward that failed
        if torch.cuda.memory_allocated() <= LIBRARIES:
            break
        time.sleep(0.1)
        gc.collect()
    torch.cuda.empty_cache()
    stayed = torch.cuda.memory_allocated()
    if stayed > LIBRARIES:
        raise MemoryStayed(
            f"{stayed:,} bytes stay allocated after a try, and would count as the next one's. Find what refers to its "
            "model or optimizer; until then leave this method out with --only."
        )


def _train(method: Method, shape: Shape, device: str, recompute: bool) -> Numbers:
    model, optimizer, scope = build(method, shape, device, recompute)
    ids = torch.randint(shape.vocab, (shape.batch, shape.sequence + 1), device=device)
    begin, loss = 0.0, torch.zeros(())
    for step in range(STEPS):
        if step == STEPS - 1:
            synchronize(device)
            begin = time.perf_counter()
        with scope():
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    seconds = time.perf_counter() - begin
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": 1e3 * seconds,
        "tokens_per_second": ids[:, 1:].numel() / seconds,
        "loss": loss.item(),
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- the search


def find_most(
    fits: Callable[[int], Numbers | None], capacity_gib: float | None, most: int
) -> tuple[int, Numbers, int | None]:
    """Return the largest count that fits, what it measured, and the smallest that was tried and did not.

    Memory is taken to be affine in the count, which chooses what to try next; what is returned was tried. A count of 0
    stands for a first one that does not fit.
    """
    measured: dict[int, Numbers] = {}
    least_failed: int | None = None
    count = 1
    while True:
        numbers = fits(count)
        if numbers is None:
            least_failed = count
        else:
            measured[count] = numbers
        largest = max(measured, default=0)
        ceiling = most if least_failed is None else least_failed - 1
        if largest >= ceiling:
            return largest, measured.get(largest, {}), least_failed
        count = min(ceiling, max(largest + 1, _predict(measured, capacity_gib, ceiling)))


def _predict(measured: dict[int, Numbers], capacity_gib: float | None, ceiling: int) -> int:
    """Return the count that should just fit, by the two largest that did."""
    if len(measured) < 2 or capacity_gib is None:
        return 2 * max(measured, default=0)
    below, above = sorted(measured)[-2:]
    peaks = measured[below]["peak_gib"], measured[above]["peak_gib"]
    slope = (peaks[1] - peaks[0]) / (above - below)
    if slope <= 0:
        return 2 * above
    guess = above + int((capacity_gib - peaks[1]) / slope)
    # once the guess has failed, halve what is left
    return guess if guess <= ceiling else (above + ceiling + 1) // 2


def measure(method: Method, name: str, options: argparse.Namespace) -> Numbers:
    """Return the largest count of blocks or sequences that trains by a method, and what it measured."""
    free(options.device)  # the method before may have broken off
    whole = name == LARGEST
    capacity = None
    if options.device == "cuda":
        capacity = options.gib or torch.cuda.get_device_properties(0).total_memory / 2**30

    def fits(count: int) -> Numbers | None:
        shape = replace(MODELS[name], **{"layers" if whole else "batch": count})
        return attempt(method, shape, options.device, recompute=whole)

    count, numbers, failed = find_most(fits, capacity, options.most)
    return {"count": count, "failed_at": failed, "capacity_gib": capacity, **numbers}


# --- output


def report(results: dict[str, dict[str, Numbers]], options: argparse.Namespace) -> None:
    table = Table("method", title="what trains on one GPU", box=box.SIMPLE)
    for name in options.model:
        table.add_column(name, justify="right", no_wrap=True)
    records = []
    for method, by_model in results.items():
        cells = []
        for name in options.model:
            n = by_model.get(name)
            cells.append("-" if n is None else describe(name, n))
            if n is None:
                continue
            shape = MODELS[name]
            params = {"model": name, "seq": shape.sequence, "gib": options.gib}
            metric, value, unit = "micro-batch", n["count"], "sequences"
            if name == LARGEST:
                metric, value, unit = "largest model", n.get("parameters", 0), "parameters"
            record = {"name": "memory", "variant": method, "params": params, "metric": metric}
            records.append({**record, "value": value, "unit": unit, **n})
        table.add_row(method, *cells)
    append_records(options.output, records)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def describe(name: str, numbers: Numbers) -> str:
    if not numbers["count"]:
        return "none"
    pace = f"{numbers['tokens_per_second']:,.0f} tok/s"
    if name == LARGEST:
        return f"{numbers['parameters'] / 1e9:.2f} B, {pace}"
    return f"{numbers['count']} × {MODELS[name].sequence}, {pace}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add = parser.add_argument
    add("--gib", type=float, help="of the GPU's memory that may be used; by default all")
    add("--most", type=int, default=512, help="sequences or blocks that are tried")
    usual = [name for name in MODELS if name != "tiny"]
    return read_choices(parser, arguments, MODELS, METHODS, lambda _: usual)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.gib and options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        if options.gib > total:
            sys.exit(f"--gib {options.gib}: the GPU has {total:.1f}")
        torch.cuda.set_per_process_memory_fraction(options.gib / total)
    results: dict[str, dict[str, Numbers]] = {}
    failed = []
    for method, name in itertools.product(options.variants, options.model):
        try:
            numbers = measure(method, name, options)
        except KeyboardInterrupt:  # what is measured is recorded
            failed.append("stopped")
            break
        except MemoryStayed as error:
            print(f"{method.name}, {name}: {error}", file=sys.stderr)
            failed.append(f"{method.name}, {name}")
            break
        except Exception as error:  # a peer that is missing, or breaks: the others go on
            print(f"{method.name}, {name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(f"{method.name}, {name}")
            continue
        results.setdefault(method.name, {})[name] = numbers
        print(f"{method.name}, {name}: {json.dumps(numbers)}", file=sys.stderr)
    report(results, options)
    print(json.dumps({"failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
