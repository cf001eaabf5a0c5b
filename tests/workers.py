"""Leaving a group, for tests whose ranks are not yet started by `ranks.run_ranks`."""

import torch


def leave_ranks():
    """Leave the group when all are done: a rank that is gone before may take the connections of another with it."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
