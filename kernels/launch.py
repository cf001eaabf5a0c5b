"""Launches of a Triton kernel that skip Triton's argument binding, for kernels that take no longer than it.

Triton looks at every argument of every launch to choose a compiled variant, which takes 10 µs of CPU and more. A
caller that knows what its arguments depend on names that in a key; the variant chosen for a key the first time is
launched again without looking: pointers are handed over as numbers, which the driver is not asked about, and hooks of
profilers are left out. A key must hold everything that Triton specializes on: integer values (or
whether 1 and 16 divide them), dtypes, whether pointers are aligned to 16 bytes, the device; and the grid.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

_BINDS_ALL = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)  # constexprs too

_MOST = 4096
"""Launches that are remembered: batches of ever new lengths must not fill the memory."""


class Launcher:
    """A Triton kernel with its launch options."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._runners: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], stream: int, *args: Any) -> None:
        """Launch with `args`, constexprs included, in the order of the kernel's signature, on the current device."""
        known = self._runners.get(key)
        if known is not None:
            compiled, pointers = known
            values = list(args)
            for i in pointers:
                values[i] = values[i].data_ptr()
            compiled.run(
                *grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                *values,
            )
            return
        compiled = self.kernel[grid](*args, **self.options)
        if _BINDS_ALL and hasattr(compiled, "packed_metadata"):  # not the interpreter
            if len(self._runners) >= _MOST:
                self._runners.clear()
            pointers = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
            self._runners[key] = compiled, pointers


def raw_stream(x: torch.Tensor) -> int:
    """Return the handle of the current stream of the GPU that `x` is on; 0 for a tensor on the CPU."""
    return int(torch._C._cuda_getCurrentRawStream(x.get_device())) if x.is_cuda else 0


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device`, a tensor's, the current one if it is a GPU that is not: Triton launches on the current one."""
    # Tensors on the CPU have no index; `device.type` takes longer than both questions.
    if device.index is None or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)
