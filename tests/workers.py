"""Joining and leaving a group, for tests whose ranks are not yet started by `ranks.run_ranks`."""

import torch


def join_ranks(rank, world, store, device):
    """Join a process group of `world` ranks on CPUs or GPUs, which meet at a file that is theirs; return its mesh."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
    return torch.distributed.device_mesh.init_device_mesh(device, (world,))


def leave_ranks():
    """Leave the group when all are done: a rank that is gone before may take the connections of another with it."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
