"""fp8stack: full-stack FP8 training for PyTorch.

    model, optimizer = fp8stack.initialize(model, optimizer, opt_level="O2")

O0 multiplies in FP8, O1 keeps gradients in FP8, O2 keeps optimizer states in 8 bits and weights in 24. Importing this
package touches no GPU and imports neither Triton nor any framework but torch; the program `fp8stack` imports that when
a command runs, and not for --help.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .version import __version__

__all__ = [
    "BlockScaledTensor", "Recipe", "__version__", "capability", "checkpoint", "comm", "errors", "finish",
    "formats", "get_report", "initialize", "levels", "linear_cross_entropy", "memory", "monitor", "nn", "optim",
    "restore", "tune",
]  # fmt: skip
_RUN = sys.orig_argv[1:3]
_IS_PROGRAM = _RUN == ["-m", "fp8stack"] or "fp8stack" in {Path(name).name for name in _RUN[:1]}

if not _IS_PROGRAM:
    from . import capability, checkpoint, comm, errors, formats, levels, memory, monitor, nn, optim
    from .api import finish, get_report, initialize, restore
    from .levels import Recipe
    from .nn.fused_loss import linear_cross_entropy
    from .tensor import BlockScaledTensor
    from .tuning import tune
else:
    _HOMES = dict.fromkeys(("finish", "get_report", "initialize", "restore"), "api")
    _HOMES |= {"Recipe": "levels", "BlockScaledTensor": "tensor", "tune": "tuning"}
    _HOMES |= {"linear_cross_entropy": "nn.fused_loss"}

    def __getattr__(name: str) -> Any:
        """Import what a command, or the code that it loads, asks for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"{__name__}.{_HOMES.get(name, name)}")
        return getattr(home, name) if name in _HOMES else home
