"""Adam and AdamW with 8-bit states, 24-bit master weights and FP8 gradients.

| per parameter of a matrix | torch AdamW, fp32 | this, bf16 weight, FP8 gradient      |
|---------------------------|-------------------|--------------------------------------|
| weight                    | 4                 | 2                                    |
| master                    | 0 (the weight)    | 1      int8 remainder                |
| gradient                  | 4                 | 1.03   E4M3 codes, scale per 128     |
| m                         | 4                 | 1.03   S1E3M4 codes, scale per 128   |
| v                         | 4                 | 1.03   UE3M5 of sqrt(v), the same    |
| total, bytes              | 16                | 6.09                                 |

Caveats: sqrt(v) is kept to 1/64 of itself and never below 1/4032 of the largest in its block of 128, so an element
whose gradients are thousands of times smaller than its neighbours' moves less than Adam would move it, never more.
The 24-bit master loses updates below 2^-17 of the weight (lr 1e-5 on a weight of 1; typical weights are 0.02).
amsgrad and differentiable are not offered. The arithmetic is in `kernels/reference/adam.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError
from fp8stack.kernels import ops

from .base import BlockwiseOptimizer, ParamsT, gradient_parts
from .state import State


class Adam(BlockwiseOptimizer):
    """Adam (Kingma and Ba, 2015) with L2 regularization, as `torch.optim.Adam`, in low-precision formats.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in torch; `lr` may be a tensor.
        states: "8bit" (default), "fp8-lm" (one scale a tensor), "float32", or "keep" (the parameter's dtype).
        master: "split24" (default), "fp16" (with states="fp8-lm"), or "keep": no master for 16-bit parameters.
        min_numel: matrices with fewer elements, and all vectors, keep float32 states.

    Raises:
        ConfigError: for a hyper-parameter out of range.
    """

    moments = ("exp_avg", "exp_avg_sq")
    torch_class: type[torch.optim.Optimizer] = torch.optim.Adam
    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        states: str = "8bit",
        master: str = "split24",
        min_numel: int = 4096,
    ) -> None:
        if (states == "fp8-lm") != (master == "fp16"):
            raise ConfigError(
                f'states={states!r} does not go with master={master!r}: "fp8-lm" and "fp16" belong together.'
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        _check(defaults)
        super().__init__(params, defaults, states, master, min_numel)

    def _hyper(
        self, group: dict[str, Any], steps: Tensor, grad_mul: Tensor, apply: Tensor
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        table = steps.new_zeros(steps.shape[0], 8)
        table[:, 0] = grad_mul
        table[:, 1] = 1 - lr * group["weight_decay"]
        table[:, 2] = lr / (1 - beta1**steps)
        table[:, 3] = (1 - beta2**steps).rsqrt()
        table[:, 4] = apply
        return table.float()

    def _update(self, group: dict[str, Any], p: nn.Parameter, state: State, hyper: Tensor) -> None:
        gradient, scale = gradient_parts(p)
        # torch's Adam(decoupled_weight_decay=True) is AdamW by another name.
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        scalars = (*group["betas"], group["eps"], group["weight_decay"], bool(decoupled))
        master = state.get("remainder", state.get("master"))
        if "exp_avg_code" not in state:
            moments = (state["exp_avg"], None, state["exp_avg_sq"], None)
        else:
            moments = tuple(
                state[f"{n}_{part}"] for n in self.moments for part in ("code", "scale")
            )
            if self.states == "fp8-lm":
                masters = (master, state.get("master_scale"))
                ops.fp8lm_adam_step(p, *masters, gradient, scale, *moments, hyper, *scalars)
                return
        ops.adam_step(p, master, gradient, scale, *moments, hyper, *scalars)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, 2019): Adam with decoupled weight decay, otherwise as `Adam` above."""

    torch_class = torch.optim.AdamW
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


def _check(defaults: dict[str, Any]) -> None:
    lr, (beta1, beta2) = defaults["lr"], defaults["betas"]
    if not isinstance(lr, Tensor) and not lr >= 0:
        raise ConfigError(f"lr must be >= 0, got {lr}.")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ConfigError(f"betas must lie in [0, 1), got {(beta1, beta2)}.")
    if not defaults["eps"] >= 0:
        raise ConfigError(f"eps must be >= 0, got {defaults['eps']}.")
    if not defaults["weight_decay"] >= 0:
        raise ConfigError(f"weight_decay must be >= 0, got {defaults['weight_decay']}.")
