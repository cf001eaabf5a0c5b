"""A matrix in FP8 with a scale for each row: activations, whose rows are tokens.

    codes    [rows64, cols16]    as in `cast.py`, padded with zeros
    scale    [rows64]            of each row; 0 for padding
    parts    [parts_of(rows64)]  largest magnitudes of parts of the matrix, as float32 bits without sign

A few tokens of a trained model hold elements that are hundreds of times as large as those of others. With a scale of
its own each token has its largest element without an error, which one scale for all tokens gives to one of them.
`parts` are what a cast with one scale (`cast.py`) takes, which makes the transpose: products over tokens cannot have
scales by token. Scale and rounding are as in `quantize.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import MiniFloat

from .activation import activate
from .cast import as_matrix
from .quantize import encode_scaled, scale_and_inverse

Rows = tuple[Tensor, Tensor, Tensor]  # codes, scale, parts

PARTS = 1024


def parts_of(rows: int) -> int:
    """Return how many parts a matrix of so many padded rows has: a power of two."""
    return min(PARTS, 1 << max(rows - 1, 0).bit_length())


def cast_rows(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    fmt: MiniFloat,  # e4m3 or e5m2
) -> Rows:
    """Quantize a matrix with a scale for each row."""
    matrix = as_matrix(x)
    amax = matrix.abs().amax(1) if matrix.numel() else matrix.new_zeros(len(matrix))
    scale, inverse = scale_and_inverse(amax, fmt)
    codes = encode_scaled(matrix, inverse.unsqueeze(1), fmt)
    parts = torch.zeros(parts_of(len(amax)), dtype=torch.int32, device=x.device)
    parts[: min(len(amax), 1)] = amax.view(torch.int32).amax() if len(amax) else 0
    return codes, scale, parts


def activation_cast_rows(
    gate: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    up: Tensor | None,  # likewise
    activation: str,  # of ACTIVATIONS
    fmt: MiniFloat,
) -> tuple[Tensor, Tensor]:  # codes [rows64, cols16], scale float32 [rows64]
    """Return act(gate) × up in FP8, with a scale for each row."""
    value, _ = activate(gate.float(), activation)
    codes, scale, _ = cast_rows(value if up is None else value * up.float(), fmt)
    return codes, scale


def matmul_rows(
    a: Tensor,  # codes [m, k]
    a_scale: Tensor,  # as cast_rows returns it, [m], or 0-d
    b: Tensor,  # codes [n, k]
    b_scale: Tensor,  # of b, [n] or 0-d
    dtype: torch.dtype,
    fast: bool = False,  # used by the GPU only
) -> Tensor:  # [m, n]
    """Return (a × a_scale) @ (b × b_scale).T, multiplied in float32."""
    # Codes are exact in whatever a float32 product is made of; in float64 the order of the scales does not matter.
    return ((a.float() @ b.float().t()).double() * a_scale.view(-1, 1) * b_scale).to(dtype)
