"""A weight in FP8 beside the weight, kept up to date by the steps; see `kernels/reference/emit.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.kernels.reference.emit import HEADROOM


class Emitted:
    """The codes of one weight with their scale, and the contents of the weight that they are of."""

    codes: Tensor  # e4m3, the weight's shape
    scales: Tensor  # float32 [4], see `reference/emit.py`

    def __init__(self, parameter: Tensor) -> None:
        self._of: tuple[int, int] | None = None
        self.current(parameter)

    @torch.no_grad()
    def current(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes, scale) of the parameter, cast again if it has changed since its last step."""
        if not self.is_of(parameter):
            codes, scale = ops.quantize_tensor(parameter.detach(), E4M3)
            if self._of is None or self.codes.device != codes.device:
                self.codes = torch.empty(codes.shape, dtype=codes.dtype, device=codes.device)
                self.scales = torch.zeros(4, dtype=torch.float32, device=codes.device)
            self.codes.copy_(codes)
            self.scales[0].copy_(scale)
            self.scales[1].copy_(scale * HEADROOM)
            self.note(parameter)
        return self.codes, self.scales[0]

    def is_of(self, parameter: Tensor) -> bool:
        """Return whether the codes are those of the parameter as it is; only writing through `.data` goes unnoticed."""
        return self._of == (parameter.data_ptr(), parameter._version)

    def note(self, parameter: Tensor) -> None:
        """Note that the codes are those of the parameter as it is."""
        self._of = parameter.data_ptr(), parameter._version
