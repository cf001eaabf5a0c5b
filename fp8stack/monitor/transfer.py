"""Numbers of the device that the host reads without waiting for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arrivals:
    """The numbers that have arrived last, and a copy that may be on its way.

    `values` are nested lists, and `label` is what they were sent with; None and [] before the first have arrived.
    """

    def __init__(self) -> None:
        self.label: Any = None
        self.values: list[Any] = []
        self._pending: tuple[Any, Tensor, torch.cuda.Event | None] | None = None

    def send(self, label: Any, values: Tensor) -> None:
        """Copy `values` to the host behind the work that is queued now; an earlier copy still on its way is dropped."""
        self.take()
        host, event = values.to("cpu", non_blocking=True, copy=True), None  # pinned, from a GPU
        if values.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))
        self._pending = label, host, event

    def take(self, wait: bool = False) -> None:
        """Take the copy if it has arrived; with `wait`, wait for it."""
        if self._pending is None:
            return
        label, host, event = self._pending
        if event is not None and wait:
            event.synchronize()
        if event is None or event.query():
            self.label, self.values, self._pending = label, host.tolist(), None
