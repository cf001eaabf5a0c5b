"""select="auto": a Linear layer multiplies in FP8 where that is faster, and in bfloat16 elsewhere.

Why: an FP8 product takes less time than one in bfloat16, but its operands have to be cast. A product grows with rows
× in_features × out_features, a cast with two of the three. So FP8 pays for large layers and many rows of input, which
are its tokens, and costs time elsewhere.

How: what FP8 saves in one forward and backward, in µs, is a sum of five terms. They are fitted to what
`benchmarks/layer_shapes.py` measured on an H100: of 247 shapes, the sum has the wrong sign for 12. One of those is an
outlier, the others take as long both ways, within a tenth. On an H200, which has faster memory, it is wrong for 20, of
which 17 are within a tenth. Of 36 heads, whose forward is in bfloat16, it is wrong for 2, by 3 %.

    + 3.7e-9 × rows × in × out      the products
    - 2.8e-6 × rows × (in + out)    casts of the input and of the gradient. Layers with as many in_features in one
                                    module (query, key, value) are taken to share an input, and its cast.
    + 3.9e-6 × rows × in            of a float32 input, which autocast would cast for bfloat16 too
    - 2.1e-6 × in × out             casts of the weight
    - 6                             launches

A fused MLP is one sum for all its layers: it casts its input and the gradient of its output only. Without an up its
kernels take longer than torch's for the activation and the sums of biases, since they look for the largest value before
they cast: 2.6e-6 µs × rows × hidden, measured over [12608, 4096] with GELU. With an up they take no longer. Of 40 MLPs
on an H200, half of them compiled, that sum has the wrong sign for one, by 2 %.

Solved for the rows, that is the number of rows from which on a layer multiplies in FP8. It is computed once, when the
model is initialized, so nothing is timed. In eager mode FP8 has to save `HOST` more, because its launches keep the host
busy for longer, which costs time unless the GPU is behind; a fused MLP, which makes three times as many as a layer,
`HOST_OF_MLP`. Those margins are chosen: on an H200 they make Llama-3.2-1B 1.47 and ViT-L 0.94 times as fast as bf16,
where `select="all"` makes them 1.41 and 0.51. They are too small for DiT-XL, which waits for the host: 28 layers that
save 114 µs each by the sum are in FP8 there, and it is 0.82 times as fast. Under torch.compile and in CUDA graphs there
are none. Inductor casts a float32 input in the kernel that makes it: under torch.compile the third term is left out. Of
36 layers compiled with a norm in front of them, the sum is wrong for 2 then, by up to 4 %. Sizes that are no multiple
of 8 slow bfloat16 down several times, and FP8 pads them, so such layers are always FP8. So are products of float32
without autocast.

Experts of transformers (`experts.py`) count pairs of token and expert, and all their matrices are cast, whoever has
tokens. A pair saves more than its products do, since nothing else of it goes through memory in bfloat16 either: 3e-9 ×
in × out, summed over its matrices, and 3.3e-5 × (in + hidden). Of the 18 measurements of `benchmarks/experts.py` that
this is fitted to, the sign of one is wrong, by 16 µs. torch multiplies float32 weights in float32, so those are always
FP8.

Limits: a layer that is compiled without what makes its input has that input cast all the same. One fit for all GPUs and
recipes; Ada and Blackwell have other ratios. `select="all"` leaves nothing out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .bf16_storage import autocast_is_on
from .layer_kinds import kind_of, sizes_of

PRODUCTS, CASTS, WIDE, WEIGHT, LAUNCHES = 3.7e-9, 2.8e-6, 3.9e-6, 2.1e-6, 6.0  # µs, see above
ACTIVATION = 2.6e-6  # of a fused MLP without an up
PAIR_PRODUCTS, PAIR_BYTES = 3e-9, 3.3e-5  # of experts
HOST, HOST_OF_MLP = 100.0, 500.0  # µs
TOO_SMALL = 'bfloat16 is faster at this size, however many rows; select="all" takes it'


class LeastRows(NamedTuple):
    """From how many rows of input on a layer multiplies in FP8; infinity: never. "graphed": in a CUDA graph."""

    narrow: float  # input in bfloat16 or float16
    wide: float  # in float32, under autocast
    narrow_graphed: float  # and under torch.compile, whatever the input's dtype
    wide_graphed: float


ALWAYS, NEVER = LeastRows(*[0] * 4), LeastRows(*[math.inf] * 4)


def least_rows(in_features: int, out_features: int, share: int = 1, experts: int = 1) -> LeastRows:
    """Return from which number of rows on FP8 is faster, for a layer whose input `share` layers read.

    With `experts`, for a product grouped over them, by the rows of all together.
    """
    size = in_features * out_features
    if in_features % 8 or out_features % 8:
        return ALWAYS
    a_row = PRODUCTS * size - CASTS * (in_features / share + out_features)
    return _solve(a_row, WIDE * in_features, WEIGHT * size * experts + LAUNCHES, HOST)


def least_rows_of_mlp(shapes: Sequence[Sequence[int]]) -> LeastRows:
    """Return from which number of rows on FP8 is faster for a fused MLP.

    `shapes` are those of the weights of gate, up and down, or of up and down.
    """
    size = sum(out_features * in_features for out_features, in_features in shapes)
    out_features, hidden = shapes[-1]
    in_features = shapes[0][1]
    a_row = PRODUCTS * size - CASTS * (in_features + out_features)
    if len(shapes) == 2:
        a_row -= ACTIVATION * hidden
    once = WEIGHT * size + LAUNCHES * len(shapes)
    return _solve(a_row, WIDE * in_features, once, HOST_OF_MLP)


def least_rows_of_experts(features: int, hidden: int, matrices: int, experts: int) -> LeastRows:
    """Return from how many pairs of token and expert on FP8 is faster than transformers' products in bfloat16.

    Each expert has so many `matrices` of features × hidden.
    """
    size = matrices * features * hidden
    a_pair = PAIR_PRODUCTS * size + PAIR_BYTES * (features + hidden)
    return LeastRows(*[math.ceil((WEIGHT * size * experts + LAUNCHES) / a_pair)] * 4)


def _solve(a_row: float, wide: float, once: float, host: float) -> LeastRows:
    """Return from how many rows on what FP8 saves of each, in µs, is more than what it costs once."""

    def rows(saved: float, cost: float) -> float:
        return math.ceil(cost / saved) if saved > 0 else math.inf

    eager = once + host
    return LeastRows(
        rows(a_row, eager), rows(a_row + wide, eager), rows(a_row, once), rows(a_row + wide, once)
    )


def least_rows_of(model: nn.Module) -> dict[str, LeastRows]:
    """Return the least rows of each Linear and Conv1D layer of `model`, and of the in-projections of attention."""
    sizes, places = {}, {}
    for name, module in model.named_modules():
        packed = type(module) is nn.MultiheadAttention  # shares its input with no layer
        if packed or kind_of(module):
            sizes[name] = sizes_of(module)
            places[name] = (name, "in") if packed else (name.rpartition(".")[0], sizes[name][1])
    readers = Counter(places.values())
    return {
        name: least_rows(inner, outer, readers[places[name]])
        for name, (outer, inner) in sizes.items()
    }


def pays(x: Tensor, rule: LeastRows | None, graphed: bool = False, rows: int | None = None) -> bool:
    """Return whether a layer with this rule (None: always) multiplies `x` [..., in_features] in FP8.

    `graphed`: it is launched in a CUDA graph. `rows`: if those of x are not what counts.
    """
    if rule is None or x.is_nested or not x.ndim:  # the layer will say what is wrong with it
        return True
    wide = x.dtype is torch.float32
    if wide and not autocast_is_on(x):
        return True
    rows = x.numel() // max(x.shape[-1], 1) if rows is None else rows
    compiled = torch.compiler.is_compiling()
    return rows >= rule[(wide and not compiled) + 2 * (compiled or graphed)]


def describe(least: LeastRows, pairs: bool = False) -> str:
    """Return what a card says of a layer, or of experts, that are in FP8 for some numbers of rows, or `pairs`."""
    if pairs:
        return f"fp8 from {least.narrow:,.0f} pairs of token and expert on"
    if least.narrow < math.inf:
        return f"fp8 from {least.narrow:,.0f} rows of input on ({least.wide:,.0f} in float32)"
    some = f"; fp8 from {least.wide:,.0f} rows of float32 input on (not compiled)"
    return "bf16" + some * (least.wide < math.inf)
