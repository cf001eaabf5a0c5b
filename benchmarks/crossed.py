"""2 × 2: what was trained in bf16 or FP8, evaluated in bf16 and in FP8, on all of the validation text.

    python benchmarks/training.py --crossed ...              # evaluates each run as it ends

Why: the loss that a run logs is that of its own products. A level that ends higher may have trained worse weights, or
have as good ones whose forward is rounded. Only the weights evaluated in bf16 tell which.

A run's last checkpoint is taken back to float32 weights in plain PyTorch: those of O2 are its masters. "bf16" is the
model under bf16 autocast; "FP8" is level O0 with the options that levels were trained with (`--flag`) and
`select="all"`, strictly: what would fall back to bf16 is an error, and layers are in FP8 where it makes them slower
too. Windows lie side by side over the validation shards, and none is left out but the tokens at the end that are no
window.

A record has the mean losses of at most BLOCKS pieces of text, in the order of the text: what intervals can be
computed from, of pairs too, without the windows themselves. Windows of a file depend on each other, and a piece
holds them together. `value` is the mean in bf16.

Limits: eager, one GPU. Dropout and the like, which these models do not have, would be off.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import ROOT
from torch import Tensor, nn

sys.path.insert(0, str(ROOT / "examples"))

from gpt import checkpoints, runs
from gpt.build import Level, Setup
from gpt.config import OF_FP8, Config
from gpt.data import open_arrays
from gpt.model import SIZES
from gpt.windows import Batch, spaced_batches

RESULTS = ROOT / "benchmarks" / "results" / "crossed.jsonl"
BLOCKS = 128
AT_ONCE = 8  # windows in a forward
Record = dict[str, Any]


def load(folder: Path, device: torch.device) -> tuple[nn.Module, list[Batch], Config]:
    """Return a run's last weights as a plain float32 model, all windows for validation, and its options without FP8.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    facts = json.loads((folder / "run.json").read_text())
    plain = {
        k: v for k, v in facts["config"].items() if k not in (*OF_FP8, "optimizer_bits", "use_fp8")
    }
    config = Config(**{**plain, "opt_level": "off", "resume": None, "overwrite": False})
    seq_len = config.seq_len or SIZES[config.model].seq_len
    _, encoding, _, held_out = open_arrays(config, seq_len)
    windows = spaced_batches(
        held_out, seq_len, sys.maxsize // AT_ONCE, AT_ONCE, encoding.vocab_size
    )
    setup = Setup(
        model=config.model_config(encoding.vocab_size),
        level=Level("off", {}),
        parallel="none",
        device=device,
        dtype=torch.bfloat16,
        seed=config.seed,
        lr=config.max_lr or 0.0,
        weight_decay=config.weight_decay,
    )
    model, _, _, _ = setup.resume(checkpoints.find(folder))
    return model.eval(), windows, config


def in_fp8(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Return a copy of a model whose products are FP8.

    Raises:
        UnsupportedDeviceError: where they would not be.
    """
    options = {**options, "select": "all"}
    converted, _ = Level("O0", options, strict=True).apply(copy.deepcopy(model), None, False)
    return converted


@torch.no_grad()
def window_losses(model: nn.Module, windows: Iterable[Batch], device: torch.device) -> np.ndarray:
    """Return the mean loss of each window under bf16 autocast, float64."""
    found: list[Tensor] = []
    for tokens, targets in windows:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens.to(device))
        # of rows: over a dimension in the middle the kernel takes several times as long
        flat = logits.float().flatten(0, 1), targets.to(device).flatten()
        own = F.cross_entropy(*flat, reduction="none").view_as(targets)
        found.append(own.double().mean(1))
    return torch.cat(found).cpu().numpy()


def in_blocks(losses: np.ndarray) -> list[float]:
    """Return the means of BLOCKS pieces, of as many windows each or one less; fewer windows are pieces each."""
    pieces = np.array_split(losses, min(BLOCKS, len(losses)))
    return [round(float(piece.mean()), 6) for piece in pieces]


def evaluate(folder: Path, device: torch.device, options: dict[str, Any]) -> Record:
    """Return what a record has beside its name and parameters.

    options: of `fp8stack.initialize` at O0, for the evaluation in FP8.
    """
    began = time.perf_counter()
    model, windows, _ = load(folder, device)
    losses = {"bf16": window_losses(model, windows, device)}
    losses["FP8"] = window_losses(in_fp8(model, options), windows, device)
    record = {
        "metric": "validation_loss",
        "value": float(losses["bf16"].mean()),
        "unit": "nats/token",
        "value_fp8": float(losses["FP8"].mean()),
        "losses": {mode: in_blocks(own) for mode, own in losses.items()},
        "windows": len(losses["bf16"]),
        "seconds": time.perf_counter() - began,
    }
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return record


def forget(folder: Path) -> None:
    """Remove a run's checkpoints; its record stays."""
    for place in runs.folders_of(folder):
        if place.is_dir():
            checkpoints.clear(place)
