"""Tokens that lie in memory or in files: cut into windows, which each epoch visits in another order.

A position is the number of samples that all ranks together have taken. A step of B samples takes the B that follow,
however many ranks share them and in however many micro-batches, so a run can be resumed with another number of both.
Windows do not overlap, but for the token that is the last target of one and the first input of the next.

Shards are files `*.bin` of tokens: raw uint16 (uint8 for bytes), or with llm.c's header. Those named val, or
something_val_something, are for validation. `meta.json` beside them names the encoding, which may be a
tokenizer.json beside them; without it, GPT-2's is taken. They are mapped, not read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8stack.errors import ConfigError

from .tokens import ENCODINGS, Encoding, open_encoding

Batch = tuple[Tensor, Tensor]  # tokens and the tokens that follow them, each [B, T], int64
HEADER_BYTES, MAGIC = 1024, 20240520  # of llm.c: 256 int32, the first of which is this


class Windows:
    """The windows of several arrays of tokens, without end."""

    def __init__(
        self,
        parts: list[np.ndarray],  # each [tokens], unsigned integers
        seq_len: int,
        seed: int,
        rank: int,
        world: int,
        vocab: int,
    ) -> None:
        self.parts, self.seq_len, self.seed, self.vocab = parts, seq_len, seed, vocab
        self.rank, self.world, self.position = rank, world, 0
        counts = [max(0, len(part) - 1) // seq_len for part in parts]
        self.ends = np.cumsum(counts)
        if not self.ends[-1]:
            raise ConfigError(
                f"--data: {sum(map(len, parts))} tokens for training are no window of {seq_len} and its target. "
                "Give more text, or a smaller --seq-len."
            )
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    @property
    def epoch(self) -> int:
        return int(self.position // self.ends[-1])

    def next_batch(self, size: int) -> Batch:
        """Return this rank's `size` windows of the next `size × world` samples: tokens and targets."""
        first = self.position + self.rank * size
        rows = [self._window(sample) for sample in range(first, first + size)]
        self.position += size * self.world
        return to_batch(np.stack(rows), self.vocab)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, self.state_dict())
        self.position = state["samples"]

    def _window(self, sample: int) -> np.ndarray:  # [seq_len + 1]
        epoch, index = divmod(sample, int(self.ends[-1]))
        if self._order[0] != epoch:
            seed = (self.seed * 1_000_003 + epoch) % 2**64  # the most that torch takes
            generator = torch.Generator().manual_seed(seed)
            self._order = epoch, torch.randperm(int(self.ends[-1]), generator=generator)
        window = int(self._order[1][index])
        part = int(np.searchsorted(self.ends, window, side="right"))
        start = (window - (self.ends[part - 1] if part else 0)) * self.seq_len
        return self.parts[part][start : start + self.seq_len + 1]


def check_state(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise ConfigError if a position is not of this kind of source."""
    if state.keys() != own.keys():
        raise ConfigError(
            f"--data: the checkpoint's position is one of {', '.join(state)}, and this source has {', '.join(own)}. "
            "Streamed documents and arrays of tokens differ: resume with the --data that it was written with."
        )


def spaced_batches(
    parts: list[np.ndarray], seq_len: int, count: int, size: int, vocab: int
) -> list[Batch]:
    """`count` batches, at most, of `size` windows spread evenly: the same yardstick in every evaluation."""
    starts = [(part, at) for part in parts for at in range(0, len(part) - seq_len, seq_len)]
    if not starts:
        raise ConfigError(
            f"--data: {sum(map(len, parts))} tokens for validation are no window of {seq_len} and its target. "
            "Give more text, or a smaller --seq-len."
        )
    chosen = np.linspace(0, len(starts) - 1, min(len(starts), count * size)).round().astype(int)
    rows = [part[at : at + seq_len + 1] for part, at in (starts[i] for i in chosen)]
    return [to_batch(np.stack(rows[i : i + size]), vocab) for i in range(0, len(rows), size)]


def to_batch(rows: np.ndarray, vocab: int) -> Batch:  # [B, T + 1]
    if rows.max() >= vocab:
        raise ConfigError(
            f"--data: holds token {rows.max()}, and its encoding has {vocab} of them. The shards are of another "
            'encoding: name it in their meta.json, as {"encoding": "gpt2"}.'
        )
    windows = torch.from_numpy(rows.astype(np.int64))
    return windows[:, :-1], windows[:, 1:]


# --- shards


def is_held_out(path: Path) -> bool:
    """Is a file for validation, by its name?"""
    return re.search(r"(?<![a-z])(val|valid|validation|test)(?![a-z])", path.stem) is not None


def find_shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.bin")) if path.is_dir() else []


def open_shards(folder: Path) -> tuple[Encoding, list[np.ndarray], list[np.ndarray]]:
    """Return the encoding, the arrays for training and those for validation.

    Raises:
        ConfigError: for a folder without one of the two, a damaged file, or an unknown encoding.
    """
    meta = folder / "meta.json"
    try:
        name = json.loads(meta.read_bytes())["encoding"] if meta.exists() else "gpt2"
        known = name in ENCODINGS or name.endswith(".json")
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise ConfigError(
            f'{meta}: must name the encoding of the shards, as {{"encoding": "gpt2"}}; one of {", ".join(ENCODINGS)}, '
            "or a tokenizer.json in the folder."
        )
    encoding = open_encoding(name, folder)
    shards = find_shards(folder)
    splits = [[path for path in shards if is_held_out(path) == held] for held in (False, True)]
    if not all(splits):
        raise ConfigError(
            f"--data {folder}: has {len(splits[0])} shards for training and {len(splits[1])} for validation; "
            'one of each is needed. Those for validation have "val" in their names, as val_000000.bin.'
        )
    train, validation = ([_map(path, encoding.dtype) for path in split] for split in splits)
    return encoding, train, validation


def _map(path: Path, dtype: type[np.unsignedinteger]) -> np.ndarray:
    with open(path, "rb") as file:
        start = file.read(8)
    size = path.stat().st_size
    skip = HEADER_BYTES if start[:4] == MAGIC.to_bytes(4, "little") else 0
    if size <= skip or (size - skip) % np.dtype(dtype).itemsize:
        raise ConfigError(
            f"{path}: {size} bytes are no {np.dtype(dtype).name} tokens; it is empty or truncated. Write it again."
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=skip)
