"""A weight in FP8 beside the weight, kept up to date by the steps; see `kernels/reference/emit.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.kernels.reference.emit import HEADROOM


class Emitted:
    """The codes of one weight with their scale, and the version of the weight that they are of."""

    def __init__(self, parameter: Tensor) -> None:
        device = parameter.device
        self.codes = torch.empty(parameter.shape, dtype=E4M3.dtype, device=device)
        self.scales = torch.zeros(4, dtype=torch.float32, device=device)
        self.version = -1
        self.current(parameter)

    @torch.no_grad()
    def current(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes, scale) of the parameter, cast again if it has changed since its last step."""
        if self.version != parameter._version:
            codes, scale = ops.quantize_tensor(parameter.detach(), E4M3)
            self.codes.copy_(codes)
            self.scales[0].copy_(scale)
            self.scales[1].copy_(scale * HEADROOM)
            self.version = parameter._version
        return self.codes, self.scales[0]
