"""`msamp.initialize` and `LinearReplacer`: fp8stack's levels under MS-AMP's names.

| MS-AMP | fp8stack | what is kept for each element of a Linear weight, bytes                                |
|--------|----------|----------------------------------------------------------------------------------------|
| O1     | O1       | weight as given 4, FP8 gradient 1.03, states as given 8 (MS-AMP: 2 + 1 + 8)             |
| O2     | O2       | bfloat16 weight 2, its next 8 bits 1, FP8 gradient 1.03, 8-bit states 2.06 (2 + 1 + 3)  |
| O3     | O2       | the same, with a warning; FP8 layers cast a weight in its forward (MS-AMP: 1 + 2 + 1 + 3)  |

O1 of a model in 16 bits keeps float32 states and a 24-bit master beside bfloat16 weights, where MS-AMP kept float32
states and scaled float16 weights: 16 bits alone would lose most updates.

Parameters stay what they are: tied weights stay tied, frozen ones frozen, and `state_dict()` has tensors. Linear layers
with `use_fp32_linear = True` are left alone altogether. As in MS-AMP, all ranks get the weights of rank 0, and a model
on the CPU of a machine with a GPU is moved there.
"""

from __future__ import annotations

import sys
from glob import escape
from typing import Any

import torch
from torch import nn

import fp8stack
from fp8stack.comm import GradientHandle
from fp8stack.errors import ConfigError, ModelError, warn
from fp8stack.optim.state_formats import is_large_matrix

from .collectives import GROUPS, share_weights
from .optimizers import COUNTERPARTS, NO_AMSGRAD

opt_levels = ["O1", "O2", "O3"]

O3_IS_O2 = (
    "O3 is O2 here: weights take 3 bytes in both, and FP8 layers multiply by FP8 weights in both"
)


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool = False,
) -> tuple[nn.Module, Any]:
    """Bring a model and its optimizer to a level of MS-AMP; return the same model and the optimizer to step.

    Args:
        model: before it is wrapped.
        optimizer: torch's Adam or AdamW; by default AdamW of all parameters.
        opt_level: "O1", "O2", or "O3", which is O2.
        use_te: has no effect: TransformerEngine's modules multiply themselves, with or without it. Their weights get
            FP8 gradients and low-bit states as others do.

    Returns:
        The model, and an optimizer that shares the given one's `param_groups` and has `all_reduce_grads(model)`.

    Raises:
        ConfigError: for another level.
        ModelError: for a model or optimizer that the level cannot be applied to. Both are ValueErrors, as MS-AMP's.
    """
    if opt_level not in opt_levels:
        raise ConfigError(
            f"msamp.initialize has the levels {', '.join(opt_levels)}, got opt_level={opt_level!r}. "
            'FP8 layers alone are fp8stack.initialize(model, optimizer, opt_level="O0").'
        )
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise ModelError(
            f"msamp.initialize takes torch.optim.Adam and AdamW, got {type(optimizer).__name__}. Use one of them (with "
            "fused=True instead of DeepSpeed's FusedAdam), or fp8stack.initialize, which takes more."
        )
    told = [O3_IS_O2] if opt_level == "O3" else []
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        told.append(NO_AMSGRAD)
    accelerator = calling_accelerator()
    scales = accelerator is not None and accelerator.scaler is not None
    if scales:
        told.append(
            "accelerate's GradScaler is taken away, since accelerate would never unscale gradients and none is needed"
        )
    if told:
        warn(f"msamp: {'; '.join(told)}")
    for group in optimizer.param_groups:
        group["amsgrad"] = False
    to_gpu(model, accelerator)
    share_weights(model)
    options: dict[str, Any] = {"skip": fp32_linears(model)}
    level = "O1" if opt_level == "O1" else "O2"
    trained = [p.dtype for p in model.parameters() if p.requires_grad]
    if level == "O1" and {torch.float16, torch.bfloat16} & {*trained}:
        options |= {"states": "fp32", "master": "auto", "optimizer_backend": "fp8stack"}
    if level == "O2":  # bitsandbytes' could not be given MS-AMP's methods
        options["optimizer_backend"] = "fp8stack"
    model, stepped = fp8stack.initialize(model, optimizer, level, **options)
    # differentiable=True at O1 stays torch's
    stepped.__class__ = COUNTERPARTS.get(type(stepped), type(stepped))
    if scales:  # the loss, for MS-AMP, and lets nobody unscale the gradients
        accelerator.scaler = None
    return model, stepped


class LinearReplacer:
    """FP8 layers without an optimizer."""

    @staticmethod
    def replace(model: nn.Module, *, src_rank: int = 0, group: Any = None) -> nn.Module:
        """Let Linear layers multiply in FP8 and give their weights FP8 gradients; return the same model.

        Args:
            model: before it is wrapped.
            src_rank: global rank whose parameters all ranks of `group` begin with.
            group: of the ranks that `optimizer.all_reduce_grads(model)` averages over; by default all.

        Raises:
            ModelError: for a model that cannot be converted, or is already.
        """
        to_gpu(model)
        share_weights(model, src_rank, group)
        fp8stack.initialize(model, None, "O0", skip=fp32_linears(model))
        if group is not None:
            GROUPS[model] = group
        weights: dict[nn.Parameter, str] = {}
        for name in fp8stack.get_report(model).converted:
            weight = model.get_parameter(f"{name}.weight" if name else "weight")
            if is_large_matrix(weight, fp8stack.levels.LEVELS["O1"].min_numel):
                weights[weight] = name
        GradientHandle().attach(weights, weights)
        return model


def fp32_linears(model: nn.Module) -> list[str]:
    """Return patterns of the Linear layers that MS-AMP was told to leave alone."""
    return [
        escape(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and getattr(module, "use_fp32_linear", False)
    ]


def to_gpu(model: nn.Module, accelerator: Any = None) -> None:
    """Move a model on the CPU to the current GPU, if there is one, or to the accelerator's device."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        gpu = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(gpu if accelerator is None else accelerator.device)


def calling_accelerator() -> Any:
    """Return the accelerate.Accelerator whose method called the function that asks, or None.

    What it was told (its level, its scaler) reaches MS-AMP's functions in no other way.
    """
    accelerate = sys.modules.get("accelerate")
    caller = sys._getframe(2).f_locals.get("self")
    return caller if accelerate and isinstance(caller, accelerate.Accelerator) else None
