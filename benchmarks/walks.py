"""How long a new user's first hour takes on a CPU: the commands and code of the README and of each tutorial, as shown.

    python benchmarks/walks.py
    python benchmarks/walks.py --only deepspeed --output FILE

A walk is a page, in an empty folder: what the page calls `train.py` and `ds_config.json` is written there, commands run
one after the other, and blocks of Python after the first are typed into `python -i train.py`. A walk that does not end
with a model trained at O2 fails. The record has the seconds of the whole walk and of each command, imports and
compilers included, and the processor's seconds; downloads (`pip install`) are left out.

Limits: wall time is that of a machine that others may use: `load` is its average of the last five minutes, this walk's
included, `threads` is OMP_NUM_THREADS where it is set. Where DeepSpeed is not installed, its walk ends at `doctor`.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any

from common import ROOT, append_records

RESULTS = ROOT / "benchmarks" / "results" / "walks.jsonl"
LOSSES = {  # what each walk prints of the last loss at O2
    "readme": r"^ *O2 .*?([\d.]+)",
    "script": r"'O2': ([\d.]+)",
    "trainer": r"^\[.* ([\d.]+)\]$",
    "deepspeed": r"^step 50: loss ([\d.]+)$",
}
PROGRAMS = {"fp8stack": "fp8stack", "torchrun": "torch.distributed.run"}
LEAST = 0.6 * log(256)  # texts are bytes, so untrained models begin at log(256)


def steps_of(page: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the files that a page has its reader write, and (command, what is typed into it) in the page's order."""
    files: dict[str, str] = {}
    steps: list[tuple[str, str]] = []
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page, re.S | re.M):
        if language == "json":
            files["ds_config.json"] = text
        elif language in ("python", "py") and "train.py" not in files:
            files["train.py"] = text
        elif language == "python":
            if not steps or not steps[-1][1]:
                steps.append(("python -i train.py", ""))
            steps[-1] = (steps[-1][0], f"{steps[-1][1]}{text}\n")
        elif language == "sh":
            lines = (re.sub(r"\s+# .*", "", line) for line in text.splitlines())
            lines = (line for line in lines if not line.startswith("pip "))
            steps += [(line, "") for line in lines]
    return files, steps


def run(command: str, typed: str, folder: Path) -> str:
    """Run a command in a folder, without a GPU; return what it printed.

    Raises:
        RuntimeError: with the end of what it printed, if it fails.
    """
    program, *arguments = shlex.split(command)
    start = [sys.executable, *(["-m", PROGRAMS[program]] if program in PROGRAMS else [])]
    told = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    told["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")  # nothing is compiled yet
    told["BROWSER"] = "true"  # the command of that name, which opens nothing
    done = subprocess.run(
        [*start, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **told},
    )
    if done.returncode or "Traceback (most" in done.stderr:  # a session that goes on ends with 0
        raise RuntimeError(f"{command} failed:\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}")
    return done.stdout


def page_of(name: str) -> Path:
    return ROOT / ("README.md" if name == "readme" else f"docs/tutorial-{name}.md")


def walk(name: str) -> dict[str, Any]:
    """Walk through a page; return its record, whose conditions are added later."""
    page = page_of(name)
    files, steps = steps_of(page.read_text())
    if name == "deepspeed" and not find_spec("deepspeed"):
        steps = [(c, typed) for c, typed in steps if not c.startswith("torchrun")]
    printed, seconds, before = "", [], resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        for file, text in files.items():
            Path(folder, file).write_text(text)
        for command, typed in steps:
            begun = time.perf_counter()
            printed += run(command, typed, Path(folder)).replace(">>> ", "")
            seconds.append(round(time.perf_counter() - begun, 1))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    record: dict[str, Any] = {"name": "walks", "variant": name}
    record["params"] = {"page": page.name, "commands": [c for c, _ in steps]}
    record |= {
        "metric": "a walk through the page, without downloads",
        "value": round(sum(seconds), 1),
    }
    record |= {"unit": "s", "seconds": seconds, "cores": os.cpu_count()}
    record |= {"load": os.getloadavg()[1], "threads": os.environ.get("OMP_NUM_THREADS", "")}
    record["processor_s"] = round(
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
    )
    if losses := re.findall(LOSSES[name], printed, re.M):
        record["loss"] = float(losses[-1])
    trained = record.get("loss", float("inf")) < LEAST
    record["ends"] = "trained at O2" if trained else "checked, not trained"
    if not trained and (name != "deepspeed" or find_spec("deepspeed")):
        raise RuntimeError(f"the walk through {name} has trained nothing:\n{printed[-1000:]}")
    return record


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    for name in options.only:
        record = walk(name)
        append_records(options.output, [record])
        print(f"{name:10} {record['value']:6.1f} s  {record['ends']}  loss {record.get('loss')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
