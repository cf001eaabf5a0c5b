"""Parameters sharded over ranks (DTensor: FSDP2, tensor parallelism): every rank steps its own part.

A block of 128 never crosses a row, so a rank's part of the codes and scales belongs to its part of the parameter. The
kernels see plain tensors of this rank. `optimizer.state` holds DTensors with the parameter's mesh and placements, which
`torch.distributed.checkpoint` reshards like any other. To agree, ranks reduce two numbers over the parameter's mesh:
the largest gradient, because either all ranks take a step or none does, and the norm that clipping needs.

Limits: a parameter may be sharded along its rows (dim 0) in any way, along dim 1 only as a matrix whose parts have a
multiple of 128 columns. Formats with one scale a tensor ("fp8-lm", master "fp16") cannot be sharded. Ranks agree within
the meshes of their parameters; pipeline stages have disjoint meshes and do not agree. The codes of states="fp8" are
float8 DTensors: torch's checkpoints handle them, gloo's collectives (`full_tensor()`) refuse them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack.errors import CheckpointError, ModelError
from fp8stack.formats import BLOCK
from fp8stack.tensor_kinds import is_sharded

from .state_formats import State


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        return x.to_local()  # type: ignore[attr-defined, no-any-return]


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Write `value`, for this rank's part, to a parameter."""
    local(parameter).copy_(value)


def local_state(state: State) -> State:
    """Return `state` with this rank's part of every DTensor."""
    return {k: local(v) if isinstance(v, Tensor) else v for k, v in state.items()}


def distribute(value: Any, parameter: Tensor) -> Any:
    """Turn a plain tensor, made for this rank's part of `parameter`, into a DTensor sharded like it.

    Numbers (0-d) stay as they are, and so does what is no tensor.
    """
    plain = isinstance(value, Tensor) and value.ndim > 0 and not is_sharded(value)
    if not (plain and is_sharded(parameter)):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, part = list(parameter.shape), local(parameter)
    if value.shape != part.shape:
        # scales, or codes of 4 bits: sharded along dim 0, or evenly along dim 1
        shape = [parameter.shape[0], *value.shape[1:]]
        if any(p.is_shard(1) for p in placements):
            shape[1] = shape[1] * parameter.shape[1] // part.shape[1]
    size = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return type(parameter).from_local(value, mesh, placements, run_check=False, **size)  # type: ignore[attr-defined]


def collect(value: Tensor, parameter: Tensor, name: str) -> Tensor:
    """Return this rank's part of a saved tensor, which may be sharded in another way or not at all.

    Raises:
        CheckpointError: if it has another number of rows than the parameter; it is called `name`.
    """
    if not is_sharded(parameter):
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    if value.ndim == 0:
        return value
    if value.shape[0] != parameter.shape[0]:
        raise CheckpointError(
            f"{name} has {value.shape[0]} rows and the parameter, which is sharded, {parameter.shape[0]} over all "
            "ranks. Load whole tensors or DTensors: torch.distributed.checkpoint gives these."
        )
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if not is_sharded(value):  # every rank has all of it
        whole = value.to(parameter.device)
        value = type(parameter).from_local(whole, mesh, run_check=False)  # type: ignore[attr-defined]
    return local(value.redistribute(mesh, placements))  # type: ignore[attr-defined]


def check_placements(parameter: Tensor, states: str, master: str | None) -> None:
    """Raise ModelError if the state of a sharded parameter cannot be kept in these formats."""
    if not is_sharded(parameter):
        return
    shape, mesh = tuple(parameter.shape), parameter.device_mesh  # type: ignore[attr-defined]
    quantized = states not in ("keep", "fp32")
    if (quantized and states == "fp8-lm") or master == "fp16":
        raise ModelError(
            f"a parameter of shape {shape} is sharded, and states={states!r}, master={master!r} keep one scale for a "
            'whole tensor, which its parts cannot share. Use states="8bit" or "fp8", master="split24" or "fp32".'
        )
    ranks: dict[int, int] = {}
    for size, placement in zip(mesh.shape, parameter.placements, strict=True):  # type: ignore[attr-defined]
        if placement.is_partial():
            raise ModelError(f"a parameter of shape {shape} is {placement}: reduce it first.")
        dim = getattr(placement, "dim", 0)
        ranks[dim] = ranks.get(dim, 1) * size
    for dim, size in ranks.items():
        fits = dim == 1 and len(shape) == 2 and shape[1] % (BLOCK * size) == 0
        if quantized and dim and not fits:
            raise ModelError(
                f"a parameter of shape {shape} is sharded along dim {dim} over {size} ranks. Blocks of {BLOCK} need "
                f"dim 0, or a matrix whose columns are a multiple of {BLOCK} × ranks. Keep its state in float32: "
                'optimizer.override(parameter, states="fp32").'
            )


def place_gradients(parameters: Iterable[Tensor]) -> None:
    """Place gradients as their parameters are: tensor parallelism leaves some whole, or as partial sums."""
    for p in [p for p in parameters if type(p) is not torch.nn.Parameter]:
        g: Any = p.grad
        whole = is_sharded(p) and not any(x.is_partial() for x in p.placements)  # type: ignore[attr-defined]
        if whole and g is not None and is_sharded(g) and g.placements != p.placements:  # type: ignore[attr-defined]
            p.grad = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]


def first_element(parameter: Tensor) -> int:
    """Return which element of the whole parameter begins the rows that this rank has."""
    if not is_sharded(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return int(offset[0]) * parameter.shape[1:].numel() if offset else 0


class Share(NamedTuple):
    """Which ranks hold parts of a parameter, and how many hold the same part."""

    mesh: Any  # torch's DeviceMesh
    copies: int


def share_of(parameter: Tensor) -> Share | None:
    """Return the share of a DTensor, None for a tensor of this rank alone."""
    if not is_sharded(parameter):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    held = zip(mesh.shape, placements, strict=True)
    return Share(mesh, math.prod(size for size, placement in held if placement.is_replicate()))


def shares_of(groups: Iterable[dict[str, Any]]) -> list[Share | None]:
    """Return the shares of all parameters, in an order that is the same on every rank."""
    return list(dict.fromkeys(share_of(p) for group in groups for p in group["params"]))


def reduce_largest(largest: Tensor, shares: Iterable[Share | None]) -> None:
    """Replace `largest` (float32, 0-d, >= 0 or NaN) by the largest over all ranks.

    The bits are compared as integers, where a NaN is larger than every number.
    """
    for mesh in dict.fromkeys(share.mesh for share in shares if share is not None):
        _all_reduce(largest.view(torch.int32), mesh, torch.distributed.ReduceOp.MAX)


def reduce_squares(squares: dict[Share | None, Tensor]) -> Tensor:  # float64, 0-d
    """Return the sum of squares over all ranks. `squares`: this rank's sums, by share."""
    whole, parts = torch.zeros_like(next(iter(squares.values()))), dict[Any, Tensor]()
    for share, value in squares.items():
        if share is None:
            whole = whole + value
        else:
            parts[share.mesh] = parts.get(share.mesh, 0) + value / share.copies
    for mesh, value in parts.items():
        _all_reduce(value, mesh, torch.distributed.ReduceOp.SUM)
        whole = whole + value
    return whole


def _all_reduce(value: Tensor, mesh: Any, operation: Any) -> None:
    """Reduce in place, on the mesh's type of device: under FSDP2's CPU offload the groups may have NCCL only."""
    there = value.to(mesh.device_type)
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(there, operation, group=mesh.get_group(dim))
    if there is not value:
        value.copy_(there)
