"""Kernels on matrices whose last rows lie beyond element 2^31: their results are those of the first rows."""

import pytest
import torch
from helpers import assert_same_bits

from fp8stack.formats import E4M3
from fp8stack.kernels import activation, cast, cast_blocks, cast_delayed, cast_rows, quantize
from fp8stack.kernels.reference.delayed_state import SEEDED, DelayedState

ROWS = 2**17 + 128  # of 2^14 elements


def quantized(x):
    codes, scale = quantize.quantize_blocks(x, E4M3)
    return codes, scale, quantize.dequantize_blocks(codes, scale, E4M3, torch.bfloat16)


def recast(factor):
    return lambda x: cast.recast(x, E4M3, x.abs().amax().float() / 448 * factor)


def delayed(casts):
    def run(x):
        state = DelayedState(4)
        if casts:
            state.on(x.device)[:2] = 0.25
            state.casts = casts
        return cast_delayed.cast_delayed(x, E4M3, state.handle, True, False)

    return run


def swiglu(x):
    codes, scale = activation.activation_cast(x, x, "silu", E4M3)
    return codes, activation.activation_backward_cast(x, x, x, scale, "silu", E4M3)[-1]


RUNS = {
    "quantize": quantized, "cast": lambda x: cast.cast(x, E4M3), "recast, kept": recast(0.98),
    "recast, grown": recast(0.5), "cast_rows": lambda x: cast_rows.cast_rows(x, E4M3)[:2],
    "swiglu by rows": lambda x: cast_rows.activation_cast_rows(x, x, "silu", E4M3),
    "cast_1x128": lambda x: cast_blocks.cast_1x128(x, E4M3),
    "cast_1x128, squares": lambda x: cast_blocks.cast_1x128(x, E4M3, squares_t=True),
    "cast_128x128": lambda x: cast_blocks.cast_128x128(x, E4M3), "cast_delayed, young": delayed(0),
    "cast_delayed": delayed(SEEDED), "swiglu": swiglu,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("rows_beyond_int32")
@pytest.mark.parametrize("cols", [2**14, 2**14 + 1], ids=["even", "odd"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_elements_beyond_two_to_the_31_are_as_the_first_ones(run, cols):
    x = torch.randn(128, cols, device="cuda").bfloat16().repeat(ROWS // 128, 1)
    seen = 0
    for result in run(x):
        for dim in (n for n, size in enumerate(result.shape) if size == ROWS):
            seen += 1
            last, first = (result.narrow(dim, at, 128) for at in (ROWS - 128, 0))
            assert_same_bits(last.contiguous(), first.contiguous())
            assert first.float().ne(0).any()
    assert seen >= 2
