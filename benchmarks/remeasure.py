"""Whole models, long runs, fine-tuning, frameworks and GPU tests in one go: before a release, or after a new default.

    python benchmarks/remeasure.py --list
    python benchmarks/remeasure.py --gpus 0 1 1 --seconds 1500 --output runs/remeasured
    python benchmarks/remeasure.py --gpus 0 --only 'models*' --output runs/remeasured
    cat runs/remeasured/real_models.jsonl >> benchmarks/results/real_models.jsonl      # what shall be kept

How: jobs are commands of this folder's programs, and GPU tests. Each GPU takes the next job that is left, in the order
of `--only` and, within one of its globs, of `--list`. One that is named twice works on two at once, so it takes none of
those that are timed. Jobs that need all GPUs run first. A job starts only if its seconds are left of `--seconds`, as
H200s with other jobs on their host took; it is stopped when they are over. Before all of them a tiny model takes a
step: what is not installed ends the program at once.

Jobs that need text are left out without it: `--shards` of `package_text.py`, or `--wheels`, the folder that
`accuracy.py` asks for. Each job has a log in --output, and its records in a file of its benchmark. What failed is named
at the end, with the last line of its log, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from common import ROOT

FOLDERS = ("output", "shards", "wheels")
ONE = "pytest -q -n 8 --dist worksteal -p no:cacheprovider -m 'gpu and not gpus'"
APART = ("kernels", "optim", "comm")  # folders of tests that are a job of their own
LONG = "--shards {shards} --warmup 320 --eval-batches 16 --deterministic --compile"
# GPT-2's layers are too small to be in FP8 by default, compiled and not fused
GPT2 = f"training.py --model gpt2 --flag select=all --steps 3200 --lr 6e-4 --eval-freq 320 --crossed {LONG}"
LLAMA = f"training.py --model llama-1b --batch 2 --steps 2000 --eval-freq 500 {LONG}"


@dataclass(frozen=True)
class Job:
    """command: of this folder, or of pytest. {gpus}, {shards} and {wheels} are filled in."""

    name: str
    seconds: int
    command: str
    variants: tuple[str, ...] = ()  # what --only gets
    timed: bool = True
    together: bool = False  # on all GPUs

    @property
    def needs(self) -> str:
        """The option without which it is left out."""
        return next((name for name in ("shards", "wheels") if f"{{{name}}}" in self.command), "")

    def words(self, options: argparse.Namespace) -> list[str]:
        """Return the command of a process, whose folder is the repository's."""
        given_folders = {name: getattr(options, name) for name in FOLDERS}
        folders = {name: os.path.relpath(p, ROOT) for name, p in given_folders.items() if p}
        given = {"gpus": len(set(options.gpus)), **folders}
        program, *rest = [word.format(**given) for word in shlex.split(self.command)]
        if program == "pytest":
            return [sys.executable, "-m", program, *rest]
        only = ["--only", *self.variants] if self.variants else []
        file = f"{'check' if self is CHECK else Path(program).stem}.jsonl"
        records = os.path.join(folders["output"], file)
        return [sys.executable, f"benchmarks/{program}", *rest, *only, "--output", records]


USUAL = ("bf16", "O0", "O2", "O2 graphed")
BOTH_COMPILED = ("bf16 compiled", "O2 compiled")
RECIPES = (
    "O2",
    "O2, current",
    "O2, head fp8",
    "O2, head bf16",
    "O2, accurate",
    "O2, rowwise",
    "O2, blockwise",
    "O2, wgrad bf16",
    "O2, fused loss",
)
MODELS = {
    **dict.fromkeys(("llama-1b", "llama-8b-4", "gpt2", "vit-l"), (*USUAL, *BOTH_COMPILED)),
    **dict.fromkeys(("qwen3-moe", "t5-base", "whisper-small"), USUAL),
    **dict.fromkeys(("dit-xl", "unet-sd15"), USUAL[:3]),
}


def list_jobs() -> list[Job]:
    """Return the jobs in the order in which they begin: what the README shows comes first."""
    everything = "pytest -q -p no:cacheprovider -m 'gpu and gpus' tests"
    jobs = [
        Job("frameworks", 420, "frameworks.py --gpus {gpus}", together=True),
        Job("tests, several GPUs", 970, everything, together=True),
    ]
    for model, variants in MODELS.items():
        jobs.append(
            Job(f"models, {model}", 40 * len(variants), f"real_models.py --model {model}", variants)
        )
    jobs += [
        Job("models, recipes", 500, "real_models.py --model llama-1b", ("bf16", *RECIPES)),
        Job("monitor", 90, "monitor_cost.py"),
        Job("host times", 60, "linear.py --model small"),
        Job("layer shapes", 180, "layer_shapes.py --ways alone forward-bf16"),
        Job("layer shapes, compiled", 360, "layer_shapes.py --ways after-a-norm"),
        Job("layer shapes, mlp", 300, "layer_shapes.py --ways mlp compiled-mlp"),
        Job("tests, kernels", 340, f"{ONE} {' '.join(f'tests/{f}' for f in APART)}", timed=False),
        Job(
            "tests, others",
            260,
            f"{ONE} tests {' '.join(f'--ignore tests/{f}' for f in APART)}",
            timed=False,
        ),
    ]
    for level in ("off", "O2"):
        run = f"{LLAMA} --levels {level} --seeds 0 --runs {{output}}/llama-{level}"
        jobs.append(Job(f"long, Llama {level}", 400, run, timed=False))
    recipes = ("current", "default", "rowwise", "blockwise")
    jobs.append(Job("accuracy", 120, "accuracy.py --wheels {wheels}", recipes, timed=False))
    recipes = ("bf16", *recipes, "default, wgrad bf16")
    noise = "gradient_noise.py --wheels {wheels}"
    jobs.append(Job("gradient noise", 120, noise, recipes, timed=False))
    for seed in range(3):
        tune, variants = (
            f"fine_tuning.py --wheels {{wheels}} --seeds {seed}",
            ("bf16", "O0", "O2", "O0, last tenth*"),
        )
        jobs.append(Job(f"fine-tuning {seed}", 360, tune, variants, timed=False))
        # tune times layers
        jobs.append(Job(f"fine-tuning {seed}, tuned", 120, tune, ("bf16", "O0, tuned*")))
    for seed in range(5):  # last: each makes an interval narrower
        for level in ("off", "O0", "O2"):
            run = f"{GPT2} --levels {level} --seeds {seed} --runs {{output}}/gpt2-{level}-{seed}"
            jobs.append(Job(f"long, GPT-2 {level} {seed}", 340, run, timed=False))
    return jobs


CHECK = Job("check", 0, "real_models.py --model tiny --steps 2", ("O2",))


class Runner:
    """Runs jobs on GPUs, each in a process of its own, until nothing is left or the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.end = options, time.monotonic() + options.seconds
        jobs = [job for job in list_jobs() if not job.needs or getattr(options, job.needs)]
        wanted = (job for glob in options.only for job in jobs if fnmatch(job.name, glob))
        self.jobs = list(dict.fromkeys(wanted))
        self.failed: dict[str, str] = {}
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[bytes]] = set()

    def run(self) -> None:
        """Run the jobs of all GPUs, then the others, a thread for each GPU."""
        together = [job for job in self.jobs if job.together]
        self.jobs = [job for job in self.jobs if not job.together]
        for job in together:
            if job.seconds <= self.left():
                self.start(job, sorted(set(self.options.gpus)))
            else:
                self.jobs.append(job)  # to be named in the end
        count = Counter(self.options.gpus)
        threads = [
            threading.Thread(target=self.work, args=(gpu, count[gpu] == 1))
            for gpu in count.elements()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """Begin no further job, and kill those that run."""
        self.jobs.clear()
        for process in [*self.running]:
            self.kill(process)

    @staticmethod
    def kill(process: subprocess.Popen[bytes]) -> None:
        """Kill a job with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def left(self) -> float:
        return self.end - time.monotonic()

    def work(self, gpu: int, alone: bool) -> None:
        """Take jobs on a GPU, which is this thread's `alone` or not."""
        while job := self.take(alone):
            try:
                self.start(job, [gpu])
            except Exception as error:  # of a thread, which nobody would see
                self.failed[job.name] = f"{type(error).__name__}: {error}"

    def take(self, alone: bool) -> Job | None:
        """Return the next job for which there is time, and remove it."""
        with self.lock:
            fits = (j for j in self.jobs if j.seconds <= self.left() and (alone or not j.timed))
            if job := next(fits, None):
                self.jobs.remove(job)
            return job

    def start(self, job: Job, gpus: list[int]) -> None:
        """Run a job, and note whether it failed."""
        begun, words = time.monotonic(), job.words(self.options)
        if "benchmarks/training.py" in words and self.options.gpus.count(gpus[0]) > 1:
            words.append("--untimed")  # another job uses this GPU
        log = self.options.output / f"{re.sub('[, ]+', '-', job.name)}.log"
        visible = ",".join(map(str, gpus))
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path}
        with log.open("w") as file:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            self.running.add(process)
            try:
                status = process.wait(max(1.0, self.left()))
            except subprocess.TimeoutExpired:
                self.kill(process)
                status = process.wait()
            self.running.discard(process)
        took = f"{time.monotonic() - begun:.0f} s"
        print(f"{job.name}: status {status} after {took}, GPU {visible}", flush=True)
        if status:
            self.failed[job.name] = (
                log.read_text().strip().splitlines() or ["nothing was printed"]
            )[-1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", default=[0], help="named twice: for two jobs at once")
    add("--seconds", type=float, default=4 * 3600, help="for all jobs (%(default)s)")
    add(
        "--only", nargs="+", default=["*"], metavar="NAME", help="globs of jobs, first things first"
    )
    add("--shards", type=Path, help="of package_text.py")
    add("--wheels", type=Path, help="of accuracy.py")
    add("--output", type=Path, default=ROOT / "runs" / "remeasured")
    add("--list", action="store_true", help="show the jobs, their seconds and commands")
    options = parser.parse_args(arguments)
    runner = Runner(options)
    if options.list:
        for job in runner.jobs:
            print(f"{job.name}: {job.seconds} s, {shlex.join(job.words(options)[1:])}")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    runner.start(CHECK, options.gpus[:1])
    try:
        if not runner.failed:
            runner.run()
    except KeyboardInterrupt:
        runner.stop()
        return 130
    for job in runner.jobs:
        print(f"{job.name}: not begun: {job.seconds} s are not left, or no GPU is named once")
    for name, why in runner.failed.items():
        print(f"{name} FAILED: {why}")
    return int(bool(runner.failed))


if __name__ == "__main__":
    sys.exit(main())
