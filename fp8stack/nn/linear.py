"""FP8 Linear layers over `torch._scaled_mm`, with current scaling.

    forward    y  = x  @ w.T     E4M3 × E4M3
    backward   dx = dy @ w       E5M2 × E4M3   (hybrid; E4M3 × E4M3 with fp8_format="e4m3")
               dw = dy.T @ x     the same

Each operand is quantized with one scale, from its own largest magnitude, and the products are accumulated in float32.
What is saved for backward is the FP8 input and weight: one byte an element where a bf16 layer saves two. FP8 GEMMs
want the inner dimension in multiples of 16: the tokens are padded with zeros for that, in and out features are checked
when the layer is converted (`convert.py`). Ada and Hopper multiply only with both operands laid out along the inner
dimension, so backward transposes codes; that, and one cast kernel per operand, is what is left to speed up.

The layer is an `nn.Linear` whose class was changed: its parameters, hooks, name and state_dict are untouched, and
changing the class back undoes it. A weight stored in bfloat16 (O2) is read as it is; the output has the dtype of the
input, or autocast's where autocast is on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8stack.formats import E4M3, E5M2, MiniFloat
from fp8stack.kernels import ops

ALIGNMENT = 16
"""FP8 GEMMs need every dimension to be a multiple of this."""


class Fp8Linear(nn.Linear):
    """An `nn.Linear` that multiplies in FP8. Not constructed: `convert.py` changes the class of a Linear to it."""

    fp8_format: str

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias: [..., in_features] -> [..., out_features], in the dtype of the input."""
        dtype = output_dtype(input)
        gradient_format = E5M2 if self.fp8_format == "hybrid" else E4M3
        output: Tensor = _Fp8Matmul.apply(input, self.weight, dtype, gradient_format)
        return output if self.bias is None else output + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8_format}"


class Bf16Linear(nn.Linear):
    """An `nn.Linear` that multiplies in bfloat16: what a level uses on a device without FP8 GEMMs."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias: [..., in_features] -> [..., out_features], in the dtype of the input."""
        dtype = output_dtype(input)
        with torch.autocast(input.device.type, enabled=False):
            output = nn.functional.linear(input.bfloat16(), self.weight.bfloat16()).to(dtype)
        return output if self.bias is None else output + self.bias.to(dtype)


class _Fp8Matmul(torch.autograd.Function):
    """x @ w.T with FP8 operands; saves their codes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., in]
        weight: Tensor,  # [out, in]
        dtype: torch.dtype,  # of the output
        gradient_format: MiniFloat,
    ) -> Tensor:  # [..., out]
        rows = x.reshape(-1, x.shape[-1])
        x8, x_scale = ops.quantize_tensor(_pad_rows(rows), E4M3)
        w8, w_scale = ops.quantize_tensor(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, weight.dtype
        ctx.gradient_format = gradient_format
        y = scaled_mm(x8, x_scale, w8, w_scale, dtype, fast=True)
        return y[: rows.shape[0]].reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        g8, g_scale = ops.quantize_tensor(_pad_rows(rows), ctx.gradient_format)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = scaled_mm(g8, g_scale, _transposed(w8), w_scale, ctx.x_dtype)
            dx = dx[: rows.shape[0]].reshape(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            dw = scaled_mm(_transposed(g8), g_scale, _transposed(x8), x_scale, ctx.w_dtype)
        return dx, dw, None, None


def scaled_mm(
    a: Tensor,  # FP8 codes [m, k], contiguous
    a_scale: Tensor,  # float32, 0-d
    b: Tensor,  # FP8 codes [n, k], contiguous
    b_scale: Tensor,  # float32, 0-d
    dtype: torch.dtype,
    fast: bool = False,  # fewer accumulator bits on Hopper; fine for the forward pass, not for gradients
) -> Tensor:  # [m, n] in dtype
    """Return (a × a_scale) @ (b × b_scale).T."""
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
    )


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that `nn.Linear` would give for this input: autocast's where it is on, else the input's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _pad_rows(x: Tensor) -> Tensor:
    """Return `x` [tokens, features] with zero rows up to a multiple of 16."""
    missing = -x.shape[0] % ALIGNMENT
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def _transposed(codes: Tensor) -> Tensor:
    return codes.t().contiguous()
