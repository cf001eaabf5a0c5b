"""Products of FP8 matrices with block scales, by cuBLAS; the twin of `reference/cast_blocks.py`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import cast_blocks


def matmul_blocks(
    a: Tensor,  # codes [m, k], contiguous
    a_scale: Tensor,  # of cast_1x128
    b: Tensor,  # codes [n, k], contiguous
    b_scale: Tensor,  # of cast_128x128 if `squares`, else of cast_1x128
    squares: bool,
    dtype: torch.dtype,
) -> Tensor:  # [m, n]
    """Return (a × a_scale) @ (b × b_scale).T."""
    if not a.numel() or not b.numel():
        return cast_blocks.matmul_blocks(a, a_scale, b, b_scale, squares, dtype)
    kinds = torch.nn.functional.ScalingType
    result: Tensor = torch.nn.functional.scaled_mm(
        a, b.t(), a_scale, kinds.BlockWise1x128, b_scale,
        kinds.BlockWise128x128 if squares else kinds.BlockWise1x128,
        output_dtype=dtype if dtype is torch.bfloat16 else torch.float32,  # all that there is
    )  # fmt: skip
    return result.to(dtype)
