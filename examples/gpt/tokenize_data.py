"""Write tokens of any source as .bin shards, which train_gpt.py maps into memory: for large runs and many epochs.

    python examples/gpt/tokenize_data.py --data fineweb-edu --shards data/fineweb-edu --max-tokens 1000000000
    python examples/train_gpt.py --data data/fineweb-edu --model gpt2

The folder gets train_000000.bin and so on, val_000000.bin, and meta.json, which names the encoding; the file of
`--encoding tokenizer.json` is copied beside it. Text files are read as a whole, without train_gpt.py's limit of
32 MiB. The folder gets its files at the end, all of them or none: until then they are in `.partial` there. Streamed
documents fill the validation shard first, unless the dataset has a split for it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it sees its own folder only

import numpy as np

from fp8stack.errors import ConfigError, first_line
from gpt import hub
from gpt.config import parse
from gpt.data import open_arrays, reading
from gpt.tokens import Encoding, TokenizerFile, open_encoding
from gpt.windows import find_shards


def write_shards(tokens: Iterable[np.ndarray], folder: Path, split: str, size: int) -> int:
    """Write arrays of tokens, joined, as shards of `size` tokens, the last one shorter; return how many tokens."""
    waiting: list[np.ndarray] = []
    count = total = index = 0
    for part in tokens:
        while len(part):
            room = size - count
            waiting.append(part[:room])
            count += len(waiting[-1])
            part = part[room:]
            if count == size:
                _write(waiting, folder / f"{split}_{index:06d}.bin")
                waiting, count, index, total = [], 0, index + 1, total + count
    if count:
        _write(waiting, folder / f"{split}_{index:06d}.bin")
    return total + count


def _write(parts: list[np.ndarray], path: Path) -> None:
    with writing(path.parent.parent):  # that of options: the file goes there
        np.concatenate(parts).tofile(path)


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in, whose files move to `folder` at the end; after an exception it is as it was."""
    partial, is_new, moved = folder / ".partial", not folder.exists(), []
    try:
        with writing(folder):
            if partial.exists():  # of one that was killed
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
        yield partial
        with writing(folder):
            for path in sorted(partial.iterdir()):  # what they are of first: meta.json
                if not (folder / path.name).exists():
                    moved.append(folder / path.name)
                path.replace(folder / path.name)
            partial.rmdir()
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            if is_new:
                folder.rmdir()
        raise


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise ConfigError where files of `folder` cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--shards {folder}: cannot be written ({error.strerror or first_line(error)}). Give another folder, or "
            "make room there."
        ) from error


def encode(documents: Iterator[str], encoding: Encoding, most: int) -> Iterator[np.ndarray]:
    """Return the tokens of each document and a separator, until there are `most`."""
    dtype, end = encoding.dtype, encoding.separator
    return take_first((np.array([*encoding.encode(t), *end], dtype) for t in documents), most)


def take_first(parts: Iterable[np.ndarray], most: int) -> Iterator[np.ndarray]:
    """Yield the first `most` tokens of arrays that follow each other."""
    for part in parts:
        first = part[:most]
        most -= len(first)
        yield first
        if not most:
            return


def check_split(
    options: argparse.Namespace, held_out: list[np.ndarray], train: Iterator[np.ndarray]
) -> Iterator[np.ndarray]:
    """Return the documents for training, all of them, if there are any.

    Raises:
        ConfigError: if those for validation are all there are: train_gpt.py takes no such shards.
    """
    first = next((part for part in train if len(part)), None)
    if first is not None:
        return itertools.chain([first], train)
    lengths = [len(part) for part in held_out if len(part)]
    if len(lengths) < 2:
        raise ConfigError(
            f"--data {options.data}: one document cannot be for validation and for training. Give more of them, or a "
            "text file, which is split."
        )
    # whole documents are set aside, so that the last one has to stay beyond what is asked for
    fitting = min(sum(lengths) // 10, sum(lengths[:-1]))
    raise ConfigError(
        f"--val-tokens {options.val_tokens}: takes all {len(lengths)} documents of --data {options.data}, "
        f"{sum(lengths)} tokens, and leaves none for training. Give fewer, as --val-tokens {max(fitting, 1)}."
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", required=True, help="as of train_gpt.py, hf:NAME:CONFIG too")
    parser.add_argument("--text-column", metavar="NAME", help="of a dataset, as of train_gpt.py")
    parser.add_argument(
        "--encoding", default="auto", help="bytes, gpt2, or the path of a tokenizer.json"
    )
    parser.add_argument("--shards", required=True, help="folder to write")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="(%(default)s)")
    parser.add_argument("--val-tokens", type=int, default=10_000_000, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=sys.maxsize, help="for training; all")
    options = parser.parse_args(argv)
    if not options.shards:
        parser.error("--shards '': must be the path of a folder")
    options.shards = Path(os.path.expanduser(options.shards))
    try:
        train, held_out = write(options)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{options.shards}: {train:,} tokens for training, {held_out:,} for validation")
    return 0


def write(options: argparse.Namespace) -> tuple[int, int]:
    """Write what the options ask for; return the tokens for training and validation."""
    for name in ("shard_tokens", "val_tokens", "max_tokens"):
        if getattr(options, name) < 1:
            given = getattr(options, name)
            raise ConfigError(f"--{name.replace('_', '-')} {given}: must be 1 or more.")
    column = ["--text-column", options.text_column] if options.text_column else []
    config = parse(["--data", options.data, "--encoding", options.encoding, *column])
    folder, size = options.shards, options.shard_tokens
    with writing(folder):
        old = find_shards(folder)
    if old:
        raise ConfigError(f"--shards {folder}: has .bin files already. Give another folder.")
    with reading(config.data):
        if hub.is_dataset(config.data):
            encoding = open_encoding("gpt2" if config.encoding == "auto" else config.encoding)
            documents, separate = hub.open_documents(config.data, config.text_column)
            text = separate(0) if separate else documents(0)
            held_out = list(encode(text, encoding, options.val_tokens))
            rest = documents(0 if separate else len(held_out))
            train = encode(rest, encoding, options.max_tokens)
            if not separate:
                train = check_split(options, held_out, train)
        else:
            _, encoding, train, held_out = open_arrays(config, seq_len=1, max_bytes=sys.maxsize)
            train = take_first(train, options.max_tokens)
            held_out = list(take_first(held_out, options.val_tokens))
    name = "tokenizer.json" if isinstance(encoding, TokenizerFile) else encoding.name
    with filling(folder) as partial:
        with writing(folder):
            if isinstance(encoding, TokenizerFile):
                shutil.copyfile(encoding.path, partial / name)
            (partial / "meta.json").write_text(json.dumps({"encoding": name}) + "\n")
        trained = write_shards(train, partial, "train", size)
        return trained, write_shards(held_out, partial, "val", size)


if __name__ == "__main__":
    sys.exit(main())
