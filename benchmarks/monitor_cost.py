"""What does a Monitor add to a training step? Blocks of steps with one and without one, in turn.

    python benchmarks/monitor_cost.py                              # GPT-2 124M and a Llama of 1 B parameters
    python benchmarks/monitor_cost.py --device cpu --model tiny --steps 4 --blocks 2

At O2, every Linear layer in FP8. A block is --steps steps, queued without waiting and timed as a whole, of which the
monitor samples the first. After the last one its numbers are read, as far as they have arrived, and written to a file
as a line of JSON. `cost` is the median block with a monitor over the median block without one, minus one. `sampled` is
the time of a step that is sampled, `plain` of one that is not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import torch
from common import ROOT, add_choices, append_records, read_choices
from end_to_end import MODELS, WARM_UP, Variant
from memory import HYPER, synchronize
from rich import box
from rich.console import Console
from rich.table import Table

import fp8stack
from fp8stack.monitor import Monitor

RESULTS = ROOT / "benchmarks" / "results" / "monitor_cost.jsonl"
VARIANTS = [
    Variant("O2", "O2", {"compute": "native"}),
    Variant("O2 delayed", "O2", {"compute": "native", "fp8_recipe": "delayed"}),
]
Numbers = dict[str, Any]


def measure(
    variant: Variant, shape: models.Config, options: argparse.Namespace, folder: Path
) -> Numbers:
    torch.manual_seed(0)
    model: Any = (models.Llama if shape.kind == "llama" else models.GPT2)(shape).to(options.device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), **HYPER)
    model, optimizer = fp8stack.initialize(
        model, optimizer, variant.level, select="all", **variant.options
    )
    ids = torch.randint(shape.vocab, (shape.batch, shape.sequence + 1), device=options.device)

    def step() -> None:
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @contextlib.contextmanager
    def monitored(every: int) -> Iterator[Callable[[], None]]:
        """Yield a step of which a monitor samples one in `every`, and the last of so many writes the numbers."""
        left = itertools.cycle(reversed(range(every)))
        with Monitor(model, optimizer, every=every) as monitor:

            def logged_step() -> None:
                step()
                if next(left) == 0:
                    with (folder / "monitor.jsonl").open("a") as file:
                        file.write(json.dumps(monitor.metrics()) + "\n")

            yield logged_step
            assert monitor.read(wait=True), "nothing was sampled"

    for _ in range(WARM_UP):
        step()
    with monitored(1) as logged:
        logged()  # compiles
    plain, watched = [], []
    for _ in range(options.blocks):
        plain.append(time_block(step, options.steps, options.device))
        with monitored(options.steps) as logged:
            watched.append(time_block(logged, options.steps, options.device))
    with monitored(1) as logged:
        sampled = [time_block(logged, 1, options.device) for _ in range(5)]
    single = [time_block(step, 1, options.device) for _ in range(5)]
    return {
        "cost": statistics.median(watched) / statistics.median(plain) - 1,
        "blocks_s": [plain, watched],
        "plain_ms": 1e3 * statistics.median(single),
        "sampled_ms": 1e3 * statistics.median(sampled),
    }


def time_block(step: Callable[[], None], steps: int, device: str) -> float:
    """Return the seconds of so many steps, the device done before and after."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    parser.add_argument("--steps", type=int, default=100, help="in a block, one of them sampled")
    parser.add_argument("--blocks", type=int, default=3, help="of each kind")
    usual = ["gpt2", "llama-1b"]
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: usual)
    table = Table("model", title=f"a Monitor, every={options.steps}", box=box.SIMPLE)
    for column in ("recipe", "plain, ms", "sampled, ms", "cost"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in options.model:
        shape = MODELS[name]
        for variant in options.variants:
            with tempfile.TemporaryDirectory() as folder:
                n = measure(variant, shape, options, Path(folder))
            params = {"model": name, "batch": shape.batch, "seq": shape.sequence}
            record = {"name": "monitor_cost", "variant": variant.name, "params": params, **n}
            record |= {"metric": f"cost of every={options.steps}", "value": record.pop("cost")}
            append_records(options.output, [{**record, "unit": "of the time of steps"}])
            cells = f"{n['plain_ms']:.1f}", f"{n['sampled_ms']:.1f}", f"{n['cost']:+.2%}"
            table.add_row(name, variant.name, *cells)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
