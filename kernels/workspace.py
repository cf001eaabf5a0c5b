"""Memory that the GPUs of a host write into each other, and the flags that say when it is there.

Why: `two_shot.py` needs no collective of NCCL, and no host, to know that another rank has written or read a tile.

How: every rank gives a workspace. For each program it has an inbox and an outbox of two steps, with a place for a tile
of every rank in each, and a flag for each rank. A tile is BLOCKS blocks of E4M3 codes, then their scales. A flag is the
number of steps that a rank has ended. It is stored with release semantics over the whole system, after a barrier of
the program that wrote the tiles, and read with acquire semantics; so a reader that sees a number sees all tiles written
before it. Numbers only grow, modulo 2^32, and are compared by the sign of their difference.

Limits: MOST_RANKS ranks. In Triton's interpreter ranks are processes that share memory, and atomics stand in for the
loads and stores of flags.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import BLOCK

from .fp8 import BYTES, FLOATS, INTERPRETED, INTS

MOST_RANKS = 8
PROGRAMS = 528
BLOCKS = 32  # of a tile
WARPS = 8

_PROGRAMS = tl.constexpr(PROGRAMS)
_RANKS = tl.constexpr(MOST_RANKS)
_THREADS = tl.constexpr(32 * WARPS)  # a flag for each, so that all find out by way of shared memory
_CODES = tl.constexpr(BLOCKS * BLOCK)  # bytes of a tile
_TILE = tl.constexpr(BLOCKS * (BLOCK + 4))  # bytes with its scales
_FLAGS = tl.constexpr(PROGRAMS * MOST_RANKS * 4)  # bytes


class Workspace(NamedTuple):
    """What a rank of a group writes through.

    Attributes:
        peers: int64 [world], where each rank's memory of `bytes_of`, zeroed at first, is for this one.
        steps: int32 [2, PROGRAMS] of zeros, on the device: steps that each program has ended, and whether it gave up.
        missing: int32 [world] of zeros, in memory of the host that the device writes to: the number of the call
            that a rank was missing from first.
        rank: of this process in the group.
        programs: to launch, at most PROGRAMS; the same on all ranks.
    """

    peers: Tensor
    steps: Tensor
    missing: Tensor
    rank: int
    programs: int = PROGRAMS


def bytes_of(world: int) -> int:
    """Return the memory that each of `world` ranks gives."""
    return int(_FLAGS.value + 2 * 2 * PROGRAMS * world * _TILE.value)


# A thread spins on the flag $1 until it is at least $2 or the clock is past $3, and returns whether it was late: the
# sign bit of flag - $2, shifted down. It spins with relaxed loads, since an acquire empties the cache of the
# multiprocessor each time, and acquires once at the end.
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
# A flag has one writer, so a store does; an atomic would not reach the memory of other GPUs over every bus. Release:
# all that this program wrote before, and the barrier ordered before this thread, is visible first.
_RAISE = tl.constexpr("""{
.reg .pred mine;
setp.ne.s32 mine, $3, 0;
@mine st.release.sys.global.b32 [$1], $2;
mov.b32 $0, $2;
}""")
_CLOCK = tl.constexpr("mov.u64 $0, %globaltimer;")


@triton.jit
def _flags(memory, program, source):
    """Return the place of a rank's flag in the memory of another."""
    return memory.to(INTS, bitcast=True) + program * _RANKS + source


@triton.jit
def deadline_after(timeout):
    """Return when to stop waiting: in ns of the GPU's clock, or in looks at a flag in the interpreter."""
    if INTERPRETED:
        return timeout
    else:
        now = tl.inline_asm_elementwise(_CLOCK, "=l", [], tl.int64, is_pure=False, pack=1)
        return now + timeout


@triton.jit
def raise_flags(peers_ptr, program, rank, value, WORLD: tl.constexpr):
    """Tell all ranks that what this program wrote is there."""
    tl.debug_barrier()  # the stores of all threads come before the flags
    lane = tl.arange(0, _THREADS)
    memory = tl.load(peers_ptr + lane, mask=lane < WORLD, other=0)
    flags = _flags(memory, program, rank)
    if INTERPRETED:
        tl.atomic_xchg(flags, value, mask=lane < WORLD, sem="release", scope="sys")
    else:
        mine = tl.where(lane < WORLD, 1, 0)
        tl.inline_asm_elementwise(
            _RAISE, "=r,l,r,r", [flags, value, mine], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_flags(
    mine, program, rank, value, deadline, missing_ptr, call, WORLD: tl.constexpr
):  # fmt: skip
    """Wait for all ranks; return 1 if one is late, which is noted, the same to all threads.

    This one never is: what its program wrote, the program sees, even if its flag is on its way when time is up.
    """
    source = tl.arange(0, _THREADS) % WORLD
    flags = _flags(mine, program, source)
    if INTERPRETED:
        none = tl.zeros((_THREADS,), tl.int32)
        late = none + 1
        looks = tl.cast(0, tl.int64)
        while (tl.max(late, axis=0) > 0) & (looks <= deadline):
            seen = tl.atomic_add(flags, none, sem="acquire", scope="sys")
            late = tl.where(seen - value < 0, 1, 0)
            looks += 1
    else:
        late = tl.inline_asm_elementwise(
            _WAIT, "=r,l,r,l", [flags, value, deadline], tl.int32, is_pure=False, pack=1
        )
    late = tl.where(source == rank, 0, late)
    tl.debug_barrier()  # and before what other threads load next
    tl.store(missing_ptr + source, call, mask=late != 0)
    return tl.max(late, axis=0)


@triton.jit
def _tile(memory, box: tl.constexpr, program, turn, place, WORLD: tl.constexpr):
    """Return where codes (uint8) and scales (float32) of a tile are: of rank `place` in the inbox (0) or outbox (1)."""
    # boxes, programs, the two steps, ranks: in this order; the flags lie before all of them
    slot = ((box * _PROGRAMS + program) * 2 + (turn & 1)) * WORLD + place
    codes = memory.to(BYTES, bitcast=True) + _FLAGS + slot * tl.cast(_TILE, tl.int64)
    scales = tl.multiple_of((codes + _CODES).to(FLOATS, bitcast=True), 16)
    return tl.multiple_of(codes, 16), scales


@triton.jit
def _code_pointers(codes, WORDS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return where the codes of a tile are: [BLOCKS, 128], or [BLOCKS, 32] words of four that are only moved."""
    block = tl.arange(0, BLOCKS)[:, None]
    if WORDS:
        return codes.to(INTS, bitcast=True) + block * 32 + tl.arange(0, 32)[None, :]
    else:
        return codes + block * 128 + tl.arange(0, 128)[None, :]


@triton.jit
def load_tile(
    memory, box: tl.constexpr, program, turn, place,
    WORDS: tl.constexpr, WORLD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    codes, scales = _tile(memory, box, program, turn, place, WORLD)
    # Past the first cache, which does not see what other GPUs write.
    code = tl.load(_code_pointers(codes, WORDS, BLOCKS), cache_modifier=".cg")
    return code, tl.load(scales + tl.arange(0, BLOCKS), cache_modifier=".cg")


@triton.jit
def store_tile(
    memory, box: tl.constexpr, program, turn, place, code, scale,
    WORDS: tl.constexpr, WORLD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    codes, scales = _tile(memory, box, program, turn, place, WORLD)
    tl.store(_code_pointers(codes, WORDS, BLOCKS), code)
    tl.store(scales + tl.arange(0, BLOCKS), scale)
