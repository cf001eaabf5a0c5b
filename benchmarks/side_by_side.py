"""Is this checkout slower or larger than an earlier one? Runs benchmarks of both in turns, on the same GPU.

    git worktree add /tmp/before dbf10cc
    python benchmarks/side_by_side.py /tmp/before --parts train optimizer micro
    python benchmarks/side_by_side.py /tmp/before --parts reduce                   # two GPUs

Each part runs in a process of its own, before, after, before, after, so that a GPU that warms up slows both down. Each
checkout measures itself by its own `train_step.py`, `optimizer_step.py` and `comm.py`; `micro`, eight micro-batches of
4,096 tokens whose gradients add up in four Llama blocks, is measured by this file over either library. Values are the
medians of the rounds; the printed ratio is after / before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
RESULTS = ROOT / "runs" / "side_by_side.jsonl"
TRAIN = ["native current", "native fused", "native current compile"]
PARTS = {
    "train": ["train_step.py", "--model", "llama", "--only", *TRAIN],
    "optimizer": ["optimizer_step.py", "--model", "llama-3.2-1b", "--only", "fp8stack"],
    "reduce": ["comm.py", "--gpus", "2", "--sizes", "64M", "256M",
               "--only", "nvlink fp8", "collective fp8"],
    "micro": [str(HERE), "--micro"],
}  # fmt: skip


def run(part: list[str], tree: Path, folder: Path) -> list[dict[str, Any]]:
    """Run one benchmark of a checkout; return its records."""
    site = (
        folder / f"site{abs(hash(tree))}"
    )  # the root itself on sys.path would shadow other packages
    if not site.exists():
        site.mkdir()
        (site / "fp8stack").symlink_to(tree / "fp8stack")
    output = folder / "records.jsonl"
    output.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    script = str(tree / "benchmarks" / part[0])  # an absolute path stays what it is
    command = [sys.executable, script, *part[1:], "--output", str(output)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=tree, text=True, capture_output=True
    )
    if done.returncode or not output.exists():
        print(done.stdout[-2000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
        return []
    return [json.loads(line) for line in output.read_text().splitlines()]


def values_of(record: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Return the numbers of a record that are compared, by variant, size and metric."""
    extra, params = record.get("extra", {}), record["params"]
    size = str(params.get("bytes", params.get("size", params.get("model", ""))))
    found = {"value": record["value"], **{k: extra.get(k) for k in ("peak_gib", "cpu_ms")}}
    return {(record["variant"], size, k): v for k, v in found.items() if v is not None}


def micro(output: Path) -> None:
    """Measure eight micro-batches whose gradients add up."""
    import models
    import torch

    import fp8stack

    config = models.resize(models.MODELS["llama"], None)
    config = models.replace(config, batch=1)
    model, batch = models.make_model(config, "cuda")
    fp8stack.initialize(model, None, "O0", skip=list(models.PLAIN), compute="native")
    parameters = list(model.parameters())

    def step() -> None:
        torch.autograd.graph.increment_version(parameters)  # as an optimizer's step would
        for _ in range(8):
            model(*batch).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    record = {
        "variant": "8 micro-batches",
        "params": {"model": "llama"},
        "value": statistics.median(times),
    }
    record["extra"] = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    output.write_text(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", help="the earlier checkout")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--name", default="before", help="what the record calls the earlier one, its commit"
    )
    parser.add_argument("--micro", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.micro:
        return micro(options.output)
    if options.before is None:
        parser.error("name the earlier checkout")
    from common import append_records  # only here: `micro` runs over the earlier library too

    trees = {"before": options.before.resolve(), "after": ROOT}
    records = []
    with tempfile.TemporaryDirectory() as temporary:
        for part in options.parts:
            seen: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(
                lambda: defaultdict(list)
            )
            for _ in range(options.rounds):
                for side, tree in trees.items():
                    for record in run(PARTS[part], tree, Path(temporary)):
                        for key, value in values_of(record).items():
                            seen[key][side].append(value)
            for (variant, size, metric), sides in sorted(seen.items()):
                if set(sides) != set(trees):
                    print(f"{part}: {variant} {size} {metric}: only {', '.join(sides)}")
                    continue
                before, after = (statistics.median(sides[side]) for side in trees)
                ratio, label = after / before, f"{part:9} {variant:32} {size:14} {metric:8}"
                print(f"{label} {before:10.4f} -> {after:10.4f}  × {ratio:.4f}", flush=True)
                params = {
                    "part": part,
                    "size": size,
                    "before": options.name,
                    "rounds": options.rounds,
                }
                extra = {side: sides[side] for side in trees}
                records.append({"name": "side_by_side", "variant": variant, "params": params, "metric": metric,
                                "value": ratio, "unit": "after / before", "extra": extra})  # fmt: skip
    append_records(options.output, records)


if __name__ == "__main__":
    main()
