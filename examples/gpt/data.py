"""What a run reads: `open_data(config, rank, world)` opens any source behind one interface.

| --data                                     | what                          | module       |
|--------------------------------------------|-------------------------------|--------------|
| stdlib; a text file or folder              | read at once, up to 32 MiB    | `corpus.py`  |
| a folder of .bin files                     | tokens, mapped into memory    | `windows.py` |
| a name, hf:NAME[:CONFIG], .parquet files   | documents, streamed           | `hub.py`     |

Batches are tokens and targets, int64 [size, seq_len], on the CPU. `train` yields them without end and in an order that
depends on the seed and the position only; `validation` is a list, the same for every rank and evaluation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import corpus
import numpy as np
import torch
from torch import Tensor

from fp8stack.errors import ConfigError, Fp8StackWarning, did_you_mean, reason_of

from . import hub
from .config import Config
from .logs import say
from .model import SIZES
from .tokens import Encoding, encode_bytes, open_encoding
from .windows import Batch, Windows, find_shards, open_shards, spaced_batches


class Train(Protocol):
    epoch: int

    def next_batch(self, size: int) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Data:
    """Text to train on and to validate with.

    train: `next_batch(size)`, called by all ranks with the same size, returns this rank's part of the next
        size × world samples. Its state is the same on all ranks, and one of fewer or more ranks can load it.
    identity: what a position is one of: the same wherever it lies.
    nbytes: of streamed files in a folder; a position is a number of their documents. 0: of others.
    vocab_size: of the model: padded.
    """

    name: str
    identity: str
    seq_len: int
    train: Train
    validation: list[Batch]
    encoding: Encoding
    nbytes: int = 0

    @property
    def vocab_size(self) -> int:
        return self.encoding.vocab_size

    @cached_property
    def readable(self) -> bool:
        """Can tokens be turned to text here? If not, a warning says why: shards need no vocabulary, but samples do."""
        try:
            self.encode("a")
        except ConfigError as error:
            text = f"there will be no samples of text, nor HellaSwag: {error}"
            warnings.warn(text, Fp8StackWarning, stacklevel=2)
            return False
        return True

    def encode(self, text: str) -> Tensor:  # [T], int64
        return torch.tensor(self.encoding.encode(text), dtype=torch.int64)

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        return self.encoding.decode(tokens.tolist() if isinstance(tokens, Tensor) else list(tokens))


@contextmanager
def reading(data: str) -> Iterator[None]:
    """Raise ConfigError where what `--data` names, or a file of it, cannot be read.

    Path.exists and Path.is_dir raise too: below a folder that may not be entered, for a name that is too long.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--data {error.filename or data}: cannot be read: {reason_of(error)}"
        ) from error


def open_data(config: Config, rank: int = 0, world: int = 1) -> Data:
    """Open what `config.data` names, for one of `world` ranks.

    Raises:
        ConfigError: if it does not exist, cannot be read, or is too little.
    """
    seq_len = config.seq_len or SIZES[config.model].seq_len
    with reading(config.data):
        if hub.is_dataset(config.data):
            data = _open_stream(config, seq_len, rank, world)
        else:
            data = _open_windows(config, seq_len, rank, world)
    if rank == 0 and data.encoding.note:
        say(f"data: {data.encoding.note}")
    return data


def open_arrays(
    config: Config, seq_len: int, max_bytes: int = corpus.MAX_BYTES
) -> tuple[str, Encoding, list[np.ndarray], list[np.ndarray]]:
    """Return name, encoding, and the tokens for training and validation of a source that lies here.

    max_bytes: that are read of text; shards are not limited. A warning says that there is more.
    """
    path = Path(config.data)
    if config.text_column:
        raise ConfigError(
            f"--text-column {config.text_column}: --data {config.data} has no columns. Leave it out: it is of datasets "
            "and folders of .parquet files."
        )
    if find_shards(path):
        encoding, train, held_out = open_shards(path)
        if config.encoding not in ("auto", encoding.name):
            raise ConfigError(
                f"--encoding {config.encoding}: the shards in {path} are of {encoding.name}. Leave it out."
            )
        return path.name, encoding, train, held_out
    if config.data != "stdlib" and not path.exists():
        raise ConfigError(
            f"--data {path}: there is no such file or folder, nor a dataset of that name.{_nearest(path)} Give an "
            f"existing text file or folder, one of {', '.join(hub.NAMES)}, or hf:NAME of any on huggingface.co; or "
            "leave it out to train on Python's standard library."
        )
    if path.suffix in (".bin", ".parquet") and path.is_file():
        raise ConfigError(
            f"--data {path}: a single {path.suffix} file is no text. Give the folder that it is in, {path.parent}."
        )
    encoding = open_encoding("bytes" if config.encoding == "auto" else config.encoding)
    try:
        text = corpus.load(None if config.data == "stdlib" else path, seq_len, max_bytes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if text.whole > max_bytes:
        warnings.warn(
            f"--data {config.data}: read {max_bytes / 2**20:.0f} MiB of text, of {math.ceil(text.whole / 2**20)} "
            "MiB of files; examples/gpt/tokenize_data.py takes all text.",
            Fp8StackWarning,
            stacklevel=3,
        )
    splits = [text.train.numpy(), text.validation.numpy()]
    if encoding.name != "bytes":
        splits = [encode_bytes(encoding, part.tobytes()) for part in splits]
    return text.name, encoding, splits[:1], splits[1:]


def _nearest(path: Path) -> str:
    """Return a did-you-mean for a path that is not there: of names of data, and of what lies beside it."""
    known = ["stdlib", *hub.NAMES]
    with suppress(OSError):
        known += map(str, path.parent.iterdir())
    return did_you_mean(str(path), known)


def _open_windows(config: Config, seq_len: int, rank: int, world: int) -> Data:
    name, encoding, train, held_out = open_arrays(config, seq_len)
    vocab = encoding.vocab_size
    windows = Windows(train, seq_len, config.seed, rank, world, vocab)
    count, size = config.eval_batches, config.eval_batch_size
    validation = spaced_batches(held_out, seq_len, count, size, vocab)
    tokens = sum(map(len, (*train, *held_out)))
    return Data(name, f"{name} ({tokens} tokens)", seq_len, windows, validation, encoding)


def _open_stream(config: Config, seq_len: int, rank: int, world: int) -> Data:
    encoding = open_encoding("gpt2" if config.encoding == "auto" else config.encoding)
    documents, held_out = hub.open_documents(config.data, config.text_column)
    count, size = config.eval_batches, config.eval_batch_size
    wanted = count * size * seq_len + 1
    tokens, read = hub.take_tokens(held_out or documents, encoding, wanted)
    if held_out is None and len(tokens) < wanted:
        raise ConfigError(
            f"--data {config.data}: all its {read} documents are fewer than the {wanted} tokens for validation. "
            "Give more text, or smaller --eval-batches, --eval-batch-size or --seq-len."
        )
    tokens = np.array(tokens[:wanted], encoding.dtype)
    validation = spaced_batches([tokens], seq_len, count, size, encoding.vocab_size)
    stream = hub.Stream(documents, encoding, seq_len, rank, world, 0 if held_out else read)
    path = Path(config.data)
    column = f" in {config.text_column}" if config.text_column else ""
    identity = f"{path.name if path.exists() else path} (documents{column})"
    held = hub.local_bytes(config.data)
    return Data(config.data, identity, seq_len, stream, validation, encoding, held)
