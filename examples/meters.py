"""What a run costs, measured from outside: the peak of its memory and the pace of its steps.

Limits: without `/proc` (macOS) there is no cheap reading of the memory of a process, and the
CPU's peak is None.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


class PeakMemory:
    """Bytes that the device's memory grows at its peak, counted from the moment of creation.

    On a GPU it is PyTorch's own peak. On a CPU it is the high-water mark of this process's resident
    memory, less what was resident before; the mark cannot be set back, so one process can take
    one measurement. (`getrusage` would give the same mark, but a child inherits its parent's.)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before: int | None = torch.cuda.memory_allocated(device)
        else:
            self.before = read_status("VmRSS")

    def read(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return None if self.before is None else read_status("VmHWM") - self.before


def read_status(field: str) -> int | None:
    """A field of this process's /proc status in bytes, None where there is no /proc."""
    if not STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


class Stopwatch:
    """Pace of training as the median over laps of a few steps.

    The median leaves out the first lap's warm-up and other programs' interruptions. A lap ends when
    the device has finished its work; time between a lap and `restart` does not count.
    """

    def __init__(self, device: torch.device, tokens_per_step: int) -> None:
        self.device = device
        self.tokens_per_step = tokens_per_step
        self.step_seconds: list[float] = []
        self.restart(step=0)

    def restart(self, step: int) -> None:
        self.step = step
        self.time = self._read_clock()

    def lap(self, step: int) -> None:
        """Note the seconds per step since the last lap or restart."""
        elapsed = self._read_clock() - self.time
        self.step_seconds.append(elapsed / (step - self.step))
        self.restart(step)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / statistics.median(self.step_seconds)

    def _read_clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
