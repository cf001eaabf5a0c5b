"""Bytes per parameter, measured from the tensors that are alive, never from a formula.

Every tensor of a model and its optimizer is counted once, under its purpose (`PARTS`). State of any library's optimizer
is recognized by torch's names; other names count as "other". State on another device than its parameter (offloaded)
counts as "host".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .tensor_kinds import inner_tensors, is_sharded

PARTS = ("weight", "master", "grad", "m", "v", "other", "host")
_PREFIXES = {"exp_avg_sq": "v", "exp_avg": "m", "momentum_buffer": "m"}
_PREFIXES |= {"remainder": "master", "master": "master"}


@dataclass
class MemoryUse:
    """Bytes by part (see PARTS), for matrices (two dimensions or more) and for everything."""

    matrix_elements: int = 0
    matrix_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def per_parameter(self) -> dict[str, float]:
        """Return bytes per parameter of matrices, by part and in "total"."""
        elements = max(self.matrix_elements, 1)
        shares = {part: size / elements for part, size in self.matrix_bytes.items()}
        return {**shares, "total": sum(shares.values())}


def measure(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryUse:
    """Measure what the parameters of `model` keep resident: weight, master, gradient and optimizer state.

    Call it while the gradients exist, after at least one step. A tied parameter counts once.
    """
    use = MemoryUse()
    for parameter in model.parameters():
        sizes = dict.fromkeys(PARTS, 0)
        whole = [parameter] if is_sharded(parameter) else inner_tensors(parameter.data)
        sizes["weight"] = sum(tensor.nbytes for tensor in whole)
        if parameter.grad is not None:
            sizes["grad"] = parameter.grad.nbytes
        if optimizer is not None:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    away = value.ndim > 0 and value.device != parameter.device
                    sizes["host" if away else _part(key)] += value.nbytes
        is_matrix = parameter.ndim >= 2
        use.matrix_elements += parameter.numel() * is_matrix
        for part, size in sizes.items():
            use.bytes[part] += size
            use.matrix_bytes[part] += size * is_matrix
    return use


def _part(key: str) -> str:
    """Return which part a state entry belongs to: exp_avg_sq_scale is v."""
    return next((part for prefix, part in _PREFIXES.items() if key.startswith(prefix)), "other")
