"""What every benchmark shares: the conditions of a run, one schema of record, the choice of what to run, a picture.

A record is one JSON object a line: name, variant, params, metric, value, unit, then the conditions: gpu, cc, driver,
torch, triton, fp8stack, git, command, time. `docs` quote no number that has no record in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fp8stack
from fp8stack import capability

ROOT = Path(__file__).resolve().parents[1]
BEGUN = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def conditions() -> dict[str, Any]:
    """Return where and with what this process runs."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else "none (CPU)",
        "cc": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else "",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if gpu
        else "",
        "torch": torch.__version__,
        "triton": _triton_version(),
        "fp8stack": fp8stack.__version__,
        "git": os.environ.get("FP8STACK_GIT") or _output("git", "rev-parse", "--short=12", "HEAD"),
        "command": shlex.join(["python", *(Path(a).name if a[:1] == "/" else a for a in sys.argv)]),
        "time": BEGUN,  # one for a run, however often it writes: tables take records of one run
    }


def append_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Add one line for each record, with this run's conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = conditions()
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps({**record, **shared}) + "\n")


def import_peer(name: str) -> Any:
    """Import a module of another library. TransformerEngine by itself may load another cuDNN beside torch's."""
    if name.partition(".")[0] == "transformer_engine" and capability.te_installation():
        capability.load_te()
    return importlib.import_module(name)


@contextlib.contextmanager
def joined(rank: int, world: int, device: torch.device, folder: str) -> Iterator[None]:
    """Be one of `world` ranks, over NCCL or gloo, that meet in a folder of their own; then end the process."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    store = {"init_method": f"file://{folder}/store", "world_size": world, "rank": rank}
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=120), **store
    )
    yield
    dist.barrier()  # none leaves before the others are done
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # threads of torch's sometimes abort a process that ends in order


def add_choices(parser: argparse.ArgumentParser, known: Collection[str], results: Path) -> None:
    """Add what a benchmark over models and configurations lets its user choose."""
    add = parser.add_argument
    add("--model", action="append", help=f"of {', '.join(known)}; repeatable, or with commas")
    add("--only", nargs="+", default=["*"], metavar="NAME", help="globs of configurations")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--output", type=Path, default=results, help="JSON lines that records are added to")


def read_choices(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    known: Collection[str],
    variants: Sequence[Any],  # configurations, with a name each
    default: Callable[[argparse.Namespace], list[str]],  # the models, where none is given
) -> argparse.Namespace:
    """Parse; `model` becomes a list of names and `variants` the configurations chosen. Exits where there is nothing."""
    options = parser.parse_args(arguments)
    options.model = ",".join(options.model or default(options)).split(",")
    options.variants = [v for v in variants if any(fnmatch(v.name, o) for o in options.only)]
    if unknown := set(options.model) - set(known):
        parser.error(f"--model {unknown.pop()}: must be of {', '.join(known)}")
    if not options.variants:
        parser.error(f"--only matches none of: {', '.join(v.name for v in variants)}")
    measures = not getattr(options, "plot", None)
    if options.device == "cuda" and measures and not torch.cuda.is_available():
        parser.error("there is no GPU; use --device cpu --model tiny")
    return options


def latest_run(
    records: Path, model: str, keep: Callable[[dict[str, Any]], bool] = lambda record: True
) -> list[dict[str, Any]]:
    """Return the records of the latest run over `model`, the slowest first. Exits if there are none."""
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    rows = [r for r in rows if r["params"]["model"] == model and keep(r)]
    rows = [r for r in rows if r["time"] == rows[-1]["time"]]  # one time for a model in a run
    if not rows:
        sys.exit(f"{records} holds no run over {model}")
    return sorted(rows, key=lambda r: -r["value"])


def draw_bars(
    rows: list[dict[str, Any]], colors: list[str], labels: list[str], picture: Path, **axes: Any
) -> None:
    """Draw the values of records as bars, the last on top; `axes` are properties of matplotlib's."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "fp8stack", "svg.fonttype": "none"})
    plot = Figure(figsize=(8, 1 + 0.28 * len(rows)), layout="tight").subplots()
    bars = plot.barh([r["variant"] for r in rows], [r["value"] for r in rows], color=colors)
    plot.bar_label(bars, labels, padding=3)
    plot.set(**axes)
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot.figure.savefig(picture, metadata={"Date": None})


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _output(*command: str) -> str:
    """Return the first line that a program prints, or an empty string if it cannot run."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else ""
