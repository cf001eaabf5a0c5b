"""The formats of FP8-LM, one scale a tensor, and an Adam step in them.

Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023, section 2.2 ("precision decoupling"): the first moment
in E4M3, the second moment and the master weight in float16, each multiplied by one power-of-two scale per tensor:

    scale = 2^ceil(log2(amax / max)),   code = round(x / scale)          value = code × scale

A scale per tensor needs the maximum of the *new* moment before its first code can be written: two passes over memory
where block scaling needs one, and elements far below the tensor's maximum lose precision. It is here to reproduce the
paper's recipe (`preset="fp8-lm"`), not because it is good.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3, TINY

from .adam import load_master, store_master, unless_written, update, write
from .fp8 import cast
from .quantize import dequantize_blocks

FLOAT16_MAX = 65504.0


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """Return the smallest power of two s with amax / s <= largest; 1 for a zero tensor, NaN for a non-finite one."""
    mantissa, exponent = torch.frexp(
        amax / largest
    )  # amax / largest = mantissa × 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(amax), exponent).clamp(min=TINY)
    scale = torch.where(amax > 0, scale, 1.0)
    return torch.where(amax.isfinite(), scale, torch.nan)


def encode_tensor(
    x: Tensor,  # float32, any shape
    dtype: torch.dtype,  # torch.float8_e4m3fn or torch.float16
) -> tuple[Tensor, Tensor]:  # codes: dtype, x's shape; scale: float32, 0-d
    """Quantize `x` with one power-of-two scale."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if dtype is E4M3.dtype:
        scale = power_of_two_scale(amax, E4M3.max)
        return cast(x / scale, E4M3), scale
    scale = power_of_two_scale(amax, FLOAT16_MAX)
    return (x / scale).to(dtype), scale


def decode_tensor(codes: Tensor, scale: Tensor) -> Tensor:
    """Return code × scale in float32."""
    return codes.float() * scale


def fp8lm_adam_step(
    weight: Tensor,  # the live weight, any floating dtype; updated
    master: Tensor | None,  # float16 with master_scale, or as in adam.py; updated
    master_scale: Tensor | None,  # float32, 0-d; updated
    grad: Tensor,  # float32, bfloat16, float16, or e4m3 codes with grad_scale
    grad_scale: Tensor | None,
    m: Tensor,  # e4m3; updated
    m_scale: Tensor,  # float32, 0-d; updated
    v: Tensor,  # float16; updated
    v_scale: Tensor,  # float32, 0-d; updated
    hyper: Tensor,  # float32 [8], see adam.HYPER
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """The update of `adam.adam_step` with the FP8-LM state formats."""
    apply = hyper[4]
    if master is not None and master_scale is not None:
        old = unless_written(weight, decode_tensor(master, master_scale))
    else:
        old = load_master(weight, master)
    w, m32, v32 = update(
        grad.float() if grad_scale is None else dequantize_blocks(grad, grad_scale, E4M3),
        old,
        decode_tensor(m, m_scale),
        decode_tensor(v, v_scale),
        hyper, beta1, beta2, eps, weight_decay, decoupled,
    )  # fmt: skip
    _store(m, m_scale, m32, apply)
    _store(v, v_scale, v32, apply)
    if master is not None and master_scale is not None:
        _store(master, master_scale, w, apply)
        write(
            weight, decode_tensor(master, master_scale), apply
        )  # the rounding of the master as it is kept
    else:
        store_master(weight, master, w, apply)


def _store(codes: Tensor, scale: Tensor, value: Tensor, apply: Tensor) -> None:
    new_codes, new_scale = encode_tensor(value, codes.dtype)
    write(codes, new_codes, apply)
    write(scale, new_scale, apply)
