"""Joining and leaving a group, for workers that are not yet started by `ranks.run_ranks`."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import assert_equal_everywhere, assert_near, drawn  # noqa: F401
from workers import leave_ranks


def enter(rank, world, store, device, timeout=60):
    """Join a group of `world` ranks; return the device of this one."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    return torch.device(device, rank) if device == "cuda" else torch.device(device)


def leave():
    """Leave the group when all are done, and end: torch's threads sometimes abort a process that ends in order."""
    leave_ranks()
    os._exit(0)
