"""The formats of FP8-LM: one power-of-two scale for a whole tensor.

Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023, section 2.2 ("precision decoupling"): the first moment
in E4M3, the second moment and the master weight in float16, each multiplied by one power-of-two scale per tensor:

    scale = 2^ceil(log2(amax / max)),   code = round(x / scale)          value = code × scale

A scale per tensor needs the maximum of the *new* moment before its first code can be written: two passes over memory
where block scaling needs one, and elements far below the tensor's maximum lose precision. It is here to reproduce the
paper's recipe (`preset="fp8-lm"`), not because it is good. One thing differs: a positive second moment below 2^-24 ×
scale is stored as 2^-24 × scale. A zero would make Adam divide by epsilon.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.formats import E4M3, TINY

from .fp8 import cast_finite, encode, noise_of_v, truncate

FLOAT16_MAX = 65504.0


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """Return the smallest power of two s with amax / s <= largest; 1 for a zero tensor, NaN for a non-finite one."""
    # by a tensor: on CUDA, torch multiplies by the reciprocal of a Python number, which rounds differently
    ratio = amax / torch.full_like(amax, largest)
    # any bit of the mantissa carries into the exponent, which alone is kept
    up = (ratio.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    scale = torch.where(amax > 0, up.view(torch.float32).clamp(min=TINY), 1.0)
    return torch.where(amax.isfinite(), scale, torch.nan)


def encode_tensor(
    x: Tensor,  # float32, any shape
    dtype: torch.dtype,  # torch.float8_e4m3fn or torch.float16
    lift: bool = False,  # a positive value never becomes zero in float16: it is a second moment
    random: Tensor | None = None,  # int64 like x, the words of `noise`: dithered
) -> tuple[Tensor, Tensor]:  # codes: dtype, x's shape; scale: float32, 0-d
    """Quantize `x` with one power-of-two scale."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    scale = power_of_two_scale(amax, E4M3.max if dtype is E4M3.dtype else FLOAT16_MAX)
    scaled = torch.where(scale.isnan(), 0.0, x / scale)  # everything decodes to NaN then
    if lift:
        scaled = torch.where(x > 0, scaled.clamp(min=2.0**-24), scaled)
    if random is None:
        return (cast_finite(scaled, E4M3) if dtype is E4M3.dtype else scaled.to(dtype)), scale
    if dtype is E4M3.dtype:
        return encode(scaled, E4M3, random).view(dtype), scale
    noise = noise_of_v(random, 13) if lift else (random >> 19).int()
    half = (truncate(scaled.abs(), 23) + noise) >> 13
    return torch.copysign(half.to(torch.int16).view(dtype), scaled), scale


def decode_tensor(codes: Tensor, scale: Tensor) -> Tensor:
    """Return code × scale in float32."""
    return codes.float() * scale
