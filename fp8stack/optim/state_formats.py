"""How optimizer state is kept: formats of moments and of master weights, as plain tensors under plain names.

A state says its own format: the names, dtypes and shapes of its tensors do, and a step follows them. The names of
formats below say what a state is made in.

| `states`            | m                       | v                           | bytes  | what it costs           |
|---------------------|-------------------------|-----------------------------|--------|-------------------------|
| "8bit" (default)    | s1e3m4, block 128       | sqrt(v) as ue3m5, block 128 | 2.06   | 6 % of m, 3 % of root   |
| "fp8"               | e4m3, block 128         | sqrt(v) as e4m3, block 128  | 2.06   | 12 % and 12 %           |
| "4bit"              | s1e3m4, block 128       | sqrt(v) as ue3m1, block 128 | 1.56   | 6 % and 50 %            |
| "fp8-lm"            | e4m3, one scale         | float16, one scale          | 3      | 12 % of m, 0.1 % of v   |
| "bf16"              | bfloat16                | bfloat16                    | 4      | 0.4 % of m, 0.8 % of v  |
| "fp32"              | float32                 | float32                     | 8      | nothing                 |
| "keep"              | the parameter's dtype   | the parameter's dtype       | 4 or 8 | as torch                |

What it costs is the largest relative error of one rounding. A step dithers all codes, and v in bfloat16, so errors
cancel over steps (`kernels/reference/fp8.py`); m in bfloat16 is rounded to nearest.

| `master`            | weight and master of a bfloat16 matrix       | bytes | relative error                  |
|---------------------|----------------------------------------------|-------|---------------------------------|
| "auto" (default)    | "split32" in groups with a rate below 1e-5, "split24" in others                        |
| "split24"           | bfloat16 and the next 8 bits, dithered       | 3     | 2^-15 a step, right on average  |
| "split32"           | bfloat16 and the next 16 bits                | 4     | none: it is the float32         |
| "fp32"              | bfloat16 and a float32 copy                  | 6     | none                            |
| "fp16"              | bfloat16 and float16, one scale, dithered    | 4     | 2^-10 a step, right on average  |
| "none"              | bfloat16, dithered                           | 2     | 2^-7 a step, right on average   |
| "keep"              | the parameter alone, rounded to nearest      | 2     | 2^-8: updates below it are lost |

A moment called `name` (torch's names: exp_avg, exp_avg_sq, momentum_buffer) is stored as one of

    {name: floating-point tensor}
    {name_code: codes, name_scale: float32 [rows, ceil(cols/128)]}   uint8, two a byte for 4 bits, or float8_e4m3fn
    {name_code: e4m3 or float16, name_scale: float32 0-d}            "fp8-lm": one scale a tensor
    {name_code: uint8, name_scale: float32 [ceil(numel/256)]}        "8bit" kept by bitsandbytes (`bitsandbytes.py`)

and a master weight as `remainder` (int8 or int16, beside a bfloat16 weight), `master` (float32), or `master` and
`master_scale` (float16). Other names than torch's hold codes on purpose: no other optimizer can mistake them for
values. "none" and "keep" leave no tensor, and "bf16" leaves what "keep" does of a bfloat16 parameter: they only say how
a step rounds what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8stack import formats
from fp8stack.kernels import ops
from fp8stack.kernels.reference import bitsandbytes_format, master, power_of_two
from fp8stack.kernels.reference.step import load_master
from fp8stack.levels import check_choice
from fp8stack.tensor_kinds import whole_shape

State = dict[str, Any]

_BLOCK_FORMATS: dict[str, tuple[formats.MiniFloat, formats.MiniFloat]] = {
    "8bit": (formats.S1E3M4, formats.UE3M5),
    "fp8": (formats.E4M3, formats.E4M3_ROOT),
    "4bit": (formats.S1E3M4, formats.UE3M1),
}
_TENSOR_FORMATS = (formats.E4M3.dtype, torch.float16)  # of "fp8-lm"
BITSANDBYTES = "bitsandbytes"
"""What "8bit" becomes in `bitsandbytes.py`; no choice of a user's."""
MASTER_KEYS = ("remainder", "master", "master_scale")
SMALL_RATE = 1e-5
"""Below this learning rate, "auto" masters have 32 bits."""
_SPLIT = {"split24": torch.int8, "split32": torch.int16}


def check_formats(states: str, master: str) -> None:
    """Raise ConfigError unless both are known."""
    check_choice("states", states)
    check_choice("master", master)


def master_for(master: str, group: Mapping[str, Any]) -> str:
    """Return the format that `master` stands for in a parameter group.

    "auto" goes by the learning rate: that which a scheduler starts from, or else the group's. 200 steps of real
    gradients end 3.5 % beside float32's with 24 bits at 1e-5, and 10 % beside them at 1e-6; 0.3 % with 32 bits.
    """
    if master != "auto":
        return master
    rate = float(group.get("initial_lr", group.get("lr", 0)))
    return "split32" if 0 < rate < SMALL_RATE else "split24"


def is_large_matrix(parameter: Tensor, min_numel: int) -> bool:
    """Return whether a parameter is quantized: a matrix or more, on the whole tensor's shape, and worth it.

    Rows shorter than 8 would spend more on scales than they save.
    """
    shape = whole_shape(parameter)
    return len(shape) > 1 and shape.numel() >= max(min_numel, 8 * shape[0])


# --- moments


def is_second(name: str) -> bool:
    """Return whether the moment `name` is a second moment, which is never negative."""
    return name == "exp_avg_sq"


def dense_dtype(parameter: Tensor, states: str) -> torch.dtype | None:
    """Return the dtype of moments that are kept as plain numbers, None for codes with scales."""
    return {"keep": parameter.dtype, "bf16": torch.bfloat16, "fp32": torch.float32}.get(states)


def zero_moment(
    name: str, parameter: Tensor, states: str, device: torch.device | None = None
) -> State:
    """Return the state of a moment that is zero everywhere, on `device` or the parameter's."""
    shape, device, second = parameter.shape, device or parameter.device, is_second(name)
    if dense := dense_dtype(parameter, states):
        return {name: torch.zeros(shape, dtype=dense, device=device)}
    dtype, codes = torch.uint8, tuple(shape)
    scales: tuple[int, ...] = formats.scale_shape(shape)
    if states in _BLOCK_FORMATS:
        fmt = _BLOCK_FORMATS[states][second]
        dtype, codes = fmt.dtype, fmt.codes_shape(shape)
    elif states == "fp8-lm":
        dtype, scales = _TENSOR_FORMATS[second], ()
    else:
        scales = (-(-shape.numel() // bitsandbytes_format.BLOCK),)
    # Scales are float32, whatever torch's default dtype is.
    scale = torch.full(scales, float(states == "fp8-lm"), dtype=torch.float32, device=device)
    return {f"{name}_code": torch.zeros(codes, dtype=dtype, device=device), f"{name}_scale": scale}


def encode_moment(name: str, value: Tensor, parameter: Tensor, states: str) -> State:
    """Return the state that holds `value` (floating point, the parameter's shape), rounded to nearest."""
    value, second = value.to(parameter.device, torch.float32).contiguous(), is_second(name)
    if dense := dense_dtype(parameter, states):
        return {name: value.to(dense, copy=True)}
    if states in _BLOCK_FORMATS:
        codes, scale = ops.quantize_blocks(value, _BLOCK_FORMATS[states][second])
    elif states == "fp8-lm":
        codes, scale = power_of_two.encode_tensor(value, _TENSOR_FORMATS[second], lift=second)
    else:
        codes, scale = bitsandbytes_format.encode(value, signed=not second)
    return {f"{name}_code": codes, f"{name}_scale": scale}


def has_moment(name: str, state: State) -> bool:
    """Return whether `state` holds the moment `name` in any format."""
    return state.get(name) is not None or {f"{name}_code", f"{name}_scale"} <= state.keys()


def is_laid_out(name: str, state: State, shape: torch.Size) -> bool:
    """Return whether the moment `name` of a parameter of `shape` is there in one of the formats, by its metadata."""
    if (value := state.get(name)) is not None:
        return is_dense(value, shape) and f"{name}_code" not in state
    weight = torch.empty(shape, device="meta")
    kinds = (*_BLOCK_FORMATS, "fp8-lm", BITSANDBYTES)
    return any(alike(state, zero_moment(name, weight, kind)) for kind in kinds)


def is_dense(value: Any, shape: torch.Size) -> bool:
    """Return whether `value` is a tensor of plain floating-point numbers of this shape."""
    dtypes = (*formats.FLOATS, torch.float64)
    return isinstance(value, Tensor) and value.dtype in dtypes and value.shape == shape


def stored_kind(name: str, state: State, shape: torch.Size) -> str:
    """Return how a step calls the format that a moment of a parameter of `shape` is in, read off its tensors."""
    codes, scale = state.get(f"{name}_code"), state.get(f"{name}_scale")
    if codes is None or scale is None or scale.ndim == 1:  # bitsandbytes' has its own step
        return "dense"
    if scale.ndim == 0:
        return "tensor"
    eight = "8bit" if codes.shape == shape else "4bit"
    states = eight if codes.dtype is torch.uint8 else "fp8"
    return _BLOCK_FORMATS[states][is_second(name)].name


def decode_moment(name: str, state: State, shape: torch.Size) -> Tensor | None:
    """Return the moment in float32, or None if the state has none of this name."""
    if not has_moment(name, state):
        return None
    if isinstance(value := state.get(name), Tensor):
        return value.float()
    codes, scale = state[f"{name}_code"], state[f"{name}_scale"]
    # Codes may be on the host, paged or offloaded, where such a scale is not.
    if scale.ndim == 0:
        return power_of_two.decode_tensor(codes.to(scale.device), scale)
    if scale.ndim == 1:
        values = bitsandbytes_format.table(not is_second(name), scale.device)
        return bitsandbytes_format.decode(codes.to(scale.device), scale, values)
    fmt = formats.FORMATS[stored_kind(name, state, shape)]
    return ops.dequantize_blocks(codes, scale, fmt, shape=shape)


def alike(saved: State, wanted: State) -> bool:
    """Return whether `saved` has the tensors of `wanted`, of the same shapes and dtypes."""
    return all(
        isinstance(x := saved.get(name), Tensor) and x.dtype is y.dtype and x.shape == y.shape
        for name, y in wanted.items()
    )


# --- masters


def masters(state: State) -> State:
    """Return the part of a state that is the master of the weight."""
    return {name: value for name, value in state.items() if name in MASTER_KEYS}


def is_master(saved: State, shape: torch.Size) -> bool:
    """Return whether these are the master of a parameter of `shape` in one of the formats, by their metadata."""
    weight = torch.empty(shape, device="meta")
    all_kinds = [zero_master(weight, kind) for kind in (*_SPLIT, "fp32", "fp16")]
    return any(saved.keys() == one.keys() and alike(saved, one) for one in all_kinds)


def zero_master(parameter: Tensor, kind: str | None) -> State:
    """Return a state laid out as that of a master, its values meaningless."""
    if kind is None or kind == "none":
        return {}
    if kind in _SPLIT:
        return {"remainder": torch.empty_like(parameter, dtype=_SPLIT[kind])}
    if kind == "fp32":
        return {"master": torch.empty_like(parameter, dtype=torch.float32)}
    scale = torch.empty((), dtype=torch.float32, device=parameter.device)
    return {"master": torch.empty_like(parameter, dtype=torch.float16), "master_scale": scale}


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
