"""Does every FP8 format train, with every recipe, margin and odd size? Many short runs, each against bf16's.

    python benchmarks/stability.py                               # both grids, on a GPU
    python benchmarks/stability.py --grid shapes
    python benchmarks/stability.py --grid formats --compute te --only 'delayed*'
    python benchmarks/stability.py --device cpu --model tiny --steps 4

`formats` is a GPT-2 of 12 layers on bytes of Python's standard library, its tied head in FP8 too: format × recipe ×
margin × a vocabulary of 50,257, which no multiple of 16 divides, or 50,304; with delayed scales also × a history of
1,024 steps or of 16, which forgets the large gradients of the first ones. `shapes` is a small GPT-2 with one size after
the other odd: sequence, batch, width, hidden width, vocabulary, and all of them. Every run is O2, so that optimizer
states and gradients meet the odd sizes too, and has the seed, batches and learning rate, without warm-up, of the run in
bf16 (float32 weights, autocast, AdamW) that it is compared with.

`gap` is the mean of the last tenth of the training losses over bf16's, minus one. `underflow` is the share of the
gradients of a layer's output that FP8 makes zero in the last step, of the median layer, from fp8stack's Monitor; null
where TransformerEngine multiplies, whose casts it does not see. A run fails where a loss is not finite, a step was
skipped, or the gap is more than --bound. Short runs say that nothing breaks, not how well it trains: for that there is
convergence.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import models
import torch
from common import ROOT, add_choices, append_records, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fp8stack
from fp8stack.monitor import Monitor
from fp8stack.monitor.advice import SHORT_HISTORY as SHORT

sys.path.insert(0, str(ROOT / "examples"))
import corpus

RESULTS = ROOT / "benchmarks" / "results" / "stability.jsonl"
VOCABULARIES = (50_257, 50_304)
SMALL = models.Config("gpt2", 512, 256, 2, 4, 4, 768, batch=4, sequence=128)
MODELS = {
    "gpt2": replace(models.MODELS["gpt2"], batch=8),
    "tiny": replace(models.MODELS["tiny-gpt2"], vocab=320),
}
ODD: dict[str, dict[str, int]] = {
    "even": {},
    "sequence 127": {"sequence": 127},
    "batch 3": {"batch": 3},
    "width 250": {"dim": 250, "heads": 5, "kv_heads": 5},
    "hidden 771": {"ffn": 771},
    "vocabulary 509": {"vocab": 509},
    "all": {
        "sequence": 127, "batch": 3, "dim": 250, "heads": 5, "kv_heads": 5, "ffn": 771, "vocab": 509,
    },
}  # fmt: skip
MARGINS = (0, 1, 2)
LR = 6e-4
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """Options of fp8stack.initialize at O2; none for bf16."""

    name: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)


def list_variants() -> list[Variant]:
    made = []
    for fmt in ("hybrid", "e4m3", "e5m2"):
        made.append(Variant(f"current {fmt}", {"fp8_recipe": "current", "fp8_format": fmt}))
        for margin in MARGINS:
            options = {"fp8_recipe": "delayed", "fp8_format": fmt, "fp8_margin": margin}
            name = f"delayed {fmt}, margin {margin}"
            short = {**options, "amax_history_len": SHORT}
            made += [Variant(name, options), Variant(f"{name}, history {SHORT}", short)]
    # scales are its own for each block, E4M3 throughout: neither format nor margin is to be chosen
    return [*made, Variant("blockwise", {"fp8_recipe": "blockwise"})]


VARIANTS = list_variants()


def of_grid(title: str, variants: list[Variant]) -> list[Variant]:
    """Return the variants that a grid asks about: of odd sizes not how long a history is."""
    odd = title.startswith("shapes")
    return [v for v in variants if not (odd and "amax_history_len" in v.options)]


def train(shape: models.Config, options: dict[str, Any] | None, run: argparse.Namespace) -> Numbers:
    """Train at O2 with these options, or in bf16 for None; return losses and what went wrong."""
    torch.manual_seed(0)
    model: Any = models.GPT2(shape).to(run.device)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.02)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    if options is not None:
        options = {"compute": run.compute, "select": "all", **options}
        model, optimizer = fp8stack.initialize(model, optimizer, "O2", **options)
    text = corpus.load(None, shape.sequence)
    windows = torch.Generator().manual_seed(0)
    stream = corpus.batches(text.train, shape.batch, shape.sequence, windows)
    losses: list[Tensor] = []
    watch = options is not None and run.compute == "native"
    monitor = Monitor(model, every=run.steps, by_hand=True) if watch else None
    for step in range(run.steps):
        if monitor is not None and step == run.steps - 1:
            monitor.begin_step(0)
        tokens, targets = (half.to(run.device) for half in next(stream))
        with torch.autocast(run.device, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack(losses).tolist()
    last = curve[-max(1, run.steps // 10) :]
    return {
        "loss": sum(last) / len(last),
        "underflow": median_underflow(monitor),
        "losses": [round(loss, 4) for loss in curve[:: max(1, run.steps // 20)]],
        "finite": all(map(math.isfinite, curve)),
        "skipped_steps": int(getattr(optimizer, "skipped_steps", 0)),
    }


def median_underflow(monitor: Monitor | None) -> float | None:
    """Return the share of a layer's gradients that became zero, of the median layer, and stop monitoring."""
    if monitor is None:
        return None
    with monitor:
        layers = monitor.read(wait=True).values()
    return statistics.median(kinds["g"]["underflow"] for kinds in layers)


def list_runs(options: argparse.Namespace) -> list[tuple[str, models.Config]]:
    """Return the shapes of the chosen grids, each under the name of its grid."""
    runs = []
    for grid in options.grid:
        if grid == "shapes":
            runs += [(f"shapes: {name}", replace(SMALL, **odd)) for name, odd in ODD.items()]
            continue
        for name in options.model:
            whole = MODELS[name]
            sizes = VOCABULARIES if name != "tiny" else (whole.vocab - 3, whole.vocab)
            runs += [(f"formats: {name}, {v}", replace(whole, vocab=v)) for v in sizes]
    return runs


def judge(numbers: Numbers, base: Numbers, bound: float) -> str:
    """Return what is wrong with a run, or an empty string."""
    if not numbers["finite"]:
        return "a loss is not finite"
    if numbers["skipped_steps"]:
        return f"{numbers['skipped_steps']} steps were skipped"
    gap = numbers["loss"] / base["loss"] - 1
    return f"{gap:+.2%} off bf16's loss" if abs(gap) > bound else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add = parser.add_argument
    add("--grid", choices=("formats", "shapes"), nargs="+", default=["formats", "shapes"])
    add("--compute", choices=("native", "te"), default="native")
    add("--steps", type=int, default=200)
    add("--bound", type=float, default=0.05, help="largest gap to bf16's loss, as a fraction")
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["gpt2"])
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    problems, count = [], 0
    for title, shape in list_runs(options):
        records = []
        base = train(shape, None, options)
        table = Table("O2", title=f"{title}: bf16 {base['loss']:.4f}", box=box.SIMPLE)
        table.add_column("loss", justify="right")
        table.add_column("gap", justify="right")
        for variant in of_grid(title, options.variants):
            try:
                numbers = train(shape, variant.options, options)
            except fp8stack.errors.Fp8StackError as error:
                problems.append(f"{title}, {variant.name}: {error}")
                continue
            gap = numbers["loss"] / base["loss"] - 1
            table.add_row(variant.name, f"{numbers['loss']:.4f}", f"{gap:+.2%}")
            if wrong := judge(numbers, base, options.bound):
                problems.append(f"{title}, {variant.name}: {wrong}")
            params = {"model": title, **vars(shape), "compute": options.compute}
            params |= {"steps": options.steps, "lr": LR, **variant.options}
            record = {"name": "stability", "variant": variant.name, "params": params}
            record |= {"metric": "gap", "value": gap, "unit": "of bf16's loss"}
            records.append({**record, "bf16_loss": base["loss"], **numbers})
        Console(width=None if sys.stdout.isatty() else 100).print(table)
        append_records(options.output, records)
        count += len(records)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    print(json.dumps({"runs": count, "failed": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
