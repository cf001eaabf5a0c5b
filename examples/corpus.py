"""Real text for the demo without a download: the Python standard library's own source files.

Every machine that can run the demo has some 700 of them (10 MB), and a small model learns their
look within minutes. `load(path)` reads any other text file or folder instead.

Text is bytes, so there is no tokenizer, nothing can be undecodable and the vocabulary is 256.

How the split is made: files are put in the order of crc32(relative path), which is the same on
every machine and has nothing to do with their contents; one file in ten goes to validation, and
reading stops at `max_bytes`. Whole files are held out, so validation text is unseen. Where files
are too few for that (one file, a small folder) the last tenth of the joined text is held out.

Limits: everything is held in memory, hence the cap; two Python versions have two standard
libraries, so losses compare on the same interpreter only.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 32 * 2**20
SNIFFED_BYTES = 4096  # a zero byte this early means a binary file, as git judges it
HELD_OUT = 10  # one file in ten, or the last tenth of the text

# Of the standard library alone: of other text, whoever names a folder means all of it. Tests repeat what they test,
# installed packages differ between machines, and `encodings` is two hundred tables of code points.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}
)

Batch = tuple[Tensor, Tensor]  # tokens and the tokens that follow them, each [B, T], int64


@dataclass(frozen=True)
class Corpus:
    name: str  # what was read, for a report
    train: Tensor  # [bytes], uint8
    validation: Tensor  # [bytes], uint8
    whole: int = 0  # bytes that the files have, where `max_bytes` let fewer be read


def load(path: str | Path | None, seq_len: int, max_bytes: int = MAX_BYTES) -> Corpus:
    """Read `path`, or the standard library if None, so that both splits hold one window or more.

    Raises FileNotFoundError if there is nothing at `path`, ValueError if there is too little text.
    """
    if path is None:
        root, suffix, skipped = Path(sysconfig.get_paths()["stdlib"]), ".py", SKIPPED_FOLDERS
        name = f"the standard library of Python {sysconfig.get_python_version()}"
    else:
        root, suffix, skipped, name = Path(path), "", frozenset(), Path(path).name
    if not root.exists():
        raise FileNotFoundError(
            f"{root}: there is no such file or folder to train on. Give an existing text file or "
            "folder as --data, or leave it out to train on Python's standard library."
        )
    texts = read_texts(root, suffix, max_bytes, skipped)
    if not texts:
        raise ValueError(
            f"{root}: holds no text to train on; one file at least must be neither empty, nor "
            "binary, nor hidden. Give another text file or folder as --data."
        )
    train, validation = split_texts(texts, seq_len)
    if min(len(train), len(validation)) <= seq_len:
        raise ValueError(
            f"{root}: holds {len(train)} bytes for training and {len(validation)} for validation; "
            f"each must be longer than a window of {seq_len} bytes. Give more text as --data "
            f"({(HELD_OUT + 1) * (seq_len + 1)} bytes are enough) or a smaller --seq-len."
        )
    is_full = sum(map(len, texts.values())) == max_bytes
    return Corpus(
        name, train, validation, whole=count_bytes(root, suffix, skipped) if is_full else 0
    )


def read_texts(
    root: Path, suffix: str, max_bytes: int, skipped: frozenset[str] = frozenset()
) -> dict[str, bytes]:
    """Relative path -> content of the text files at `root`, by crc32 of the path, up to max_bytes.

    In the order of a hash the cap takes a fair sample of a large folder, not its first letters.
    """
    if root.is_file():
        folder, paths = root.parent, [root.name]
    else:
        folder = root
        paths = sorted(find_files(root, suffix, skipped), key=lambda path: (hash_path(path), path))
    texts: dict[str, bytes] = {}
    room = max_bytes
    for path in paths:
        with open(folder / path, "rb") as file:
            content = file.read(min(room, os.fstat(file.fileno()).st_size))
        if content.strip() and b"\0" not in content[:SNIFFED_BYTES]:
            texts[path] = content
            room -= len(content)
        if not room:
            break
    return texts


def count_bytes(root: Path, suffix: str, skipped: frozenset[str]) -> int:
    """Bytes of all files at `root`, binary ones too: to open each would take as long as to read it."""
    if root.is_file():
        return root.stat().st_size
    return sum((root / path).stat().st_size for path in find_files(root, suffix, skipped))


def find_files(root: Path, suffix: str, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    """Relative paths, with forward slashes, of the files below `root` that are not hidden.

    skipped: names of folders to stay out of. Links to folders are followed, after all that is there by its own name,
    and no folder is read twice. `lost+found`, which is the system's own, is left out.

    Raises OSError at a folder that may not be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    entered: set[tuple[int, int]] = set()
    waiting = [root]
    for start in waiting:  # which grows
        for folder, children, files in os.walk(start, onerror=refuse):
            status = os.stat(folder)
            if status.st_ino and (status.st_dev, status.st_ino) in entered:
                children.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            children[:] = sorted(
                c for c in children if c not in skipped and c[0] != "." and c != "lost+found"
            )
            waiting += [path for c in children if (path := Path(folder) / c).is_symlink()]
            for file in files:
                path = Path(folder) / file
                # is_file: a broken link cannot be opened, and opening a pipe would wait for ever.
                if file.endswith(suffix) and file[0] != "." and path.is_file():
                    yield path.relative_to(root).as_posix()


def hash_path(path: str) -> int:
    return zlib.crc32(path.encode("utf-8", "surrogateescape"))


def split_texts(texts: dict[str, bytes], seq_len: int) -> tuple[Tensor, Tensor]:
    """Training and validation bytes: by file, or by position where that leaves one side short."""
    train = join(text for path, text in texts.items() if hash_path(path) % HELD_OUT)
    validation = join(text for path, text in texts.items() if not hash_path(path) % HELD_OUT)
    if min(len(train), len(validation)) <= seq_len:
        everything = join(texts.values())
        cut = len(everything) - len(everything) // HELD_OUT
        train, validation = everything[:cut], everything[cut:]
    return to_tensor(train), to_tensor(validation)


def join(texts: Iterable[bytes]) -> bytes:
    return b"\n\n".join(texts)


def to_tensor(text: bytes) -> Tensor:  # [bytes], uint8
    if not text:  # frombuffer refuses an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def encode(text: str) -> Tensor:  # [bytes], int64
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Text of byte tokens. Padding tokens (>= 256), which an untrained model may draw, are cut."""
    return bytes(token for token in tokens.tolist() if token < 256).decode("utf-8", "replace")


def batches(
    split: Tensor,  # [bytes], uint8
    batch: int,
    seq_len: int,
    generator: torch.Generator,
) -> Iterator[Batch]:
    """Random windows without end; the same generator state gives the same windows."""
    while True:
        starts = torch.randint(len(split) - seq_len, (batch,), generator=generator)
        yield cut_windows(split, starts, seq_len)


def spaced_batches(
    split: Tensor,  # [bytes], uint8
    batch: int,
    seq_len: int,
    count: int,
) -> list[Batch]:
    """`count` batches of windows spread evenly over the split: a fixed yardstick, no generator."""
    starts = torch.linspace(0, len(split) - seq_len - 1, batch * count, dtype=torch.float64).long()
    return [cut_windows(split, part, seq_len) for part in starts.split(batch)]


def cut_windows(split: Tensor, starts: Tensor, seq_len: int) -> Batch:
    windows = split[starts[:, None] + torch.arange(seq_len + 1)].long()
    return windows[:, :-1], windows[:, 1:]
