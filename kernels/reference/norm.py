"""The norm and the largest magnitude of gradients of all formats, as a step needs them.

Blocks are scaled before squaring (FP8 by their scale, dense ones by their largest element) and summed in float64, so
neither overflow nor underflow of float32 squares falsifies the norm of a very large or very small gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3

from .quantize import as_blocks


def largest(grad: Tensor, scale: Tensor | None) -> Tensor:  # float32, 0-d
    """Return the largest magnitude in a gradient (for FP8, the largest that its scales allow), NaN if there is one."""
    source = grad if scale is None else scale
    if not source.numel():
        return torch.zeros((), dtype=torch.float32, device=grad.device)
    amax: Tensor = torch.linalg.vector_norm(source, torch.inf).float()
    return amax if scale is None else amax * E4M3.max


def sum_of_squares(grad: Tensor, scale: Tensor | None) -> Tensor:  # float64, 0-d
    """Return the sum of the squares of a gradient; `scale` is the scale of e4m3 codes, [rows, blocks]."""
    blocks = as_blocks(grad.float())
    if scale is None:
        scale = blocks.abs().amax(-1)
        blocks = torch.where(scale.unsqueeze(-1) > 0, blocks / scale.unsqueeze(-1), blocks)
    return (blocks.square().sum(-1).double() * scale.double().square()).sum()
