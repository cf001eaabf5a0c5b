"""Process groups of many hosts: what goes over NVLink first, and what over the network.

A group may be given a hierarchy. Its all_reduce, and DataParallel's buckets, then add up within each host, across hosts
what each rank owns, and gather the same way back, so that a rank sends 2 (M - 1) / M of its n / L elements over the
network, not nearly 2 n (`model.py`). A value is quantized three times then, not twice.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from fp8stack.errors import ConfigError

_HIERARCHIES: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def set_hierarchy(gpus_per_host: int, group: Any = None) -> None:
    """Say how many ranks of a group, one after the other, are on one host; to be called by all ranks.

    Args:
        gpus_per_host: a divisor of the group's size; that size itself, or 1, ends the hierarchy.
        group: a process group of all ranks; by default torch's own.

    Raises:
        ConfigError: if the group has not all ranks, or their number is no multiple of `gpus_per_host`.
    """
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != dist.get_world_size():  # new groups are made by all ranks together
        raise ConfigError(
            f"a hierarchy is of all {dist.get_world_size()} ranks; this group has {len(ranks)}."
        )
    if gpus_per_host < 1 or len(ranks) % gpus_per_host:
        raise ConfigError(
            f"gpus_per_host must divide the group's {len(ranks)} ranks, got {gpus_per_host}."
        )
    _HIERARCHIES.pop(group, None)
    if gpus_per_host in (1, len(ranks)):
        return
    backend, size = dist.get_backend(group), gpus_per_host
    hosts = [ranks[i : i + size] for i in range(0, len(ranks), size)]
    inside = [dist.new_group(host, backend=backend) for host in hosts]
    across = [dist.new_group(ranks[place::size], backend=backend) for place in range(size)]
    host, place = divmod(dist.get_rank(group), size)
    _HIERARCHIES[group] = inside[host], across[place]


def hierarchy_of(group: Any) -> tuple[Any, ...]:
    """Return the groups within this rank's host and across hosts; nothing if the group has no hierarchy."""
    if not _HIERARCHIES:
        return ()
    group = dist.group.WORLD if group is None else group
    # None before there are groups, a number for a rank that is not in it
    return _HIERARCHIES.get(group, ()) if isinstance(group, dist.ProcessGroup) else ()
