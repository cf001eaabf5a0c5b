"""The command line: `python -m fp8stack`.

    python -m fp8stack all-reduce --hosts 1 8 32 --gpus 8 --parameters 7e9

prints what the cost model (`comm/model.py`) says of averaging the gradients of a model, in bfloat16 and in FP8. It
needs neither a GPU nor torch.distributed.

    python -m fp8stack doctor --deepspeed ds_config.json --model train.py:build_model

prints what is known not to work with a DeepSpeed configuration and a model (`integrations/known/`), with exit status 1
if that is more than a warning.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

from fp8stack.comm.model import Cluster, Estimate, estimate
from fp8stack.errors import Fp8StackError

_HEADER = ("hosts", "GPUs", "bf16 ms", "FP8 ms", "faster", "longest in FP8", "bf16 MB", "FP8 MB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status. What is wrong with arguments is said on stderr, with status 2."""
    parser = argparse.ArgumentParser(prog="python -m fp8stack", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    reduce = commands.add_parser(
        "all-reduce",
        help="how long gradients take over many hosts, in bf16 and FP8, by a cost model",
        allow_abbrev=False,
    )
    default = Cluster()
    add = reduce.add_argument
    add("--hosts", type=_count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], metavar="M")
    add("--gpus", type=_count, default=default.gpus, metavar="L", help="of one host")
    add("--parameters", type=_count, default=7 * 10**9, metavar="N", help="such as 7e9")
    add("--nvlink", type=_rate, default=default.nvlink, help="GB/s of a GPU, one direction")
    add("--network", type=_rate, default=default.network, help="likewise, its share of the network")
    doctor = commands.add_parser(
        "doctor",
        help="what is known not to work with a DeepSpeed configuration and a model",
        allow_abbrev=False,
    )
    add = doctor.add_argument
    add("--deepspeed", required=True, metavar="ds_config.json")
    add("--model", metavar="file.py:function", help="returns a model, or (model, optimizer)")
    add("--opt-level", metavar="O2", help="where the configuration names none; O2 by default")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return _doctor(options, doctor)
    if 1 in options.hosts and options.gpus == 1:
        reduce.error("one host of one GPU has nothing to reduce; give --hosts or --gpus above 1")
    sys.stdout.write(_all_reduce(options))
    return 0


def _doctor(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from fp8stack.integrations.known.command import diagnose

    try:
        text, failed = diagnose(options.deepspeed, options.model, options.opt_level)
    except Fp8StackError as error:
        parser.error(str(error))
    sys.stdout.write(text)
    return int(failed)


def _all_reduce(options: argparse.Namespace) -> str:
    rows: list[tuple[str, ...]] = [_HEADER]
    for hosts in options.hosts:
        cluster = Cluster(hosts, options.gpus, nvlink=options.nvlink, network=options.network)
        plain, ours = (estimate(options.parameters, cluster, k, k) for k in ("bf16", "fp8"))
        sent = [f"{e.network_bytes / 1e6:.1f}" for e in (plain, ours)]
        times = [f"{1e3 * e.seconds:.2f}" for e in (plain, ours)]
        faster = f"{plain.seconds / ours.seconds:.2f}×"
        rows.append((str(hosts), str(hosts * options.gpus), *times, faster, _longest(ours), *sent))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return (
        f"All-reduce of the gradients of {options.parameters:,} parameters: a model's estimate, not a measurement.\n"
        f"{options.gpus} GPUs a host, {options.nvlink:g} GB/s over NVLink and {options.network:g} GB/s of network for "
        "each; MB: what a GPU sends over the network.\n\n" + "\n".join(lines) + "\n"
    )


def _longest(e: Estimate) -> str:
    """Return the part that takes longest."""
    parts = {"NVLink": e.nvlink, "network": e.network, "memory": e.memory, "latency": e.latency}
    return max(parts, key=lambda name: parts[name])


def _rate(text: str) -> float:
    return _above_zero(text, "a number", lambda value: True)


def _count(text: str) -> int:
    return int(_above_zero(text, "a whole number", float.is_integer))


def _above_zero(text: str, kind: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf and fits(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
