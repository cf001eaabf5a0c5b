"""MS-AMP's optimizers: fp8stack's Adam and AdamW with MS-AMP's arguments and `all_reduce_grads`.

| exp_avg_dtype, exp_avg_sq_dtype      | `states`  |                                                    |
|--------------------------------------|-----------|----------------------------------------------------|
| uint8 (E4M3), float16 (the default)  | "fp8-lm"  | the same formats, one power-of-two scale a tensor  |
| uint8, uint8                         | "fp8"     | blocks of 128; v as its square root                |
| float32, float32                     | "fp32"    | the same                                           |
| int8 (E5M2) instead of uint8         | as uint8  | E4M3: the nearest, with a warning                  |
| float16, float16 or uint8            | "bf16"    | the nearest, with a warning                        |
| one of them float32                  | "fp32"    | the nearest, with a warning                        |

`msamp.initialize` at O2 does not go by these: its states are O2's. Vectors and matrices of less than 4,096 elements
keep float32 states. L2 decay is part of the gradient that the moments see, as in torch.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fp8stack import optim
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.optim.optimizer import ParamsT

from .collectives import all_reduce_grads

_KINDS = {torch.uint8: "fp8", torch.int8: "fp8", torch.float16: "half", torch.float32: "float"}
_STATES = {
    ("fp8", "fp8"): "fp8",
    ("fp8", "half"): "fp8-lm",
    ("half", "fp8"): "bf16",
    ("half", "half"): "bf16",
}
_EXACT = ((torch.uint8, torch.float16), (torch.uint8, torch.uint8), (torch.float32, torch.float32))


class LowBitOptimizer(optim.BlockwiseOptimizer):
    """What MS-AMP's optimizers have beside torch's methods."""

    def all_reduce_grads(self, model: nn.Module) -> None:
        """Average the gradients of `model` over ranks; nothing where DistributedDataParallel has done so."""
        all_reduce_grads(model)


class LBAdamW(LowBitOptimizer, optim.AdamW):
    """AdamW with low-bit states, with MS-AMP's arguments and their order.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch's.
        exp_avg_dtype, exp_avg_sq_dtype: formats of the moments, see above.
        bias_correction, amsgrad, tensor_scale: other values than these defaults are warned of and have no effect.

    Raises:
        ConfigError: for a dtype that MS-AMP does not take either, or a hyper-parameter out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype = torch.uint8,
        exp_avg_sq_dtype: torch.dtype = torch.float16,
        tensor_scale: bool = True,
    ) -> None:
        states = states_for(exp_avg_dtype, exp_avg_sq_dtype, bias_correction, amsgrad, tensor_scale)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, states=states)


class LBAdam(LowBitOptimizer, optim.Adam):
    """Adam with L2 decay and low-bit states; otherwise as `LBAdamW`, in MS-AMP's order of arguments."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        *,
        bias_correction: bool = True,
        exp_avg_dtype: torch.dtype = torch.uint8,
        exp_avg_sq_dtype: torch.dtype = torch.float16,
        tensor_scale: bool = True,
    ) -> None:
        states = states_for(exp_avg_dtype, exp_avg_sq_dtype, bias_correction, amsgrad, tensor_scale)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, states=states)


class DSAdam(LBAdam):
    """DeepSpeed's arguments: `adam_w_mode` chooses AdamW's decay. `set_grad_none` is always so. Else as `LBAdam`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **options: Any,
    ) -> None:
        self.decoupled = adam_w_mode
        options["bias_correction"] = bias_correction
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class FSDPAdam(LBAdam):
    """`LBAdam` for parameters of `FP8FullyShardedDataParallel`: one scale a tensor needs all of it, blocks do not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.states == "fp8-lm":
            self.states = "8bit"


COUNTERPARTS: dict[type[optim.BlockwiseOptimizer], type[LowBitOptimizer]] = {
    optim.AdamW: LBAdamW,
    optim.Adam: LBAdam,
}
"""The same optimizers under MS-AMP's names."""


def states_for(
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
    bias_correction: bool,
    amsgrad: bool,
    tensor_scale: bool,
) -> str:
    """Return the formats that MS-AMP's arguments ask for, with one warning of all that is not exactly so."""
    for name, dtype in (("exp_avg_dtype", exp_avg), ("exp_avg_sq_dtype", exp_avg_sq)):
        if dtype not in _KINDS:
            known = ", ".join(str(d) for d in _KINDS)
            raise ConfigError(
                f"{name}={dtype} is no format of a moment; use one of {known} (uint8 is E4M3, int8 E5M2)."
            )
    states = _STATES.get((_KINDS[exp_avg], _KINDS[exp_avg_sq]), "fp32")
    told = []
    if (exp_avg, exp_avg_sq) not in _EXACT:
        told.append(f'moments of {exp_avg} and {exp_avg_sq} are kept as states="{states}"')
    if not bias_correction:
        told.append("bias_correction=False has no effect: moments are always corrected")
    if amsgrad:
        told.append(NO_AMSGRAD)
    if not tensor_scale:
        told.append("tensor_scale=False has no effect: states always have scales")
    if told:
        warnings.warn(f"msamp: {'; '.join(told)}", Fp8StackWarning, stacklevel=3)
    return states


NO_AMSGRAD = "amsgrad=True has no effect, as it had none in MS-AMP"
