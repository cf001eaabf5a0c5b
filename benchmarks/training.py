"""Does a level train as well as bf16, and faster, over a long run of the application? Loss, speed and memory.

    python benchmarks/training.py --text FOLDER --shards DIR       # only writes shards, with a tokenizer of their own
    python benchmarks/training.py --shards DIR --model gpt2 llama-1b --levels off O0 O1 O2 --steps 1000 --gpus 0 1
    python benchmarks/training.py --shards DIR --model tiny --levels off O2 --steps 6 --device cpu

Each (model, level, seed) is one run of `examples/train_gpt.py`, in a process and on a GPU of its own; those of a model
and seed have the same weights, data, batch and learning rate. "off" is plain PyTorch, recorded as "bf16": float32
weights under bf16 autocast and torch's fused AdamW; levels are `fp8stack.initialize` on top, all Linear layers in FP8,
the head too. The whole effective batch is one micro-batch.

Shards are tokens of a byte-level BPE of 50,257, trained on the training part of the text: GPT-2's size without its
download, so that a machine needs no network.

As a run ends, its record is added to `benchmarks/results/training.jsonl`: the last validation loss and both curves
(training losses are means of 25 steps); the medians of tokens/s and of milliseconds a step, those of the first 50 steps
left out, and evaluations with the steps beside them; the peak of memory over the whole run, evaluations included; and
what `fp8stack estimate` says of it. Runs and what they printed stay in --runs. One that fails is named with the end of
its output, the others go on, and the exit status is 1. Ctrl-C stops what runs; what ended is recorded.

Limits: on a CPU `peak_gib` is the memory of the process, and nothing is estimated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import ROOT, append_records
from convergence import average
from peaks import shape_of_gpt
from rich import box
from rich.console import Console
from rich.table import Table

from fp8stack import planning
from fp8stack.levels import LEVELS, recipe_for

sys.path.insert(0, str(ROOT / "examples"))

import corpus
from gpt import tokenize_data
from gpt.config import parse as parse_flags
from gpt.runs import run_folder
from gpt.tokens import SEPARATORS, split_text

RESULTS = ROOT / "benchmarks" / "results" / "training.jsonl"
TOKENS = 50_257  # of GPT-2's vocabulary, and of the one that is trained here
SKIPPED = 50  # steps at the start that are not timed
WARM_UP = 100  # steps of the learning rate's
BASE = "bf16"
HEADS = ("loss", "gap", "tokens/s", "× bf16", "peak GiB", "× bf16", "estimate", "off by")
Record = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    size: int
    seq: int
    lr: float


MODELS = {
    "gpt2": Batch(32, 1024, 6e-4),
    "llama-1b": Batch(4, 4096, 3e-4),
    "tiny": Batch(4, 64, 3e-3),  # for tests on a CPU
}


@dataclass(frozen=True)
class Run:
    model: str
    seed: int
    level: str  # or "off"

    @property
    def variant(self) -> str:
        return BASE if self.level == "off" else self.level

    @property
    def name(self) -> str:
        return f"{self.model}, {self.variant}, seed {self.seed}"

    def folder(self, options: argparse.Namespace) -> Path:
        config = parse_flags(self.flags(options))
        return run_folder(config, config.precision)

    def flags(self, options: argparse.Namespace) -> list[str]:
        batch, steps = MODELS[self.model], options.steps
        compute = None if self.level == "off" else options.compute
        tag = "" if compute in (None, "native") else f"-{compute}"
        flags = {
            "model": self.model, "opt-level": self.level, "seed": self.seed, "compute": compute,
            "data": options.shards, "steps": steps, "seq-len": batch.seq, "max-lr": batch.lr,
            "warmup-steps": min(WARM_UP, max(1, steps // 2)),
            "target-effective-batch-size": batch.size, "micro-batch": batch.size, "checkpoint-freq": 0,
            "eval-freq": options.eval_freq, "eval-batches": options.eval_batches,
            "eval-batch-size": min(4, batch.size), "device": options.device, "out": options.runs,
            "run-name": f"{self.model}-seed{self.seed}{tag}",
        }  # fmt: skip
        return [*as_flags(flags), "--no-tensorboard"]


def as_flags(values: dict[str, Any]) -> list[str]:
    """Return what is not None as a command line has it."""
    given = {name: value for name, value in values.items() if value is not None}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def visible_gpus() -> list[str] | None:
    """Return the GPUs that this process is restricted to, as CUDA_VISIBLE_DEVICES has them; None: it is not."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]


def environment(gpu: int, device: str) -> dict[str, str]:
    """Return the environment of a run on one of the GPUs that are visible here."""
    seen = visible_gpus()
    name = str(gpu) if seen is None or device == "cpu" else seen[gpu]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": name}


def start(run: Run, gpu: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a run, which prints into a file beside its folder."""
    options.runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *run.flags(options)]
    print(f"{run.name}: starts", file=sys.stderr, flush=True)
    with open(run.folder(options).with_suffix(".log"), "wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(gpu, options.device)
        )


def to_record(run: Run, seconds: float, options: argparse.Namespace) -> Record:
    """Return what a run that ended has left behind; a value of None is not finite."""
    folder, batch = run.folder(options), MODELS[run.model]
    facts = json.loads((folder / "run.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validation = [[line["step"], line["val_loss"]] for line in lines if "val_loss" in line]
    steps = [line for line in lines if "loss" in line]
    untimed = {step + late for step, _ in validation for late in (0, 1)}
    first = min(SKIPPED, len(steps) // 2)
    timed = [x for x in steps if x["step"] > first and x["step"] not in untimed] or steps
    expected = estimate(run, facts["architecture"], options.compute)
    return {
        "name": "training",
        "variant": run.variant,
        "params": {
            "model": run.model, "parameters": facts["parameters"], "batch": batch.size, "seq": batch.seq,
            "steps": options.steps, "lr": batch.lr, "seed": run.seed, "data": facts["data"],
        },
        "metric": "validation_loss",
        "value": validation[-1][1],
        "unit": "nats/token",
        "precision": facts["precision"],
        "compute": None if run.level == "off" else options.compute,
        "validation": validation,
        "train_loss_per_25_steps": average([x for line in steps if (x := line["loss"]) is not None], 25),
        "skipped_steps": sum(line["norm"] is None for line in steps),
        "tokens_per_second": median(line["tokens_per_second"] for line in timed),
        "step_ms": median(line["dt_ms"] for line in timed),
        "peak_gib": max(line["memory_gib"] for line in steps),
        "estimate_gib": expected.peak / 2**30 if options.device == "cuda" else None,
        "seconds": seconds,
    }  # fmt: skip


def estimate(run: Run, model: dict[str, Any], compute: str) -> planning.Estimate:
    """Return what `fp8stack estimate` says of a run; `model` are the fields of a ModelConfig."""
    batch = MODELS[run.model]
    shape = shape_of_gpt(model, batch.seq)
    precision = planning.BASELINES["bf16"]
    if run.level != "off":
        precision = planning.at_level(recipe_for(run.level, compute=compute))
    return planning.estimate(shape, precision, planning.Setup(batch.size, batch.seq))


def run_all(runs: list[Run], options: argparse.Namespace) -> Iterator[tuple[Run, float, int]]:
    """Run one at a time on each GPU; yield those that ended, with seconds and exit status. Leaves none running."""
    waiting, running = list(runs), {}
    try:
        while waiting or running:
            for gpu in options.gpus:
                if waiting and gpu not in running:
                    run = waiting.pop(0)
                    running[gpu] = run, time.perf_counter(), start(run, gpu, options)
            for gpu, (run, began, process) in list(running.items()):
                if process.poll() is not None:
                    del running[gpu]
                    yield run, time.perf_counter() - began, process.returncode
            time.sleep(0.1)
    finally:
        for _, _, process in running.values():
            process.kill()
            process.wait()


def report(records: list[Record], console: Console) -> None:
    """Show a table for each model: means over seeds, gaps paired by seed, the largest memory."""
    for model in dict.fromkeys(r["params"]["model"] for r in records):
        rows = [r for r in records if r["params"]["model"] == model]
        base = {r["params"]["seed"]: r for r in rows if r["variant"] == BASE}
        table = Table("level", title=f"{model}: {rows[0]['params']['steps']} steps", box=box.SIMPLE)
        for column in HEADS:
            table.add_column(column, justify="right", no_wrap=True)
        for variant in dict.fromkeys(r["variant"] for r in rows):
            own = [r for r in rows if r["variant"] == variant]
            pairs = [(r, base[s]) for r in own if (s := r["params"]["seed"]) in base]
            cells = [
                (fmean(r["value"] for r in own), ".4f"),
                (mean_ratio(pairs, "value", -1), "+.2%"),
                (fmean(r["tokens_per_second"] for r in own), ",.0f"),
                (mean_ratio(pairs, "tokens_per_second"), ".2f"),
                (peak := max(r["peak_gib"] for r in own), ".2f"),
                (mean_ratio(pairs, "peak_gib"), ".2f"),
                (planned := own[0]["estimate_gib"], ".2f"),
                (planned and planned / peak - 1, "+.1%"),
            ]
            table.add_row(variant, *("-" if c is None else format(c, how) for c, how in cells))
        console.print(table)


def mean_ratio(pairs: list[tuple[Record, Record]], key: str, more: float = 0) -> float | None:
    """Return the mean over seeds of a number over bf16's, plus `more`; None without bf16."""
    return fmean(r[key] / base[key] for r, base in pairs) + more if pairs else None


def write_shards(options: argparse.Namespace) -> int:
    """Train a tokenizer on the text and write the shards; return tokenize_data's exit status."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = corpus.load(options.text, 1, sys.maxsize).train.numpy().tobytes()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(split_text(text), trainer)
    tokenizer.add_special_tokens([SEPARATORS[0]])  # the last one, as in GPT-2's
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/tokenizer.json"
        tokenizer.save(file)
        where = {"data": options.text, "encoding": file, "shards": options.shards}
        most = {"max-tokens": options.max_tokens, "val-tokens": options.val_tokens}
        return tokenize_data.main(as_flags(where | most))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="to train on, or to write")
    add("--text", type=Path, metavar="FOLDER", help="only write shards of this text")
    for name in ("--max-tokens", "--val-tokens"):
        add(name, type=int, metavar="N", help="with --text, as of gpt/tokenize_data.py")
    add("--model", nargs="+", choices=MODELS, default=["gpt2"])
    add("--levels", nargs="+", choices=("off", *LEVELS), default=["off", *LEVELS])
    add("--compute", choices=("native", "te"), default="native", help="what multiplies at levels")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--steps", type=int, default=1000)
    add("--eval-freq", type=int, default=100, help="steps between evaluations")
    add("--eval-batches", type=int, default=32)
    add("--gpus", nargs="+", type=int, default=[0], help="of those visible; one run at a time each")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--runs", type=Path, default=ROOT / "runs" / "training", help="folder of the runs")
    add("--output", type=Path, default=RESULTS, help="JSON lines that records are added to")
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.eval_freq < 1:
        parser.error("--steps must be 2 or more, --eval-freq 1 or more")
    seen = visible_gpus() if options.device == "cuda" else None
    if min(options.gpus) < 0 or (seen is not None and max(options.gpus) >= len(seen)):
        held = "" if seen is None else f", and CUDA_VISIBLE_DEVICES has {len(seen)}"
        parser.error(f"--gpus {' '.join(map(str, options.gpus))}: numbers count from 0{held}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.text:
        return write_shards(options)
    runs = [Run(*each) for each in product(options.model, options.seeds, options.levels)]
    records, failed, interrupted = [], [], False
    try:
        for run, seconds, status in run_all(runs, options):
            record = {"value": None} if status else to_record(run, seconds, options)
            if record["value"] is None:
                output = run.folder(options).with_suffix(".log").read_text(errors="replace")
                print(f"{run.name}: failed ({status}):\n{output[-2000:]}", file=sys.stderr)
                failed.append(run.name)
                continue
            append_records(options.output, [record])
            records.append(record)
            print(f"{run.name}: {record['value']:.4f}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    report(records, Console(width=None if sys.stdout.isatty() else 120))
    print(json.dumps({"failed": failed}))
    return 130 if interrupted else int(bool(failed))  # 130: as of shells


if __name__ == "__main__":
    # What stops it leaves no runs behind; shells let jobs ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
