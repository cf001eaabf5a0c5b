"""Activations of MLPs joined to the casts around them; the twin of `reference/activation.py`.

Why: for an element of SwiGLU in bfloat16 forward moves 4 + 4 bytes in (delayed: 4) and 1 out, backward 6 + 6 in (6) and
5 out; torch's kernels and the casts behind them move 16 and 30. Without an up it is 2 + 2 and 1, 4 + 4 and 3; torch
moves 7 and 12.

How: with current scaling each direction is two kernels, as a cast is (`cast.py`): one looks for the largest magnitude
of what it computes, the other computes it again and casts. With delayed scaling the second is enough, and the first
only gives a young state its first scale. Backward also casts the activation again, with its scale of forward, in the
layout that the product for the weight's gradient wants, so nothing of the activation need be kept. Each of its programs
adds its tile's rows up for the gradients of biases, and torch adds those sums: no atomics, so they have the same bits
every time.

With a scale for each row, forward is one kernel that reads its inputs once: `cast_rows.py` has it.

Limits: exponentials are the GPU's, so results may lie one code from the reference's; next to zero, where terms of a
slope cancel, several of E5M2. Where something is not finite and scales are current, the scale is NaN as the
reference's, and codes are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8stack.formats import E4M3, MiniFloat

from .cast_delayed import cast_rows, note_amax, state_scale, take_amax
from .fp8 import bits_of_magnitude, casts_in_hardware, reciprocal, scale_and_inverse
from .launch import launched, next_power_of_2
from .reference.activation import CUBE, ROOT
from .reference.activation import FLAT as NEAR
from .reference.cast import TOKENS, aligned
from .reference.delayed_state import NOTES, SEEDED, STATES
from .transpose_tiles import load_rows, place_tile

PARTS, FLAT, ROWS, COLS = 1024, 2048, 64, 64  # measured on an H200, over [8192, 14336]
_NOTES = tl.constexpr(NOTES)
_ROOT, _CUBE, _NEAR = tl.constexpr(ROOT), tl.constexpr(CUBE), tl.constexpr(NEAR)


# 1 / (1 + exp(-x)): 0fBFB8AA3B is -log2(e), 0f3F800000 is 1. Subnormals count as zero (ftz), which saves the five
# instructions that Triton's own sigmoid spends on them.
_PTX = tl.constexpr("""{
.reg .f32 e;
mul.f32 e, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 e, e;
add.f32 e, e, 0f3F800000;
rcp.approx.ftz.f32 $0, e;
}""")


@triton.jit
def _sigmoid(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.inline_asm_elementwise(_PTX, "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.sigmoid(x)


_RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def _gelu_share(g, square, HARDWARE: tl.constexpr):
    """Return (1 + erf(g / √2)) / 2 and exp(-g² / 2), of which the first is made too.

    The polynomial is 7.1.26 of Abramowitz and Stegun, whose error is 1.5e-7. CUDA's own erf takes several times as
    long, and then these kernels wait for it and not for the memory.
    """
    e = tl.exp2(square * -0.7213475204444817)  # -log2(e) / 2
    t = 1 + tl.abs(g) * 0.23164188762  # 0.3275911 / √2
    if HARDWARE:
        t = tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [t], tl.float32, True, 1)
    else:
        t = 1 / t
    tail = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    tail = t * (0.127414796 + t * (-0.142248368 + t * tail)) * e
    return tl.where(g < 0, tail, 1 - tail), e


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr, HARDWARE: tl.constexpr):
    """Return act(g) and act'(g), of float32."""
    if ACTIVATION == "relu":
        value = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(g <= 0, 0.0, 1.0)
    elif ACTIVATION == "silu":
        s = _sigmoid(g, HARDWARE)
        value = g * s
        slope = s + value * (1 - s)
    else:
        near = tl.minimum(g, _NEAR, propagate_nan=tl.PropagateNan.ALL)
        near = tl.maximum(near, -_NEAR, propagate_nan=tl.PropagateNan.ALL)
        square = near * near
        if ACTIVATION == "gelu":
            s, e = _gelu_share(near, square, HARDWARE)
            slope = s + near * e * (0.5 * _ROOT)
        else:
            # Triton's interpreter wants constants on the right.
            s = _sigmoid((near + near * square * _CUBE) * (2 * _ROOT), HARDWARE)
            slope = s + near * s * (1 - s) * ((1 + square * (3 * _CUBE)) * (2 * _ROOT))
        value = g * s
    return value, slope


@triton.jit
def values(
    d, g, u,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return h = act(g) × u and its gradients for g and u, or h in their place, in float32.

    The compiler drops what a caller does not use.
    """
    d, u = d.to(tl.float32), u.to(tl.float32)
    value, slope = _activate(g.to(tl.float32), ACTIVATION, HARDWARE)
    h = value * u if GATED else value
    if BACKWARD:
        return h, d * u * slope if GATED else d * slope, d * value
    else:
        return h, h, h


@launched(num_warps=8)
def _activation_parts_kernel(
    d_ptr, g_ptr, u_ptr, parts_ptr, numel, rounds,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HARDWARE: tl.constexpr,
    PARTS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    first = tl.zeros((FLAT,), dtype=tl.int32)
    second = first
    last = tl.cdiv(numel, FLAT) - 1
    for i in range(rounds):  # from the end, as `cast.py` does
        at = (last - tl.program_id(0) - i * PARTS).to(tl.int64) * FLAT + tl.arange(0, FLAT)
        inside = (at >= 0) & (at < numel)
        g = tl.load(g_ptr + at, mask=inside, other=0.0)
        u = tl.load(u_ptr + at, mask=inside, other=0.0) if GATED else g
        d = tl.load(d_ptr + at, mask=inside, other=0.0) if BACKWARD else g
        _h, a, b = values(d, g, u, ACTIVATION, GATED, BACKWARD, HARDWARE)
        first = tl.maximum(first, bits_of_magnitude(a))
        if BACKWARD and GATED:
            second = tl.maximum(second, bits_of_magnitude(b))
    tl.store(parts_ptr + tl.program_id(0), tl.max(first, axis=0))
    if BACKWARD and GATED:
        tl.store(parts_ptr + PARTS + tl.program_id(0), tl.max(second, axis=0))


@triton.jit
def store_scale(
    parts_ptr, state_ptr, growth, scale_ptr,
    DELAYED: tl.constexpr, SEED: tl.constexpr, AGAIN: tl.constexpr, PARTS: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Return the reciprocal of the scale of the parts or of the state, which the first program stores."""
    if DELAYED:
        scale = state_scale(state_ptr, parts_ptr, growth, SEED, AGAIN, MANTISSA)
    else:
        bits = tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), axis=0)
        scale, _inverse = scale_and_inverse(bits, MANTISSA)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    return reciprocal(scale)


@launched(num_warps=8)
def _activation_cast_kernel(
    d_ptr, g_ptr, u_ptr, parts_ptr, a_state_ptr, b_state_ptr, a_notes_ptr, b_notes_ptr,
    a_ptr, a_t_ptr, a_scale_ptr, b_ptr, b_t_ptr, b_scale_ptr, h_t_ptr, h_scale_ptr, a_sums_ptr, b_sums_ptr,
    growth, rows, cols, rows16, cols16,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, SUMS: tl.constexpr,
    BACKWARD: tl.constexpr, DELAYED: tl.constexpr, SEED: tl.constexpr, AGAIN: tl.constexpr, UPDATE: tl.constexpr,
    PARTS: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # scales first and notes last: with fewer registers in between, more programs run at a time
    a_inverse = store_scale(
        parts_ptr, a_state_ptr, growth, a_scale_ptr, DELAYED, SEED, AGAIN, PARTS, MANTISSA
    )
    if BACKWARD and GATED:
        b_inverse = store_scale(
            parts_ptr + PARTS, b_state_ptr, growth, b_scale_ptr, DELAYED, SEED, AGAIN, PARTS, MANTISSA
        )  # fmt: skip
    if BACKWARD:
        h_inverse = reciprocal(tl.load(h_scale_ptr))
    q, c = place_tile(tl.program_id(0), tl.cdiv(cols16, COLS), ROWS, COLS)
    g0, g1, g2, g3 = load_rows(g_ptr, q, c, rows, cols, EVEN)
    u0, u1, u2, u3 = load_rows(u_ptr, q, c, rows, cols, EVEN) if GATED else (g0, g1, g2, g3)
    d0, d1, d2, d3 = load_rows(d_ptr, q, c, rows, cols, EVEN) if BACKWARD else (g0, g1, g2, g3)
    h0, a0, b0 = values(d0, g0, u0, ACTIVATION, GATED, BACKWARD, HARDWARE)
    h1, a1, b1 = values(d1, g1, u1, ACTIVATION, GATED, BACKWARD, HARDWARE)
    h2, a2, b2 = values(d2, g2, u2, ACTIVATION, GATED, BACKWARD, HARDWARE)
    h3, a3, b3 = values(d3, g3, u3, ACTIVATION, GATED, BACKWARD, HARDWARE)
    a = cast_rows(
        a0, a1, a2, a3, a_inverse, a_ptr, a_t_ptr, q, c, rows16, cols16,
        True, BACKWARD, MANTISSA, HARDWARE, EVEN,
    )  # fmt: skip
    if BACKWARD:
        if GATED:
            b = cast_rows(
                b0, b1, b2, b3, b_inverse, b_ptr, b_t_ptr, q, c, rows16, cols16,
                True, True, MANTISSA, HARDWARE, EVEN,
            )  # fmt: skip
        cast_rows(
            h0, h1, h2, h3, h_inverse, h_t_ptr, h_t_ptr, q, c, rows16, cols16,
            False, True, 3, HARDWARE, EVEN,
        )  # fmt: skip
        if SUMS:
            at = (tl.program_id(0) // tl.cdiv(cols16, COLS)).to(tl.int64) * cols + c
            tl.store(a_sums_ptr + at, tl.sum(a0 + a1 + (a2 + a3), axis=0), mask=c < cols)
            if GATED:
                tl.store(b_sums_ptr + at, tl.sum(b0 + b1 + (b2 + b3), axis=0), mask=c < cols)
    if DELAYED and UPDATE:
        note_amax(a, a_notes_ptr, _NOTES)
        if BACKWARD and GATED:
            note_amax(b, b_notes_ptr, _NOTES)


def activation_cast(
    gate: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    up: Tensor | None,  # likewise
    activation: str,
    fmt: MiniFloat,
    of: Sequence[int] = (),  # the handle of a DelayedState, or none: current scaling
    update: bool = False,
    again: bool = False,
) -> tuple[Tensor, Tensor]:  # codes [rows16, cols16], scale float32 0-d
    """Return act(gate) × up in FP8."""
    codes, scale = _run(None, gate, up, None, activation, fmt, of, update, again)
    return codes, scale


def activation_backward_cast(
    dh: Tensor,  # the gradient of act(gate) × up, [rows, cols]
    gate: Tensor,
    up: Tensor | None,
    h_scale: Tensor,  # the scale that activation_cast returned
    activation: str,
    fmt: MiniFloat,
    of: Sequence[int] = (),  # handles of gate's DelayedState and up's, or none
    update: bool = False,
    sums: bool = False,
) -> list[Tensor]:
    """Return codes, codes_t and scale of gate's gradient, then of up's if there is one, then E4M3 codes_t of
    act(gate) × up; and with `sums` the gradients of gate and up summed over all rows, float32 [cols]."""
    return _run(dh, gate, up, h_scale, activation, fmt, of, update, False, sums)


def _run(
    dh: Tensor | None,  # None: forward
    gate: Tensor,
    up: Tensor | None,
    h_scale: Tensor | None,  # of backward only
    activation: str,
    fmt: MiniFloat,
    of: Sequence[int],
    update: bool,
    again: bool,
    sums: bool = False,
) -> list[Tensor]:
    backward, gated = dh is not None, up is not None
    gate = gate.contiguous()
    # arguments that are neither read nor written may be any tensor
    d, u = (gate if t is None else t.contiguous() for t in (dh, up))
    (rows, cols), device = gate.shape, gate.device
    rows16, cols16 = aligned(rows, TOKENS), aligned(cols)
    codes, turned = (rows16, cols16), (cols16, rows16)
    shapes = [codes, turned, ()] * (1 + gated) if backward else [codes, ()]
    results = [gate.new_empty(s, dtype=fmt.dtype if s else torch.float32) for s in shapes]
    scales = results[2::3] if backward else results[1:]
    if backward:
        results.append(gate.new_empty(turned, dtype=E4M3.dtype))
    added = [
        gate.new_empty((-(-rows16 // ROWS), cols), dtype=torch.float32) for _ in scales if sums
    ]
    if not gate.numel():
        return [x if x.ndim else x.zero_() for x in results] + [x.zero_().sum(0) for x in added]
    a_scale = scales[0]
    first = results[:3] if backward else (results[0], *results)
    second, h_t = (results[-4:-1], results[-1]) if backward else (first, results[0])
    out = *first, *second, h_t, a_scale if h_scale is None else h_scale
    own_sums = (added[0], added[-1]) if sums else (a_scale, a_scale)
    states = [STATES[handle] for handle in of]
    update = update and all(state.learns(update) for state in states)
    tensors = [state.on(device, update) for state in states]
    notes = [state.parts_on(device) for state in states]
    seed, margin = any(s.casts <= SEEDED for s in states), states[0].margin if states else 0
    tiles = -(-gate.numel() // FLAT)
    parts = min(PARTS, next_power_of_2(tiles))
    even, hardware = rows % ROWS == 0 and cols % COLS == 0, casts_in_hardware(device)
    found = a_scale  # not read, unless
    if seed or not states:
        found = gate.new_empty((2, parts), dtype=torch.int32)
        _activation_parts_kernel(
            (parts, 1, 1),
            d, gate, u, found, gate.numel(), -(-tiles // parts), activation, gated, backward, hardware, parts, FLAT,
        )  # fmt: skip
    if states:
        found, parts = found.amax(-1) if seed else found, 1
    sources = (tensors[0], tensors[-1], notes[0], notes[-1]) if states else (found,) * 4
    _activation_cast_kernel(
        (-(-rows16 // ROWS) * -(-cols16 // COLS), 1, 1),
        d, gate, u, found, *sources, *out, *own_sums, 2.0**margin, rows, cols, rows16, cols16, activation, gated, sums,
        backward, bool(states), seed, again, update, parts, fmt.mantissa_bits, hardware, even, ROWS, COLS,
    )  # fmt: skip
    if update:
        for state, own in zip(states, scales, strict=False):  # none with current scaling
            take_amax(state, fmt, own)
    return results + [x.sum(0) for x in added]
