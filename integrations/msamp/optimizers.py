"""MS-AMP's optimizers: fp8stack's Adam and AdamW with MS-AMP's arguments and `all_reduce_grads`.

| exp_avg_dtype, exp_avg_sq_dtype      | `states`  |                                                    |
|--------------------------------------|-----------|----------------------------------------------------|
| uint8 (E4M3), float16 (the default)  | "fp8-lm"  | the same formats, one power-of-two scale a tensor  |
| uint8, uint8                         | "fp8"     | blocks of 128; v as its square root                |
| float32, float32                     | "fp32"    | the same                                           |

`msamp.initialize` at O2 does not go by these: its states are O2's. Vectors and matrices of less than 4,096 elements
keep float32 states. L2 decay is part of the gradient that the moments see, as in torch.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from fp8stack import optim
from fp8stack.errors import ConfigError, warn
from fp8stack.tensor_kinds import is_sharded

from .collectives import all_reduce_grads

NO_AMSGRAD = "amsgrad=True has no effect, as it had none in MS-AMP"
_STATES = {
    (torch.uint8, torch.float16): "fp8-lm",
    (torch.uint8, torch.uint8): "fp8",
    (torch.float32, torch.float32): "fp32",
}
_IDLE = {  # arguments of MS-AMP's that have no effect at another value than this one
    "bias_correction": (True, "bias_correction=False has no effect: moments are always corrected"),
    "amsgrad": (False, NO_AMSGRAD),
    "tensor_scale": (True, "tensor_scale=False has no effect: states always have scales"),
    "set_grad_none": (True, "set_grad_none=False has no effect: gradients are always freed"),
}


class LowBitOptimizer(optim.BlockwiseOptimizer):
    """What MS-AMP's optimizers have beside torch's methods: its arguments, in its order, and `all_reduce_grads`.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch's, with the defaults of torch's.
        exp_avg_dtype, exp_avg_sq_dtype: formats of the moments, see above; uint8 and float16.
        bias_correction, amsgrad, tensor_scale, set_grad_none: have no effect, and a warning says so.

    Raises:
        ConfigError: for other dtypes, or a hyper-parameter out of range.
    """

    ORDER: ClassVar[tuple[str, ...]] = ()  # of positional arguments

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        if len(args) > len(self.ORDER):
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.ORDER)}, got {args}")
        options |= dict(zip(self.ORDER, args, strict=False))
        told = [text for name, (idle, text) in _IDLE.items() if options.pop(name, idle) != idle]
        if told:
            warn(f"msamp: {'; '.join(told)}")
        first = options.pop("exp_avg_dtype", torch.uint8)
        second = options.pop("exp_avg_sq_dtype", torch.float16)
        if (first, second) not in _STATES:
            known = "; ".join(f"{one} and {other}" for one, other in _STATES)
            raise ConfigError(
                f"exp_avg_dtype={first}, exp_avg_sq_dtype={second}: moments have no such formats. Use {known}."
            )
        if "adam_w_mode" in self.ORDER:  # DeepSpeed's
            self.decoupled = options.pop("adam_w_mode", True)
        super().__init__(params, states=_STATES[first, second], **options)

    all_reduce_grads = staticmethod(all_reduce_grads)


class LBAdamW(LowBitOptimizer, optim.AdamW):
    """AdamW with low-bit states."""

    ORDER = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad")


class LBAdam(LowBitOptimizer, optim.Adam):
    """Adam with L2 decay and low-bit states."""

    ORDER: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class DSAdam(LBAdam):
    """DeepSpeed's arguments: `adam_w_mode` chooses AdamW's decay. `set_grad_none` is always so."""

    ORDER = (
        "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none",
    )  # fmt: skip


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip as torch does; as in MS-AMP, a `max_norm` of 0 or less only measures."""
    limit = max_norm if max_norm > 0 else math.inf
    norm: Any = nn.utils.clip_grad_norm_(parameters, limit, norm_type, error_if_nonfinite)
    whole: torch.Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return whole.float()


COUNTERPARTS: dict[type, type[LowBitOptimizer]] = {optim.AdamW: LBAdamW, optim.Adam: LBAdam}
"""The same optimizers under MS-AMP's names."""
