"""Reads the optimizer states of bitsandbytes and torchao: returns them under torch's names.

bitsandbytes keeps `state1` and `state2`, in float32 or as codes with `absmax1` and `qmap1` (the table of their values).
They lie in a dictionary of their own or beside the other entries; blocks have 256 elements, in old versions 2048.
torchao uses torch's names, and tensor subclasses as values. Reading checkpoints of bitsandbytes does not need the
library; those of torchao need it, because torch.load makes its classes.

Only states are translated. Parameter groups load as they are. SGD keeps the momentum it was made with, because
bitsandbytes saves it among `betas`. bitsandbytes' Adam decays weights as AdamW does: load its states into AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8stack.errors import CheckpointError
from fp8stack.kernels.reference import bitsandbytes_format
from fp8stack.tensor import is_sharded

from .saved_checks import check_tensors
from .sharded import local
from .state_formats import State, decode_moment, is_second

_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCKS = (bitsandbytes_format.BLOCK, 2048)


def translate(entry: State, moments: tuple[str, ...], parameter: Tensor, key: Any) -> State:
    """Return one parameter's saved state with torch's names; a state of neither library is returned as it is.

    Args:
        moments: the names of the optimizer's moments, in the order of bitsandbytes' `state1` and `state2`.
        parameter: whose state it is. Of a sharded one, codes with flat blocks are decoded, because no slice of rows
            can be cut from them.

    Raises:
        CheckpointError: for a state whose tensors are not all there or larger than the parameter, an incomplete one of
            bitsandbytes, or one of an optimizer with other moments.
    """
    entry = {**entry, **entry.get(_WRAPPED, {})}
    entry.pop(_WRAPPED, None)
    check_tensors(entry, parameter)
    if "state1" in entry:
        entry = _from_bitsandbytes(entry, moments, key)
    for name in moments if is_sharded(parameter) else ():
        codes, scale = entry.get(f"{name}_code"), entry.get(f"{name}_scale")
        if codes is not None and scale is not None and scale.ndim == 1:
            entry[name] = decode_moment(name, entry, codes.shape)
            del entry[f"{name}_code"], entry[f"{name}_scale"]
    return {name: _plain(value) for name, value in entry.items()}


def _from_bitsandbytes(entry: State, moments: tuple[str, ...], key: Any) -> State:
    found = sum(name in entry for name in ("state1", "state2"))
    if found != len(moments):
        raise CheckpointError(
            f"state of parameter {key}: bitsandbytes saved {found} moments, this optimizer has {len(moments)}. "
            "Make the optimizer that the checkpoint was saved from."
        )
    result = {"step": entry["step"]}
    for i, name in enumerate(moments, 1):
        codes = entry[f"state{i}"]
        if codes.dtype is not torch.uint8:
            result[name] = codes
            continue
        scale, values = entry.get(f"absmax{i}"), entry.get(f"qmap{i}")
        blocks = 0 if scale is None else scale.numel()
        block = next((b for b in _BLOCKS if -(-codes.numel() // b) == blocks), None)
        if scale is None or block is None or values is None or values.shape != (256,):
            raise CheckpointError(
                f"state of parameter {key}: bitsandbytes' state{i} has {codes.numel()} codes, which need a qmap{i} of "
                f"256 values and an absmax{i} for each 256 (or 2048) of them; there are {blocks}. The checkpoint is "
                "damaged; use an earlier one."
            )
        if block == bitsandbytes_format.BLOCK and torch.equal(
            values.cpu(), bitsandbytes_format.table(not is_second(name), torch.device("cpu"))
        ):
            result |= {f"{name}_code": codes, f"{name}_scale": scale}  # the same format
        else:
            result[name] = bitsandbytes_format.decode(codes, scale, values, block)
    return result


def _plain(value: Any) -> Any:
    """Return the value of torchao's OptimState8bit, OptimState4bit or OptimStateFp8; others as they are."""
    if isinstance(value, Tensor) and is_sharded(value) and _is_quantized(local(value)):
        part, mesh, placements = local(value).dequantize(), value.device_mesh, value.placements  # type: ignore[attr-defined]
        size = {"shape": value.shape, "stride": value.stride()}
        return type(value).from_local(part, mesh, placements, run_check=False, **size)  # type: ignore[attr-defined]
    return value.dequantize() if _is_quantized(value) else value


def _is_quantized(value: Any) -> bool:
    return isinstance(value, Tensor) and {"codes", "scale"} <= vars(value).keys()
