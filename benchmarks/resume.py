"""Does a run go on from a checkpoint with the bits that it would have had, on this device? And what does that cost?

    python benchmarks/resume.py                                    # GPT-2 124M and a Llama of 1.1 B parameters
    python benchmarks/resume.py --only gpt2/O2 llama-1b/O2
    python benchmarks/resume.py --device cpu --only tiny/O2 --steps 6 --output FILE

Each case, a model at a level ("off": plain PyTorch), is measured with `--deterministic` and without. A run of
`examples/train_gpt.py` trains STEPS steps and leaves a checkpoint half-way; another process goes on from there.
Both train from then on with the same samples, in the same order. Compared are the losses of their steps.

A record has the number of steps after the checkpoint whose losses are the same to the last bit, out of so many, and the
first that is not; how far the last losses are apart; and the median of tokens/s of the whole run, its first ten steps
left out, and of the one that went on. As a case ends, its record is added to `benchmarks/results/resume.jsonl`. Runs
lie in a temporary folder, that of the system or TMPDIR's: a Llama's checkpoints have 14 GB.

Why they would not: attention's backward on a GPU adds up in whatever order blocks come to it, unless told otherwise.

Limits: equal losses are equal bits of a mean over all tokens of a step; weights are not compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import ROOT, append_records

RESULTS = ROOT / "benchmarks" / "results" / "resume.jsonl"
UNTIMED = 10  # steps at the start
Lines = dict[int, dict[str, Any]]  # of metrics.jsonl, by step


class Case(NamedTuple):
    model: str
    level: str
    batch: int
    lr: float
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}/{self.level}"


CASES = [
    Case("gpt2", "off", 64, 6e-4),
    Case("gpt2", "O2", 64, 6e-4),
    Case("gpt2", "O2", 64, 6e-4, ("--compile",)),
    Case("llama-1b", "off", 8, 3e-4),
    Case("llama-1b", "O2", 8, 3e-4, ("--fp8-recipe", "delayed", "--fuse")),
    Case("tiny", "O2", 4, 3e-3),  # for tests on a CPU
]
ON_GPUS = ["gpt2/*", "llama-1b/*"]


def train(case: Case, options: argparse.Namespace, out: Path, *more: str) -> tuple[Path, Lines]:
    """Run the application; return its run's folder and what it has logged of every step.

    Raises:
        RuntimeError: with the end of what it printed, if it fails.
    """
    half, batch = str(options.steps // 2), str(case.batch)
    flags = [
        "--model",
        case.model,
        "--opt-level",
        case.level,
        *case.flags,
        "--max-lr",
        str(case.lr),
    ]
    flags += ["--target-effective-batch-size", batch, "--micro-batch", batch, "--out", str(out)]
    flags += ["--steps", str(options.steps), "--checkpoint-freq", half, "--eval-freq", "0"]
    flags += ["--device", options.device, "--no-tensorboard", *more]
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(flags)} failed:\n{done.stdout[-1000:]}")
    (folder,) = out.iterdir()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return folder, {line["step"]: line for line in lines if "loss" in line}


def speed(lines: Lines, first: int) -> float:
    """Return the median of tokens/s after a step, or of all where there are no more."""
    timed = [x["tokens_per_second"] for step, x in lines.items() if step > first]
    return median(timed or [x["tokens_per_second"] for x in lines.values()])


def measure(case: Case, deterministic: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a case; its conditions are added later."""
    mode = ["--deterministic"] if deterministic else []
    half = options.steps // 2
    with tempfile.TemporaryDirectory() as name:
        folder, whole = train(case, options, Path(name, "whole"), *mode)
        (start,) = folder.glob(f"checkpoints*/step_{half:08d}")
        resume = ["--resume", str(start)]
        _, again = train(case, options, Path(name, "again"), *mode, *resume)
    after = range(half + 1, options.steps + 1)
    differ = [step for step in after if whole[step]["loss"] != again[step]["loss"]]
    last, theirs = (lines[options.steps]["loss"] for lines in (whole, again))
    return {
        "name": "resume",
        "variant": "--deterministic" if deterministic else "default",
        "params": {
            "model": case.model, "level": case.level, "flags": " ".join(case.flags), "batch": case.batch,
            "steps": options.steps, "resumed_at": half,
        },
        "metric": "steps with the same loss after a resume",
        "value": len(after) - len(differ),
        "unit": "steps",
        "of": len(after),
        "first_other_step": differ[0] if differ else None,
        "last_loss_off": theirs / last - 1,
        "tokens_per_second": speed(whole, UNTIMED),
        "tokens_per_second_resumed": speed(again, half + UNTIMED),
    }  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, names = parser.add_argument, [case.name for case in CASES]
    add("--only", nargs="+", default=ON_GPUS, metavar="MODEL/LEVEL", help=f"of {', '.join(names)}")
    add("--steps", type=int, default=40)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--output", type=Path, default=RESULTS, help="JSON lines that records are added to")
    options = parser.parse_args(arguments)
    options.cases = [case for case in CASES if any(fnmatch(case.name, o) for o in options.only)]
    if options.steps < 2 or options.steps % 2:
        parser.error(
            f"--steps {options.steps}: must be even, 2 or more: half are before the resume"
        )
    if not options.cases:
        parser.error(f"--only matches none of: {', '.join(names)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for case, deterministic in product(options.cases, (False, True)):
        record = measure(case, deterministic, options)
        append_records(options.output, [record])
        first = record["first_other_step"]
        print(
            f"{case.name}, {record['variant']}: {record['value']} of {record['of']} steps with the same loss"
            f"{f', the first other one is {first}' if first else ''}; {record['tokens_per_second']:,.0f} tokens/s, "
            f"{record['tokens_per_second_resumed']:,.0f} resumed",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
