"""`fp8stack inspect CKPT`: what is in a checkpoint: step, level, dtypes, formats of optimizer states, largest tensors.

It takes what `fp8stack.checkpoint.save` or `torch.save` wrote, a folder of torch.distributed.checkpoint, or a
safetensors file (`stored.py`). The level is that of the manifest beside a checkpoint of examples/train_gpt.py; others
do not name it, and it is told from the optimizer's formats: "O2" where states or masters are kept in fewer bits, "O1"
where fp8stack's optimizer kept torch's formats, none where nothing shows (O0, or without fp8stack).
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.optim.state import MASTER_KEYS

from .output import add_command, show, size, table
from .stored import Stored, place_of, read

if TYPE_CHECKING:
    from rich.console import Console

    from .output import Commands


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "inspect", "what is in a checkpoint")
    parser.add_argument("checkpoint", metavar="CKPT", help="a .pt, DCP folder or .safetensors")
    parser.add_argument("--largest", type=int, default=5, metavar="N", help="tensors to list; 5")


def run(options: argparse.Namespace) -> int:
    if options.largest < 0:
        raise ConfigError(f"--largest {options.largest} must be 0 or more.")
    path = Path(options.checkpoint)
    stored = read(path)
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
    data = {
        "path": str(path),
        "kind": stored.kind,
        "file_bytes": sum(f.stat().st_size for f in files),
        **describe(stored, options.largest),
    }
    show(options, data, draw)
    return 0


def describe(stored: Stored, largest: int = 5) -> dict[str, Any]:
    """Return what a checkpoint holds, as plain data."""
    tensors = {place_of(t): t for t in stored.model.values()}.values()  # tied ones once
    told = {**stored.extra, **stored.manifest}
    dtypes: dict[str, dict[str, int]] = {}
    for t in tensors:
        row = dtypes.setdefault(_dtype(t), {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"], row["elements"] = row["tensors"] + 1, row["elements"] + t.numel()
        row["bytes"] += _bytes(t)
    formats: dict[str, Counter[str]] = {}
    nbytes: Counter[str] = Counter()
    named = [(name, t) for name, t in stored.model.items()]
    for parameter, entry in stored.states.items():
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                continue
            part = next((key.removesuffix(s) for s in ("_code", "_scale") if key.endswith(s)), key)
            nbytes["master" if key in MASTER_KEYS else part] += _bytes(value)
            named.append((f"{parameter} {key}", value))
            if value.ndim and not key.endswith("_scale"):
                formats.setdefault(part, Counter())[_format(key, entry, stored, parameter)] += 1
    named.sort(key=lambda pair: -_bytes(pair[1]))
    return {
        "step": _step(stored),
        "level": _level(stored),
        "precision": stored.manifest.get("precision"),
        "elements": sum(row["elements"] for row in dtypes.values()),
        "model": dtypes,
        "optimizer": {
            name: {
                "formats": dict(kinds),
                "bytes": nbytes["master" if name in MASTER_KEYS else name],
            }
            for name, kinds in formats.items()
        },
        "extra": {k: v for k, v in told.items() if isinstance(v, (int, float, str, bool))},
        "largest": [
            {"name": n, "dtype": _dtype(t), "shape": list(t.shape), "bytes": _bytes(t)}
            for n, t in named[:largest]
        ],
    }


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show a summary, dtypes, formats and the largest tensors."""
    step = "no step" if data["step"] is None else f"step {data['step']}"
    level = data["precision"] or data["level"] or "no level that shows (O0, or without fp8stack)"
    title = f"{data['path']}: {data['kind']}, {size(data['file_bytes'])}, {step}, {level}"
    console.print(title, soft_wrap=True)
    if data["extra"]:
        console.print(", ".join(f"{k}={v!r}" for k, v in data["extra"].items()))
    header = ("model", "tensors", "elements", "size")
    rows = (
        (dtype, row["tensors"], f"{row['elements']:,}", size(row["bytes"]))
        for dtype, row in data["model"].items()
    )
    console.print(table(header, rows, right="tensors elements size"))
    if data["optimizer"]:
        states = (
            (name, ", ".join(f"{n} × {f}" for f, n in row["formats"].items()), size(row["bytes"]))
            for name, row in data["optimizer"].items()
        )
        console.print(table(("optimizer", "formats", "size"), states, right="size"))
    large = (
        (t["name"], t["dtype"], "×".join(map(str, t["shape"])), size(t["bytes"]))
        for t in data["largest"]
    )
    console.print(table(("largest", "dtype", "shape", "size"), large, right="size"))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # nbytes is not defined for sparse ones


def _format(key: str, entry: dict[str, Any], stored: Stored, parameter: str) -> str:
    """Return how a state is kept, read from its layout; see `fp8stack/optim/state.py`."""
    value, scale = entry[key], entry.get(f"{key.removesuffix('_code')}_scale")
    if scale is None:
        return _dtype(value)
    if scale.ndim == 0:
        return f"{_dtype(value)}, one scale"
    if scale.ndim == 1:
        return "8-bit block 256 (bitsandbytes)"
    if value.is_floating_point():
        return f"{_dtype(value)}, block 128"
    weight = stored.model.get(parameter)
    codes, blocks = value.shape[-1], scale.shape[-1]  # of a row; two codes of 4 bits are one
    if weight is None and blocks == 1 and codes <= 64:  # of either
        return "block 128"
    packed = codes <= 64 * blocks if weight is None else value.shape != weight.shape
    return "4-bit block 128" if packed else "8-bit block 128"


def _step(stored: Stored) -> int | None:
    """Return the step that was saved, or that of the optimizer."""
    saved = {**stored.extra, **stored.manifest}.get("step")
    if isinstance(saved, int):
        return saved
    counts = [e.get("step") for e in stored.states.values()]
    known = [int(c) for c in counts if c is not None and not getattr(c, "is_meta", False)]
    return max(known, default=None)


def _level(stored: Stored) -> str | None:
    if stored.manifest:
        return str(stored.manifest["level"])
    keys = {key for entry in stored.states.values() for key in entry}
    if keys & set(MASTER_KEYS) or any(key.endswith("_code") for key in keys):
        return "O2"
    return "O1" if stored.header.get("states") == "keep" else "O2" if stored.header else None
