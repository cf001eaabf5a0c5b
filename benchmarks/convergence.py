"""Does a level train as well as the baseline? The demo's model, larger, over several seeds.

    python benchmarks/convergence.py --seeds 0 1 2 --steps 1500 --jobs 4
    python benchmarks/convergence.py --model 126m --levels baseline --formats 8bit/split24 4bit/split24 --batch 16 \
        --lr 6e-4 --data stdlib --out optimizer_parity.jsonl
    python benchmarks/convergence.py --model 126m --fallbacks fp8stack bitsandbytes --batch 16 --lr 6e-4 --data stdlib
    python benchmarks/convergence.py --model 126m --levels --peers '*' 'torchao *bit/bf16' --batch 16 --lr 6e-4 \
        --data stdlib

The first compares the levels. The second compares optimizers alone: O2 with GEMMs in bf16, whose gradients are FP8
and whose states and masters are kept in the formats named, against torch's AdamW in float32, which must be 0.3 % away
at most (1 % for 4-bit states). The third adds what a GPU without FP8 falls back to: bfloat16 products and gradients,
and 8-bit states that fp8stack or bitsandbytes steps. The fourth steps the baseline with the optimizers of other
libraries, as `optimizer_step.py` makes them: over float32 weights, or bfloat16 ones where the optimizer keeps a master
of its own or "/bf16" is asked for (torchao then rounds stochastically). No bound is set for them; those that are not
installed are named, and left out. The third has run the baseline, hence no --levels.

Every (level, seed) pair is one run of `examples/demo.py`'s `train`, in a process of its own, `--jobs` at a time;
the same seed gives every level the same weights and batches, so differences are paired. It appends one record a run,
with the curves, to `--out`; the table is of all that the file holds of this model, with
as many steps, the same batch and learning rate, over the text of the last baseline, so seeds may be run in several
calls. The last line of output is one JSON object with the result, and the exit status is 1 if any level's mean
validation loss is further than 0.5 % from the baseline's, or a peer's run broke off.

The text is the source of the installed PyTorch, tens of megabytes, so that no run sees it twice by much. Batches are
large because this model learns to copy from its context in one sudden transition, whose step is a matter of luck when
the gradient is noisy: with 8,192 tokens a step, runs of the baseline itself ended 14 % apart.

Limits: a byte-level model of this size on megabytes of Python is a regression test, and says little of a large one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from fnmatch import fnmatch
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import ROOT, append_records
from optimizer_step import VARIANTS, Variant, count_bytes, make_step
from paired_runs import beside_baseline, tabulate
from torch import nn
from torch.optim import Optimizer

sys.path.insert(0, str(ROOT / "examples"))

import corpus
import demo
from demo import LEVELS, Settings, build_optimizer, choose_device, train
from gpt import ModelConfig
from record import Record

RESULTS = ROOT / "benchmarks" / "results" / "convergence.jsonl"
TOLERANCE = 0.005
PARITY = 0.003
PARITY_4BIT = 0.01
FALLBACK, PEER = "fallback", "peer"
PEERS = {v.name: v for v in VARIANTS if not v.module.startswith(("fp8stack.", "torch."))}
MODELS = {
    "19m": ModelConfig(dim=512, layers=6, heads=8, kv_heads=4, ffn=1536, seq_len=512),
    "126m": ModelConfig(dim=896, layers=12, heads=14, kv_heads=14, ffn=2688, seq_len=1024),
    "tiny": ModelConfig(dim=128, layers=1, heads=2, kv_heads=2, ffn=256, seq_len=64),
}


def run(level: str, seed: int, options: argparse.Namespace) -> Record:
    """Train one model; called in a process of its own."""
    entered, given = options_of(level)
    settings = Settings(
        level=entered,
        options={**given, "skip": tuple(options.skip)},
        model=MODELS[options.model],
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        seed=seed,
        device=choose_device("auto"),
    )
    text = corpus.load(options.data, MODELS[options.model].seq_len)
    if level.startswith(f"{PEER}/"):
        return train_with_peer(level.removeprefix(f"{PEER}/"), settings, text)
    return train(settings, text, show_progress=False)[1]


def options_of(variant: str) -> tuple[str, dict[str, str]]:
    """Return the level and the options of `initialize` that a level, or optimizer formats, stand for."""
    first, _, rest = variant.partition("/")
    if not rest:  # the models are small: FP8 is what is compared, whether it is faster or not
        return variant, {} if variant == "baseline" else {"select": "all"}
    if first == PEER:
        return "baseline", {}
    if first == FALLBACK:
        return "O2", {"compute": "bf16", "gradients": "keep", "optimizer_backend": rest}
    return "O2", {"compute": "bf16", "states": first, "master": rest}


# --- optimizers of other libraries


def choose_peers(wanted: list[str]) -> list[str]:
    """Return the variants of peers that globs stand for; say which are not installed. Exits where none is meant."""
    chosen: dict[str, None] = {}
    for given in wanted:
        pattern, _, weights = given.partition("/")
        named = [peer for peer in PEERS if fnmatch(peer, pattern)]
        if not named or weights not in ("", "fp32", "bf16"):
            sys.exit(f"--peers {given}: must be NAME or NAME/bf16, NAME of {', '.join(PEERS)}")
        for peer in named:
            library = PEERS[peer].module.partition(".")[0]
            if find_spec(library) is None:
                print(f"{peer}: not installed ({library})", file=sys.stderr)
            else:
                own = weights in ("", usual_weights(PEERS[peer]))
                chosen[f"{PEER}/{peer}" + ("" if own else f"/{weights}")] = None
    return list(chosen)


def usual_weights(peer: Variant) -> str:
    """Return in which dtype weights are left to a peer: bfloat16 alone would lose updates, so it takes a master."""
    return "fp32" if peer.master == "none" else "bf16"


def build_peer(name: str, model: nn.Module, lr: float) -> Optimizer:
    """Return a peer's optimizer with the groups and numbers of the demo's, over weights of the dtype that it takes."""
    peer, _, weights = name.partition("/")
    if (weights or usual_weights(PEERS[peer])) == "bf16":
        for p in model.parameters():  # not the buffers: rotary tables stay exact
            p.data = p.data.bfloat16()
    numbers = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{n: group[n] for n in numbers} for group in build_optimizer(model, lr).param_groups]
    optimizer = make_step(PEERS[peer], groups)[0]
    for group in optimizer.param_groups:  # flashoptim's is its default, and a schedule goes by it
        group["initial_lr"] = float(group["lr"])
    return optimizer


def train_with_peer(name: str, settings: Settings, text: corpus.Corpus) -> Record:
    """Run the demo's loop with a peer's optimizer in it; `count_bytes` knows the states of each."""
    sizes: dict[str, float] = {}

    def build(model: nn.Module, lr: float) -> Optimizer:
        optimizer = build_peer(name, model, lr)

        def count(*_: Any) -> None:  # after the first step, when states and gradients are there
            if not sizes:
                sizes.update(count_bytes(list(model.parameters()), optimizer))

        optimizer.register_step_post_hook(count)
        return optimizer

    with patch.object(demo, "build_optimizer", build):
        record = train(settings, text, show_progress=False)[1]
    record.bytes_per_parameter = sizes
    return record


# --- runs and their records


def variants_of(options: argparse.Namespace) -> list[str]:
    """Return all that is to be run with each seed."""
    fallbacks = (f"{FALLBACK}/{backend}" for backend in options.fallbacks)
    peers = choose_peers(options.peers)
    return [*options.levels, *options.formats, *fallbacks, *peers]


def run_all(options: argparse.Namespace) -> bool:
    """Run every pair, several at a time; append a record as each ends, so that an interrupted call loses few.

    A peer that breaks is named, without a record. Returns whether one did.
    """
    broken = False
    variants = variants_of(options)
    # One process per run: a child that ends gives its GPU memory back and leaves no state behind.
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures: dict[Future[Record], tuple[str, int]] = {
            pool.submit(run, level, seed, options): (level, seed)
            for seed in options.seeds
            for level in variants
        }
        for future in as_completed(futures):
            level, seed = futures[future]
            error = future.exception()
            if error is not None and level.startswith(f"{PEER}/"):
                print(f"{level} seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                broken = True
                continue
            record = to_record(future.result(), level, seed, options)
            append_records(options.out, [record])
            print(f"{level:>8} seed {seed}: {record['value']:.4f}", flush=True)
    return broken


def to_record(record: Record, level: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return one run with its curves, that of training averaged over 25 steps."""
    return {
        "name": "convergence",
        "variant": " ".join([level, *(f"skip={p}" for p in options.skip)]),
        "params": params_of(seed, options, record.conditions["text"]),
        "metric": "validation_loss",
        "value": record.final_loss,
        "unit": "nats/byte",
        "validation": record.validation,
        "train_loss_per_25_steps": average(record.train_loss, 25),
        "bytes_per_parameter": record.bytes_per_parameter,
        "skipped_steps": record.skipped_steps,
    }


def params_of(seed: int, options: argparse.Namespace, text: str) -> dict[str, Any]:
    """Return what makes two runs of a variant comparable, and the seed."""
    return {
        **asdict(MODELS[options.model]),
        "steps": options.steps,
        "batch": options.batch,
        "lr": options.lr,
        "seed": seed,
        "text": text,
    }


def average(losses: list[float], steps: int) -> list[float]:
    """Return the means of so many losses each."""
    parts = (losses[i : i + steps] for i in range(0, len(losses), steps))
    return [round(statistics.mean(part), 4) for part in parts]


def by_variant(
    path: Path, keep: Callable[[dict[str, Any]], bool] = lambda record: True
) -> dict[str, dict[int, dict[str, Any]]]:
    """Read all records that are to be kept: variant, then seed."""
    return tabulate(filter(keep, map(json.loads, path.read_text().splitlines())))


def summarize(
    table: dict[str, dict[int, dict[str, Any]]], base: str = "baseline"
) -> dict[str, dict[str, Any]]:
    """Return, for each variant, its mean loss and the paired differences to `base`, as fractions of it."""
    summary = {}
    for variant, runs in table.items():
        paired = {s: r["value"] / table[base][s]["value"] - 1 for s, r in sorted(runs.items())}
        summary[variant] = {
            "mean": statistics.mean(r["value"] for r in runs.values()),
            "difference": statistics.mean(paired.values()),
            "differences": paired,
        }
    return summary


def show(summary: dict[str, dict[str, Any]], width: int = 14) -> None:
    """Print a line for each variant: its mean, the mean difference and that of each seed."""
    width = max([width, *map(len, summary)])
    for variant, row in summary.items():
        each = ", ".join(f"{d:+.2%}" for d in row["differences"].values())
        print(f"{variant:>{width}}  {row['mean']:.4f}  {row['difference']:+.3%}   ({each})")


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add what a loss check lets its user choose of the runs."""
    add = parser.add_argument
    add(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: only sum up what is recorded"
    )
    add("--model", choices=MODELS, default="19m")
    add("--steps", type=int, default=1500)
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=2e-3)
    add(
        "--data", default=Path(torch.__file__).parent, help="text file or folder, or stdlib",
        type=lambda given: None if given == "stdlib" else Path(given),
    )  # fmt: skip
    add("--out", type=Path, default=RESULTS)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training(parser)
    add = parser.add_argument
    add("--levels", nargs="*", choices=LEVELS, default=list(LEVELS))
    add("--formats", nargs="*", default=[], metavar="STATES/MASTER", help="e.g. 8bit/split24")
    add("--fallbacks", nargs="*", default=[], choices=("fp8stack", "bitsandbytes"))
    add("--peers", nargs="*", default=[], metavar="NAME", help=f"globs of {', '.join(PEERS)}")
    add("--skip", nargs="*", default=[], metavar="PATTERN", help="layers to leave as they are")
    add("--jobs", type=int, default=1, help="runs at a time on the one device")
    options = parser.parse_args(arguments)
    broken = bool(options.seeds) and run_all(options)
    if not options.out.exists():
        return int(broken)
    records = map(json.loads, options.out.read_text().splitlines())
    alike = [record for record in records if is_alike(record, options)]
    compared = beside_baseline(alike)
    if not compared:
        print("there is no baseline of such runs, so nothing is compared", file=sys.stderr)
        return int(broken)
    if alone := len(alike) - len(compared):
        why = "of another text than the last baseline's, or of a seed that it lacks"
        print(f"{alone} of {len(alike)} runs are left out: {why}", file=sys.stderr)
    table = tabulate(compared)
    summary = summarize(table)
    show(summary)
    print(json.dumps(summary))
    off = any(is_off(v, row["difference"]) for v, row in summary.items())
    return int(off | any_skipped(table) | broken)


def is_alike(record: dict[str, Any], options: argparse.Namespace) -> bool:
    """Return whether a record is of the model, steps, batch and learning rate of this call."""
    params = record["params"]
    asked = params_of(params["seed"], options, params["text"])  # older records lack parts of these
    return all(asked.get(key) == value for key, value in params.items())


def any_skipped(table: dict[str, dict[int, dict[str, Any]]]) -> bool:
    """Say which runs had gradients that were not finite: their steps are skipped, and losses look fine all the same."""
    found = False
    for variant, runs in table.items():
        for seed, record in sorted(runs.items()):
            if skipped := record.get("skipped_steps"):
                print(f"{variant} seed {seed}: {skipped} steps were skipped")
                found = True
    return found


def is_off(variant: str, difference: float) -> bool:
    """Return whether a variant that has a bound is beyond it; NaN is."""
    return tolerance(variant) < float("inf") and not abs(difference) <= tolerance(variant)


def tolerance(variant: str) -> float:
    """Return how far the mean loss of a variant may be from the baseline's."""
    if "/" not in variant:
        return TOLERANCE if variant in LEVELS else float("inf")
    if variant.startswith(f"{PEER}/"):
        return float("inf")
    if variant.partition("/")[0] == FALLBACK:
        return TOLERANCE
    return PARITY_4BIT if variant.startswith("4bit") else PARITY


if __name__ == "__main__":
    sys.exit(main())
