"""Shapes and dtypes of what operators return, for FakeTensor and torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import FORMATS, scale_shape

from .reference import cast as matrix
from .reference import cast_blocks
from .reference.cast_blocks import Codes


def fake_quantize_blocks(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    shape = FORMATS[fmt].codes_shape(x.shape)
    codes = torch.empty(shape, dtype=FORMATS[fmt].dtype, device=x.device)
    return codes, x.new_empty(scale_shape(x.shape), dtype=torch.float32)


def fake_quantize_tensor(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=FORMATS[fmt].dtype, device=x.device)
    return codes, x.new_empty((), dtype=torch.float32)


def fake_cast(
    x: Tensor, fmt: str, codes: bool, transposed: bool, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    cols = matrix.aligned(x.shape[-1])
    rows, dtype = matrix.aligned(x.numel() // max(x.shape[-1], 1)), FORMATS[fmt].dtype
    return (
        x.new_empty((rows, cols) if codes else (0, 0), dtype=dtype),
        x.new_empty((cols, rows) if transposed else (0, 0), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )


def fake_blocks(x: Tensor, fmt: str, squares: bool = False) -> Codes:
    rows = cast_blocks.padded(x.numel() // max(x.shape[-1], 1))
    cols, dtype = cast_blocks.padded(x.shape[-1]), FORMATS[fmt].dtype
    down, across = rows // 128, cols // 128
    scale, scale_t = (across, rows), (down, cols)
    if squares:
        scale = (down, cast_blocks.in_fours(across))
        scale_t = (across, cast_blocks.in_fours(down))
    scales = (x.new_empty(shape, dtype=torch.float32).t() for shape in (scale, scale_t))
    codes = x.new_empty((rows, cols), dtype=dtype), x.new_empty((cols, rows), dtype=dtype)
    return codes[0], next(scales), codes[1], next(scales)
