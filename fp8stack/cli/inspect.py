"""`fp8stack inspect CKPT`: what is in a checkpoint: step, level, dtypes, formats of optimizer states.

`read` takes a checkpoint of a model and its optimizer: a file of `fp8stack.checkpoint.save`, or of torch.save({"model":
model.state_dict(), "optimizer": optimizer.state_dict()}), which is read with `weights_only=True`; or a folder of
torch.distributed.checkpoint with these two keys, which torch's own converter first makes such a file, in a temporary
folder. A checkpoint does not name its level; it is told from the optimizer's formats: "O2" where states or masters are
kept in fewer bits, "O1" where fp8stack's optimizer keeps torch's formats, none where nothing shows.

Limits: a folder's header (`.metadata`) is a pickle, as torch writes it: open those that you trust. A folder holds tied
weights twice, and they are not tied again. Weights alone are read by torch.load and safetensors.safe_open.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack import checkpoint
from fp8stack.errors import CheckpointError, first_line
from fp8stack.optim.saved_checks import are_names
from fp8stack.optim.state_formats import MASTER_KEYS
from fp8stack.tensor_kinds import fault_of

from .output import Lines, show, size, table


class Contents(NamedTuple):
    """What a checkpoint holds: the optimizer's states by the name of their parameter, and what it says of itself."""

    kind: str
    model: dict[str, Tensor]
    states: dict[str, dict[str, Any]]
    header: dict[str, Any]
    extra: dict[str, Any]
    steps: int | None  # that the optimizer has taken


def run(options: argparse.Namespace) -> int:
    path = Path(options.checkpoint)
    contents = read(path)
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
    nbytes = sum(f.stat().st_size for f in files)
    show(options, {"path": str(path), "file_bytes": nbytes, **describe(contents)}, draw)
    return 0


def read(path: Path) -> Contents:
    """Read a checkpoint.

    Raises:
        CheckpointError: for what is missing, damaged, or no checkpoint of a model and its optimizer.
    """
    if path.is_dir():
        held, kind = _read_folder(path), "torch.distributed.checkpoint"
    else:
        held = checkpoint.read_file(path)
        kind = "fp8stack.checkpoint" if checkpoint.is_saved(held) else "torch.save"
    try:
        rest = {**held}  # dict() would go through a tensor's elements
        model, optimizer = rest.pop("model"), rest.pop("optimizer")
        optimizer = {"state": {}} if optimizer is None else optimizer
        header = {**optimizer.get("fp8stack", {})}
        listed = rest.pop("names", None) or header.get("names", [])
        names = dict(enumerate(listed if are_names(listed) else ()))
        states = {names.get(k, str(k)): {**entry} for k, entry in optimizer["state"].items()}
        tensors = {name: t for name, t in model.items() if isinstance(t, Tensor)}
        steps = [int(entry["step"]) for entry in states.values() if "step" in entry]
        for name, entry in {"model": tensors, **states}.items():
            for key, value in entry.items():
                _check_part(f"{key!r} of {name}", key, value, entry is tensors)
        extra = {**rest["extra"]} if checkpoint.is_saved(held) else rest
    except Exception as error:  # whatever parts of another kind raise
        keys = f", its keys are {[*held]}" if isinstance(held, dict) else ""
        why = first_line(error)
        raise CheckpointError(
            f"{path} is no checkpoint of a model and its optimizer{keys:.100} ({why:.200}). Save with "
            'fp8stack.checkpoint.save, or as {"model": model.state_dict(), "optimizer": optimizer.state_dict()}. '
            "Weights alone are read by torch.load(weights_only=True) or safetensors.safe_open."
        ) from error
    return Contents(kind, tensors, states, header, extra, max(steps, default=None))


def _check_part(place: str, key: Any, value: Any, may_be_sparse: bool) -> None:
    """Raise TypeError for a part of a state_dict that cannot be described or decoded; its data is not looked at."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    fault = fault_of(value) if dense or (isinstance(value, Tensor) and not may_be_sparse) else ""
    if not isinstance(key, str) or (key.endswith("_scale") and (not dense or value.ndim > 2)):
        fault = f"is {type(key).__name__}: {type(value).__name__}"
    if fault:
        raise TypeError(f"{place} {fault}")


def _read_folder(path: Path) -> Any:
    # takes as long to import as torch, which every command would wait for
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory(prefix="fp8stack-") as folder:
        try:
            if not any(path.glob("*.metadata")):  # torch would log a traceback
                raise FileNotFoundError("it has no file .metadata")
            dcp_to_torch_save(path, f"{folder}/checkpoint.pt")
        except (Exception, CheckpointException) as error:  # whatever a damaged pickle raises
            raise CheckpointError(
                f"{path} cannot be read as a checkpoint of torch.distributed.checkpoint ({first_line(error)}). Name "
                "the folder with its .metadata; if that is damaged, use an earlier one."
            ) from error
        return checkpoint.read_file(f"{folder}/checkpoint.pt")


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is the same for tied tensors, and for no others."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *start, tensor.shape, tensor.stride(), tensor.dtype


def describe(contents: Contents) -> dict[str, Any]:
    """Return what a checkpoint holds, as plain data."""
    tied_once = {place_of(t): t for t in contents.model.values()}.values()
    held: list[tuple[str, Tensor, Any, Any]] = [("model", t, None, None) for t in tied_once]
    for parameter, entry in contents.states.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.ndim and not key.endswith("_scale"):
                part, weight = key.removesuffix("_code"), contents.model.get(parameter)
                held.append((part, value, entry.get(f"{part}_scale"), weight))
    parts: dict[tuple[str, str], Counter[str]] = {}
    for part, codes, scale, weight in held:
        nbytes = sum(t.numel() * t.element_size() for t in (codes, scale) if t is not None)
        row = parts.setdefault((part, _format(codes, scale, weight)), Counter())
        row.update(tensors=1, elements=codes.numel(), bytes=nbytes)
    keys = {key for entry in contents.states.values() for key in entry}
    keeps = contents.header.get("states") == "keep"
    level = "O1" if keeps else "O2" if contents.header else None
    if keys & set(MASTER_KEYS) or any(key.endswith("_code") for key in keys):
        level = "O2"
    return {
        "kind": contents.kind,
        "step": contents.extra.get("step", contents.steps),
        "level": level,
        "parts": [{"part": p, "format": f, **counts} for (p, f), counts in parts.items()],
        "extra": {k: v for k, v in contents.extra.items() if isinstance(v, int | float | str)},
    }


def draw(data: dict[str, Any]) -> Lines:
    """Show a summary and the formats."""
    step = "no step" if data["step"] is None else f"step {data['step']}"
    level = data["level"] or "no level that shows (O0, or without fp8stack)"
    yield f"{data['path']}: {data['kind']}, {size(data['file_bytes'])}, {step}, {level}"
    if data["extra"]:
        yield ", ".join(f"{k}={v!r}" for k, v in data["extra"].items())
    rows = (
        (p["part"], p["format"], p["tensors"], f"{p['elements']:,}", size(p["bytes"]))
        for p in data["parts"]
    )
    header = ("part", "format", "tensors", "elements", "size")
    yield table(header, rows, right="tensors elements size")


def _format(value: Tensor, scale: Tensor | None, weight: Tensor | None) -> str:
    """Return how a state is kept, read off its layout; see `fp8stack/optim/state_formats.py`."""
    dtype = str(value.dtype).removeprefix("torch.")
    if scale is None:
        return dtype
    scaled = ("one scale", "block 256", "block 128")[scale.ndim]  # bitsandbytes' blocks are of 256
    if value.is_floating_point():
        return f"{dtype}, {scaled}"
    packed = scale.ndim == 2 and weight is not None and value.shape != weight.shape
    return f"{4 if packed else 8}-bit {scaled}"
