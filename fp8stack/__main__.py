"""The program `fp8stack`, also run as `python -m fp8stack`: its commands are the modules of `fp8stack/cli/`.

    fp8stack doctor      what this machine can run, and what is wrong with it
    fp8stack plan train.py:build_model

Each command has --help and --json. Without a command the help is printed. Exit status: 0 for success, 1 where the
answer is no (doctor found trouble), 2 for wrong arguments or files (one line on stderr says which), 130 for Ctrl-C.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from fp8stack import __version__
from fp8stack.cli import convert, doctor, estimate, inspect, plan
from fp8stack.cli.output import Parser, keep_stdout
from fp8stack.errors import Fp8StackError, did_you_mean, reason_of

COMMANDS = (doctor, plan, estimate, inspect, convert)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Wrong arguments exit with status 2."""
    parser = Parser(
        prog="fp8stack", description="FP8 training for PyTorch: tools.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fp8stack {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for module in COMMANDS:
        module.add_parser(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    if not given[0].startswith("-") and given[0] not in commands.choices:
        known = ", ".join(commands.choices)
        meant = did_you_mean(given[0], commands.choices)
        parser.error(f"there is no command {given[0]!r}.{meant} Commands: {known}.")
    for place, text in enumerate(given):
        if not text or (text.startswith("--") and text.endswith("=")):
            before = " ".join([*given[:place], text]).strip()
            parser.error(
                f"the argument after {before!r} is empty: is a variable of the shell not set?"
            )
    options, unknown = parser.parse_known_args(given)
    if unknown:
        command = commands.choices[options.command]
        own, names = command._option_string_actions, [u for u in unknown if u.startswith("-")]
        meant = "".join(did_you_mean(name.partition("=")[0], own) for name in names)
        if given[0] in own:
            command.error(f"{given[0]} goes behind the command, {options.command}.")
        command.error(f"unrecognized arguments: {' '.join(unknown)}.{meant}")
    runs = {m.__name__.rpartition(".")[2].replace("_", "-"): m.run for m in COMMANDS}
    # Its CPU backend logs a warning about kernels that no command needs.
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    if arguments is None:
        keep_stdout()
    try:
        status: int = runs[options.command](options)
    except Fp8StackError as error:
        commands.choices[options.command].error(str(error))
    except OSError as error:  # of a file, or of stdout, which has no name
        what = f"{error.filename} cannot be used: " * (error.filename is not None)
        commands.choices[options.command].error(f"{what}{reason_of(error)}")
    except KeyboardInterrupt:
        return 130  # as a shell's of SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
