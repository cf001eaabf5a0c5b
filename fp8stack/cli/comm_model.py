"""`fp8stack comm-model`: how long the gradients of a model take over many hosts, by the cost model of `comm/model.py`.

    fp8stack comm-model --hosts 1 8 32 --gpus 8 --parameters 7e9

It compares an average of all gradients in bfloat16 with one in FP8, and needs neither a GPU nor torch.distributed.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from fp8stack.comm.model import Cluster, Estimate, estimate
from fp8stack.errors import ConfigError

from .output import add_command, number_of, show, table

if TYPE_CHECKING:
    from rich.console import Console

    from .output import Commands


def add_parser(commands: Commands) -> None:
    brief = "how long gradients take over many hosts, in bf16 and FP8, by a cost model"
    add, default = add_command(commands, "comm-model", brief).add_argument, Cluster()
    add("--hosts", type=_count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], metavar="M")
    add("--gpus", type=_count, default=default.gpus, metavar="L", help="of one host")
    add("--parameters", type=_parameters, default=7 * 10**9, metavar="N", help="such as 7e9 or 7B")
    add("--nvlink", type=_rate, default=default.nvlink, help="GB/s of a GPU, one direction")
    add("--network", type=_rate, default=default.network, help="likewise, its share of the network")


def run(options: argparse.Namespace) -> int:
    if 1 in options.hosts and options.gpus == 1:
        raise ConfigError(
            "one host of one GPU has nothing to reduce; give --hosts or --gpus above 1."
        )
    names = ("parameters", "gpus", "nvlink", "network")
    data = {name: getattr(options, name) for name in names}
    show(options, {**data, "clusters": [_cluster(options, hosts) for hosts in options.hosts]}, draw)
    return 0


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show a line for each number of hosts."""
    console.print(
        f"All-reduce of the gradients of {data['parameters']:,} parameters: a model's estimate, not a measurement.\n"
        f"{data['gpus']} GPUs a host, {data['nvlink']:g} GB/s over NVLink and {data['network']:g} GB/s of network for "
        "each; MB: what a GPU sends over the network."
    )
    header = ("hosts", "GPUs", "bf16 ms", "FP8 ms", "faster", "longest in FP8", "bf16 MB", "FP8 MB")
    rows = (
        (
            c["hosts"],
            c["gpus"],
            f"{c['bf16']['ms']:.2f}",
            f"{c['fp8']['ms']:.2f}",
            f"{c['faster']:.2f}×",
            c["fp8"]["longest"],
            f"{c['bf16']['network_mb']:.1f}",
            f"{c['fp8']['network_mb']:.1f}",
        )
        for c in data["clusters"]
    )
    console.print(table(header, rows, right="*"))


def _cluster(options: argparse.Namespace, hosts: int) -> dict[str, Any]:
    cluster = Cluster(hosts, options.gpus, nvlink=options.nvlink, network=options.network)
    plain, ours = (estimate(options.parameters, cluster, kind, kind) for kind in ("bf16", "fp8"))
    return {
        "hosts": hosts,
        "gpus": hosts * options.gpus,
        "bf16": _figures(plain),
        "fp8": _figures(ours),
        "faster": plain.seconds / ours.seconds,
    }


def _figures(e: Estimate) -> dict[str, Any]:
    """Return time, bytes, and the part that takes longest."""
    parts = {"NVLink": e.nvlink, "network": e.network, "memory": e.memory, "latency": e.latency}
    longest = max(parts, key=lambda name: parts[name])
    return {"ms": 1e3 * e.seconds, "network_mb": e.network_bytes / 1e6, "longest": longest}


def _rate(text: str) -> float:
    return _limited(text, number_of(text), "a number", 1e6)


def _count(text: str) -> int:
    return _whole(text, number_of(text), 1e6)


def _parameters(text: str) -> int:
    return _whole(text, number_of(text, suffixes=True), 1e15)


def _whole(text: str, value: float, most: float) -> int:
    whole = value if value.is_integer() else math.nan
    return int(_limited(text, whole, "a whole number", most))


def _limited(text: str, value: float, kind: str, most: float) -> float:
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} above 0 and up to {most:g}")
    return value
