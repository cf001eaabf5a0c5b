"""Lion with its momentum in 8-bit blocks, 24-bit masters and FP8 gradients.

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, program 1. Bytes per parameter of a matrix: 2
weight, 1 master, 1.03 gradient, 1.03 momentum. Only the sign of a sum is used, so 8 bits are ample.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from .optimizer import BlockwiseOptimizer, Options, ParamsT, check_range, sign_of


class Lion(BlockwiseOptimizer):
    """Lion with decoupled weight decay, in low-precision formats.

    Args:
        params: parameters or groups of them.
        lr: best about a tenth of AdamW's; may be a tensor.
        betas: of the interpolation whose sign is the update, and of the momentum.
        weight_decay: decoupled; best about ten times AdamW's.
        maximize: ascend instead.
        states, master, min_numel, max_grad_norm, offload: as in `fp8stack.optim.Adam`.

    Raises:
        ConfigError: for a hyper-parameter out of range or an unknown format.
    """

    moments = ("exp_avg",)
    algorithm = "lion"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        lr, betas, _, decay = check_range(group)
        return (lr, *betas, 0.0, decay, 0.0, sign_of(group), 0.0)
