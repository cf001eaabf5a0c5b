"""Ranks that run out of inputs before others: what they do for `DataParallel.join`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from .parallel import DataParallel


class Shadow(JoinHook):
    """What a rank without inputs does while others have some."""

    def __init__(self, parallel: DataParallel, divide_by_initial: bool) -> None:
        self.parallel = parallel
        parallel._divide_by_initial = divide_by_initial

    def main_hook(self) -> None:
        """Take part in one step with gradients of zero."""
        parallel = self.parallel
        sync, source = parallel._agree(False, -1)
        if not sync:
            return
        if parallel.broadcast_buffers:
            parallel._broadcast(list(parallel.module.buffers()), source)
        parallel._fired.clear()
        for region in parallel._regions:
            region.gradient.zero_()
        parallel._sent = 0
        while parallel._sent < len(parallel.buckets):
            parallel._send()
        parallel._find_unused(set(parallel._regions))
        parallel._wait()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that was the last to have inputs."""
        parallel = self.parallel
        rank = dist.get_rank(parallel.process_group)
        last = torch.tensor([rank if is_last_joiner else -1], device=parallel.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, parallel.process_group)
        everything = [*parallel.module.parameters(), *parallel.module.buffers()]
        parallel._broadcast(everything, int(last.item()))
