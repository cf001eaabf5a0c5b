"""Sums of tensors over the GPUs of one host in one launch: E4M3 blocks written straight into each other's memory.

The bits are those of `wire.py`'s kernels around an all-to-all and an all-gather: the same blocks, added up in float32
in the order of ranks, and every rank decodes its own part from the codes as all others do.

Rank j owns stripe j of the tensor (`reference/wire.py`). Programs of the same number on all ranks work on the same
tiles, a round at a time, and wait for none but each other:

    1  quantize a tile of every stripe into its owner's inbox, then raise my flag there
    2  once all flags of my inbox are up: add up, quantize, write into every rank's outbox, raise my flag there
    3  once all flags of my outbox are up: decode a tile of every stripe (a reduce-scatter ends with step 2)

A program does step 1 of a round, 2 of the round before, and 3 of the one before that, and several programs share a
multiprocessor, so links and memory are busy at once. Each rank starts at another owner, so all links are.

Inbox and outbox hold SLOTS rounds, and nothing is waited for to use a slot again. A rank writes round r + 3 after it
saw the outbox flags of r, so the inbox has been read; an owner writes the outbox of r + 3 after it saw the inbox flags
of r + 3, which are raised after the outbox of r was read. Rounds are counted in memory over all launches, so a captured
launch can be replayed.

A flag that is not up by the deadline ends the wait: what would be made of it is NaN on all ranks that are left, and
`missing` names the rank. Bytes over the links, each way, of n elements between N ranks: 2 (N-1)/N n × 1.03.

Limits: memory that GPUs share, at most 8 ranks; launches of one workspace must be in the same order on all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK, E4M3

from .fp8 import casts_in_hardware, decode, element_offsets, encode_blocks, round_to
from .launch import Launcher, on_device, raw_stream
from .reference.wire import Layout
from .wire import divide, division

MOST_RANKS = 8
PROGRAMS = 264
BLOCKS = 32  # of a tile
SLOTS = 4  # 3 are needed; a power of two keeps its place when the count of rounds overflows

_MAX = tl.constexpr(E4M3.max)
_PROGRAMS = tl.constexpr(PROGRAMS)
_RANKS = tl.constexpr(MOST_RANKS)
_SLOTS = tl.constexpr(SLOTS)
_CODES = tl.constexpr(BLOCKS * BLOCK)  # bytes of a tile
_TILE = tl.constexpr(BLOCKS * (BLOCK + 4))  # bytes with its scales
_FLAGS = tl.constexpr(2 * PROGRAMS * MOST_RANKS * 4)  # bytes
_BYTES = tl.constexpr(tl.pointer_type(tl.uint8))
_INTS = tl.constexpr(tl.pointer_type(tl.int32))
_FLOATS = tl.constexpr(tl.pointer_type(tl.float32))


class Workspace(NamedTuple):
    """What a rank of a group writes through.

    Attributes:
        peers: int64 [world], where each rank's memory of `workspace_bytes`, zeroed at first, is for this one.
        rounds: int32 [PROGRAMS] of zeros, on the device.
        missing: int32 [world] of zeros, in memory of the host that the device writes to: the number of the last call
            that a rank was missing from.
        rank: of this process in the group.
        programs: to launch, at most PROGRAMS; the same on all ranks.
    """

    peers: Tensor
    rounds: Tensor
    missing: Tensor
    rank: int
    programs: int = PROGRAMS


def workspace_bytes(world: int) -> int:
    """Return the memory that each of `world` ranks gives."""
    return int(_FLAGS.value + 2 * PROGRAMS * SLOTS * world * _TILE.value)


_INTERPRETED = tl.constexpr(not isinstance(decode, triton.JITFunction))

# Spins on a flag until it is at least $2 or the clock is past $3; returns whether it was late. Threads look without
# acquiring, which would empty the cache of the multiprocessor each time.
_WAIT = tl.constexpr("""{
.reg .pred up, early;
.reg .b32 seen, ahead;
.reg .b64 now;
again:
ld.relaxed.sys.global.b32 seen, [$1];
sub.s32 ahead, seen, $2;
setp.ge.s32 up, ahead, 0;
@up bra done;
mov.u64 now, %globaltimer;
setp.lt.u64 early, now, $3;
@early bra again;
done:
ld.acquire.sys.global.b32 seen, [$1];
sub.s32 ahead, seen, $2;
shr.u32 $0, ahead, 31;
}""")
_CLOCK = tl.constexpr("mov.u64 $0, %globaltimer;")


@triton.jit
def _deadline(timeout):
    """Return when to stop waiting: in ns of the GPU's clock, or in looks at a flag in the interpreter."""
    if _INTERPRETED:
        return timeout
    else:
        now = tl.inline_asm_elementwise(_CLOCK, "=l", [], tl.int64, is_pure=False, pack=1)
        return now + timeout


@triton.jit
def _flags(memory, phase: tl.constexpr, program, source):
    """Return the place of a flag in a rank's memory."""
    return memory.to(_INTS, bitcast=True) + (phase * _PROGRAMS + program) * _RANKS + source


@triton.jit
def _raise_flags(peers_ptr, phase: tl.constexpr, program, rank, value, WORLD: tl.constexpr):
    """Tell all ranks that what this program wrote is there."""
    tl.debug_barrier()
    lane = tl.arange(0, _RANKS)
    memory = tl.load(peers_ptr + lane, mask=lane < WORLD, other=0)
    flags = _flags(memory, phase, program, rank)
    values = tl.zeros((_RANKS,), tl.int32) + value
    tl.atomic_xchg(flags, values, mask=lane < WORLD, sem="release", scope="sys")


@triton.jit
def _await_flags(
    mine, phase: tl.constexpr, program, value, deadline, missing_ptr, call, WORLD: tl.constexpr
):
    """Wait for all ranks; return 1 if one is late, which is noted."""
    source = tl.arange(0, _RANKS) % WORLD
    flags = _flags(mine, phase, program, source)
    if _INTERPRETED:
        looks = tl.cast(0, tl.int64)
        none = tl.zeros((_RANKS,), tl.int32)
        late = tl.where(tl.atomic_add(flags, none, sem="acquire", scope="sys") - value < 0, 1, 0)
        while (tl.max(late, axis=0) > 0) & (looks < deadline):
            late = tl.where(
                tl.atomic_add(flags, none, sem="acquire", scope="sys") - value < 0, 1, 0
            )
            looks += 1
    else:
        values = tl.zeros((_RANKS,), tl.int32) + value
        until = tl.zeros((_RANKS,), tl.int64) + deadline
        late = tl.inline_asm_elementwise(
            _WAIT, "=r,l,r,l", [flags, values, until], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    tl.store(missing_ptr + source, tl.zeros((_RANKS,), tl.int32) + call, mask=late != 0)
    return tl.max(late, axis=0)


@triton.jit
def _tile(memory, box: tl.constexpr, program, turn, place, WORLD: tl.constexpr):
    """Return where codes (uint8) and scales (float32) of a tile are: of rank `place` in the inbox (0) or outbox (1)."""
    slot = ((box * _PROGRAMS + program) * _SLOTS + (turn & (_SLOTS - 1))) * WORLD + place
    codes = memory.to(_BYTES, bitcast=True) + _FLAGS + slot * tl.cast(_TILE, tl.int64)
    scales = tl.multiple_of((codes + _CODES).to(_FLOATS, bitcast=True), 16)
    return tl.multiple_of(codes, 16), scales


@triton.jit
def _load_tile(
    memory, box: tl.constexpr, program, turn, place, WORLD: tl.constexpr, BLOCKS: tl.constexpr
):
    codes, scales = _tile(memory, box, program, turn, place, WORLD)
    lane, block = tl.arange(0, 128), tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + lane[None, :]
    # Past the first cache, which does not see what other GPUs write.
    code = tl.load(codes + at, cache_modifier=".cg")
    return code, tl.load(scales + block, cache_modifier=".cg")


@triton.jit
def _store_tile(
    memory,
    box: tl.constexpr,
    program,
    turn,
    place,
    code,
    scale,
    WORLD: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    codes, scales = _tile(memory, box, program, turn, place, WORLD)
    lane, block = tl.arange(0, 128), tl.arange(0, BLOCKS)
    tl.store(codes + block[:, None] * 128 + lane[None, :], code)
    tl.store(scales + block, scale)


@triton.jit
def _send(
    x_ptr, x_scales_ptr, peers_ptr, program, turn, rank, within, n_blocks, per, blocks_per_row, cols,
    WORLD: tl.constexpr, CODES: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write a tile of every stripe into the inbox of its owner."""
    for i in tl.static_range(WORLD):
        owner = (rank + 1 + i) % WORLD
        block = owner * tl.cast(per, tl.int64) + within
        inside = (within < per) & (block < n_blocks)
        offset, mask = element_offsets(block, inside, blocks_per_row, cols, EVEN)
        x = tl.load(x_ptr + offset, mask=mask, other=0)
        if CODES:
            code, scale = x, tl.load(x_scales_ptr + block, mask=inside, other=0.0)
        else:
            code, scale = encode_blocks(x.to(tl.float32), 3, _MAX, HARDWARE)
        there = tl.load(peers_ptr + owner)
        _store_tile(there, 0, program, turn, rank, code, scale, WORLD, BLOCKS)


@triton.jit
def _add_up(
    mine, program, turn, by, WORLD: tl.constexpr, DIVIDE: tl.constexpr, BLOCKS: tl.constexpr
):
    """Return the sum (float32 [BLOCKS, 128]) of what all ranks wrote into the inbox, divided."""
    total = tl.zeros((BLOCKS, 128), dtype=tl.float32)
    for source in tl.static_range(WORLD):
        code, scale = _load_tile(mine, 0, program, turn, source, WORLD, BLOCKS)
        total += decode(code, 3, -6, True) * scale[:, None]
    return divide(total, by, DIVIDE)


@triton.jit
def _quantize_sum(total, error_ptr, at, inside, ERROR: tl.constexpr, HARDWARE: tl.constexpr):
    """Return codes and scales of a sum; what is cut off is kept and added the next time."""
    if ERROR:
        total += tl.load(error_ptr + at, mask=inside, other=0.0)
    code, scale = encode_blocks(total, 3, _MAX, HARDWARE)
    if ERROR:  # none of a block that is not finite, whose error would stay for ever
        lost = total - decode(code, 3, -6, True) * scale[:, None]
        kept = (scale == scale)[:, None] & (at >= 0)
        tl.store(error_ptr + at, tl.where(kept, lost, 0.0), mask=inside)
    return code, scale


@triton.jit
def _receive(
    out_ptr, out_scales_ptr, mine, late, program, turn, rank, within, n_blocks, per, blocks_per_row, cols,
    WORLD: tl.constexpr, CODES: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Decode a tile of every stripe from the outbox; NaN if one is late."""
    for i in tl.static_range(WORLD):
        owner = (rank + 1 + i) % WORLD
        block = owner * tl.cast(per, tl.int64) + within
        inside = (within < per) & (block < n_blocks)
        offset, mask = element_offsets(block, inside, blocks_per_row, cols, EVEN)
        code, scale = _load_tile(mine, 1, program, turn, owner, WORLD, BLOCKS)
        scale = tl.where(late != 0, float("nan"), scale)
        if CODES:
            tl.store(out_ptr + offset, code, mask=mask)
            tl.store(out_scales_ptr + block, scale, mask=inside)
        else:
            value = round_to(decode(code, 3, -6, True) * scale[:, None], out_ptr.dtype.element_ty)
            tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[
    "rank", "rounds", "call", "divisor", "n_blocks", "per", "blocks_per_row", "cols", "timeout",
])  # fmt: skip
def _two_shot_kernel(
    x_ptr, x_scales_ptr, out_ptr, out_scales_ptr, error_ptr, peers_ptr, rounds_ptr, missing_ptr,
    rank, rounds, call, divisor, n_blocks, per, blocks_per_row, cols, timeout,
    WORLD: tl.constexpr, SCATTER: tl.constexpr, CODES_IN: tl.constexpr, CODES_OUT: tl.constexpr,
    DIVIDE: tl.constexpr, ERROR: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    program, stride = tl.program_id(0), tl.num_programs(0) * BLOCKS
    mine = tl.load(peers_ptr + rank)
    first = tl.load(rounds_ptr + program)
    deadline = _deadline(timeout)
    start = program.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    for step in range(rounds + 2):
        turn = first + step
        if step < rounds:
            _send(
                x_ptr, x_scales_ptr, peers_ptr, program, turn, rank, start + step * stride,
                n_blocks, per, blocks_per_row, cols, WORLD, CODES_IN, HARDWARE, EVEN, BLOCKS,
            )  # fmt: skip
            _raise_flags(peers_ptr, 0, program, rank, turn + 1, WORLD)
        if (step >= 1) & (step <= rounds):
            late = _await_flags(mine, 0, program, turn, deadline, missing_ptr, call, WORLD)
            total = _add_up(mine, program, turn - 1, divisor, WORLD, DIVIDE, BLOCKS)
            within = start + (step - 1) * stride
            at = within[:, None] * 128 + tl.arange(0, 128)[None, :]
            if SCATTER:
                total = tl.where(late != 0, float("nan"), total)
                value = round_to(total, out_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + at, value, mask=at < cols)
            else:
                inside = (within < per)[:, None] & (at >= 0)
                code, scale = _quantize_sum(total, error_ptr, at, inside, ERROR, HARDWARE)
                scale = tl.where(late != 0, float("nan"), scale)
                for i in tl.static_range(WORLD):
                    there = tl.load(peers_ptr + (rank + 1 + i) % WORLD)
                    _store_tile(there, 1, program, turn - 1, rank, code, scale, WORLD, BLOCKS)
            _raise_flags(peers_ptr, 1, program, rank, turn, WORLD)
        if step >= 2:
            late = _await_flags(mine, 1, program, turn - 1, deadline, missing_ptr, call, WORLD)
            if not SCATTER:
                _receive(
                    out_ptr, out_scales_ptr, mine, late, program, turn - 2, rank, start + (step - 2) * stride,
                    n_blocks, per, blocks_per_row, cols, WORLD, CODES_OUT, EVEN, BLOCKS,
                )  # fmt: skip
    tl.store(rounds_ptr + program, first + rounds)


# Every multiplication rounds on its own: contracting them would give other bits than the reference.
_launch = Launcher(_two_shot_kernel, num_warps=4, enable_fp_fusion=False)


def all_reduce(
    x: Tensor,  # float32, bfloat16, float16, or uint8 codes of E4M3; contiguous, rows × cols elements
    x_scales: Tensor | None,  # float32 [blocks], of codes
    out: Tensor,  # as `x`, may be the same
    out_scales: Tensor | None,
    layout: Layout,
    space: Workspace,
    call: int,
    timeout: float,  # seconds
    divisor: float = 1.0,
    error: Tensor | None = None,  # float32 [per × 128], see `reference.wire.reduce_blocks`
) -> None:
    """Add up a tensor over all ranks, in float32 in their order, and divide by `divisor`."""
    _run(x, x_scales, out, out_scales, error, layout, space, call, timeout, divisor, False)


def reduce_scatter(
    x: Tensor,  # float32, bfloat16 or float16, contiguous, world × cols elements
    out: Tensor,  # of cols elements
    layout: Layout,  # of `world` rows
    space: Workspace,
    call: int,
    timeout: float,  # seconds
    divisor: float = 1.0,
) -> None:
    """Add up a row over all ranks, in float32 in their order, divide by `divisor`, and round to the dtype of `out`."""
    _run(x, None, out, None, None, layout, space, call, timeout, divisor, True)


def _run(
    x: Tensor, x_scales: Tensor | None, out: Tensor, out_scales: Tensor | None, error: Tensor | None,
    layout: Layout, space: Workspace, call: int, timeout: float, divisor: float, scatter: bool,
) -> None:  # fmt: skip
    tiles = triton.cdiv(layout.per, BLOCKS)
    rounds = triton.cdiv(tiles, space.programs)
    grid = (triton.cdiv(tiles, max(rounds, 1)), 1, 1)
    wait = int(timeout * (1e6 if _INTERPRETED else 1e9))
    tensors = [x, x_scales, out, out_scales, error]
    places = [0 if t is None else t.data_ptr() % 16 for t in tensors]
    filled = [x if t is None else t for t in tensors]
    how, by = division(divisor)
    flags = (x_scales is not None, out_scales is not None, how, error is not None)
    even, large = layout.cols % BLOCK == 0, layout.cols >= 2**31
    key = (layout.world, scatter, *flags, even, large, x.dtype, out.dtype, x.device, grid, *places)
    with on_device(x.device):
        _launch(
            key, grid, raw_stream(x),
            *filled, space.peers, space.rounds, space.missing,
            space.rank, rounds, call, by, layout.blocks, layout.per, layout.blocks_per_row, layout.cols, wait,
            layout.world, scatter, *flags, casts_in_hardware(x.device), even, BLOCKS,
        )  # fmt: skip
