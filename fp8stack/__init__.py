"""fp8stack: full-stack FP8 training for PyTorch.

    model, optimizer = fp8stack.initialize(model, optimizer, opt_level="O2")

O0 multiplies in FP8, O1 keeps gradients in FP8, O2 keeps optimizer states in 8 bits and weights in 24. Importing this
package touches no GPU and imports neither Triton nor any framework.
"""

from . import capability, checkpoint, comm, errors, formats, levels, memory, monitor, nn, optim
from .api import finish, get_report, initialize, restore
from .levels import Recipe
from .nn.fused_loss import linear_cross_entropy
from .tensor import BlockScaledTensor
from .tuning import tune
from .version import __version__

__all__ = [
    "BlockScaledTensor", "Recipe", "__version__", "capability", "checkpoint", "comm", "errors", "finish",
    "formats", "get_report", "initialize", "levels", "linear_cross_entropy", "memory", "monitor", "nn", "optim",
    "restore", "tune",
]  # fmt: skip
