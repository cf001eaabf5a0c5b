"""A matrix in FP8 with a scale known before it is read; the twin of `reference/cast_delayed.py`, bit for bit.

Why: with the scale known, one kernel reads the matrix once.

How: every program casts a tile with the scale that the state holds, and notes the tile's largest magnitude in one of
512 places, so that few programs meet at one. A second kernel of one program then writes the history and the next scale.
For the first casts of a state, torch finds the matrix's own largest magnitude, for a scale if it has none.

Limits: values beyond the scale saturate until the next cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import MiniFloat

from .cast import COLS, ROWS, prepare
from .fp8 import INTS, bits_of_magnitude, encode_ocp, reciprocal, scale_and_inverse
from .launch import UNFUSED, launched, next_power_of_2
from .reference.cast import TOKENS, Cast
from .reference.delayed_state import HEADER, NOTES, SEEDED, STATES, DelayedState
from .transpose_tiles import load_float, magnitude, place_tile, store_both

_HEADER = tl.constexpr(HEADER)


@triton.jit
def state_scale(
    state_ptr, seed_ptr, growth, SEED: tl.constexpr, AGAIN: tl.constexpr, MANTISSA: tl.constexpr
):  # float32
    """Return the scale that a cast takes from its state, or from `seed` if SEED and the state has none."""
    scale = tl.load(state_ptr)
    if AGAIN:
        scale = tl.where(scale > 0, tl.load(state_ptr + 1), 0.0)
    if SEED:
        own = (tl.load(seed_ptr).to(tl.float32, bitcast=True) * growth).to(tl.int32, bitcast=True)
        seeded, _inverse = scale_and_inverse(own, MANTISSA)
        scale = tl.where(tl.load(state_ptr) > 0, scale, seeded)
    return scale


# x × inverse, but NaN where x is infinite: n = x × 0 + inverse is the inverse for all that is finite and NaN for the
# rest, and costs one instruction. It is PTX because Triton contracts either all multiply-adds of a kernel or none.
_SCALE = tl.constexpr("""{
.reg .f32 n;
fma.rn.f32 n, $1, 0f00000000, $2;
mul.rn.f32 $0, $1, n;
}""")


@triton.jit
def encode_saturating(x, inverse, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Return uint8 codes of x × inverse: the largest where that is beyond it, NaN where x is not finite."""
    if HARDWARE:
        scaled = tl.inline_asm_elementwise(_SCALE, "=f,f,f", [x, inverse], tl.float32, True, 1)
        return encode_ocp(scaled, MANTISSA, True)
    else:
        finite = bits_of_magnitude(x) < 0x7F800000
        code = encode_ocp(tl.where(finite, x * inverse, 0.0), MANTISSA, False)
        return tl.where(finite, code, 0x7F).to(tl.uint8)


@triton.jit
def cast_rows(
    x0, x1, x2, x3, inverse, codes_ptr, codes_t_ptr, q, c, rows16, cols16,
    CODES: tl.constexpr, TRANSPOSED: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Cast a tile of float32, store it, and return its magnitudes, of four rows together."""
    c0 = encode_saturating(x0, inverse, MANTISSA, HARDWARE)
    c1 = encode_saturating(x1, inverse, MANTISSA, HARDWARE)
    c2 = encode_saturating(x2, inverse, MANTISSA, HARDWARE)
    c3 = encode_saturating(x3, inverse, MANTISSA, HARDWARE)
    store_both(
        c0, c1, c2, c3, codes_ptr, codes_t_ptr, q, c, rows16, cols16, CODES, TRANSPOSED, HARDWARE, EVEN
    )  # fmt: skip
    return magnitude(x0, x1, x2, x3)


@triton.jit
def note_amax(bits, parts_ptr, PARTS: tl.constexpr):
    """Add the largest of a tile's magnitudes to those of its program's part."""
    most = tl.max(tl.max(bits, axis=1), axis=0)
    tl.atomic_max(parts_ptr + tl.program_id(0) % PARTS, most, sem="relaxed")


@launched(num_warps=8, **UNFUSED)
def _cast_delayed_kernel(
    x_ptr, state_ptr, seed_ptr, parts_ptr, codes_ptr, codes_t_ptr, scale_ptr, rows, cols, rows16, cols16, growth,
    SEED: tl.constexpr, AGAIN: tl.constexpr, UPDATE: tl.constexpr,
    MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    scale = state_scale(state_ptr, seed_ptr, growth, SEED, AGAIN, MANTISSA)
    q, c = place_tile(tl.program_id(0), tl.cdiv(cols16, COLS), ROWS, COLS)
    x0, x1, x2, x3 = load_float(x_ptr, q, c, rows, cols, EVEN)
    most = cast_rows(
        x0, x1, x2, x3, reciprocal(scale), codes_ptr, codes_t_ptr, q, c, rows16, cols16,
        True, True, MANTISSA, HARDWARE, EVEN,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    if UPDATE:
        note_amax(most, parts_ptr, PARTS)


@launched(num_warps=4, **UNFUSED)
def _update_kernel(
    state_ptr, parts_ptr, scale_ptr, history, growth,
    MOST_RECENT: tl.constexpr, MANTISSA: tl.constexpr, HISTORY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    place = parts_ptr + tl.arange(0, PARTS)
    most = tl.max(tl.load(place), axis=0)
    tl.store(place, 0)
    position_ptr = state_ptr.to(INTS, bitcast=True) + 2
    position = tl.load(position_ptr)
    n = tl.arange(0, HISTORY)
    past = tl.load(state_ptr + _HEADER + n, mask=n < history, other=0.0)
    amax = most.to(tl.float32, bitcast=True)
    largest = tl.maximum(tl.max(tl.where(n == position, 0.0, past), axis=0), amax)
    if MOST_RECENT:
        largest = amax
    new, _inverse = scale_and_inverse((largest * growth).to(tl.int32, bitcast=True), MANTISSA)
    # an amax too small for a scale counts as zero
    if (most > 0) & (most < 0x7F800000) & (new >= 2.0**-126):
        tl.store(state_ptr + _HEADER + position, amax)
        tl.store(state_ptr, new)
        tl.store(position_ptr, (position + 1) % history)
    tl.store(state_ptr + 1, tl.load(scale_ptr))


def cast_delayed(x: Tensor, fmt: MiniFloat, of: int, update: bool, again: bool) -> Cast:
    """Quantize a matrix with the scale in its state."""
    x, g, codes, codes_t = prepare(x, fmt, True, True, 0, TOKENS)
    if not x.numel():
        return codes, codes_t, x.new_zeros((), dtype=torch.float32)
    own = STATES[of]
    update = own.learns(update)
    state, parts = own.on(x.device, update), own.parts_on(x.device)
    seed = own.casts <= SEEDED
    scale = x.new_empty((), dtype=torch.float32)
    found = state  # not read, unless
    if seed:
        found = torch.linalg.vector_norm(x.detach(), torch.inf).float().view(torch.int32)
    _cast_delayed_kernel(
        (g.programs, 1, 1),
        x, state, found, parts, codes, codes_t, scale, *g.sizes, 2.0**own.margin,
        seed, again, update, *g.casting, g.even, NOTES, ROWS, COLS,
    )  # fmt: skip
    if update:
        take_amax(own, fmt, scale)
    return codes, codes_t, scale


def take_amax(of: DelayedState, fmt: MiniFloat, scale: Tensor) -> None:
    """Write the amax that programs noted, and what it makes of the scale, to a state whose last cast had `scale`."""
    device = scale.device
    _update_kernel(
        (1, 1, 1),
        of.on(device), of.parts_on(device), scale, of.history, 2.0**of.margin,
        of.most_recent, fmt.mantissa_bits, next_power_of_2(of.history), NOTES,
    )  # fmt: skip
