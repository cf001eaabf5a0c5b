"""How optimizer state is kept: formats of moments and of master weights, as plain tensors under plain names.

| `states`            | m                       | v                           | bytes  | what it costs           |
|---------------------|-------------------------|-----------------------------|--------|-------------------------|
| "8bit" (default)    | s1e3m4, block 128       | sqrt(v) as ue3m5, block 128 | 2.06   | 3 % of m, 1.6 % of root |
| "fp8"               | e4m3, block 128         | sqrt(v) as e4m3, block 128  | 2.06   | 6 % and 6 %             |
| "4bit"              | s1e3m4, block 128       | sqrt(v) as ue3m1, dithered  | 1.56   | 3 % and 33 %, unbiased  |
| "fp8-lm"            | e4m3, one scale         | float16, one scale          | 3      | the FP8-LM paper's      |
| "bf16"              | bfloat16                | bfloat16, dithered          | 4      | 0.4 % and 0.8 %         |
| "fp32"              | float32                 | float32                     | 8      | nothing                 |
| "keep"              | the parameter's dtype   | the parameter's dtype       | 4 or 8 | as torch                |

What it costs is the largest relative error of one rounding (half a step for nearest, a step where dithered).

| `master`            | weight and master of a bfloat16 matrix       | bytes | relative error                  |
|---------------------|----------------------------------------------|-------|---------------------------------|
| "split24" (default) | bfloat16 and the next 8 bits                 | 3     | 2^-16                           |
| "split32"           | bfloat16 and the next 16 bits                | 4     | none: it is the float32         |
| "fp32"              | bfloat16 and a float32 copy                  | 6     | none                            |
| "fp16"              | bfloat16 and float16 with one scale (FP8-LM) | 4     | 2^-11                           |
| "none"              | bfloat16, rounded stochastically             | 2     | 2^-7 a step, right on average   |
| "keep"              | the parameter alone, rounded to nearest      | 2     | 2^-8: updates below it are lost |

A moment called `name` (torch's names: exp_avg, exp_avg_sq, momentum_buffer) is stored as one of

    {name: floating-point tensor}
    {name_code: codes, name_scale: float32 [rows, ceil(cols/128)]}   uint8, two a byte for 4 bits, or float8_e4m3fn
    {name_code: e4m3 or float16, name_scale: float32 0-d}            "fp8-lm": one scale a tensor
    {name_code: uint8, name_scale: float32 [ceil(numel/256)]}        "8bit" kept by bitsandbytes (`bitsandbytes.py`)

and a master weight as `remainder` (int8 or int16, beside a bfloat16 weight), `master` (float32), or `master` and
`master_scale` (float16). Other names than torch's hold codes on purpose: no other optimizer can mistake them for
values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8stack.formats import (
    E4M3,
    E4M3_ROOT,
    S1E3M4,
    UE3M1,
    UE3M5,
    MiniFloat,
    scale_shape,
)
from fp8stack.kernels import ops
from fp8stack.kernels.reference import bitsandbytes_format, master, power_of_two
from fp8stack.kernels.reference.step import StepKind, StepTensors, load_master
from fp8stack.levels import CHOICES

State = dict[str, Any]

_BLOCK_FORMATS: dict[str, tuple[MiniFloat, MiniFloat]] = {
    "8bit": (S1E3M4, UE3M5),
    "fp8": (E4M3, E4M3_ROOT),
    "4bit": (S1E3M4, UE3M1),
}
STATES, MASTERS = CHOICES["states"], CHOICES["master"]
BITSANDBYTES = "bitsandbytes"
"""What "8bit" becomes in `bitsandbytes.py`; no choice of a user's."""
MASTER_KEYS = ("remainder", "master", "master_scale")
_SPLIT = {"split24": torch.int8, "split32": torch.int16}


def is_second(name: str) -> bool:
    """Return whether the moment `name` is a second moment, which is never negative."""
    return name == "exp_avg_sq"


def block_format(name: str, states: str) -> MiniFloat | None:
    """Return the block format of the moment `name`, or None if `states` keeps it otherwise."""
    pair = _BLOCK_FORMATS.get(states)
    return None if pair is None else pair[is_second(name)]


def tensor_format(name: str) -> torch.dtype:
    """Return the FP8-LM storage of the moment `name`."""
    return torch.float16 if is_second(name) else E4M3.dtype


def float_dtype(parameter: Tensor, states: str) -> torch.dtype:
    return {"keep": parameter.dtype, "bf16": torch.bfloat16}.get(states, torch.float32)


def is_dense(value: Tensor, parameter: Tensor, states: str) -> bool:
    """Return whether `value` is how `states` keeps a moment: as plain numbers, of this dtype."""
    coded = states in _BLOCK_FORMATS or states in ("fp8-lm", BITSANDBYTES)
    return not coded and value.dtype is float_dtype(parameter, states)


def zero_moment(
    name: str, parameter: Tensor, states: str, device: torch.device | None = None
) -> State:
    """Return the state of a moment that is zero everywhere, on `device` or the parameter's."""
    fmt, shape, device = block_format(name, states), parameter.shape, device or parameter.device
    if fmt is not None:
        codes = torch.zeros(fmt.codes_shape(shape), dtype=torch.uint8, device=device)
        scale = torch.zeros(scale_shape(shape), dtype=torch.float32, device=device)
        return {f"{name}_code": codes.view(fmt.dtype), f"{name}_scale": scale}
    if states == "fp8-lm":
        return {
            f"{name}_code": torch.zeros(shape, dtype=tensor_format(name), device=device),
            f"{name}_scale": torch.ones((), dtype=torch.float32, device=device),
        }
    if states == BITSANDBYTES:
        blocks = -(-parameter.numel() // bitsandbytes_format.BLOCK)
        return {
            f"{name}_code": torch.zeros(shape, dtype=torch.uint8, device=device),
            f"{name}_scale": torch.zeros(blocks, dtype=torch.float32, device=device),
        }
    return {name: torch.zeros(shape, dtype=float_dtype(parameter, states), device=device)}


def encode_moment(name: str, value: Tensor, parameter: Tensor, states: str) -> State:
    """Return the state that holds `value` (floating point, the parameter's shape), rounded to nearest."""
    value = value.to(device=parameter.device, dtype=torch.float32).contiguous()
    fmt = block_format(name, states)
    if fmt is not None:
        codes, scale = ops.quantize_blocks(value, fmt)
    elif states == "fp8-lm":
        codes, scale = power_of_two.encode_tensor(value, tensor_format(name), lift=is_second(name))
    elif states == BITSANDBYTES:
        codes, scale = bitsandbytes_format.encode(value, signed=not is_second(name))
    else:
        return {name: value.to(float_dtype(parameter, states), copy=True)}
    return {f"{name}_code": codes, f"{name}_scale": scale}


def decode_moment(name: str, state: State, shape: torch.Size) -> Tensor | None:
    """Return the moment in float32, or None if the state has none of this name."""
    if name in state and state[name] is not None:
        value: Tensor = state[name].float()
        return value
    codes = state.get(f"{name}_code")
    if codes is None:
        return None
    scale = state[f"{name}_scale"]
    if scale.ndim == 1:  # the codes may be paged
        values = bitsandbytes_format.table(not is_second(name), scale.device)
        return bitsandbytes_format.decode(codes.to(scale.device), scale, values)
    fmt = stored_format(name, codes, scale, shape)
    if fmt is None:
        return power_of_two.decode_tensor(codes, scale)
    return ops.dequantize_blocks(codes, scale, fmt, shape=shape)


def stored_format(name: str, codes: Tensor, scale: Tensor, shape: torch.Size) -> MiniFloat | None:
    """Return the block format that `codes` of the moment `name` are in, or None for one scale a tensor."""
    if scale.ndim == 0:
        return None
    states = "fp8"
    if codes.dtype is torch.uint8:
        states = "8bit" if codes.shape == shape else "4bit"
    return block_format(name, states)


# --- masters


def zero_master(parameter: Tensor, kind: str | None) -> State:
    """Return a state laid out as that of a master, its values meaningless."""
    if kind is None or kind == "none":
        return {}
    if kind in _SPLIT:
        return {"remainder": torch.empty_like(parameter, dtype=_SPLIT[kind])}
    if kind == "fp16":
        scale = torch.empty((), dtype=torch.float32, device=parameter.device)
        return {"master": torch.empty_like(parameter, dtype=torch.float16), "master_scale": scale}
    return {"master": torch.empty_like(parameter, dtype=torch.float32)}


def encode_master(value: Tensor, kind: str | None) -> tuple[Tensor, State]:
    """Return (the weight's new contents, which the caller casts; the state of its master) for a float32 `value`."""
    if kind in _SPLIT:
        weight, remainder = master.split(value, _SPLIT[kind])
        return weight, {"remainder": remainder}
    if kind == "fp16":
        codes, scale = power_of_two.encode_tensor(value.contiguous(), torch.float16)
        weight = power_of_two.decode_tensor(codes, scale).bfloat16()
        return weight, {"master": codes, "master_scale": scale}
    if kind == "fp32":
        return value, {"master": value.clone(memory_format=torch.contiguous_format)}
    return value, {}


def decode_master(parameter: Tensor, state: State) -> Tensor:
    """Return the float32 weight that the optimizer accumulates in, as a new tensor."""
    value, scale = state.get("remainder", state.get("master")), state.get("master_scale")
    if value is not None:  # it may be offloaded
        value = value.to(parameter.device)
    return load_master(parameter.detach(), value, scale).clone()


# --- what the kernels take


def step_kind(
    algorithm: str, coupled: bool, moments: tuple[str, ...], states: str, master: str | None
) -> StepKind:
    """Return the kernel for a parameter whose moments are kept as `states`, its master as `master`."""
    kinds = ["", ""]
    for name in moments:
        fmt = block_format(name, states)
        kind = fmt.name if fmt else "tensor" if states == "fp8-lm" else "dense"
        if states == "bf16" and is_second(name):
            kind = "dithered"  # to nearest, it would not move by less than 1/256
        kinds[is_second(name)] = kind
    names = {None: "", "none": "dithered", "fp16": "tensor", "fp32": "dense"}
    return StepKind(algorithm, coupled, kinds[0], kinds[1], names.get(master, "split"))


def step_tensors(
    weight: Tensor,
    grad: Tensor,
    grad_block_scale: Tensor | None,
    moments: tuple[str, ...],
    state: State,
) -> StepTensors:
    """Return the tensors that a step on one parameter reads and writes."""
    parts: list[Tensor | None] = [None, None, None, None]
    for name in moments:
        at = 2 * is_second(name)
        parts[at] = state.get(f"{name}_code", state.get(name))
        parts[at + 1] = state.get(f"{name}_scale")
    value = state.get("remainder", state.get("master"))
    return StepTensors(weight, value, state.get("master_scale"), grad, grad_block_scale, *parts)
