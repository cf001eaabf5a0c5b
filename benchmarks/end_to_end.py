"""How long is a whole training step, and what does it hold? Forward, backward and optimizer, at every level.

    python benchmarks/end_to_end.py                                    # a Llama of 1 B parameters, 16,384 tokens
    python benchmarks/end_to_end.py --model gpt2 --only 'bf16*' 'O2*'
    python benchmarks/end_to_end.py --device cpu --model tiny --steps 2

"bf16" is what most people train with: float32 weights under bf16 autocast, torch's fused AdamW. Levels are
`fp8stack.initialize` in the same script, every Linear layer in FP8, the head too. "fused" is with `fuse=True`,
"compiled" torch.compile of the whole model after an eager step, in which layers learn what they share. "te AdamW" has
TransformerEngine's Linear layers over the same weights and optimizer.

`ms` is the median of device events around steps queued one behind the other. `resident` are the bytes a parameter of
weights, masters, gradients and states, counted on live tensors between backward and step, and `GiB` is the peak of a
step, activations included; each variant has a process of its own, so that nothing of one is in the peak of another.
bf16 is measured again at the end, to show how far the GPU drifted.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import models
import torch
from common import ROOT, add_choices, append_records, read_choices
from memory import HYPER, use_te
from memory import MODELS as SIZES
from rich import box
from rich.console import Console
from rich.table import Table
from timing import time_steps
from torch import nn

import fp8stack
from fp8stack import memory
from fp8stack.kernels.reference.delayed_state import SEEDED

RESULTS = ROOT / "benchmarks" / "results" / "end_to_end.jsonl"
BASE = "bf16"
MODELS = {
    "llama-1b": replace(SIZES["1b"], batch=4),
    "gpt2": models.MODELS["gpt2"],
    "tiny": models.MODELS["tiny"],
}
WARM_UP = SEEDED + 4  # steps: the first compile and make states, delayed scaling fills histories
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    name: str
    level: str = ""  # of fp8stack; none for the others
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    fused: bool = False
    compiled: bool = False
    te: bool = False


def list_variants() -> list[Variant]:
    native = {"compute": "native"}
    fast = {**native, "fp8_recipe": "delayed", "fp8_fast_accum": True}
    eager = [
        Variant(BASE),
        *(Variant(level, level, native) for level in ("O0", "O1", "O2")),
        Variant("O2 fused", "O2", native, fused=True),
        Variant("O2 fused, delayed", "O2", {**native, "fp8_recipe": "delayed"}, fused=True),
        Variant("O2 fused, delayed, fast sums", "O2", fast, fused=True),
    ]
    compiled = [replace(v, name=f"{v.name} compiled", compiled=True) for v in eager]
    peers = [Variant("O2 te", "O2", {"compute": "te"}), Variant("te AdamW", te=True)]
    return [*eager, *peers, *compiled]


VARIANTS = list_variants()


def measure(variant: Variant, shape: models.Config, options: argparse.Namespace) -> Numbers:
    cuda = options.device == "cuda"
    torch.manual_seed(0)
    model: Any = (models.Llama if shape.kind == "llama" else models.GPT2)(shape).to(options.device)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.02)
    scope: Any = partial(torch.autocast, options.device, torch.bfloat16)
    if variant.te:
        scope = use_te(model, scope)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=cuda or None, **HYPER)
    if variant.level:
        given = {"fuse": variant.fused, **variant.options}
        model, optimizer = fp8stack.initialize(model, optimizer, variant.level, **given)
    ids = torch.randint(shape.vocab, (shape.batch, shape.sequence + 1), device=options.device)

    def backward() -> torch.Tensor:
        with scope():
            loss: torch.Tensor = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return loss.detach()

    def step() -> torch.Tensor:
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    start = time.perf_counter()
    if variant.compiled:
        step()
        model.compile(backend="inductor" if cuda else "eager")  # needs no C++ compiler on a CPU
    for _ in range(WARM_UP - 1):
        step()
    backward()
    resident = memory.measure(model, optimizer).per_parameter()
    optimizer.step()
    optimizer.zero_grad()
    numbers: Numbers = {"resident": resident, "warm_up_s": time.perf_counter() - start}
    numbers["loss"] = step().item()
    peak = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() / 2**30
    gc.collect()
    step_ms, cpu_ms, count = time_steps(step, options.steps, cuda)
    tokens = shape.batch * shape.sequence
    return {
        **numbers,
        "step_ms": step_ms,
        "cpu_ms": cpu_ms,
        "steps": count,
        "peak_gib": peak,
        "tokens_per_second": 1e3 * tokens / step_ms,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def apart(variant: Variant, name: str, options: argparse.Namespace) -> Numbers:
    """Return what `measure` does, in a process of its own; raise what it raises."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, variant, MODELS[name], options).result()


def report(results: dict[str, Numbers], name: str, options: argparse.Namespace) -> None:
    shape = MODELS[name]
    base = results.get(BASE)
    table = Table("variant", title=f"{name}: a whole step", box=box.SIMPLE)
    for column in (
        "ms",
        "× bf16",
        "× compiled bf16",
        "tokens/s",
        "resident",
        "GiB",
        "CPU ms",
        "loss",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    compiled = results.get(f"{BASE} compiled")
    records = []
    for variant, n in results.items():
        n["speedup"] = base and base["step_ms"] / n["step_ms"]
        n["speedup_compiled"] = compiled and compiled["step_ms"] / n["step_ms"]
        n["resident_ratio"] = base and n["resident"]["total"] / base["resident"]["total"]
        cells = [n["step_ms"], n["speedup"], n["speedup_compiled"], n["tokens_per_second"]]
        cells += [n["resident"]["total"], n["peak_gib"], n["cpu_ms"], n["loss"]]
        table.add_row(variant, *("-" if c is None else f"{c:,.2f}" for c in cells))
        params = {"model": name, "batch": shape.batch, "seq": shape.sequence}
        record = {"name": "end_to_end", "variant": variant, "params": params, "metric": "step"}
        rest = {k: v for k, v in n.items() if k != "step_ms"}
        records.append({**record, "value": n["step_ms"], "unit": "ms", **rest})
    append_records(options.output, records)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    return read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["llama-1b"])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    failed = []
    for name in options.model:
        results: dict[str, Numbers] = {}
        again = [replace(v, name=f"{BASE} again") for v in options.variants if v.name == BASE]
        for variant in (*options.variants, *again):
            try:
                results[variant.name] = apart(variant, name, options)
                print(f"{variant.name}: {results[variant.name]['step_ms']:.1f} ms", file=sys.stderr)
            except KeyboardInterrupt:  # what is measured is recorded
                failed.append("stopped")
                break
            except Exception as error:  # a peer that is missing, or breaks: the others go on
                print(f"{variant.name}: {type(error).__name__}: {error}", file=sys.stderr)
                failed.append(f"{name}, {variant.name}")
        report(results, name, options)
        if "stopped" in failed:
            break
    print(json.dumps({"failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
