"""SGD with momentum (and Nesterov's), the momentum in 8-bit blocks, with 24-bit masters and FP8 gradients.

As `torch.optim.SGD`. Bytes per parameter of a matrix: 2 weight, 1 master, 1.03 gradient, 1.03 momentum: 5.06 where
float32 takes 12. The momentum is kept as Adam's m.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from fp8stack.errors import ConfigError
from fp8stack.levels import FINITE, check_choice, check_number

from .optimizer import BlockwiseOptimizer, Options, ParamsT, check_range, sign_of


class SGD(BlockwiseOptimizer):
    """SGD as `torch.optim.SGD`, in low-precision formats.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch; `lr` may be a tensor.
        states, master, min_numel, max_grad_norm, offload: as in `fp8stack.optim.Adam`.

    Raises:
        ConfigError: for a hyper-parameter out of range, an unknown format, or nesterov without momentum.
    """

    moments = ("momentum_buffer",)
    algorithm = "sgd"

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
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        defaults |= {"weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def algorithm_of(self, group: dict[str, Any]) -> tuple[str, bool]:
        return "nesterov" if group["nesterov"] else "sgd", bool(group["weight_decay"])

    def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        lr, _, _, decay = check_range(group)
        momentum = check_number("momentum", group["momentum"])
        dampening = check_number("dampening", group["dampening"], -FINITE)
        nesterov = check_choice("nesterov", group["nesterov"], (False, True, None))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"nesterov needs momentum > 0 and dampening = 0, got {momentum} and {dampening}."
            )
        return lr, momentum, 0.0, 0.0, 0.0, decay, sign_of(group), dampening
