"""How long an all-reduce takes on many hosts, and what FP8 saves: an alpha-beta model, not a measurement.

With L GPUs a host and M hosts, n elements are reduced in three stages: a reduce-scatter within each host, an all-reduce
of each GPU's n / L elements with its peers on the other hosts, and an all-gather within each host.

    T_nv   = (L - 1) / L × n × (b_scatter + b_gather) / B_nv      bytes an element b, NVLink's rate B_nv
    T_net  = 2 (M - 1) / M × n / L × b_net / B_net                a GPU's share of the network
    T_hbm  = 7 n / B_hbm                                          casts, where anything is in FP8
    T      = 2 a_nv + 2 ceil(log2 M) a_net + max + (sum - max) / chunks

The stages overlap over `chunks` pieces of the tensor, so the longest counts in full and the others by a chunk. What is
gathered in the end has the format of the network: codes that came over it need no second rounding.

The constants are of H100-like hosts: NCCL's own for latencies (its tuning.cc), 370 GB/s for NVLink without multicast,
45 GB/s for one 400 Gb/s adapter a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8stack.errors import ConfigError, did_you_mean
from fp8stack.formats import BLOCK

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4 / BLOCK}
"""Of an element on the wire."""


@dataclass(frozen=True)
class Cluster:
    """Hosts and what joins them.

    Attributes:
        hosts: M.
        gpus: of one host, L.
        nvlink: GB/s of one GPU in one direction.
        nvlink_us: latency of a collective within a host, µs.
        network: GB/s of one GPU's share of the network, in one direction.
        network_us: latency of a step between hosts, µs.
        memory: TB/s of a GPU's memory.
        chunks: pieces of a tensor that stages overlap by.
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
                raise ConfigError(f"Cluster.{name} must be above 0, got {value}.")


@dataclass(frozen=True)
class Estimate:
    """What the model says of one all-reduce.

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


def estimate(
    elements: int, cluster: Cluster, within: str = "fp8", between: str = "fp8"
) -> Estimate:
    """Return the time of an all-reduce of `elements`, sent as `within` within a host and as `between` between hosts.

    Raises:
        ConfigError: for a format that is not "fp32", "bf16" or "fp8".
    """
    for given in (within, between):
        if given not in BYTES:
            raise ConfigError(
                f'a format on the wire is "fp32", "bf16" or "fp8", got "{given}".{did_you_mean(given, BYTES)}'
            )
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
