"""Clips gradients by the norm of all of them.

An FP8 gradient is read once, one byte an element, and multiplied through its scales, a thirty-second of its bytes. With
`max_grad_norm` the optimizer clips inside the step instead, which also saves dense gradients a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.kernels import ops
from fp8stack.kernels.ops import triton_runs_on
from fp8stack.kernels.pointer_table import deal, upload_rows
from fp8stack.tensor import BlockScaledTensor, is_sharded

from .step import gradient_parts


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their total norm is at most `max_norm`; return the norm.

    Does what `torch.nn.utils.clip_grad_norm_` does. Torch's function works on FP8 gradients too, but takes a pass for
    each tensor, and more memory. It takes over where the kernels do not run: without a GPU, for another norm than the
    2-norm, for `error_if_nonfinite`, and where a gradient is sharded (DTensor), not contiguous or on another device.

    Args:
        parameters: with gradients of any format: FP8 blocks, float32, bfloat16, float16.
        max_norm: the largest norm allowed; infinity only measures.
        norm_type, error_if_nonfinite: as in torch. Gradients whose norm is NaN or infinite become NaN or zero, and the
            optimizer's step is skipped.
        foreach: only for signature compatibility.

    Returns:
        The total norm, float32, 0-d, on the device of the first gradient.

    Raises:
        ConfigError: for a negative or NaN `max_norm`.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be a number >= 0, got {max_norm}.")
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    parameters = [p for p in parameters if p.grad is not None and p.grad.numel()]
    grads = [p.grad for p in parameters if p.grad is not None]
    devices = {g.device for g in grads}
    if norm_type != 2 or error_if_nonfinite or len(devices) != 1 or not all(map(_is_fused, grads)):
        total = torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach=False
        )
        return (total.full_tensor() if is_sharded(total) else total).float()  # type: ignore[attr-defined]
    norm, (device,), tables = ops.triton_module("norm"), devices, _tables(grads)
    programs = sum(len(owner) for *_, owner in tables)
    total = torch.empty((), dtype=torch.float32, device=device)
    norm.total(tables, torch.empty(programs, dtype=torch.float64, device=device), total)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    blocks = [g for g in grads if isinstance(g, BlockScaledTensor)]
    residuals = [BlockScaledTensor(*g.residual) for g in blocks if g.residual is not None]
    for dtype, _, rows, owner in [*tables, *(_tables(residuals) if residuals else [])]:
        norm.multiply(rows, owner, dtype, factor)
    return total


def _is_fused(grad: Tensor) -> bool:
    return triton_runs_on(grad.device) and not is_sharded(grad) and grad.is_contiguous()


Table = tuple[torch.dtype, str, Tensor, Tensor]
_TABLES: dict[Any, list[Table]] = {}
_KEPT = 8  # tables of the last calls: gradients often come back to the same addresses


def _tables(grads: Sequence[Tensor]) -> list[Table]:
    """Return (dtype, layout, rows, owner) of the launches that read `grads`, all contiguous and on one device."""
    device = grads[0].device
    addresses = [
        g.addresses if isinstance(g, BlockScaledTensor) else (g.data_ptr(), g.dtype) for g in grads
    ]
    key = device, tuple(addresses), tuple(g.shape for g in grads)
    if key in _TABLES:
        return _TABLES[key]
    norm, step = ops.triton_module("norm"), ops.triton_module("step")
    launches: dict[tuple[torch.dtype, str], list[dict[str, int]]] = {}
    for values, scale in map(gradient_parts, grads):
        row = step.table_row(values.shape, grad=values, grad_block_scale=scale)
        layout = step.row_layout(values.shape, (values,))
        launches.setdefault((values.dtype, layout), []).append(row)
    result = []
    for (dtype, layout), rows in launches.items():
        owner = deal(rows, norm.SPAN, "first_span", device)
        result.append((dtype, layout, upload_rows(rows, device), owner))
    if len(_TABLES) == _KEPT:
        del _TABLES[next(iter(_TABLES))]
    _TABLES[key] = result
    return result
