"""One optimizer step on many tensors in one launch and one pass: decode, update, encode, in registers.

Why: an optimizer step is bound by memory. Each byte of state is read once and written once, and a launch costs the same
for one tensor or ten thousand.

How: the arithmetic is `reference/step.py`'s. The tensors stand in a table of pointers on the device
(`pointer_table.py`), and each program owns 8 blocks of 128 elements of one of them. States with one scale for the whole
tensor (FP8-LM's) take two launches: the first only finds the new maxima, by integer atomics, the second does the work;
a third kernel, of one program a tensor, then stores the new scales.

Limits: `FAST`, the default on a GPU, contracts the moments' multiply-adds and takes the approximate reciprocal and
square root: against the reference at most one code in a thousand differs, nearly always by one. Without it every bit
agrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK, GRAD_LIMIT, rows_cols, scale_shape

from . import state_codecs, tile_io
from .launch import UNFUSED, launched
from .pointer_table import COLUMN, WIDTH
from .reference.fp8 import NEIGHBOUR as _NEIGHBOUR
from .reference.step import StepKind, StepTensors

BLOCKS = 8
FLOAT16_MAX = tl.constexpr(65504.0)
_GRAD_LIMIT = tl.constexpr(GRAD_LIMIT)
NEIGHBOUR = tl.constexpr(_NEIGHBOUR)

_WIDTH = tl.constexpr(WIDTH)
_WEIGHT, _MASTER, _MASTER_SCALE, _GRAD, _GRAD_BLOCK_SCALE, _M, _M_SCALE, _V, _V_SCALE = (
    tl.constexpr(COLUMN[name]) for name in StepTensors._fields
)
_FIRST = tl.constexpr(COLUMN["first"])


@launched(num_warps=2, **UNFUSED)
def _step_kernel(
    table_ptr, owner_ptr, hyper_ptr, amax_ptr,
    ALGORITHM: tl.constexpr, COUPLED: tl.constexpr, MASTER: tl.constexpr,
    M: tl.constexpr, V: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MASTER_TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr, M_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    ROWS: tl.constexpr, PASS: tl.constexpr, FAST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    OTHER: tl.constexpr = None if ROWS == "flat" else 0  # a block of padding is never written
    ROOTED: tl.constexpr = (V == "ue3m5" or V == "ue3m1") or V == "e4m3_root"
    PLAIN: tl.constexpr = (M == "" or M == "dense") and (V == "" or V == "dense")
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    row = table_ptr + tensor.to(tl.int64) * _WIDTH
    # Everything that a load or the arithmetic waits for is asked for first.
    hyper = hyper_ptr + tensor * 16
    grad_mul = tl.load(hyper)
    decay = tl.load(hyper + 1)
    step_size = tl.load(hyper + 2)
    inv_sqrt_bc2 = tl.load(hyper + 3)
    apply = tl.load(hyper + 4)
    beta1 = tl.load(hyper + 5)
    gain = tl.load(hyper + 6)
    beta2 = tl.load(hyper + 7)
    one_minus_beta2 = tl.load(hyper + 8)
    eps = tl.load(hyper + 9)
    weight = tile_io.pointer(row, _WEIGHT, WEIGHT_TYPE, ROWS)
    master = tile_io.pointer(row, _MASTER, MASTER_TYPE, ROWS)
    grad = tile_io.pointer(row, _GRAD, GRAD_TYPE, ROWS)
    m_codes = tile_io.pointer(row, _M, M_TYPE, ROWS)
    v_codes = tile_io.pointer(row, _V, V_TYPE, ROWS)
    master_scale = tile_io.pointer(row, _MASTER_SCALE, tl.float32, "any")
    grad_block_scale = tile_io.pointer(row, _GRAD_BLOCK_SCALE, tl.float32, "any")
    m_scale = tile_io.pointer(row, _M_SCALE, tl.float32, "any")
    v_scale = tile_io.pointer(row, _V_SCALE, tl.float32, "any")
    first = (program - tl.load(row + _FIRST).to(tl.int32)) * BLOCKS
    block, inside, offset, mask, packed, packed_mask = tile_io.places(row, first, ROWS, BLOCKS)

    # The weight is loaded first and stored last: the default kernel then takes 72 registers, and 14 programs fit an
    # SM of an H200. In any other order it takes 80, 12 fit, and it is 3 to 8 % slower.
    w = tile_io.load_master(weight, master, master_scale, offset, mask, MASTER, OTHER)
    g = tl.load(grad + offset, mask=mask, other=OTHER)
    if GRAD_TYPE == tl.uint8:
        scale = tl.load(grad_block_scale + block, mask=inside, other=OTHER) * grad_mul
        g = state_codecs.decode_blocks(g, scale, "e4m3")
    else:
        g = g.to(tl.float32) * grad_mul
    if COUPLED:
        g = g + tl.load(hyper + 10) * w
        if ALGORITHM == "adam":
            g = tl.where(g > _GRAD_LIMIT, _GRAD_LIMIT, tl.where(g < -_GRAD_LIMIT, -_GRAD_LIMIT, g))
    random = offset
    if not (PLAIN and (MASTER == "" or MASTER == "dense")):
        # Sixteen neighbours have the same `offset - place`: a thread that holds them computes one hash.
        place = tl.arange(0, 128)[None, :] & 15
        phase = tl.load(hyper + 12).to(tl.uint32, bitcast=True)
        random = (
            state_codecs.noise(offset - place, tl.load(hyper + 11))
            + phase
            + place.to(tl.uint32) * NEIGHBOUR
        )

    if M == "":
        u = g
    else:
        m = tile_io.load_moment(
            m_codes, m_scale, block, inside, offset, mask, packed, packed_mask, M, OTHER, BLOCKS
        )
        if ALGORITHM == "lion":
            u = beta1 * m + gain * g
            u = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, u))
            new_m = state_codecs.weighted_sum(beta2, m, one_minus_beta2, g, FAST)
        else:
            new_m = state_codecs.weighted_sum(beta1, m, gain, g, FAST)
            if ALGORITHM == "sgd":
                u = new_m
            elif ALGORITHM == "nesterov":
                u = g + beta1 * new_m
            elif ALGORITHM == "muon":
                u = beta2 * new_m + one_minus_beta2 * g
            else:
                v = tile_io.load_moment(
                    v_codes, v_scale, block, inside, offset, mask, packed, packed_mask, V, OTHER, BLOCKS
                )  # fmt: skip
                if ROOTED:
                    v = v * v
                v = state_codecs.weighted_sum(beta2, v, one_minus_beta2, g * g, FAST)
                v_root = state_codecs.root(v, FAST)
                u = state_codecs.quotient(new_m, v_root * inv_sqrt_bc2 + eps, FAST)
                new_v = v_root if ROOTED else v
    w = u if ALGORITHM == "muon" else w * decay - step_size * u

    # Loads do not wait for the decision to skip, stores do.
    live = block >= tl.where(apply > 0, 0, 0x7FFFFFFF)
    inside, mask, packed_mask = inside & live, mask & live[:, None], packed_mask & live[:, None]
    amax = amax_ptr + tensor * 4
    if PASS == 1:
        if M == "tensor":
            tile_io.offer_maximum(amax, new_m, mask)
        if V == "tensor":
            tile_io.offer_maximum(amax + 1, new_v, mask)
        if MASTER == "tensor":
            tile_io.offer_maximum(amax + 2, w, mask)
    else:
        new_scale = 0.0
        if M != "":
            if M == "tensor":
                new_scale = state_codecs.power_of_two_scale(tl.load(amax), state_codecs.E4M3_MAX)
            tile_io.store_moment(
                m_codes, m_scale, new_m, block, inside, offset, mask, packed, packed_mask,
                random, new_scale, M, FAST, BLOCKS,
            )  # fmt: skip
        if V != "":
            if V == "tensor":
                new_scale = state_codecs.power_of_two_scale(tl.load(amax + 1), FLOAT16_MAX)
            tile_io.store_moment(
                v_codes, v_scale, new_v, block, inside, offset, mask, packed, packed_mask,
                random, new_scale, V, FAST, BLOCKS,
            )  # fmt: skip
        if MASTER == "tensor":
            new_scale = state_codecs.power_of_two_scale(tl.load(amax + 2), FLOAT16_MAX)
        tile_io.store_master(weight, master, w, offset, mask, random, new_scale, MASTER)


@launched(num_warps=1)
def _scales_kernel(
    table_ptr, hyper_ptr, amax_ptr, M: tl.constexpr, V: tl.constexpr, MASTER: tl.constexpr
):  # fmt: skip
    """Store the new scales of one tensor and clear its maxima."""
    tensor = tl.program_id(0)
    row = table_ptr + tensor.to(tl.int64) * _WIDTH
    amax = amax_ptr + tensor * 4
    apply = tl.load(hyper_ptr + tensor * 16 + 4) > 0
    if M:
        scale = state_codecs.power_of_two_scale(tl.load(amax), state_codecs.E4M3_MAX)
        tl.store(tile_io.pointer(row, _M_SCALE, tl.float32, "any"), scale, mask=apply)
    if V:
        scale = state_codecs.power_of_two_scale(tl.load(amax + 1), FLOAT16_MAX)
        tl.store(tile_io.pointer(row, _V_SCALE, tl.float32, "any"), scale, mask=apply)
    if MASTER:
        scale = state_codecs.power_of_two_scale(tl.load(amax + 2), FLOAT16_MAX)
        tl.store(tile_io.pointer(row, _MASTER_SCALE, tl.float32, "any"), scale, mask=apply)
    tl.store(amax + tl.arange(0, 4), 0)


# --- launching

TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8,
    torch.int8: tl.int8, torch.int16: tl.int16, torch.float8_e4m3fn: tl.uint8,
}  # fmt: skip


class Launch(NamedTuple):
    """What one compiled kernel is for: tensors with the same `Launch` share a launch."""

    kind: StepKind
    dtypes: tuple[torch.dtype | None, ...]  # of weight, master, gradient, m and v
    rows: str  # "flat": blocks lie end to end; "sixteen": rows are multiples of 16; "any"


def launch_of(kind: StepKind, t: StepTensors) -> Launch:
    """Return the launch that `t` belongs to."""
    main = (t.weight, t.master, t.grad, t.m, t.v)
    dtypes = tuple(None if x is None else x.dtype for x in main)
    return Launch(kind, dtypes, row_layout(t.weight.shape, main))


def row_layout(shape: torch.Size, tensors: Iterable[Tensor | None]) -> str:
    """Return how the rows of tensors of `shape` lie: what a kernel may take for granted about addresses."""
    if any(x is not None and x.data_ptr() % 16 for x in tensors):
        return "any"
    return _layout_of(_extent(shape)[2])


def _layout_of(cols: int) -> str:
    return "flat" if cols % BLOCK == 0 else "sixteen" if cols % 16 == 0 else "any"


@lru_cache(maxsize=4096)
def _extent(shape: torch.Size) -> tuple[int, int, int]:
    """Return what a shape decides of a table's row, `_EXTENT`. Kept, as tables of gradients are made at every step."""
    rows, per_row = scale_shape(shape)
    return rows * per_row, per_row, rows_cols(shape)[1]


_EXTENT = ("blocks", "blocks_per_row", "cols")


def table_row(shape: torch.Size, **tensors: Tensor | None) -> dict[str, int]:
    """Return the row of a pointer table for tensors of one parameter of `shape`."""
    addresses = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
    return addresses | dict(zip(_EXTENT, _extent(shape), strict=True))


def groups_of(
    tensors: Sequence[tuple[torch.dtype, torch.Size, int]],
) -> Iterator[tuple[torch.dtype, str, list[int], dict[str, Sequence[int]]]]:
    """Group contiguous tensors, given by dtype, shape and address, that share a launch.

    Yields the dtype of each group, its layout (see `row_layout`), the places of its tensors in the list, and columns of
    a pointer table, "grad" for their addresses.
    """
    found: dict[tuple[torch.dtype, str], list[int]] = {}
    extents = [_extent(shape) for _, shape, _ in tensors]
    for i, ((dtype, _, address), extent) in enumerate(zip(tensors, extents, strict=True)):
        layout = "any" if address % 16 else _layout_of(extent[2])
        found.setdefault((dtype, layout), []).append(i)
    for (dtype, layout), of in found.items():
        columns: dict[str, Sequence[int]] = {"grad": [tensors[i][2] for i in of]}
        columns |= zip(_EXTENT, zip(*(extents[i] for i in of), strict=True), strict=True)
        yield dtype, layout, of, columns


def step_table(
    launch: Launch,
    rows: Tensor,  # int64 [tensors, 16], see pointer_table.py
    owner: Tensor,  # int32 [programs]
    hyper: Tensor,  # float32 [tensors, 16], columns as `reference.step.HYPER`
    amax: Tensor,  # int32 [tensors, 4], zeros and left as zeros: for formats with one scale a tensor
    fast: bool = True,
) -> None:
    """Step every tensor of a table. `fast`: approximate reciprocals and roots, contracted multiply-adds."""
    if not len(owner):
        return
    kind = launch.kind
    dtypes = [tl.float32 if d is None else TYPES[d] for d in launch.dtypes]
    if kind.master in ("split", "dithered"):
        dtypes[0] = tl.int16  # the bits of bfloat16
    if kind.v == "dithered":
        dtypes[4] = tl.int16
    one_scale = [kept == "tensor" for kept in (kind.m, kind.v, kind.master)]
    for number in (1, 2) if any(one_scale) else (0,):
        _step_kernel(
            (len(owner), 1, 1),
            rows, owner, hyper, amax, kind.algorithm, kind.coupled, kind.master, kind.m, kind.v, *dtypes,
            launch.rows, number, fast, BLOCKS,
        )  # fmt: skip
    if any(one_scale):
        _scales_kernel((len(rows), 1, 1), rows, hyper, amax, *one_scale)
