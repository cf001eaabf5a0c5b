"""How optimizer state is kept: formats of moments and of master weights, as plain tensors under plain names.

A moment called `name` (torch's names: exp_avg, exp_avg_sq, momentum_buffer) is stored as one of

    {name: floating-point tensor}                                   "keep": float32, or the dtype of the parameter
    {name_code: uint8, name_scale: float32 [rows, ceil(cols/128)]}  "8bit": S1E3M4, or UE3M5 of the square root
    {name_code: e4m3 or float16, name_scale: float32 0-d}           "fp8-lm": one scale a tensor

and a master weight as `remainder` (int8, beside a bfloat16 weight), `master` (float32), or `master` and `master_scale`
(float16, FP8-LM). Other names than torch's hold codes on purpose: no other optimizer can mistake them for values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8stack.formats import E4M3, S1E3M4, UE3M5, Float8, scale_shape
from fp8stack.kernels import ops
from fp8stack.kernels.reference import adam, fp8lm, master

State = dict[str, Any]


def block_format(name: str) -> Float8:
    """Return the 8-bit format of the moment `name`."""
    return UE3M5 if name == "exp_avg_sq" else S1E3M4


def tensor_format(name: str) -> torch.dtype:
    """Return the FP8-LM storage of the moment `name`."""
    return torch.float16 if name == "exp_avg_sq" else E4M3.dtype


def zero_moment(name: str, parameter: Tensor, kind: str) -> State:
    """Return the state of a moment that is zero everywhere. `kind`: "float32", "keep", "8bit" or "fp8-lm"."""
    if kind == "8bit":
        return {
            f"{name}_code": _zeros(parameter, torch.uint8),
            f"{name}_scale": parameter.new_zeros(scale_shape(parameter.shape), dtype=torch.float32),
        }
    if kind == "fp8-lm":
        return {
            f"{name}_code": _zeros(parameter, tensor_format(name)),
            f"{name}_scale": parameter.new_ones((), dtype=torch.float32),
        }
    return {name: _zeros(parameter, float_dtype(parameter, kind))}


def encode_moment(name: str, value: Tensor, parameter: Tensor, kind: str) -> State:
    """Return the state that holds `value` (floating point, the parameter's shape)."""
    value = value.to(device=parameter.device, dtype=torch.float32).contiguous()
    if kind == "8bit":
        codes, scale = ops.quantize_blocks(value, block_format(name))
    elif kind == "fp8-lm":
        codes, scale = fp8lm.encode_tensor(value, tensor_format(name))
    else:
        return {name: value.to(float_dtype(parameter, kind), copy=True)}
    return {f"{name}_code": codes, f"{name}_scale": scale}


def decode_moment(name: str, state: State) -> Tensor | None:
    """Return the moment in float32, or None if the state has none of this name."""
    if name in state and state[name] is not None:
        value: Tensor = state[name].float()
        return value
    codes = state.get(f"{name}_code")
    if codes is None:
        return None
    if codes.dtype is torch.uint8:
        return ops.dequantize_blocks(codes, state[f"{name}_scale"], block_format(name))
    return fp8lm.decode_tensor(codes, state[f"{name}_scale"])


def _zeros(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """State is always row-major, whatever the strides of the parameter: blocks are."""
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)


def float_dtype(parameter: Tensor, kind: str) -> torch.dtype:
    return parameter.dtype if kind == "keep" else torch.float32


def encode_master(value: Tensor, kind: str) -> tuple[Tensor, State]:
    """Return (the weight's new contents, the state of its master) for a float32 `value`.

    `kind`: "split24" (bfloat16 and int8), "float32" (the caller casts the weight) or "fp16".
    """
    if kind == "split24":
        weight, remainder = master.split(value)
        return weight, {"remainder": remainder}
    if kind == "fp16":
        codes, scale = fp8lm.encode_tensor(value, torch.float16)
        weight = fp8lm.decode_tensor(codes, scale).bfloat16()
        return weight, {"master": codes, "master_scale": scale}
    return value, {"master": value.clone(memory_format=torch.contiguous_format)}


def decode_master(parameter: Tensor, state: State) -> Tensor:
    """Return the float32 weight that the optimizer accumulates in, as a new tensor."""
    weight = parameter.detach()
    if "master_scale" in state:
        return adam.unless_written(
            weight, fp8lm.decode_tensor(state["master"], state["master_scale"])
        )
    return adam.load_master(weight, state.get("remainder", state.get("master"))).clone()
