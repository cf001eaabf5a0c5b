"""A matrix in FP8 with one scale, in both layouts that FP8 GEMMs of Ada and Hopper want, padded to multiples of 16.

    codes    [rows16, cols16]    the operand of a product along the columns
    codes_t  [cols16, rows16]    its transpose, the operand of a product along the rows

rows16 and cols16 are the sizes rounded up to a multiple of 16; the codes there are zero. Scale and rounding are
`quantize.py`'s ("current scaling": from the amax of this very tensor).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8stack.formats import MiniFloat

from .fp8 import cast_finite
from .quantize import scale_and_inverse

ALIGNMENT = 16
"""FP8 GEMMs need every dimension to be a multiple of this."""


def aligned(size: int) -> int:
    """Return the next multiple of 16."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def cast(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    fmt: MiniFloat,  # e4m3 or e5m2
    codes: bool = True,
    transposed: bool = True,
    amax: Tensor | None = None,  # the largest magnitude of x, if it is known
    eager: bool = False,  # of the kernel's alone
) -> tuple[Tensor, Tensor, Tensor]:  # codes, codes_t (empty if not asked for), scale float32 0-d
    """Quantize a matrix with one scale.

    `amax` is 0-d, or int32 [a power of two]: bits of the largest magnitudes of parts of x, of which x's is the largest.
    """
    x = x.detach().reshape(-1, x.shape[-1]).float()
    if amax is None:
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
    elif amax.dtype is torch.int32:
        amax = amax.amax().view(torch.float32)
    scale, inverse = scale_and_inverse(amax.float(), fmt)
    padded = pad(x, (0, -x.shape[1] % ALIGNMENT, 0, -x.shape[0] % ALIGNMENT))
    result = cast_finite(torch.where(inverse > 0, padded * inverse, 0.0), fmt)
    nothing = torch.empty((0, 0), dtype=fmt.dtype, device=x.device)
    return (
        result if codes else nothing,
        result.t().contiguous() if transposed else nothing.clone(),
        scale,
    )


def transpose(codes: Tensor) -> Tensor:  # one byte an element, [rows, cols] -> [cols, rows]
    """Return the transpose, laid out as rows."""
    return codes.t().contiguous()
