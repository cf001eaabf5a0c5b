"""What all commands share: how a command is added, and how its result is shown.

A result is a dict of plain data, and that is what --json prints, with null for numbers that are not finite. Tables are
drawn from the same dict with rich, which is imported only then: --json works without it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, TextIO, TypeAlias

from fp8stack.errors import ConfigError

Console: TypeAlias = Any
"""rich's console and table, which are imported only when something is drawn."""
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
WIDTH = 120
"""Columns of what is not written to a terminal."""
_stdout: TextIO | None = None  # of the program's results alone


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line}\n")


def missing(what: str, library: str, extra: str, otherwise: str = "") -> ConfigError:
    """Return the error of a command that needs a library that is not installed."""
    remedy = f'Install it with: pip install "fp8stack[{extra}]"{otherwise}.'
    return ConfigError(f"{what} needs {library}, which is not installed. {remedy}")


def add_command(commands: Commands, name: str, brief: str) -> Parser:
    """Return the parser of a new command, which has --json."""
    text = brief[0].upper() + brief[1:] + "."
    parser = commands.add_parser(name, help=brief, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    return parser


def show(
    options: argparse.Namespace,
    data: dict[str, Any],
    draw: Callable[[Console, dict[str, Any]], None],
) -> None:
    """Print `data` as one JSON object if --json was given, else let `draw` show it on a console.

    Raises:
        ConfigError: where there is something to draw, and rich is not installed.
        OSError: where stdout cannot be written.
    """
    if options.json:
        finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
        _write(json.dumps(finite, indent=2) + "\n")
        return
    try:
        from rich.console import Console
    except ImportError:
        raise missing("a table", "rich", "cli", ", or use --json") from None
    out = _stdout or sys.stdout
    width = None if out and out.isatty() else WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as drawn:
        draw(console, data)
    _write(drawn.get())


def keep_stdout() -> None:
    """Keep stdout for the command's result; what else prints, a user's code and its processes, does so to stderr."""
    global _stdout
    with suppress(OSError, ValueError, AttributeError):  # one of the two is closed
        own = os.dup(sys.stdout.fileno())
        # "?" stands for what the encoding lacks
        _stdout = open(own, "w", encoding=sys.stdout.encoding, errors="replace")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout = sys.stderr


def _write(text: str) -> None:
    """Print `text`; a reader that leaves, as `head` does, is no error."""
    try:
        print(text, end="", flush=True, file=_stdout)
    except OSError as error:
        out = _stdout or sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # Python flushes at exit
        if not isinstance(error, BrokenPipeError):
            raise


def table(header: Iterable[str], rows: Iterable[Iterable[object]], right: str = "") -> Any:
    """Return rich's table; `right` names its right-aligned columns, separated by spaces."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in header:
        number = name in right.split()
        justify = "right" if number else "left"
        made.add_column(name, justify=justify, no_wrap=number, overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def size(nbytes: float) -> str:
    """Return bytes in the largest unit of 1024 that makes them at least 1, such as "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
