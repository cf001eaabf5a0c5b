"""Clips gradients by the norm of all of them.

An FP8 gradient is read once, one byte an element, and multiplied through its scales, a thirty-second of its bytes. With
`max_grad_norm` the optimizer clips inside the step instead, which also saves dense gradients a pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp8stack.formats import FLOATS
from fp8stack.kernels import ops
from fp8stack.kernels.ops import triton_runs_on
from fp8stack.kernels.reference.norm import sum_of_squares
from fp8stack.levels import check_number
from fp8stack.tensor import BlockScaledTensor, BlockScaledView, is_sharded

from .step import gradient_parts


@torch.no_grad()
@torch._disable_dynamo  # type: ignore[attr-defined]
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their total norm is at most `max_norm`; return the norm.

    Does what `torch.nn.utils.clip_grad_norm_` does, in fewer launches. Torch's function takes over for another norm
    than the 2-norm, and where a gradient is sharded (DTensor), sparse or of a dtype not named below. Gradients that the
    kernels cannot take, on a CPU or not contiguous, are measured and multiplied one by one.

    Args:
        parameters: with gradients of any format: FP8 blocks, float32, bfloat16, float16.
        max_norm: the largest norm allowed; infinity only measures.
        norm_type: 2, or another of torch's.
        error_if_nonfinite: raise where the norm is NaN or infinite, which waits for the GPU. Otherwise the gradients
            become NaN or zero, and the optimizer's step is skipped.
        foreach: only for signature compatibility.

    Returns:
        The total norm, float32, 0-d, on the device of the first gradient.

    Raises:
        ConfigError: for a negative or NaN `max_norm`, or a `norm_type` that is no number.
        RuntimeError: for `error_if_nonfinite`; nothing is changed.
    """
    one = isinstance(max_norm, Tensor) and max_norm.numel() == 1
    number = float(max_norm) if one else max_norm
    max_norm = check_number("max_norm", number, most=math.inf)
    power = math.inf if isinstance(norm_type, str) and norm_type == "inf" else norm_type
    norm_type = check_number("norm_type", power, -math.inf, math.inf)
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    parameters = [p for p in parameters if p.grad is not None and p.grad.numel()]
    grads = [p.grad for p in parameters if p.grad is not None]
    if norm_type != 2 or not grads or not all(map(_is_measured_here, grads)):
        total = torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach=False
        )
        return (total.full_tensor() if is_sharded(total) else total).float()  # type: ignore[attr-defined]
    fused: dict[torch.device, list[Tensor]] = {}  # what the kernels take
    others: list[Tensor] = []
    for g in grads:
        if triton_runs_on(g.device) and g.is_contiguous():
            fused.setdefault(g.device, []).append(g)
        else:
            others.append(g)
    kernels: Any = ops.triton_module("norm") if fused else None
    tables = {
        where: kernels.tables([gradient_parts(g) for g in group]) for where, group in fused.items()
    }
    norms = []
    for group in tables.values():
        partial = kernels.empty_partial(group)
        norm = partial.new_empty((), dtype=torch.float32)
        kernels.total(group, partial, norm)
        norms.append(norm)
    total = norms[0] if norms else torch.zeros((), device=grads[0].device)
    if others or len(norms) > 1:
        squares = [norm.double().square() for norm in norms]
        squares += [sum_of_squares(*gradient_parts(g.contiguous())) for g in others]
        device = grads[0].device
        total = torch.stack([part.to(device) for part in squares]).sum().sqrt().float()
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of the gradients is {float(total)}: non-finite, so it cannot be clipped. "
            "Pass error_if_nonfinite=False to let the optimizer skip such steps."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for where, group in fused.items():
        residuals = [g.residual for g in group if isinstance(g, BlockScaledTensor) and g.residual]
        for t in (*tables[where], *(kernels.tables(residuals) if residuals else ())):
            kernels.multiply(t.rows, t.owner, t.dtype, factor.to(where))
    for g in others:
        if isinstance(g, BlockScaledTensor):
            g.mul_(factor.to(g.device))
        else:  # in float32: torch would round the factor to the dtype of g
            g.copy_(g.float() * factor.to(g.device))
    return total


def _is_measured_here(grad: Tensor) -> bool:
    if isinstance(grad, BlockScaledTensor):
        return True
    elsewhere = isinstance(grad, BlockScaledView) or is_sharded(grad)
    return grad.dtype in FLOATS and grad.layout is torch.strided and not elsewhere
