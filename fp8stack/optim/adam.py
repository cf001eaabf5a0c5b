"""Adam and AdamW with low-precision states, 24-bit master weights and FP8 gradients.

| per parameter of a matrix | torch AdamW, fp32 | this, bf16 weight, FP8 gradient      |
|---------------------------|-------------------|--------------------------------------|
| weight                    | 4                 | 2                                    |
| master                    | 0 (the weight)    | 1      int8 remainder                |
| gradient                  | 4                 | 1.03   E4M3 codes, scale per 128     |
| m                         | 4                 | 1.03   S1E3M4 codes, scale per 128   |
| v                         | 4                 | 1.03   UE3M5 of sqrt(v), the same    |
| total, bytes              | 16                | 6.09                                 |

Other formats are in `state_formats.py`. Caveats: sqrt(v) is kept to 1/64 of itself and never below 1/4032 of the
largest in its block of 128, so an element whose gradients are thousands of times smaller than its neighbours' moves
less than Adam would move it, never more. A step rounds the 24-bit master by 2^-16 of the weight at most, up or down as
often as is right on average; at learning rates below 1e-5 the master has 32 bits. amsgrad and differentiable are not
offered.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from .optimizer import BlockwiseOptimizer, Options, ParamsT, check_range, sign_of


class Adam(BlockwiseOptimizer):
    """Adam (Kingma and Ba, 2015) with L2 regularization, as `torch.optim.Adam`, in low-precision formats.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in torch (weight_decay is 0, and 0.01 for AdamW); `lr` may be
            a tensor. A parameter group may have its own "states" and "master". "flat": True says that its vectors are
            many parameters end to end (ZeRO's partitions), which are kept as matrices are.
        states: "8bit" (default), "fp8", "4bit", "fp8-lm", "bf16", "fp32", or "keep" (the
            parameter's dtype); see `fp8stack/optim/state_formats.py`.
        master: "auto" (default: "split24", but "split32" in groups with a learning rate below 1e-5), "split24",
            "split32", "fp16", "fp32", "none" (stochastic rounding), or "keep": no master.
        min_numel: matrices with fewer elements, and all vectors, keep float32 states.
        max_grad_norm: clip the norm of all gradients to this, fused into the step; `grad_norm` holds the norm then.
        offload: "cpu" keeps the state of parameters on a GPU in pinned host memory, which the step reads and writes
            across the bus. Weights and gradients stay on the GPU.

    Raises:
        ConfigError: for a hyper-parameter out of range or an unknown format.
    """

    moments = ("exp_avg", "exp_avg_sq")
    algorithm = "adam"
    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if weight_decay is None:
            weight_decay = 0.01 if self.decoupled else 0.0
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize}, **options)

    def _is_decoupled(self, group: dict[str, Any]) -> bool:
        # torch's Adam(decoupled_weight_decay=True) is AdamW by another name.
        return bool(group.get("decoupled_weight_decay", self.decoupled))

    def algorithm_of(self, group: dict[str, Any]) -> tuple[str, bool]:
        return "adam", bool(group["weight_decay"]) and not self._is_decoupled(group)

    def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        lr, betas, eps, decay = check_range(group)
        decays = (decay, 0.0) if self._is_decoupled(group) else (0.0, decay)
        return (lr, *betas, eps, *decays, sign_of(group), 0.0)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, 2019): Adam with decoupled weight decay, otherwise as `Adam` above."""

    decoupled = True
