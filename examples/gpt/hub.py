"""Documents of Hugging Face datasets, by name or from a local folder of parquet or text files, streamed.

Documents are joined, with a separator after each, into one endless row of tokens; sample i is the i-th stretch of
seq_len. A position is the number of documents read, and the tokens of the last one that no sample has had yet.
Validation text is the dataset's own split where it has one, else its first documents, which training skips.

Limits: every rank reads and encodes the whole stream and keeps its share, so that positions do not depend on ranks:
for large clusters, or a second epoch, write shards first (`tokenize_data.py`). Documents come in the dataset's order.
Going back to a position reads the documents before it once more, without encoding them.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import numpy as np

from fp8stack.errors import ConfigError, Fp8StackWarning, did_you_mean, first_line

from .tokens import Encoding
from .windows import Batch, check_state, is_held_out, to_batch

Documents = Callable[[int], Generator[str, None, None]]  # those after the first n
NAMES = {  # and their configurations
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", None),
    "tinyshakespeare": ("karpathy/tiny_shakespeare", None),
}
# of files, as `datasets` has them: how their names end, and options
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # a size of its own: by default it is that of the first rows of a file, which may have none
    "parquet": (".parquet", {"batch_size": 1000}),
    "text": (".txt", {"sample_by": "document"}),
}
CONVERTED = "refs/convert/parquet"  # the branch with the Hub's own conversion of a dataset
HELD_OUT = ("validation", "test")  # names of splits
ACCESS = (
    "By name, it needs access to huggingface.co; on a machine without, copy its parquet files into a folder and give "
    "that."
)


class UnreadableError(ConfigError):
    """Documents that cannot be read, while others of the dataset were."""


def is_dataset(data: str) -> bool:
    return data in NAMES or data.startswith("hf:") or bool(_local_files(Path(data), ".parquet"))


def open_documents(data: str, column: str | None = None) -> tuple[Documents, Documents | None]:
    """Return the documents for training and for validation, if the dataset has a split for that.

    Args:
        data: a key of NAMES, "hf:NAME" or "hf:NAME:CONFIG" of a dataset, "hf:FOLDER" or a folder of parquet files.
        column: that the documents are in; None: "text", or the only one with text.

    Raises:
        ConfigError: if no dataset is named, `datasets` is missing, the dataset cannot be opened, or has no column of
            text.
    """
    named = _split_name(data)[0].split("/")
    if data.startswith("hf:") and not set(named) - {"", ".", ".."}:  # folders, to `datasets`
        raise ConfigError(
            f"--data {data}: names no dataset. Give hf:NAME of one on huggingface.co, or the path of a folder."
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f'--data {data} needs the package datasets, which is not installed: pip install -e ".[train]".'
        ) from error
    load = partial(load_dataset, **_arguments(data), streaming=True)
    try:
        try:
            splits = load()
        except (RuntimeError, ValueError) as error:  # of `datasets` from 4 on, and before
            if not re.search("dataset scripts|custom code", str(error).lower()):
                raise
            warnings.warn(
                f"--data {data} comes with a script, which is not run: reading the Hub's own conversion to parquet, "
                "which may hold less of a large dataset.",
                Fp8StackWarning,
                stacklevel=2,
            )
            splits = load(revision=CONVERTED)
        if "train" not in splits:
            raise ValueError(f"it has no split named train, but {', '.join(splits)}")
        row = _first_values(splits["train"])
    except Exception as error:  # of the network, the Hub, files, formats: all of them end here
        path, _ = _split_name(data)
        if "config name is missing" in str(error).lower():
            raise _no_configuration(path, error) from error
        if Path(path).is_file():
            raise ConfigError(
                f"--data {data}: is a file. Give its folder, as --data hf:{Path(path).parent}."
            ) from error
        here = Path(path).is_dir()
        raise ConfigError(
            f"--data {data}: cannot be opened ({first_line(error) or type(error).__name__}). "
            + ("Write its files again, or give others." if here else ACCESS)
        ) from error
    column = _text_column(data, row, column)
    held_out = next((splits[name] for name in HELD_OUT if name in splits), None)
    parts = [
        part and partial(_documents, data, part, column) for part in (splits["train"], held_out)
    ]
    return parts[0], parts[1]


def _arguments(data: str) -> dict[str, Any]:
    """Return what `datasets.load_dataset` is to be called with."""
    if data in NAMES:
        return dict(zip(("path", "name"), NAMES[data], strict=True))
    path, config = _split_name(data)
    kind, train, held_out = _local_splits(data)
    if not kind:
        return {"path": path, "name": config}
    splits = {"train": train, **({"validation": held_out} if held_out else {})}
    files = {split: [glob.escape(file) for file in part] for split, part in splits.items()}
    return {"path": kind, "data_files": files, **KINDS[kind][1]}


def local_bytes(data: str) -> int:
    """Return the size of a dataset's files that lie in a folder; 0 of one of the Hub, or in other formats."""
    _, train, held_out = _local_splits(data)
    return sum(map(os.path.getsize, train + held_out))


def _local_splits(data: str) -> tuple[str, list[str], list[str]]:
    """Return what a folder's files are to `datasets`, those to train on, and those for validation; "": not known."""
    folder = Path(_split_name(data)[0])
    for kind, (suffix, _) in KINDS.items():
        files = _local_files(folder, suffix) if data not in NAMES else []
        train = [file for file in files if not is_held_out(Path(file))]
        if train:
            return kind, train, [file for file in files if is_held_out(Path(file))]
    return "", [], []


def _split_name(data: str) -> tuple[str, str | None]:
    """Return the dataset or folder that "hf:NAME:CONFIG" names, and its configuration."""
    path, _, config = data.removeprefix("hf:").partition(":")
    return os.path.expanduser(path), config or None


def _no_configuration(path: str, error: Exception) -> ConfigError:
    """Return what to say of a dataset that has several configurations, of which `datasets` lists the names."""
    listed = re.search(r"configs: \[(.*?)\]", str(error))
    names = re.findall(r"'([^']*)'", listed[1]) if listed else []
    shown = f": {', '.join(names)}" if names else ""
    return ConfigError(
        f"--data hf:{path}: has several configurations{shown}. Choose one, as hf:NAME:CONFIG: "
        f"--data hf:{path}:{names[0] if names else 'CONFIG'}."
    )


def _local_files(folder: Path, suffix: str) -> list[str]:
    files = corpus.find_files(folder, suffix) if folder.is_dir() else []
    return sorted(str(folder / file) for file in files)


def _first_values(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the first value of each column that is not missing, of some rows."""
    found: dict[str, Any] = {}
    for row in itertools.islice(rows, 100):
        found |= {name: value for name, value in row.items() if found.get(name) is None}
        if None not in found.values():
            break
    return found


def _text_column(data: str, row: dict[str, Any], wish: str | None) -> str:
    """Return the column of a dataset's documents, by a value of each."""
    if not row:
        raise ConfigError(f"--data {data}: has no rows. Give other data.")
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if wish is not None and wish not in texts:
        what = "is no text" if wish in row else "is not there"
        raise ConfigError(
            f"--text-column {wish}: {what}.{did_you_mean(wish, texts)} Of the columns of {data}, "
            f"{', '.join(row)}, these are text: {', '.join(texts) or 'none'}."
        )
    if wish is not None or "text" in texts or len(texts) == 1:
        return wish or ("text" if "text" in texts else texts[0])
    if texts:
        raise ConfigError(
            f'--data {data}: has no column named "text", but several others that are text: {", ".join(texts)}. Choose '
            f"one, as with --text-column {texts[0]}."
        )
    kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
    raise ConfigError(
        f"--data {data}: has no column of text, only {kinds}. Documents are texts, one in a row: give such data."
    )


def _documents(data: str, dataset: Any, column: str, first: int) -> Generator[str, None, None]:
    """Yield the documents of a dataset after the first ones.

    Raises:
        UnreadableError: at one that cannot be read, of a damaged file or a network that is gone.
    """
    read = first
    try:
        for row in dataset.skip(first):
            yield row[column] or ""  # some have none
            read += 1
    except Exception as error:  # as where it is opened
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UnreadableError(
            f"--data {data}: what comes after {read} documents cannot be read ({reason}). Write damaged files "
            "again, or wait for the network, and start again (a run that has checkpoints: with --resume latest)."
        ) from error


class Stream:
    """Samples from documents, without end: after the last document the first follows, and an epoch has passed."""

    def __init__(
        self,
        documents: Documents,
        encoding: Encoding,
        seq_len: int,
        rank: int,
        world: int,
        skipped: int = 0,  # documents at the start that are not for training
    ) -> None:
        self.documents, self.encoding, self.seq_len = documents, encoding, seq_len
        self.rank, self.world, self.skipped = rank, world, skipped
        self.epoch, self.read, self.left = 0, skipped, []
        self._rest: Generator[str, None, None] | None = None

    def next_batch(self, size: int) -> Batch:
        """Return this rank's `size` samples of the next `size × world` ones: tokens and targets."""
        count = size * self.world * self.seq_len
        while len(self.left) <= count:
            self._read_document()
        first = self.rank * size * self.seq_len
        row = np.array(self.left[first : first + size * self.seq_len + 1])
        self.left = self.left[count:]
        rows = np.lib.stride_tricks.sliding_window_view(row, self.seq_len + 1)
        return to_batch(rows[:: self.seq_len], self.encoding.vocab_size)

    def state_dict(self) -> dict[str, Any]:
        return {**self._position(), "skipped": self.skipped}

    def _position(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "documents": self.read, "left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position. As many documents as there stay out of training, where it says that they are more.

        Raises:
            ConfigError: for a position of another kind of source, or one with fewer documents for validation.
        """
        position = dict(state)
        skipped = position.pop("skipped", self.skipped)  # older checkpoints do not say
        check_state(position, self._position())
        if self.skipped > skipped:
            raise ConfigError(
                f"--data: validation would take the first {self.skipped} documents, of which the run has trained on "
                f"all after the first {skipped}. Go on with the --eval-batches, --eval-batch-size and --seq-len that "
                "it began with, or smaller ones."
            )
        self.skipped = skipped
        self.epoch, self.read, self.left = state["epoch"], state["documents"], list(state["left"])
        self._rest = None

    def _read_document(self) -> None:
        if self._rest is None:
            self._rest = self.documents(self.read)
            weakref.finalize(
                self, self._rest.close
            )  # at exit, before the modules that it reads with are gone
        text = next(self._rest, None)
        if text is not None:
            self.read += 1
            self.left += self.encoding.encode(text)
            self.left += self.encoding.separator
            return
        if self.read == self.skipped:
            raise ConfigError("--data: the dataset has no documents beyond those for validation.")
        self.epoch, self.read, self._rest = self.epoch + 1, self.skipped, None


def take_tokens(documents: Documents, encoding: Encoding, count: int) -> tuple[list[int], int]:
    """Return at least `count` tokens, or all there are, from the first documents, and how many those were."""
    tokens: list[int] = []
    read = 0
    for text in documents(0):
        if len(tokens) >= count:
            break
        tokens += encoding.encode(text)
        tokens += encoding.separator
        read += 1
    return tokens, read
