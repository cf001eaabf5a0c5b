"""A matrix in FP8 with one scale, in both layouts that FP8 GEMMs need on Ada and Hopper, padded.

    codes    [rows16, cols16]    the operand of a product along the columns
    codes_t  [cols16, rows16]    its transpose, the operand of a product along the rows

rows16 and cols16 are the sizes rounded up to a multiple of 16, which FP8 GEMMs need. The rows of an input and of a
gradient, which are tokens, are rounded up to a multiple of 64: cuBLAS takes a tenth longer for a layer with others, and
taking rows off a product costs nothing. The codes of the padding are zero. Scale and rounding are as in `quantize.py`,
from this tensor's own amax ("current scaling").

`recast` is for a matrix that changed a little since its last cast, as a weight does in a step. It keeps the last scale
while the matrix's own scale is in (1/2, 1 + 1/32] times the last; otherwise it returns what `cast` returns. So kernels
can cast before they know the amax, and at most a factor of 2 of the range goes unused. Nothing saturates that would not
be rounded to the largest code anyway: 448 × 33/32 = 462, which is nearer to 448 than to 480, E4M3's next step.

With `exact` the last scale is kept only if it equals the matrix's own. The result is that of `cast`, and kernels need
one read of the matrix if the last scale is right.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8stack.formats import MiniFloat

from .delayed_state import STATES
from .quantize import encode_scaled, scale_and_inverse

Cast = tuple[Tensor, Tensor, Tensor]  # codes, codes_t (empty if not asked for), scale float32 0-d

ALIGNMENT = 16  # FP8 GEMMs need every dimension to be a multiple of this
TOKENS = 64  # of what the rows of inputs and gradients are padded to a multiple

# `recast` keeps the last scale while LEAST × last < own scale <= MOST × last.
LEAST, MOST = 1 / 2, 1 + 1 / 32


def aligned(size: int, multiple: int = ALIGNMENT) -> int:
    """Return the next multiple of a number."""
    return -(-size // multiple) * multiple


def cast(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    fmt: MiniFloat,  # e4m3 or e5m2
    codes: bool = True,
    transposed: bool = True,
    amax: Tensor | None = None,  # the largest magnitude of x, if it is known
    rows_to: int = ALIGNMENT,  # of what rows are padded to a multiple
    reuse: bool = True,  # used by the Triton kernel only
) -> Cast:
    """Quantize a matrix with one scale.

    `amax` is 0-d, or int32 [a power of two]: the float32 bits of the largest magnitude in each of several parts of x.
    """
    if amax is None:
        amax = largest_magnitude(x)
    elif amax.dtype is torch.int32:
        amax = amax.amax().view(torch.float32)
    scale, _ = scale_and_inverse(amax.float(), fmt)
    return _cast_with(scale, x, fmt, codes, transposed, rows_to)


def recast(
    x: Tensor,  # as `cast` takes it
    fmt: MiniFloat,
    of: int | Tensor,  # the scale of this matrix's last cast, or the handle of its DelayedState
    codes: bool = True,
    transposed: bool = True,
    exact: bool = False,  # keep the last scale only if it equals the matrix's own: the result is that of `cast`
    reuse: bool = True,  # used by the Triton kernel only
) -> Cast:
    """Quantize a matrix with the scale of its last cast if that fits, else with its own."""
    last = STATES[of].on(x.device)[0] if isinstance(of, int) else of
    own, _ = scale_and_inverse(largest_magnitude(x), fmt)
    # without `exact`, the last scale never fits if it or the own one is zero or not finite
    fits = own == last if exact else (own > last * LEAST) & (own <= last * MOST)
    result = _cast_with(torch.where(fits, last, own), x, fmt, codes, transposed)
    if isinstance(of, int) and x.numel():
        last.copy_(result[2])
    return result


def largest_magnitude(x: Tensor) -> Tensor:  # float32, 0-d
    return x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def as_matrix(x: Tensor, multiple: int = ALIGNMENT, rows_to: int = TOKENS) -> Tensor:
    """Return `x` in float32 as rows, padded with zeros to multiples of two numbers."""
    x = x.detach().reshape(-1, x.shape[-1]).float()
    if x.numel():  # torch 2.6 does not pad what is empty
        return pad(x, (0, -x.shape[1] % multiple, 0, -x.shape[0] % rows_to))
    return x.new_zeros(aligned(x.shape[0], rows_to), aligned(x.shape[1], multiple))


def _cast_with(
    scale: Tensor,
    x: Tensor,
    fmt: MiniFloat,
    codes: bool,
    transposed: bool,
    rows_to: int = ALIGNMENT,
) -> Cast:
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    result = encode_scaled(as_matrix(x, ALIGNMENT, rows_to), inverse, fmt)
    nothing = torch.empty((0, 0), dtype=fmt.dtype, device=x.device)
    turned = transpose(result) if transposed else nothing.clone()
    return result if codes else nothing, turned, scale


def transpose(codes: Tensor) -> Tensor:  # one byte an element, [rows, cols] -> [cols, rows]
    """Return the transpose, laid out as rows, in memory of its own: contiguous() of no rows would be a view."""
    return codes.t().clone(memory_format=torch.contiguous_format)
