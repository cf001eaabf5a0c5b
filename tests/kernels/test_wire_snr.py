"""What E4M3 on the wire costs in accuracy, for every number of ranks from 2 to 64, emulated with the reference.

Gaussian gradients, independent of each other or the same on all ranks: the latter grow with the number of ranks, and
would be cut off at once if sums had no scales of their own. The limits are those of `docs/comm.md`.
"""

import pytest
import torch

from fp8stack.formats import BLOCK, E4M3
from fp8stack.kernels.reference import wire
from fp8stack.kernels.reference.wire import Layout

RANKS = range(2, 65)
SIZE = 2**14 + 77  # the last block is short, and stripes of many ranks reach beyond the end
HALF_STEP = 2.0 ** -(E4M3.mantissa_bits + 1)  # of a normal number, relative to it
ALL_REDUCE_DB, REDUCE_SCATTER_DB = 28, 31


def decode(chunks, layout):
    """Return the values in chunks, and of each the scale of its block."""
    scales = wire.scales_of(chunks, layout.per).reshape(-1).repeat_interleave(BLOCK)[:SIZE]
    out = torch.empty(SIZE)
    wire.unpack(chunks, out, layout)
    return out.double(), scales.double()


def saturated(exact, result, scales):
    """Count the elements that are further from what was quantized than rounding to E4M3 explains."""
    rounding = torch.maximum(exact.abs() * HALF_STEP, scales * (E4M3.min_positive / 2))
    return int(((result - exact).abs() > rounding * (1 + 1e-5)).sum())


def noise_ratio(result, exact):
    """Return the signal-to-noise ratio in dB."""
    return float(10 * torch.log10(exact.square().sum() / (result - exact).square().sum()))


def exchange(tensors):
    """Return the float32 sums that the ranks' stripes hold, what all_reduce ends with, and what saturated."""
    layout = Layout(1, SIZE, len(tensors))
    sent = torch.stack([wire.pack(x, layout) for x in tensors])  # [rank, stripe, pitch]
    cut_off = 0
    for x, chunks in zip(tensors, sent, strict=True):
        cut_off += saturated(x.double(), *decode(chunks, layout))
    stripes = [stripe.contiguous() for stripe in sent.unbind(1)]  # what each rank receives
    sums = torch.empty(layout.world, layout.per * BLOCK)
    for stripe, out in zip(stripes, sums, strict=True):
        wire.reduce_unpack(stripe, out)
    scattered = sums.view(-1)[:SIZE].double()
    reduced = torch.stack([wire.reduce_pack(stripe, layout) for stripe in stripes])
    gathered, scales = decode(reduced, layout)
    return scattered, gathered, cut_off + saturated(scattered, gathered, scales)


@pytest.mark.parametrize("alike", [False, True], ids=["independent", "the same on all ranks"])
def test_sums_keep_their_signal_for_every_number_of_ranks(alike):
    for world in RANKS:
        tensors = [torch.randn(SIZE)] * world if alike else list(torch.randn(world, SIZE))
        exact = torch.stack(tensors).double().sum(0)
        scattered, gathered, cut_off = exchange(tensors)
        reached = noise_ratio(gathered, exact), noise_ratio(scattered, exact)
        assert cut_off == 0, f"{world} ranks: {cut_off} elements saturate"
        assert reached[0] >= ALL_REDUCE_DB, f"{world} ranks: all_reduce keeps {reached[0]:.2f} dB"
        assert reached[1] >= REDUCE_SCATTER_DB, (
            f"{world} ranks: reduce_scatter keeps {reached[1]:.2f} dB"
        )


def test_a_sum_that_is_cut_off_is_noticed():
    """A sum with the scales of what was sent, as one that FP8 adds up, stops at 448 of them."""
    exact = torch.full((4,), 2.0).double()
    stopped, scales = torch.ones(4).double(), torch.full((4,), 1 / E4M3.max).double()
    assert saturated(exact, stopped, scales) == 4
    assert saturated(exact, exact * (1 - HALF_STEP), scales) == 0
