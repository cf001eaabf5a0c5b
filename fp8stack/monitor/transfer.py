"""Numbers on their way from the device to the host, which does not wait for them."""

from __future__ import annotations

import torch
from torch import Tensor


class Transfer:
    """A copy of `values` (any shape) to pinned memory, behind what is queued on the device now."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        if values.is_cuda:
            with torch.cuda.device(values.device):
                self._event = torch.cuda.Event()
                self._event.record()

    def take(self, wait: bool = False) -> list[list[float]] | None:
        """Return the numbers as nested lists, or None if they are not there yet; with `wait`, wait for them."""
        if self._event is not None and wait:
            self._event.synchronize()
        if self._event is not None and not self._event.query():
            return None
        numbers: list[list[float]] = self._host.tolist()
        return numbers
