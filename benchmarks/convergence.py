"""Does a level train as well as the baseline? The demo's model, larger, over several seeds.

    python benchmarks/convergence.py --seeds 0 1 2 --steps 1500 --jobs 4

Every (level, seed) pair is one run of `examples/train_gpt.py`'s `train`, in a process of its own, `--jobs` at a time;
the same seed gives every level the same weights and batches, so differences are paired. It writes one record a run,
with the curves, to `benchmarks/results/convergence.jsonl` and draws `docs/assets/convergence.svg`. The last line of
output is one JSON object with the result, and the exit status is 1 if any level's mean validation loss is further
than 0.5 % from the baseline's.

The text is the source of the installed PyTorch, tens of megabytes, so that no run sees it twice by much. Batches are
large because this model learns to copy from its context in one sudden transition, whose step is a matter of luck when
the gradient is noisy: with 8,192 tokens a step, runs of the baseline itself ended 14 % apart.

Limits: a byte-level model of tens of millions of parameters on tens of megabytes of Python says little of a large
model. It is a regression test of the numerics with a statement of noise, not a claim about every model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import ROOT, append_records, conditions

sys.path.insert(0, str(ROOT / "examples"))

import corpus
from gpt import GPTConfig
from record import Record
from train_gpt import LEVELS, Settings, choose_device, train

RESULTS = ROOT / "benchmarks" / "results" / "convergence.jsonl"
PICTURE = ROOT / "docs" / "assets" / "convergence.svg"
TOLERANCE = 0.005
MODEL = GPTConfig(dim=512, layers=6, heads=8, kv_heads=4, ffn=1536, seq_len=512)


def run(level: str, seed: int, options: argparse.Namespace) -> Record:
    """Train one model; called in a process of its own."""
    settings = Settings(
        level=level,
        model=MODEL,
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        seed=seed,
        device=choose_device("auto"),
    )
    text = corpus.load(options.data, MODEL.seq_len)
    return train(settings, text, show_progress=False)[1]


def run_all(options: argparse.Namespace) -> dict[tuple[str, int], Record]:
    """Run every pair, several at a time, and report each as it ends."""
    results = {}
    # One process per run: a child that ends gives its GPU memory back and leaves no state behind.
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {
            pool.submit(run, level, seed, options): (level, seed)
            for seed in options.seeds
            for level in LEVELS
        }
        for future in as_completed(futures):
            level, seed = futures[future]
            results[level, seed] = future.result()
            print(f"{level:>8} seed {seed}: {results[level, seed].final_loss:.4f}", flush=True)
    return results


def summarize(results: dict[tuple[str, int], Record], seeds: list[int]) -> dict[str, Any]:
    """Return, for each level, its losses and their paired differences to the baseline as fractions of it."""
    summary = {}
    for level in LEVELS:
        losses = [results[level, seed].final_loss for seed in seeds]
        paired = [
            results[level, s].final_loss / results["baseline", s].final_loss - 1 for s in seeds
        ]
        summary[level] = {
            "mean": statistics.mean(losses),
            "losses": losses,
            "difference": statistics.mean(paired),
            "differences": paired,
        }
    return summary


def to_records(
    results: dict[tuple[str, int], Record], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one record a run, the training curve averaged over 25 steps."""
    records = []
    for (level, seed), record in sorted(results.items()):
        losses = record.train_loss
        curve = [round(statistics.mean(losses[i : i + 25]), 4) for i in range(0, len(losses), 25)]
        records.append(
            {
                "name": "convergence",
                "variant": level,
                "params": {
                    **asdict(MODEL),
                    "steps": options.steps,
                    "batch": options.batch,
                    "lr": options.lr,
                    "seed": seed,
                    "text": record.conditions["text"],
                },
                "metric": "validation_loss",
                "value": record.final_loss,
                "unit": "nats/byte",
                "validation": record.validation,
                "train_loss_per_25_steps": curve,
                "bytes_per_parameter": record.bytes_per_parameter,
            }
        )
    return records


def draw(results: dict[tuple[str, int], Record], options: argparse.Namespace, path: Path) -> None:
    """Draw the mean validation curves and, below, their difference to the baseline, one thin line a seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8stack"
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1)
    )
    steps = [step for step, _ in results["baseline", options.seeds[0]].validation]
    for level, color in zip(LEVELS, ("black", "tab:blue", "tab:orange", "tab:red"), strict=True):
        curves = [[loss for _, loss in results[level, seed].validation] for seed in options.seeds]
        above.plot(
            steps, [statistics.mean(c) for c in zip(*curves, strict=True)], color=color, label=level
        )
        for curve, seed in zip(curves, options.seeds, strict=True):
            base = [loss for _, loss in results["baseline", seed].validation]
            relative = [100 * (a / b - 1) for a, b in zip(curve, base, strict=True)]
            below.plot(steps, relative, color=color, linewidth=0.8)
    below.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="0.92", zorder=0)
    above.set(ylabel="validation loss, nats/byte", title=f"mean of seeds {options.seeds}")
    below.set(xlabel="step", ylabel="difference to baseline, %", ylim=(-2, 2))
    above.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time on the one device")
    parser.add_argument(
        "--data", type=Path, default=Path(torch.__file__).parent, help="text file or folder"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    results = run_all(options)
    append_records(options.out, to_records(results, options))
    draw(results, options, options.picture)
    summary = summarize(results, options.seeds)
    print(f"\n{conditions()['gpu']}, {options.steps} steps, seeds {options.seeds}")
    for level, row in summary.items():
        each = ", ".join(f"{d:+.2%}" for d in row["differences"])
        print(f"{level:>8}  {row['mean']:.4f}  {row['difference']:+.3%}   ({each})")
    print(json.dumps(summary))
    return int(any(abs(row["difference"]) > TOLERANCE for row in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
