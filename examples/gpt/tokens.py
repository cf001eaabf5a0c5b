"""Text to tokens and back: bytes, which need nothing, or GPT-2's byte-pair encoding through tiktoken.

Both pad their vocabulary to a multiple of 64, since GEMMs of 50257 rows are slow (FP8 ones, of a size that is no
multiple of 16, impossible): models train on 320 and 50304 classes, and never see the tokens beyond the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fp8stack.errors import ConfigError, first_line


class Encoding(Protocol):
    name: str
    vocab_size: int  # padded
    dtype: type[np.unsignedinteger]  # what holds a token in a file
    separator: tuple[int, ...]  # between two documents
    note: str  # what a user is told once

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class Bytes:
    """UTF-8 bytes: a vocabulary of 256, padded to 320."""

    name, vocab_size, dtype, note = "bytes", 320, np.uint8, ""
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

    name, vocab_size, dtype = "gpt2", 50_304, np.uint16
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
                "--encoding gpt2 needs the package tiktoken, which is not installed: "
                'pip install -e ".[train]", or use --encoding bytes.'
            ) from error
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # of requests, of files, of checksums: whatever comes first
            raise ConfigError(
                f"--encoding gpt2: tiktoken cannot load GPT-2's vocabulary ({first_line(error)}), which it downloads "
                "once: run it where there is network access, with TIKTOKEN_CACHE_DIR set to a folder that both "
                "machines see; or use --encoding bytes."
            ) from error

    def encode(self, text: str) -> list[int]:
        return self.table.encode_ordinary(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.table.decode([token for token in tokens if token <= self.separator[0]])


ENCODINGS: dict[str, type[Encoding]] = {"bytes": Bytes, "gpt2": Gpt2}
