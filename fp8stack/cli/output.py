"""What all commands share: how a command is added, and how its result is shown.

A result is a dict of plain data, and that is what --json prints, with null for numbers that are not finite. Tables are
drawn from the same dict.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TextIO, TypeAlias

Lines: TypeAlias = Iterable[str]
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
WIDTH = 120
"""Columns of what is not written to a terminal."""
WHOLE_WORDS: dict[str, Any] = {
    "break_long_words": False,
    "break_on_hyphens": False,
}  # names are copied
_stdout: TextIO | None = None  # of the program's results alone


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def add_command(commands: Commands, name: str, brief: str) -> Parser:
    """Return the parser of a new command, which has --json."""
    text = brief[0].upper() + brief[1:] + "."
    parser = commands.add_parser(name, help=brief, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    return parser


def show(
    options: argparse.Namespace, data: dict[str, Any], draw: Callable[[dict[str, Any]], Lines]
) -> None:
    """Print `data` as one JSON object if --json was given, else the lines that `draw` makes of it.

    Raises:
        OSError: where stdout cannot be written.
    """
    if options.json:
        finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=2)
    else:
        text = "\n".join(draw(data))
    try:
        print(text, flush=True, file=_stdout)
    except OSError as error:
        out = _stdout or sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # Python flushes at exit
        if not isinstance(error, BrokenPipeError):  # a reader that leaves, as `head` does
            raise


def keep_stdout() -> None:
    """Keep stdout for the command's result; what else prints, a user's code and its processes, does so to stderr."""
    global _stdout
    with suppress(OSError, ValueError, AttributeError):  # one of the two is closed
        own = os.dup(sys.stdout.fileno())
        # "?" stands for what the encoding lacks
        _stdout = open(own, "w", encoding=sys.stdout.encoding, errors="replace")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout = sys.stderr


def table(header: Sequence[str], rows: Iterable[Iterable[object]], right: str = "") -> str:
    """Return a table, its last column wrapped; `right` names its right-aligned columns, separated by spaces."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = sum(widths[:-1]) + 3 * len(widths) - 3
    widths[-1] = min(widths[-1], max(shutil.get_terminal_size((WIDTH, 24)).columns - left, 40))
    lines = []
    for *first, last in cells:
        for part in textwrap.wrap(last, widths[-1], **WHOLE_WORDS) or [""]:
            row = zip(header, [*first, part], widths, strict=True)
            aligned = (c.rjust(n) if name in right.split() else c.ljust(n) for name, c, n in row)
            lines.append("   ".join(aligned).rstrip())
            first = [""] * len(first)
    return "\n".join([lines[0], "─" * (left + widths[-1]), *lines[1:], ""])


def size(nbytes: float) -> str:
    """Return bytes in the largest unit of 1024 that makes them at least 1, such as "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
