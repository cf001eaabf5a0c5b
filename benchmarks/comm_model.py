"""How long an all-reduce takes over many hosts, and how much of it FP8 saves: an alpha-beta model, not a measurement.

    python benchmarks/comm_model.py --hosts 1 8 32 --gpus 8 --parameters 7e9

With L GPUs on each of M hosts, n elements are reduced in three stages: a reduce-scatter within each host, an all-reduce
of each GPU's n / L elements with the GPUs of the same place on the other hosts, and an all-gather within each host.

    T_nv   = (L - 1) / L × n × (b_scatter + b_gather) / B_nv      bytes an element b, NVLink's rate B_nv
    T_net  = 2 (M - 1) / M × n / L × b_net / B_net                a GPU's share of the network
    T_hbm  = 7 n / B_hbm                                          casts, if anything is in FP8
    T      = 2 a_nv + 2 ceil(log2 M) a_net + max + (sum - max) / chunks

The stages overlap over `chunks` pieces of the tensor, so the longest counts in full and each other one for a piece. The
last all-gather has the format of the network, since codes that came over it need no second rounding.

The constants are those of H100-like hosts: NCCL's own for latencies (its tuning.cc), 370 GB/s for NVLink without
multicast, 45 GB/s for one 400 Gb/s adapter a GPU.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from fp8stack.formats import BLOCK

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4 / BLOCK}
"""Of an element on the wire."""


@dataclass(frozen=True)
class Cluster:
    """Hosts and the links between them.

    Attributes:
        hosts: M.
        gpus: of one host, L.
        nvlink: GB/s of one GPU in one direction.
        nvlink_us: latency of a collective within a host, µs.
        network: GB/s of one GPU's share of the network, in one direction.
        network_us: latency of a step between hosts, µs.
        memory: TB/s of a GPU's memory.
        chunks: pieces of a tensor by which the stages overlap.
    """

    hosts: int = 1
    gpus: int = 8
    nvlink: float = 370.0
    nvlink_us: float = 10.0
    network: float = 45.0
    network_us: float = 14.0
    memory: float = 4.0
    chunks: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"Cluster.{name} must be above 0, got {value}.")


@dataclass(frozen=True)
class Estimate:
    """The model's result for one all-reduce.

    Attributes:
        seconds: the whole.
        nvlink, network, memory, latency: seconds of each part, by itself.
        network_bytes: that one GPU sends to other hosts.
    """

    seconds: float
    nvlink: float
    network: float
    memory: float
    latency: float
    network_bytes: float

    @property
    def longest(self) -> str:
        """The part that takes longest."""
        return max(("nvlink", "network", "memory", "latency"), key=lambda name: getattr(self, name))


def estimate(elements: float, cluster: Cluster, within: str, between: str) -> Estimate:
    """Return the time of an all-reduce of `elements`, sent as `within` inside a host and as `between` between hosts."""
    hosts, gpus = cluster.hosts, cluster.gpus
    gathered = BYTES[between if hosts > 1 else within]
    local = (gpus - 1) / gpus * elements * (BYTES[within] + gathered) / (cluster.nvlink * 1e9)
    sent = 2 * (hosts - 1) / hosts * elements / gpus * BYTES[between]
    remote = sent / (cluster.network * 1e9)
    casts = 7 * elements / (cluster.memory * 1e12) if "fp8" in (within, between) else 0.0
    latency = 2 * cluster.nvlink_us * (gpus > 1)
    latency = 1e-6 * (latency + 2 * math.ceil(math.log2(hosts)) * cluster.network_us)
    parts = (local, remote, casts)
    seconds = latency + max(parts) + (sum(parts) - max(parts)) / cluster.chunks
    return Estimate(seconds, *parts, latency, sent)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each number of hosts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, default = parser.add_argument, Cluster()
    add("--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], metavar="M")
    add("--gpus", type=int, default=default.gpus, metavar="L", help="of one host")
    add("--parameters", type=float, default=7e9, metavar="N", help="such as 7e9")
    add("--nvlink", type=float, default=default.nvlink, help="GB/s of a GPU, one direction")
    add(
        "--network",
        type=float,
        default=default.network,
        help="the same for its share of the network",
    )
    options = parser.parse_args(arguments)
    print(
        f"All-reduce of the gradients of {options.parameters:,.0f} parameters: a model's estimate, not a measurement.\n"
        f"{options.gpus} GPUs a host, {options.nvlink:g} GB/s over NVLink and {options.network:g} GB/s of network for "
        "each; MB: sent over the network by one GPU."
    )
    row = "{:>6} {:>6} {:>9} {:>9} {:>8} {:>15} {:>9} {:>9}".format
    print(
        row("hosts", "GPUs", "bf16 ms", "FP8 ms", "faster", "longest in FP8", "bf16 MB", "FP8 MB")
    )
    for hosts in options.hosts:
        cluster = Cluster(hosts, options.gpus, nvlink=options.nvlink, network=options.network)
        plain, ours = (
            estimate(options.parameters, cluster, kind, kind) for kind in ("bf16", "fp8")
        )
        faster = f"{plain.seconds / ours.seconds:.2f}×" if ours.seconds else "-"
        ms = (f"{1e3 * e.seconds:.2f}" for e in (plain, ours))
        mb = (f"{e.network_bytes / 1e6:.1f}" for e in (plain, ours))
        print(row(hosts, hosts * options.gpus, *ms, faster, ours.longest, *mb))


if __name__ == "__main__":
    main()
