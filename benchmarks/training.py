"""Does a level train as well as bf16, and faster, over a long run of the application? Loss, speed and memory.

    python benchmarks/training.py --text FOLDER --shards DIR       # only writes shards, with a tokenizer of their own
    python benchmarks/training.py --shards DIR --model gpt2 llama-1b --seeds 0 1 2 --steps 1000 --gpus 0 1 2 3
    python benchmarks/training.py --shards DIR --levels off O2 --flag fp8-recipe=delayed --flag fuse=true
    python benchmarks/training.py --shards DIR --model tiny --levels off O2 --steps 6 --device cpu
    python benchmarks/training.py --shards DIR --levels off O0 O2 --seeds 0 1 2 --steps 3200 --warmup 320 \
        --flag select=all --deterministic --compile --crossed --missing --within 580   # over several calls

Each (model, level, seed) is one run of `examples/train_gpt.py`, in a process and on a GPU of its own; those of a model
and seed have the same weights, data, batch and learning rate. "off" is plain PyTorch, recorded as "bf16": float32
weights under bf16 autocast and torch's fused AdamW; levels are `fp8stack.initialize` on top. Layers of GPT-2's size are
mostly left in bf16, which is faster: `--flag select=all` has all in FP8, and tells what FP8 does to a loss. The whole
effective batch is one micro-batch.

"again" is "off" with the batch in two micro-batches, recorded as "bf16 again": the same samples, whose gradients are
added up in another order. How far it ends from "off" is what rounding alone does over so many steps, the noise floor:
the gap of a level says something about FP8 where it is larger. `--lr` and `--warmup` are for a calmer start, where the
floor is high; over two seeds and more a gap has its 95 % interval. Time and memory of "again" are those of its own
micro-batch, and not compared.

`--deterministic` is the application's: a run that is repeated is the same run to the last bit, so that what is left
between two seeds is what a seed changes, and "again" what rounding does. `--crossed` keeps a run's last checkpoint,
evaluates its weights in bf16 and in FP8 over all of the validation shards (`crossed.py`) into crossed.jsonl beside
--output, and removes it. `--missing` leaves out the runs that have a record; with `--within SECONDS` none starts that
would end later, by the longest so far. The tables `training` and `crossed` show what comes of it.

`--flag NAME=VALUE` is an option of the application for levels alone. Options that do not go together end this before
any run starts.

Shards are tokens of a byte-level BPE of 50,257, trained on the training part of the text: GPT-2's size without its
download, so that a machine needs no network.

As a run ends, its record is added to `benchmarks/results/training.jsonl`: the last validation loss and both curves
(training losses are means of 25 steps); the medians of tokens/s and of milliseconds a step, those of the first 50 steps
left out, and evaluations with the steps beside them; the peak of memory over the whole run, evaluations included; and
what `fp8stack estimate` says of it. Runs and what they printed stay in --runs. One that fails is named with the end of
its output, the others go on, and the exit status is 1. Ctrl-C stops what runs; what ended is recorded.

Limits: on a CPU `peak_gib` is the memory of the process, and nothing is estimated; nor are flags in NOT_ESTIMATED.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import crossed
import torch
from common import ROOT, append_records
from convergence import average
from peaks import shape_of_gpt
from rich import box
from rich.console import Console
from rich.table import Table
from training_tables import AGAIN, BASE, summarize

from fp8stack import planning
from fp8stack.errors import ConfigError
from fp8stack.levels import LEVELS

sys.path.insert(0, str(ROOT / "examples"))

import corpus
from gpt import tokenize_data
from gpt.config import DEFAULTS, Config
from gpt.config import parse as parse_flags
from gpt.runs import run_folder
from gpt.tokens import SEPARATORS, split_text

RESULTS = ROOT / "benchmarks" / "results" / "training.jsonl"
TOKENS = 50_257  # of GPT-2's vocabulary, and of the one that is trained here
SKIPPED = 50  # steps at the start that are not timed
WARM_UP = 100  # steps of the learning rate's
PLAIN = {"off": BASE, "again": AGAIN}  # what is not a level, as it is recorded
SWITCHES = {f.name.replace("_", "-") for f in fields(Config) if str(f.type).startswith("bool")}
NOT_ESTIMATED = ("blocks", "attention", "compute_dtype", "fuse_loss")
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
    level: str  # or "off", "again"

    @property
    def variant(self) -> str:
        return PLAIN.get(self.level, self.level)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.variant}, seed {self.seed}"

    def config(self, options: argparse.Namespace) -> Config:
        """Return what the application is told.

        Raises:
            ConfigError: for options that do not go together.
        """
        return parse_flags(self.flags(options))

    def folder(self, options: argparse.Namespace) -> Path:
        config = self.config(options)
        return run_folder(config, config.precision)

    def log(self, options: argparse.Namespace) -> Path:
        """Return the file that a run prints into, beside its folder."""
        folder = self.folder(options)
        return folder.with_name(f"{folder.name}.log")  # names have dots of their own

    def own_flags(self, options: argparse.Namespace) -> dict[str, str]:
        """Return the values of --flag by name, which only levels have."""
        return {} if self.level in PLAIN else options.flag

    def flags(self, options: argparse.Namespace) -> list[str]:
        own = []
        for name, value in self.own_flags(options).items():
            switch = {"true": [f"--{name}"], "false": [f"--no-{name}"]}
            own += switch[value] if name in SWITCHES else [f"--{name}", value]
        return [*as_flags(self.settings(options)), "--no-tensorboard", *own]

    def settings(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return the application's options that are decided here."""
        batch, steps = MODELS[self.model], options.steps
        size = options.batch or batch.size
        switches = {
            "deterministic": options.deterministic,
            "compile": options.compile,
            "overwrite": options.crossed,
        }
        warmup = min(WARM_UP, max(1, steps // 2)) if options.warmup is None else options.warmup
        return {
            "model": self.model, "seed": self.seed, "opt-level": "off" if self.level in PLAIN else self.level,
            "compute": None if self.level in PLAIN else options.compute,
            "data": options.shards, "steps": steps, "seq-len": batch.seq,
            "max-lr": batch.lr if options.lr is None else options.lr, "warmup-steps": warmup,
            "target-effective-batch-size": size,
            "micro-batch": size // 2 if self.level == "again" else size,
            "checkpoint-freq": steps if options.crossed else 0,
            "eval-freq": options.eval_freq, "eval-batches": options.eval_batches,
            # of the size in training: what is compiled has one
            "eval-batch-size": size if options.compile else min(4, size), "device": options.device, "out": options.runs,
            "run-name": self.run_name(options), **{name: True for name, wanted in switches.items() if wanted},
        }  # fmt: skip

    def run_name(self, options: argparse.Namespace) -> str:
        """Return a name that runs with other settings do not have; the number of steps is not in it."""
        given = {
            f"lr{options.lr}": options.lr is not None,
            f"warmup{options.warmup}": options.warmup is not None,
            f"batch{options.batch}": options.batch is not None,
            "deterministic": options.deterministic,
            "compiled": options.compile,
            "again": self.level == "again",
            options.compute: self.level in LEVELS and options.compute != "native",
        }
        parts = [self.model, f"seed{self.seed}", *(part for part, holds in given.items() if holds)]
        parts += [f"{name}-{value}" for name, value in self.own_flags(options).items()]
        return re.sub(r"[^\w.+-]", "_", "-".join(parts))


def as_flags(values: dict[str, Any]) -> list[str]:
    """Return what is not None as a command line has it; True is a switch."""
    given = {name: value for name, value in values.items() if value is not None}
    pairs = (
        [f"--{name}"] if value is True else [f"--{name}", str(value)]
        for name, value in given.items()
    )
    return [text for pair in pairs for text in pair]


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
    """Start a run."""
    options.runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *run.flags(options)]
    print(f"{run.name}: starts", file=sys.stderr, flush=True)
    with open(run.log(options), "wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(gpu, options.device)
        )


def to_record(run: Run, seconds: float, options: argparse.Namespace) -> Record:
    """Return what a run that ended has left behind; a value of None is not finite."""
    config, folder = run.config(options), run.folder(options)
    facts = json.loads((folder / "run.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validation = [[line["step"], line["val_loss"]] for line in lines if "val_loss" in line]
    steps = [line for line in lines if "loss" in line]
    untimed = {step + late for step, _ in validation for late in (0, 1)}
    first = min(SKIPPED, len(steps) // 2)
    timed = [x for x in steps if x["step"] > first and x["step"] not in untimed] or steps
    expected = estimate(config, facts["architecture"]) if options.device == "cuda" else None
    return {
        "name": "training",
        "variant": run.variant,
        "params": {**params_of(run, options), "parameters": facts["parameters"], "data": facts["data"]},
        "metric": "validation_loss",
        "value": validation[-1][1],
        "unit": "nats/token",
        "precision": facts["precision"],
        "compute": None if run.level in PLAIN else options.compute,
        "validation": validation,
        "train_loss_per_25_steps": average([x for line in steps if (x := line["loss"]) is not None], 25),
        "skipped_steps": sum(line["norm"] is None for line in steps),
        "tokens_per_second": None if options.untimed else median(line["tokens_per_second"] for line in timed),
        "step_ms": None if options.untimed else median(line["dt_ms"] for line in timed),
        "peak_gib": max(line["memory_gib"] for line in steps),
        "estimate_gib": expected and expected.peak / 2**30,
        "seconds": seconds,
    }  # fmt: skip


def params_of(run: Run, options: argparse.Namespace) -> Record:
    """Return a record's parameters, without those that only a run knows."""
    config = run.config(options)
    own = {name: config.to_dict()[name.replace("-", "_")] for name in run.own_flags(options)}
    return {
        "model": run.model, "batch": config.target_effective_batch_size, "micro_batch": config.micro_batch,
        "seq": config.seq_len, "steps": config.steps, "lr": config.max_lr, "warmup": config.warmup_steps,
        "seed": run.seed, **({"flags": own} if own else {}),
        **{name: True for name in ("deterministic", "compile") if getattr(options, name)},
    }  # fmt: skip


def is_recorded(run: Run, options: argparse.Namespace) -> bool:
    """Return whether the output has a record of a run with these settings over shards of this name."""
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    own = {**params_of(run, options), "data": options.shards.name}
    compute = None if run.level in PLAIN else options.compute
    return any(
        (r["variant"], r["compute"]) == (run.variant, compute)
        and {k: v for k, v in r["params"].items() if k != "parameters"} == own
        for r in map(json.loads, lines)
    )


def cross(run: Run, gpu: int, record: Record, options: argparse.Namespace) -> None:
    """Evaluate the weights of a run that ended in bf16 and in FP8, record that, and remove them."""
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", gpu)
    # bf16's weights too are evaluated in what levels are trained with
    level = Run(run.model, run.seed, next(iter(LEVELS))).config(options)
    fp8 = {k: v for k, v in level.fp8_options()[1].items() if k != "states"}
    found = crossed.evaluate(run.folder(options), device, fp8)
    kept = {name: record[name] for name in ("variant", "params", "precision", "compute")}
    append_records(
        options.output.with_name("crossed.jsonl"),
        [{"name": "crossed", **kept, "fp8": fp8, **found}],
    )
    crossed.forget(run.folder(options))


def estimate(config: Config, model: dict[str, Any]) -> planning.Estimate | None:
    """Return what `fp8stack estimate` says of a run, if it covers it; `model` are the fields of a ModelConfig."""
    if any(getattr(config, name) != DEFAULTS[name] for name in NOT_ESTIMATED):
        return None
    batch, micro = MODELS[config.model], int(config.micro_batch)
    setup = planning.Setup(
        micro,
        batch.seq,
        checkpointing=config.checkpointing,
        accumulate=micro < config.target_effective_batch_size,
        compile=config.compile,
    )
    recipe = config.recipe()
    precision = planning.at_level(recipe) if recipe else planning.BASELINES["bf16"]
    return planning.estimate(shape_of_gpt(model, batch.seq), precision, setup)


def run_all(runs: list[Run], options: argparse.Namespace) -> Iterator[tuple[Run, int, float, int]]:
    """Run one at a time on each GPU; yield those that ended, with GPU, seconds and exit status. Leaves none running.

    With --within those that would end too late stay in `runs`; of the others it has none at the end.
    """
    waiting, running = runs, {}
    first, longest = time.perf_counter(), 0.0
    try:
        while waiting or running:
            late = options.within and time.perf_counter() - first + longest > options.within
            if late and not running:
                return
            for gpu in [] if late else options.gpus:
                if waiting and gpu not in running:
                    run = waiting.pop(0)
                    running[gpu] = run, time.perf_counter(), start(run, gpu, options)
            for gpu, (run, began, process) in list(running.items()):
                if process.poll() is not None:
                    del running[gpu]
                    yield run, gpu, time.perf_counter() - began, process.returncode
                    longest = max(
                        longest, time.perf_counter() - began
                    )  # with what was done with it
            time.sleep(0.1)
    finally:
        for _, _, process in running.values():
            process.kill()
            process.wait()


def report(records: list[Record], console: Console) -> None:
    """Show a table for each model, as `summarize` has it."""
    for model in dict.fromkeys(r["params"]["model"] for r in records):
        rows = [r for r in records if r["params"]["model"] == model]
        table = Table("level", title=f"{model}: {rows[0]['params']['steps']} steps", box=box.SIMPLE)
        for column in HEADS:
            table.add_column(column, justify="right", no_wrap=True)
        for s in summarize(rows):
            cells = [
                (s.loss, ".4f"), (s.gap, "+.2%"), (s.tokens, ",.0f"), (s.faster, ".2f"), (s.peak, ".2f"),
                (s.part, ".2f"), (s.estimate, ".2f"), (s.off, "+.1%"),
            ]  # fmt: skip
            shown = ["-" if value is None else format(value, how) for value, how in cells]
            if s.error is not None:
                shown[1] += f" ± {s.error:.2%}"
            table.add_row(s.variant, *shown)
        console.print(table)


def train_tokenizer(texts: Iterable[str], file: Path) -> None:
    """Write the tokenizer.json of a byte-level BPE of TOKENS, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([SEPARATORS[0]])  # the last one, as in GPT-2's
    tokenizer.save(str(file))


def write_shards(options: argparse.Namespace) -> int:
    """Train a tokenizer on the text and write the shards; return tokenize_data's exit status."""
    text = corpus.load(options.text, 1, sys.maxsize).train.numpy().tobytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        train_tokenizer(split_text(text), file)
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
    kinds = (*PLAIN, *LEVELS)
    add("--levels", nargs="+", choices=kinds, default=list(kinds))
    add("--compute", choices=("native", "te"), default="native", help="what multiplies at levels")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--steps", type=int, default=1000)
    add("--batch", type=int, metavar="N", help="sequences in a step, instead of the model's")
    add("--lr", type=float, help="highest learning rate, instead of the model's")
    add("--warmup", type=int, metavar="STEPS", help=f"of the learning rate; by default {WARM_UP}")
    add("--flag", action="append", type=read_flag, default=[], metavar="NAME=VALUE",
        help="an option of train_gpt.py for levels, such as fp8-recipe=delayed, fuse=true; repeatable")  # fmt: skip
    add("--eval-freq", type=int, default=100, help="steps between evaluations")
    add("--eval-batches", type=int, default=32)
    add("--deterministic", action="store_true", help="a run that is repeated has the same bits")
    add("--compile", action="store_true", help="torch.compile, of plain PyTorch too")
    add("--crossed", action="store_true", help="evaluate the weights in bf16 and in FP8")
    add("--untimed", action="store_true", help="other jobs use the GPU too: no speed is recorded")
    add("--missing", action="store_true", help="leave out runs that have a record")
    add("--within", type=float, metavar="SECONDS", help="start no run that would end later")
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
    options.flag = dict(options.flag)
    try:
        check(options)
    except ConfigError as error:
        parser.error(str(error))
    return options


def read_flag(text: str) -> tuple[str, str]:
    """Return the name and the value of a --flag.

    Raises:
        argparse.ArgumentTypeError: for what is not NAME=VALUE.
    """
    name, _, value = text.partition("=")
    name = name.replace("_", "-")
    if not value or (name in SWITCHES and value not in ("true", "false")):
        kind = f"{name}=true or {name}=false" if name in SWITCHES else "NAME=VALUE"
        raise argparse.ArgumentTypeError(f"{text!r} must be {kind}")
    return name, value


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError for what the application would not take, and for flags that records would not show."""
    for run in all_runs(options):
        decided = {*run.settings(options), "config", "tensorboard"} & options.flag.keys()
        if decided:
            raise ConfigError(
                f"--flag {decided.pop()}: this is the same in all runs, or has an option here."
            )
        run.config(options)


def all_runs(options: argparse.Namespace) -> list[Run]:
    return [Run(*each) for each in product(options.model, options.seeds, options.levels)]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.text:
        return write_shards(options)
    runs = [r for r in all_runs(options) if not (options.missing and is_recorded(r, options))]
    records, failed, interrupted = [], [], False
    try:
        for run, gpu, seconds, status in run_all(runs, options):
            record = {"value": None} if status else to_record(run, seconds, options)
            if record["value"] is None:
                output = run.log(options).read_text(errors="replace")
                print(f"{run.name}: failed ({status}):\n{output[-2000:]}", file=sys.stderr)
                failed.append(run.name)
                continue
            if options.crossed:
                cross(run, gpu, record, options)
            append_records(options.output, [record])
            records.append(record)
            print(f"{run.name}: {record['value']:.4f}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    report(records, Console(width=None if sys.stdout.isatty() else 120))
    print(json.dumps({"failed": failed, **({"left": [r.name for r in runs]} if runs else {})}))
    return 130 if interrupted else int(bool(failed))  # 130: as of shells


if __name__ == "__main__":
    # What stops it leaves no runs behind; shells let jobs ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
