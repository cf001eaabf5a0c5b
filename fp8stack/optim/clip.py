"""Clips gradients by the norm of all of them.

An FP8 gradient is read once, one byte an element, and multiplied through its scales, a thirty-second of its bytes. With
`max_grad_norm` the optimizer clips inside the step instead, which also saves dense gradients a pass.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.kernels import ops
from fp8stack.kernels.ops import triton_runs_on
from fp8stack.kernels.pointer_table import deal, upload_rows
from fp8stack.kernels.reference import norm as reference
from fp8stack.tensor import BlockScaledTensor, is_sharded

from .gradients import gradient_parts
from .triton_step import on_device


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
    each tensor, and more memory.

    Args:
        parameters: with gradients of any format: FP8 blocks, float32, bfloat16, float16. On any devices.
        max_norm: the largest norm allowed; infinity only measures.
        norm_type: 2 or infinity; others go to torch's function, as do sharded parameters (DTensor).
        error_if_nonfinite: raise where the norm is NaN or infinite (waits for the GPU). Otherwise the gradients become
            NaN or zero as in torch, and the optimizer's step is skipped.
        foreach: only for signature compatibility.

    Returns:
        The total norm, float32, 0-d, on the device of the first gradient.

    Raises:
        ConfigError: for a negative or NaN `max_norm`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be a number >= 0, got {max_norm}.")
    if norm_type not in (2, math.inf) or any(is_sharded(p) for p in parameters):
        total = torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach=False
        )
        return total.full_tensor() if is_sharded(total) else total  # type: ignore[attr-defined]
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    groups = [_Gradients(where, grads) for where in dict.fromkeys(g.device for g in grads)]
    norms = torch.stack([group.norm(norm_type).to(device) for group in groups])
    total = norms.amax() if norm_type == math.inf else norms.double().square().sum().sqrt().float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}, so it cannot be clipped. "
            "Pass error_if_nonfinite=False to let the optimizer skip such steps."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for group in groups:
        group.multiply(factor.to(group.device))
    return total


class _Gradients:
    """The gradients on one device: contiguous ones go through a table of pointers, others through torch."""

    def __init__(self, device: torch.device, grads: list[Tensor]) -> None:
        self.device, self.grads = device, [g for g in grads if g.device == device]
        fused = triton_runs_on(device)
        self.direct = [g for g in self.grads if fused and g.is_contiguous()]
        self.others = [g for g in self.grads if not (fused and g.is_contiguous())]
        self.tables = _tables(self.direct) if self.direct else []

    def norm(self, norm_type: float) -> Tensor:
        """Return the norm of all, float32, 0-d."""
        if norm_type == math.inf:  # the scales of FP8 only bound the largest element: decode
            return torch.stack([g.abs().amax().float() for g in self.grads]).amax()
        squares = [reference.sum_of_squares(*gradient_parts(g.contiguous())) for g in self.others]
        if self.tables:
            programs = sum(len(owner) for *_, owner in self.tables)
            partial = torch.empty(programs, dtype=torch.float64, device=self.device)
            out = torch.empty((), dtype=torch.float32, device=self.device)
            with on_device(self.device):
                ops.triton_module("norm").total(self.tables, partial, out)
            squares.append(out.double().square())
        return torch.stack(squares).sum().sqrt().float()

    def multiply(self, factor: Tensor) -> None:
        """Multiply all in place by a device scalar."""
        for g in self.others:
            g.mul_(factor)
        if not self.direct:
            return
        blocks = [g for g in self.direct if isinstance(g, BlockScaledTensor)]
        residuals = [BlockScaledTensor(*g.residual) for g in blocks if g.residual is not None]
        tables = [*self.tables, *(_tables(residuals) if residuals else [])]
        with on_device(self.device):
            for dtype, _, rows, owner in tables:
                ops.triton_module("norm").multiply(rows, owner, dtype, factor)


Table = tuple[torch.dtype, str, Tensor, Tensor]
_TABLES: OrderedDict[Any, list[Table]] = OrderedDict()
_KEPT = 8  # tables of the last calls: gradients often come back to the same addresses


def _tables(grads: Sequence[Tensor]) -> list[Table]:
    """Return (dtype, layout, rows, owner) of the launches that read `grads`, all contiguous and on one device."""
    addresses = [
        g.addresses if isinstance(g, BlockScaledTensor) else (g.data_ptr(), g.dtype) for g in grads
    ]
    key = grads[0].device, tuple(addresses), tuple(g.shape for g in grads)
    if key in _TABLES:
        _TABLES.move_to_end(key)
        return _TABLES[key]
    norm, step = ops.triton_module("norm"), ops.triton_module("step")
    launches: dict[tuple[torch.dtype, str], list[dict[str, int]]] = {}
    for values, scale in map(gradient_parts, grads):
        row = step.table_row(values.shape, grad=values, grad_block_scale=scale)
        layout = step.row_layout(values.shape, (values,))
        launches.setdefault((values.dtype, layout), []).append(row)
    result = []
    for (dtype, layout), rows in launches.items():
        owner = deal(rows, norm.spans, "first_span", grads[0].device)
        result.append((dtype, layout, upload_rows(rows, grads[0].device), owner))
    _TABLES[key] = result
    while len(_TABLES) > _KEPT:
        _TABLES.popitem(last=False)
    return result
