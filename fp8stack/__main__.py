"""The program `fp8stack`, also run as `python -m fp8stack`: its commands are modules of `fp8stack/cli/`.

    fp8stack doctor      what this machine can run, and what is wrong with it
    fp8stack plan train.py:build_model

Each command has --help and --json. Without a command the help is printed. Exit status: 0 for success, 1 where the
answer is no (doctor found trouble), 2 for wrong arguments or files (one line on stderr says which), 130 for Ctrl-C.
Until a command runs, no torch is imported: help, errors and a shell's completion (argcomplete) take a tenth of a
second.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from fp8stack.cli.output import Parser, keep_stdout
from fp8stack.cli.parsers import COMMANDS
from fp8stack.errors import Fp8StackError, did_you_mean, reason_of
from fp8stack.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Wrong arguments exit with status 2."""
    parser = Parser(prog="fp8stack", description="FP8 training for PyTorch", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fp8stack {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for add in COMMANDS.values():
        add(commands)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        import argcomplete

        argcomplete.autocomplete(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    options, unknown = parser.parse_known_args(given)
    command = commands.choices[options.command]
    if unknown:
        meant = "".join(
            did_you_mean(u, command._option_string_actions) for u in unknown if u[:1] == "-"
        )
        command.error(
            f"unrecognized arguments: {' '.join(unknown)}.{meant} Options go behind {options.command}."
        )
    # Its CPU backend logs a warning about kernels that no command needs.
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    if arguments is None:
        keep_stdout()
    try:
        status: int = import_module(f"fp8stack.cli.{options.command}").run(options)
    except Fp8StackError as error:
        command.error(str(error))
    except OSError as error:  # of a file, or of stdout, which has no name
        what = f"{error.filename} cannot be used: " * (error.filename is not None)
        command.error(f"{what}{reason_of(error)}")
    except KeyboardInterrupt:
        return 130  # as a shell's of SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
