"""SGD with momentum (and Nesterov's), the momentum in 8-bit blocks, with 24-bit masters and FP8 gradients.

As `torch.optim.SGD`; the arithmetic is in `kernels/reference/sgd.py`. Bytes per parameter of a matrix: 2 weight,
1 master, 1.03 gradient, 1.03 momentum: 5.06 where float32 takes 12. The momentum is S1E3M4, as Adam's m.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError
from fp8stack.kernels import ops

from .base import BlockwiseOptimizer, ParamsT, gradient_parts
from .state import State


class SGD(BlockwiseOptimizer):
    """SGD as `torch.optim.SGD`, in low-precision formats.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch; `lr` may be a tensor.
        states, master, min_numel: as in `fp8stack.optim.Adam`; "fp8-lm" is a recipe for Adam only.

    Raises:
        ConfigError: for a hyper-parameter out of range, or nesterov without momentum.
    """

    moments = ("momentum_buffer",)
    torch_class = torch.optim.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        states: str = "8bit",
        master: str = "split24",
        min_numel: int = 4096,
    ) -> None:
        if states == "fp8-lm" or master == "fp16":
            raise ConfigError(
                f'states={states!r}, master={master!r}: FP8-LM is a recipe for Adam; use "8bit" and "split24".'
            )
        numbers = {"momentum": momentum, "weight_decay": weight_decay}
        if not isinstance(lr, Tensor):
            numbers["lr"] = lr
        for name, value in numbers.items():
            if not value >= 0:
                raise ConfigError(f"{name} must be >= 0, got {value}.")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"nesterov needs momentum > 0 and dampening = 0, got {momentum} and {dampening}."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, states, master, min_numel)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def _hyper(
        self, group: dict[str, Any], steps: Tensor, grad_mul: Tensor, apply: Tensor
    ) -> Tensor:
        table = steps.new_zeros(steps.shape[0], 8)
        table[:, 0] = grad_mul
        table[:, 1] = group["lr"]
        table[:, 2] = torch.where(steps > 1, 1 - group["dampening"], 1.0)
        table[:, 3] = apply
        return table.float()

    def _update(self, group: dict[str, Any], p: nn.Parameter, state: State, hyper: Tensor) -> None:
        gradient, scale = gradient_parts(p)
        buffer = buffer_scale = None
        if group["momentum"]:
            buffer = state.get("momentum_buffer_code", state.get("momentum_buffer"))
            buffer_scale = state.get("momentum_buffer_scale")
        master = state.get("remainder", state.get("master"))
        ops.sgd_step(
            p, master, gradient, scale, buffer, buffer_scale, hyper,
            float(group["momentum"]), float(group["weight_decay"]), bool(group["nesterov"]),
        )  # fmt: skip
