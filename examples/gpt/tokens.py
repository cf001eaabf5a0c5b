"""Text to tokens and back: bytes, which need nothing, GPT-2's byte-pair encoding, or the tokenizer of any other model.

GPT-2's comes through tiktoken, others through Hugging Face's tokenizers, from the tokenizer.json that lies beside a
model's weights. `open_encoding` makes them by name.

All pad their vocabulary to a multiple of 64, since GEMMs of 50257 rows are slow (FP8 ones, of a size that is no
multiple of 16, impossible): models train on 320 and 50304 classes, and never see the tokens beyond the real ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp8stack.errors import ConfigError, first_line

MULTIPLE = 64  # of the size of a vocabulary
PIECE = 2**20  # bytes of text to encode at once: a token takes hundreds of bytes meanwhile
SEPARATORS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # as models name them


class Encoding(Protocol):
    name: str
    vocab_size: int  # padded
    dtype: type[np.unsignedinteger]  # what holds a token in a file
    separator: tuple[int, ...]  # between two documents
    note: str  # what a user is told once
    identity: str  # the same for the same numbers of tokens, wherever the file lies

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class Bytes:
    """UTF-8 bytes: a vocabulary of 256, padded to 320."""

    name = identity = "bytes"
    vocab_size, dtype, note = 320, np.uint8, ""
    separator = tuple(b"\n\n")

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text; padding tokens, which an untrained model may draw, are cut."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class Gpt2:
    """GPT-2's encoding: a vocabulary of 50257, padded to 50304; its last token separates documents.

    It is loaded at its first use: training on shards needs it for samples of text only.
    """

    name = identity = "gpt2"
    vocab_size, dtype = 50_304, np.uint16
    separator = (50_256,)
    note = "vocabulary of 50257 tokens (GPT-2), padded to 50304, a multiple of 64"

    @cached_property
    def table(self) -> Any:
        """tiktoken's encoding.

        Raises:
            ConfigError: if tiktoken is missing, or can neither find nor download the vocabulary.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise ConfigError(
                "--encoding gpt2, which datasets and .parquet files have by default, needs the package tiktoken: "
                'pip install -e ".[train]", or use --encoding bytes.'
            ) from error
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # of requests, of files, of checksums: whatever comes first
            raise ConfigError(
                "--encoding gpt2, which datasets and .parquet files have by default: tiktoken cannot load GPT-2's "
                f"vocabulary ({first_line(error)}), which it downloads once: run it where there is network access, "
                "with TIKTOKEN_CACHE_DIR set to a folder that both machines see; or use --encoding bytes."
            ) from error

    def encode(self, text: str) -> list[int]:
        return self.table.encode_ordinary(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.table.decode([token for token in tokens if token <= self.separator[0]])


class TokenizerFile:
    """The tokenizer in a file of Hugging Face's, tokenizer.json, used as it is: without special tokens of its own.

    Sizes are read at once, from the JSON, the tokenizer at its first use: shards need it for samples of text only.

    Raises:
        ConfigError: if there is no such file, or it is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        ids = _read_vocabulary(path)
        self.size = max(ids.values()) + 1
        self.identity = (
            f"a tokenizer of CRC-32 {zlib.crc32(repr(sorted(ids.items())).encode()):08x}"
        )
        self.vocab_size = -(-self.size // MULTIPLE) * MULTIPLE
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        self.separator = tuple(ids[name] for name in SEPARATORS if name in ids)[:1]
        self.note = ""
        if self.size < self.vocab_size:
            self.note = (
                f"vocabulary of {self.size} tokens ({path.name}), padded to {self.vocab_size}, "
                f"a multiple of {MULTIPLE}"
            )

    @cached_property
    def table(self) -> Any:
        """The tokenizer.

        Raises:
            ConfigError: if the package tokenizers is missing, or does not take the file.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"--encoding {self.path} needs the package tokenizers, which is not installed: "
                'pip install -e ".[train]", or use --encoding bytes.'
            ) from error
        try:
            table = Tokenizer.from_file(str(self.path))
        except Exception as error:  # of the package: a bare Exception
            raise _no_tokenizer(self.path, first_line(error)) from error
        table.no_truncation()  # some files ask for 512 tokens at most
        table.no_padding()
        table.encode_special_tokens = True  # "</s>" in a text is text
        return table

    def encode(self, text: str) -> list[int]:
        return self.table.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text; padding tokens, which nobody knows, are cut."""
        return self.table.decode(list(tokens), skip_special_tokens=False)


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Return the numbers of a tokenizer.json's tokens."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # of unigrams: tokens and scores
            vocab = {token: index for index, (token, _) in enumerate(vocab)}
        ids = {**vocab, **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}
        if not ids or not all(type(index) is int for index in ids.values()):
            raise ValueError("no numbered tokens")
    except OSError as error:
        raise ConfigError(
            f"--encoding {path}: cannot be read ({error.strerror}). Give the tokenizer.json of a model, or one of "
            f"{', '.join(ENCODINGS)}."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_tokenizer(path, f"{type(error).__name__}: {first_line(error)}") from error
    return ids


def _no_tokenizer(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"--encoding {path}: is no tokenizer of Hugging Face's ({reason}). Give a model's tokenizer.json, which has "
        "its vocabulary; tokenizer_config.json and vocab.json are other files."
    )


ENCODINGS: dict[str, type[Encoding]] = {"bytes": Bytes, "gpt2": Gpt2}


def open_encoding(name: str, folder: Path = Path()) -> Encoding:
    """Return an encoding: a key of ENCODINGS, or the path of a tokenizer.json, relative to `folder`.

    Raises:
        ConfigError: if there is none of that name, or the file is no tokenizer.
    """
    if name in ENCODINGS:
        return ENCODINGS[name]()
    if name.endswith(".json"):
        return TokenizerFile(folder / name)
    raise ConfigError(
        f"encoding={name!r} must be one of {', '.join(ENCODINGS)}, or a path that ends in .json."
    )


def split_text(text: bytes) -> Iterator[str]:
    """Yield a long text in pieces that end with a line."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE) + 1 or len(text)
        yield text[start:end].decode("utf-8", "replace")
        start = end


def encode_bytes(encoding: Encoding, text: bytes) -> np.ndarray:  # [tokens]
    """Return the tokens of a long text, piece by piece."""
    pieces = [np.array(encoding.encode(p), encoding.dtype) for p in split_text(text)]
    return np.concatenate([np.empty(0, encoding.dtype), *pieces])
