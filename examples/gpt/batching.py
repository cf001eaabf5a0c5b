"""Batches: the largest micro-batch that fits into memory, and how many of them make a step.

`find_largest` doubles until a step runs out of memory, then halves the interval. After every attempt the ranks agree
(a rank whose memory is fuller decides for all), so they all try the same sizes; what an attempt has taken is freed
before the next. Where forward itself talks to other ranks (FSDP2), one that runs out of memory would leave the others
waiting: there `predict_largest` measures what a step takes, and tries no size that is not expected to fit on all ranks.
`split` then divides the sequences of a step among ranks and micro-batches. On a CPU nothing is tried: the system kills
a process that takes too much, and sizes beyond CPU_SIZE save no time there.

Limits: a step that fits when it is tried may not fit later, where memory is fragmented or other programs take it; then
training ends with advice. What is measured is an eager step's memory, and of a GPU not what a limit of the process
leaves of it. The first sequence can still run out of memory: under FSDP2 on one rank, whose others torchrun then ends.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8stack.errors import ConfigError

# runs a step of so many sequences; returns the part of memory that it took
Measure = Callable[[Callable[[int], None], int], float]
REMEDY = "Use --checkpointing, --opt-level O2, a smaller model or --seq-len, or more ranks."
TOO_LARGE = f"--micro-batch auto: one sequence does not fit into memory. {REMEDY}"
CPU_SIZE = 8  # the most sequences of a micro-batch on a CPU
MARGIN = 0.95  # of the memory that is free, how much a predicted step may take


@dataclass(frozen=True)
class Split:
    """How a step is made up: `micro` sequences a rank at a time, `accumulation` times."""

    micro: int
    accumulation: int
    world: int

    @property
    def effective(self) -> int:
        """Sequences of a step."""
        return self.micro * self.accumulation * self.world


def send(part: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on `device`; a GPU is not waited for, which takes pinned memory."""
    if device.type != "cuda":
        return part.to(device)
    return part.contiguous().pin_memory().to(device, non_blocking=True)


def find_largest(
    try_step: Callable[[int], None], limit: int, least: Callable[[int], int] = int
) -> int:
    """Return the largest micro-batch up to `limit` that `try_step` runs with.

    Args:
        try_step: runs a forward and backward of so many sequences; leaves nothing behind.
        limit: the largest to try, 1 or more.
        least: returns the smallest of a number on all ranks, here 0 for one where the step did not fit.

    Raises:
        ConfigError: if not even one sequence fits.
    """
    fits, too_large = 0, limit + 1
    while too_large - fits > 1:
        doubled = fits == 0 or too_large > limit
        size = min(max(2 * fits, 1), limit) if doubled else (fits + too_large) // 2
        if least(_runs(try_step, size)):
            fits = size
        else:
            too_large = size
    if fits == 0:
        raise ConfigError(TOO_LARGE)
    return fits


def part_of_memory(try_step: Callable[[int], None], size: int) -> float:
    """Return the part that a step takes of the GPU's memory beside what is allocated now, less a margin."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - held
    try_step(size)
    # gaps between tensors that stay count as taken, though a small step may lie in them: the part is never too small
    return (torch.cuda.max_memory_reserved() - held) / (MARGIN * room)


def predict_largest(
    try_step: Callable[[int], None],
    limit: int,
    least: Callable[[int], int] = int,
    measure: Measure = part_of_memory,
) -> int:
    """Return the largest micro-batch up to `limit` that is expected to fit on all ranks.

    A step takes c + b × sequences. For s of them that is a part u of the memory there is; so s / u sequences fit, and
    more the less c is of it. Each size is tried that the ones before say will fit, from one sequence on; where s / u
    is no larger, the last two sizes tell b. One sequence that takes more than half tells nothing of a second, which is
    not tried then.

    Args:
        try_step: runs a forward and backward of so many sequences; leaves nothing behind.
        limit: the largest to try, 1 or more.
        least: returns the smallest of a number on all ranks.
        measure: runs such a step; returns the part that it took.

    Raises:
        ConfigError: if not even one sequence fits.
    """
    try:
        try_step(1)  # makes what stays: optimizer states, communicators, libraries' workspaces
        tried = [(1, measure(try_step, 1))]
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise ConfigError(TOO_LARGE) from None
        raise
    while True:
        size, part = tried[-1]
        fits = int(size / max(part, 1e-6))
        if fits <= size and len(tried) > 1:
            before, less = tried[-2]
            more = (1 - part) * (size - before) / (part - less) if part > less else 0.0
            fits = size + int(more + 1e-6)
        following = least(min(fits, limit))
        if following <= size:
            return size
        tried.append((following, measure(try_step, following)))


def _runs(try_step: Callable[[int], None], size: int) -> bool:
    """Return whether a step of this size fits; if not, free what it took."""
    try:
        try_step(size)
        return True
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # after the block: the error's frames hold tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on a GPU or a CPU (whose allocator raises a plain RuntimeError)."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error)


def split(target: int, largest: int, world: int, fixed: bool = False) -> Split:
    """Return the split of a step of `target` sequences with micro-batches of at most `largest` a rank.

    If one that is more than half of `largest` divides the step, it is used. If not, the step is the nearest above that
    so few micro-batches can be made to be. `fixed` uses `largest` itself.
    """
    share = math.ceil(target / world)  # of a rank
    largest = largest if fixed else min(largest, share)
    if not fixed:
        exact = [m for m in range(largest, largest // 2, -1) if target % (m * world) == 0]
        if exact:
            return Split(exact[0], target // (exact[0] * world), world)
    accumulation = math.ceil(share / largest)
    micro = largest if fixed else math.ceil(share / accumulation)
    return Split(micro, accumulation, world)
